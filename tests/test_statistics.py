"""Numbers that can be worked out by hand, and properties."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from maelm_composer import statistics
from maelm_composer.statistics import (
    ExampleVariance,
    MeanInterval,
    adjust_holm,
    estimate_contrast,
    estimate_mean,
    measure_example_variance,
)

VALUES = st.lists(st.integers(-1000, 1000).map(lambda n: n / 1000), min_size=2, max_size=9)


@given(VALUES)
def test_the_interval_ignores_the_order_and_holds_the_mean(values):
    found, again = estimate_mean(values), estimate_mean(values[::-1])
    if len(set(values)) == 1:
        assert (found.low, again.p) == (None, None)
        return
    assert found.low <= found.mean <= found.high
    assert (again.mean, again.low) == pytest.approx((found.mean, found.low))


def test_a_t_interval_by_hand():
    found = estimate_mean([1.0, 2.0, 4.0])
    error = math.sqrt((16 + 1 + 25) / 9 / 2 / 3)
    assert (found.mean, found.low) == (pytest.approx(7 / 3), pytest.approx(7 / 3 - 4.302653 * error, abs=1e-6))
    t = 7 / 3 / error
    assert found.p == pytest.approx(1 - t / math.sqrt(2 + t * t))  # the t distribution of two degrees of freedom
    assert estimate_mean([2.0]) == MeanInterval(2.0, None, None, None, None)
    assert estimate_mean([1.0, math.inf]).low is None
    assert estimate_mean([1.0, 1.0]) == MeanInterval(1.0, None, None, None, None)  # equal by chance, or by nature
    for differences in ([63.4 - 61.2, 62.4 - 60.2], [0.0, 7.1e-15, 7.1e-15]):  # equal but for rounding
        assert estimate_mean(differences).p is None


@pytest.fixture
def without_p(monkeypatch):
    """For thousands of intervals: p is found by bisection, which takes longer than all else about an interval."""
    monkeypatch.setattr(statistics, '_find_p', lambda *_: math.nan)


@pytest.mark.usefixtures('without_p')
@pytest.mark.parametrize('count', [2, 3, 5])
def test_the_interval_over_pretraining_seeds_covers_what_it_says(count):
    """Fine-tuning seeds within pretraining seeds, medians of three: simulated as the tables are made."""
    generator, repeats = np.random.default_rng(count), 2000
    pretraining = generator.normal(0, 1, (repeats, count))
    scores = np.median(pretraining[..., None] + generator.normal(0, 2, (repeats, count, 3)), axis=-1)
    found = [estimate_mean(values) for values in scores]
    covered = np.mean([one.low <= 0 <= one.high for one in found])
    assert covered == pytest.approx(0.95, abs=3 * math.sqrt(0.95 * 0.05 / repeats))


def draw_crossed(generator, seeds, examples, of_seed, of_example, of_both):
    """(seeds, examples) with a mean of 0: an effect of the seed, of the example, and of both together."""
    return (
        generator.normal(0, of_seed, (seeds, 1))
        + generator.normal(0, of_example, examples)
        + generator.normal(0, of_both, (seeds, examples))
    )


@pytest.mark.usefixtures('without_p')
@pytest.mark.parametrize('seeds', [2, 3, 5])
@pytest.mark.parametrize(
    'of_seed, of_example, of_both', [(0.01, 0.3, 0.5), (0.03, 0.3, 0.5), (0.03, 0.3, 0.0), (0.0, 0.5, 0.5)]
)
def test_with_the_variance_of_the_examples_the_interval_covers_other_examples(seeds, of_seed, of_example, of_both):
    generator, repeats, covered = np.random.default_rng(seeds), 1000, 0
    for _ in range(repeats):
        drawn = draw_crossed(generator, seeds, 400, of_seed, of_example, of_both)
        means, influences = drawn.mean(1), drawn - drawn.mean(1, keepdims=True)
        found = estimate_contrast([means], [measure_example_variance([influences])])
        covered += found.low <= 0 <= found.high
    assert covered / repeats > 0.95 - 2 * math.sqrt(0.95 * 0.05 / repeats)


def test_the_variance_of_examples_by_hand():
    influences = np.array([[1.0, -1.0, 0.0], [1.0, 0.0, -1.0]])
    # The mean over seeds is (1, -1/2, -1/2): variance 3/4. What is left, ±(0, 1/2, -1/2), has a mean square of 1/2.
    found = measure_example_variance([2 * influences])
    assert (found.own, found.shared, found.count) == (pytest.approx(4 * 0.75 / 3), pytest.approx(4 * 0.5 / 6), 3)
    assert measure_example_variance([influences, -influences]).own == 0.0
    # Seeds that agree by chance: the interval is never narrower than the examples alone make it.
    alone = estimate_contrast([[0.5, 0.5]], [ExampleVariance(0.04, 0.03, 400)])
    assert alone.high - alone.mean == pytest.approx(0.2 * stats.t(399).ppf(0.975))


def test_seeds_and_two_sets_of_examples_by_hand():
    first, second = ExampleVariance(0.04, 0.01, 400), ExampleVariance(0.09, 0.0, 300)
    found = estimate_contrast([[1.0, 2.0, 4.0]], [first, second])
    of_seeds = 4.302653 * math.sqrt((16 + 1 + 25) / 9 / 2 / 3)
    of_examples = stats.t(399).ppf(0.975) * math.sqrt(0.04 - 0.01), stats.t(299).ppf(0.975) * 0.3
    assert found.high - found.mean == pytest.approx(math.hypot(of_seeds, *of_examples))


def test_a_contrast_of_independent_groups_by_hand():
    first, second = [1.0, 2.0, 4.0], [3.0, 3.5, 9.0, 1.0]
    found = estimate_contrast([first, [-value for value in second]])
    ends = [estimate_mean(values) for values in (first, second)]
    assert found.mean == pytest.approx(ends[0].mean - ends[1].mean)
    assert found.high - found.mean == pytest.approx(math.hypot(*(end.high - end.mean for end in ends)))
    assert estimate_contrast([first, [-2.0]]).low is None


@given(VALUES, st.integers(1, 30), st.integers(0, 10), st.integers(1, 4000))
def test_p_is_where_the_interval_ends_at_zero(values, own, shared, mean):
    """Of the shifted values whose interval ends at zero, p is 5 %; further away, less."""
    examples = [ExampleVariance(own / 100, min(own, shared) / 100, 500)]
    found = estimate_contrast([values], examples)
    half = found.high - found.mean
    at_zero = estimate_contrast([[value - found.mean + half for value in values]], examples)
    assert at_zero.p == pytest.approx(0.05)
    shifted = estimate_contrast([[value - found.mean + mean / 100 for value in values]], examples)
    assert (shifted.p < 0.05) == (mean / 100 > half)


def test_equal_whole_numbers_are_no_certainty():
    found = estimate_contrast([[1.0, 1.0, 1.0]], rounding=[1 / 6])
    assert found.high - 1 == pytest.approx(4.302653 * math.sqrt(1 / 6 / 3), abs=1e-6)
    assert 0.05 < found.p < 0.06
    apart = [1.0, 2.0, 4.0]  # vary by more than rounding does
    assert estimate_contrast([apart], rounding=[1 / 6]) == estimate_mean(apart)


def test_influences_that_overflowed_decide_nothing():
    for own in (math.inf, math.nan):
        found = estimate_contrast([[1.0, 2.0, 4.0]], [ExampleVariance(own, 0.0, 500)])
        assert found == MeanInterval(7 / 3, None, None, None, None)


def test_the_detectable_difference_is_found_in_about_four_of_five_cases():
    generator = np.random.default_rng(0)
    size = np.mean([estimate_mean(generator.normal(0, 1, 5)).detectable for _ in range(500)])
    found = [estimate_mean(generator.normal(size, 1, 5)).p < 0.05 for _ in range(2000)]
    assert 0.7 < np.mean(found) < 0.9


def test_holm_by_hand():
    assert adjust_holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert adjust_holm([0.5, 0.9]) == [1.0, 1.0]
    assert adjust_holm([]) == []
