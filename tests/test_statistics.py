"""Numbers that can be worked out by hand, properties, and SciPy where it is installed."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maelm_composer.statistics import Difference, Summary, bootstrap_difference, permutation_p_value, summarize

FIVE = [0.70, 0.74, 0.71, 0.69, 0.73]
VALUES = st.lists(st.floats(-1, 1, allow_nan=False), min_size=2, max_size=9)


def test_five_seeds_by_hand():
    found = summarize(FIVE)
    assert (found.count, found.median, found.mean) == (5, 0.71, pytest.approx(0.714))
    assert found.std == pytest.approx(math.sqrt((0.014**2 + 0.026**2 + 0.004**2 + 0.024**2 + 0.016**2) / 4))
    # P(at least 3 of 5 draws are the smallest) = 0.058 > 0.025: the interval is the range.
    assert (found.low, found.high) == (0.69, 0.74)


def test_many_values_give_a_narrower_interval_than_their_range():
    values = np.random.default_rng(0).normal(size=101).tolist()
    found = summarize(values)
    ordered = sorted(values)
    # By the binomial distribution the 95 % interval is about the 41st to the 61st of 101.
    assert ordered[37] <= found.low <= ordered[43] <= found.median <= ordered[57] <= found.high <= ordered[63]


def test_one_value_has_no_spread():
    assert summarize([0.5]) == Summary(1, 0.5, 0.5, None, None, None)
    assert bootstrap_difference([0.5, 0.6, 0.7], [0.5]) == Difference(pytest.approx(0.1), None, None)
    with pytest.raises(ValueError, match='no values'):
        summarize([])


@given(VALUES)
def test_a_summary_holds_its_median_and_ignores_the_order(values):
    found = summarize(values)
    assert min(values) <= found.low <= found.median <= found.high <= max(values)
    assert summarize(values) == found
    assert summarize(values[::-1]).median == found.median


def test_a_difference_by_hand():
    ours = [value + 0.1 for value in FIVE]
    apart = bootstrap_difference(ours, FIVE)
    assert apart.value == pytest.approx(0.1)
    assert apart.low < 0.1 < apart.high
    paired = bootstrap_difference(ours, FIVE, is_paired=True)  # each pair differs by the same
    assert (paired.value, paired.low, paired.high) == pytest.approx((0.1, 0.1, 0.1))
    with pytest.raises(ValueError, match='5 and 4 values are no pairs'):
        bootstrap_difference(FIVE, FIVE[:4], is_paired=True)


@given(VALUES, VALUES)
def test_a_difference_changes_its_sign_with_its_samples(ours, theirs):
    there, back = bootstrap_difference(ours, theirs).value, bootstrap_difference(theirs, ours).value
    assert there == -back
    assert permutation_p_value(ours, theirs) == permutation_p_value(theirs, ours)


def test_p_values_by_hand():
    low, high = [1.0, 2, 3, 4, 5], [6.0, 7, 8, 9, 10]
    assert permutation_p_value(low, high) == 2 / 252
    assert permutation_p_value(low, high, is_paired=True) == 2 / 32
    assert permutation_p_value(low, low) == 1.0
    # Of the sums of two of 1, 2, 3, 4, four lie as far from 5 as 2 + 4 does or farther.
    assert permutation_p_value([2.0, 4.0], [1.0, 3.0]) == 4 / 6
    assert permutation_p_value([0.3], [0.1]) == 1.0


def test_a_rearrangement_that_only_rounding_makes_smaller_counts():
    assert permutation_p_value([0.1, 0.2, 0.3], [0.3, 0.2, 0.1]) == 1.0
    assert permutation_p_value([0.7, 0.1], [0.1, 0.7], is_paired=True) == 1.0


@pytest.mark.parametrize('is_paired', [True, False])
def test_many_values_are_drawn_and_never_give_zero(is_paired):
    generator = np.random.default_rng(1)
    ours, theirs = generator.normal(3, 1, 40), generator.normal(0, 1, 40)
    assert permutation_p_value(ours, theirs, is_paired) == 1 / 10_001
    assert permutation_p_value(ours, ours + generator.normal(0, 0.1, 40), is_paired) > 0.01


@pytest.mark.parametrize('is_paired', [True, False])
def test_p_values_equal_scipys(is_paired):
    stats = pytest.importorskip('scipy.stats', reason='SciPy is not installed')
    generator = np.random.default_rng(2)
    for size in (2, 3, 5, 6):
        ours, theirs = generator.normal(0.8, 1, size), generator.normal(0, 1, size)
        expected = stats.permutation_test(
            (ours, theirs),
            lambda a, b: abs(a.mean() - b.mean()),
            permutation_type='samples' if is_paired else 'independent',
            alternative='greater',
            n_resamples=np.inf,
        )
        assert permutation_p_value(ours, theirs, is_paired) == pytest.approx(expected.pvalue, abs=1e-12)
