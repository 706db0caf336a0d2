"""Time to accuracy: first crossing, interpolation, a target reached by the first checkpoint or never."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maelm_composer.errors import InputError
from maelm_composer.reporting import figure3
from maelm_composer.reporting.artefacts import MAE_LM, ROBERTA
from maelm_composer.reporting.figure3 import Axis, ScoredCheckpoint, find_arrival, measure_stalls
from tests.reporting.conftest import SAMPLES, build

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


ARRIVAL = "MAE-LM to RoBERTa's final accuracy"
LEAD = 'figure3', 'MAE-LM − RoBERTa', 'time_to_target', None


def test_the_lead_is_interpolated_and_in_hours(full):
    rows = build(full)
    # Medians 55, 61, 63 after 0.5, 1 and 2 hours; RoBERTa's 58.9 took 2.
    assert rows['figure3', ARRIVAL, 'hours, first crossing', None].value == pytest.approx(1)
    hours = 0.5 + 0.5 * (58.9 - 55) / 6
    assert rows['figure3', ARRIVAL, 'hours, interpolated', None].value == pytest.approx(hours)
    assert rows['figure3', ARRIVAL, 'flops, first crossing', None].value == pytest.approx(2e15)
    share, lead = rows['figure3', ARRIVAL, 'share_of_time_to_target', None], rows[LEAD]
    assert (share.value, share.paper) == (pytest.approx(hours / 2), 0.4)
    assert (lead.value, lead.paper) == (pytest.approx(hours / 2 - 1), None)
    assert share.count == lead.count == 5
    assert lead.low < lead.value < lead.high < 0
    assert lead.verdict.startswith('holds')


def race_rows(archive, *roberta, early=(0.3, 0.35), ours=None, slower=1, device='CPU, 2 threads'):
    """All rows where RoBERTa's final scores are these, one tuple over fine-tuning seeds a pretraining seed.

    Args:
        early: scores of RoBERTa's two earlier checkpoints.
        ours: scores of MAE-LM's checkpoints.
        slower: how much longer MAE-LM trains.
        device: of MAE-LM's seed 18.
    """
    made = archive('medium')
    made.add_everything(models=(MAE_LM, ROBERTA))
    for pretraining_seed, scores in zip((17, 18, 19), roberta, strict=True):
        for seed, score in enumerate(scores, start=1):
            for samples, value in zip(SAMPLES, (*early, score), strict=True):
                made.add_score(f'medium-roberta-s{pretraining_seed}', 'mnli', seed, value, samples)
            for samples, value in zip(SAMPLES if ours else (), ours or (), strict=True):
                made.add_score(f'medium-s{pretraining_seed}', 'mnli', seed, value, samples)
    for path in (made.records / 'finetuning').glob('mnli-medium-s*'):
        record = json.loads(path.read_text())
        record['checkpoint']['training_seconds'] *= slower
        path.write_text(json.dumps(record))
    path = made.records / 'pretraining/medium-s18.json'
    path.write_text(json.dumps(json.loads(path.read_text()) | {'device': device}))
    return build(made)


def race(archive, *roberta, **settings):
    return race_rows(archive, *roberta, **settings)[LEAD]


LATE = {'early': (0.3, 0.6), 'ours': (0.3, 0.35, 0.9)}  # RoBERTa gets there by its second checkpoint, MAE-LM does not


def test_a_model_that_arrives_later_fails(archive):
    lead = race(archive, *([score] * 5 for score in (0.5, 0.51, 0.52)), **LATE)
    assert lead.low > 0
    assert lead.verdict.startswith('fails')


def test_an_upper_bound_cannot_fail(archive):
    lead = race(archive, *([score] * 5 for score in (0.5, 0.51, 0.52)), early=(0.3, 0.6), ours=(0.9,) * 3, slower=4)
    assert lead.low > 0
    assert lead.verdict.startswith("undecided: MAE-LM's first recorded checkpoint is there already")


def test_hours_of_different_machines_decide_nothing(archive):
    lead = race(archive, *([score] * 5 for score in (0.5, 0.51, 0.52)), **LATE, device='8 × H100')
    assert lead.verdict.startswith('undecided: the runs of one seed were trained on different machines')


def test_hours_with_stalls_decide_nothing(full):
    assert 'stalls' not in build(full)[LEAD].verdict
    path = full.records / 'pretraining/medium-roberta-s18.csv'
    rows = [line.split(',') for line in path.read_text().splitlines()]  # 300 of a second each
    for row in rows[151:]:
        row[5] = str(int(row[5]) + 40)
    path.write_text(''.join(','.join(row) + '\n' for row in rows))
    stalled = 'undecided: 12% of the time of medium-roberta-s18 are stalls, as when other jobs take the processor'
    assert build(full)[LEAD].verdict.startswith(stalled)
    path.unlink()
    assert build(full)[LEAD].verdict.startswith('undecided: the log of medium-roberta-s18, which would show stalls')


def test_the_untimed_batches_of_a_process_are_no_stall():
    seconds = [0, 0, 0, *range(4, 25), 24, 24, 24, *range(28, 49)]  # resumed after 24 batches
    log = [{'samples': str(16 * n), 'training_seconds': str(at)} for n, at in enumerate(seconds, 1)]
    assert measure_stalls(log) == 0
    assert measure_stalls(log[:3]) == measure_stalls([]) == 0


def test_a_last_checkpoint_that_was_not_fine_tuned_is_missing_and_not_a_miss(full):
    for path in (full.records / 'finetuning').glob('mnli-medium-s*-400-*.json'):
        path.unlink()
    lead = build(full)[LEAD]
    assert lead.value is None
    assert 'mnli' in lead.note


def test_a_model_that_equals_roberta_has_no_lead_though_its_curve_is_noisy(archive):
    lead = race(archive, [0.58] * 5, [0.5801] * 5, [0.5802] * 5, early=(0.5, 0.6), ours=(0.5, 0.6, 0.58))
    assert lead.value == 0
    assert lead.verdict.startswith('undecided: without the sign of the claim, but without a variance over the seeds')


def test_an_upper_bound_of_roberta_cannot_hold(archive):
    scores = ([score] * 5 for score in (0.5, 0.51, 0.52))
    lead = race(archive, *scores, early=(0.6, 0.6), ours=(0.3, 0.9, 0.9), slower=0.1)
    assert lead.high < 0
    assert lead.verdict.startswith("undecided: RoBERTa's first recorded checkpoint is there already")


def test_an_upper_bound_of_roberta_may_fail(archive):
    lead = race(archive, *([score] * 5 for score in (0.5, 0.51, 0.52)), early=(0.6, 0.6), ours=(0.3, 0.35, 0.9))
    assert lead.low > 0
    assert lead.verdict.startswith('fails')


@pytest.mark.parametrize('scores, missed', [((0.9, 0.91, 0.92), 3), ((0.9, 0.58, 0.58), 1)])
def test_a_miss_is_infinity_and_still_compared_at_the_lower_accuracy(archive, scores, missed):
    rows = race_rows(archive, *([score] * 5 for score in scores))
    share, lead = rows['figure3', ARRIVAL, 'share_of_time_to_target', None], rows[LEAD]
    assert math.isinf(share.value)
    assert not share.is_missing
    assert share.note == f'never in {missed} of 3 seeds'
    assert math.isfinite(lead.value)
    assert lead.note == ''
    # MAE-LM ends at 63, after 2 hours; RoBERTa, from 35 after 1 hour to 90 and more after 2, is there before.
    assert lead.verdict.startswith('fails' if missed == 3 else 'undecided')


def test_exchanging_the_models_changes_the_sign_of_the_lead():
    """Whichever model ends lower, no seed is lost: otherwise chance would favour the model that ends higher."""
    slow, fast = [0.3, 0.4, 0.6], [0.4, 0.65, 0.7]
    pairs = [[curve_of(*scores) for scores in order] for order in ((slow, fast), (fast, slow))]
    leads = [figure3.race(tuple(pair)).lead for pair in pairs]
    assert leads == pytest.approx([-0.4, 0.4])


def test_the_later_model_is_that_of_the_mean_share():
    """A seed on a slow machine may turn the sum of hours, but not the shares that are judged."""
    slow = [replace(point, hours=point.hours * 100) for point in curve_of(0.4, 0.6, 0.7)]
    pairs = [(curve_of(0.7, 0.7, 0.7), [replace(c, hours=c.hours / 9) for c in curve_of(0.6, 0.7, 0.8)])] * 5
    slower = [replace(point, hours=point.hours * 1.05) for point in slow]
    races = [figure3.race(pair) for pair in [*pairs, (slow, slower)]]
    assert sum(each.lead * each.hours for each in races) > 0 > sum(each.lead for each in races)
    assert figure3.explain_undecided(races, 0.0).startswith("RoBERTa's first recorded checkpoint is there already")


def test_a_target_at_chance_decides_nothing(archive):
    lead = race(archive, *[[0.4 - seed / 1000 for seed in range(1, 6)]] * 3)  # a constant answer: 0.4
    assert lead.verdict.startswith("undecided: the lower final accuracy is not above a constant answer's")


def test_figure3_needs_a_checkpoint_before_the_last(archive):
    made = archive('medium')
    for name in ('medium', 'medium-roberta'):
        made.add_run(name)
        made.add_score(name, 'mnli', 1, 0.6)
    lead = build(made)[LEAD]
    assert lead.value is None
    assert lead.note.startswith('one checkpoint of MAE-LM')


def test_a_checkpoint_without_a_time_leaves_the_other_axes(full):
    for path in (full.records / 'finetuning').glob('mnli-medium-s*-100-*.json'):
        record = json.loads(path.read_text())
        record['checkpoint']['training_seconds'] = None
        path.write_text(json.dumps(record))
    rows = build(full)
    assert rows['figure3', ARRIVAL, 'samples, first crossing', None].value == 200
    assert rows[LEAD].note == 'a record holds no hours of a checkpoint'
