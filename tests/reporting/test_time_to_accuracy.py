"""Time to accuracy: first crossing, interpolation, a target reached by the first checkpoint or never."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maelm_composer.errors import InputError
from maelm_composer.reporting.figure3 import Axis, ScoredCheckpoint, find_arrival

HALF = {1: 0.5}
SCORES = st.floats(0, 1, allow_nan=False)


def curve_of(*scores: float) -> list[ScoredCheckpoint]:
    """A checkpoint every 100 samples, hour and 1e12 operations."""
    return [ScoredCheckpoint(100 * i, i, 1e12 * i, {1: score}) for i, score in enumerate(scores, 1)]


@pytest.mark.parametrize(
    'axis, crossing, interpolated',
    [(Axis.hours, 3, 2.5), (Axis.samples, 300, 250), (Axis.flops, 3e12, 2.5e12)],
)
def test_each_axis_by_hand(axis, crossing, interpolated):
    arrival = find_arrival(curve_of(0.5, 0.6, 0.8, 0.9), 0.7, axis)
    assert (arrival.first_crossing, arrival.interpolated) == pytest.approx((crossing, interpolated))
    assert not arrival.starts_above


def test_the_first_crossing_counts_whatever_comes_after():
    assert find_arrival(curve_of(0.5, 0.7, 0.4, 0.9), 0.7, Axis.hours).first_crossing == 2
    # From the dip just before it, not from an earlier, higher point.
    assert find_arrival(curve_of(0.6, 0.4, 0.8), 0.7, Axis.hours).interpolated == pytest.approx(2.75)


def test_a_curve_that_starts_above_pays_its_first_checkpoint_whole():
    arrival = find_arrival(curve_of(0.8, 0.9), 0.7, Axis.hours)
    assert (arrival.first_crossing, arrival.interpolated, arrival.starts_above) == (1, 1, True)


def test_a_miss_is_infinity():
    arrival = find_arrival(curve_of(0.5, 0.6), 0.7, Axis.hours)
    assert arrival.first_crossing == arrival.interpolated == math.inf


def test_medians_over_seeds_decide():
    """Neither a single high seed nor a single low one decides."""
    curve = [ScoredCheckpoint(1, 1, 1, {1: 0.5, 2: 0.9, 3: 0.6}), ScoredCheckpoint(2, 2, 2, {1: 0.8, 2: 0.1, 3: 0.7})]
    assert find_arrival(curve, 0.7, Axis.hours).first_crossing == 2
    assert find_arrival(curve, 0.7, Axis.hours).interpolated == pytest.approx(2)


@given(st.lists(SCORES, min_size=1, max_size=12), SCORES, st.sampled_from(list(Axis)))
def test_properties_of_any_curve(scores, target, axis):
    curve = curve_of(*scores)
    arrival = find_arrival(curve, target, axis)
    assert (arrival.first_crossing == math.inf) == (max(scores) < target)
    assert (arrival.interpolated == math.inf) == (max(scores) < target)
    assert curve[0].get_cost(axis) <= arrival.interpolated <= arrival.first_crossing
    assert arrival.starts_above == (scores[0] >= target)
    if max(scores) >= target:
        crossed = [point.get_cost(axis) for point in curve if point.median >= target]
        assert arrival.first_crossing == crossed[0]
        before = [point.get_cost(axis) for point in curve if point.get_cost(axis) < crossed[0]]
        assert not before or arrival.interpolated >= before[-1]


@given(st.lists(SCORES, min_size=1, max_size=12), SCORES, SCORES)
def test_a_higher_target_never_comes_sooner(scores, target, other):
    low, high = (find_arrival(curve_of(*scores), t, Axis.samples) for t in sorted((target, other)))
    assert low.first_crossing <= high.first_crossing
    assert low.interpolated <= high.interpolated


@pytest.mark.parametrize(
    'curve, axis',
    [
        ([ScoredCheckpoint(2, 1, 1, HALF), ScoredCheckpoint(1, 2, 2, HALF)], Axis.samples),
        ([ScoredCheckpoint(1, 0, 1, HALF)], Axis.hours),
        ([ScoredCheckpoint(1, 1, 5, HALF), ScoredCheckpoint(2, 2, 5, HALF)], Axis.flops),
    ],
)
def test_curves_whose_costs_do_not_rise_are_refused(curve, axis):
    with pytest.raises(InputError, match=f'{axis.name} of the checkpoints must rise'):
        find_arrival(curve, 0.5, axis)
