"""Numbers that can be worked out by hand, and properties."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maelm_composer.statistics import Summary, summarize

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
    with pytest.raises(ValueError, match='no values'):
        summarize([])


@given(VALUES)
def test_a_summary_holds_its_median_and_ignores_the_order(values):
    found = summarize(values)
    assert min(values) <= found.low <= found.median <= found.high <= max(values)
    assert summarize(values) == found
    assert summarize(values[::-1]).median == found.median
