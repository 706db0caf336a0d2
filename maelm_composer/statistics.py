"""What a handful of seeds says: median, spread, bootstrap intervals, permutation tests. Imports no torch."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 10_000
SEED = 17
TAILS = (2.5, 97.5)  # percentiles: a 95 % interval
MAX_EXACT = 50_000  # rearrangements that are all looked at; of more, RESAMPLES are drawn
ROUNDING = 1e-12  # a rearrangement counts as extreme when it is less so by no more than this share of the differences


@dataclass(frozen=True)
class Summary:
    """Of one sample; ``std`` (n - 1 in the denominator), ``low`` and ``high`` are None where there is one value."""

    count: int
    median: float
    mean: float
    std: float | None
    low: float | None  # 95 % percentile-bootstrap interval of the median
    high: float | None


@dataclass(frozen=True)
class Difference:
    """Of two samples' medians, with its 95 % percentile-bootstrap interval; None where a sample has one value."""

    value: float
    low: float | None
    high: float | None


def summarize(values: Sequence[float]) -> Summary:
    """Summarize ``values``, one a seed.

    With the protocol's five seeds the interval is the range of the five: a resample has the smallest as its median in
    5.8 % of cases, more than the 2.5 % that a tail holds. That range covers the true median in 1 - 2/2^5 = 93.75 % of
    experiments, so it is as good as five values can give, and no better.

    Raises:
        ValueError: no values.
    """
    sample = _as_sample(values)
    if len(sample) == 1:
        return Summary(1, float(sample[0]), float(sample[0]), None, None, None)
    low, high = np.percentile(np.median(sample[_draw_indices(len(sample))], axis=1), TAILS)
    return Summary(
        len(sample), float(np.median(sample)), float(sample.mean()), float(sample.std(ddof=1)), float(low), float(high)
    )


def bootstrap_difference(ours: Sequence[float], theirs: Sequence[float], is_paired: bool = False) -> Difference:
    """median(ours) - median(theirs), with its interval.

    Args:
        is_paired: the two are of the same seeds, in the same order, and a seed means the same to both: the seeds are
            resampled, and not each sample on its own.

    Raises:
        ValueError: no values, or pairs of unequal length.
    """
    first, second = _as_sample(ours), _as_sample(theirs)
    _assert_pairs(first, second, is_paired)
    value = float(np.median(first) - np.median(second))
    if min(len(first), len(second)) == 1:
        return Difference(value, None, None)
    generator = np.random.default_rng(SEED)
    rows = _draw_indices(len(first), generator)
    other_rows = rows if is_paired else _draw_indices(len(second), generator)
    differences = np.median(first[rows], axis=1) - np.median(second[other_rows], axis=1)
    low, high = np.percentile(differences, TAILS)
    return Difference(value, float(low), float(high))


def permutation_p_value(ours: Sequence[float], theirs: Sequence[float], is_paired: bool = False) -> float:
    """Two-sided p-value of the difference of the means, were it chance which value is whose.

    Exact for small samples. The least that five against five can give is 2/252 = 0.008; five pairs, 2/32 = 0.0625.

    Args:
        is_paired: as in :func:`bootstrap_difference`; then the signs of the pairs' differences are flipped.

    Raises:
        ValueError: no values, or pairs of unequal length.
    """
    first, second = _as_sample(ours), _as_sample(theirs)
    _assert_pairs(first, second, is_paired)
    generator = np.random.default_rng(SEED)
    if is_paired:
        values, observed = first - second, abs((first - second).sum())
        signs, is_exact = _rearrange_signs(len(values), generator)
        sums = np.abs(signs @ values)
    else:
        # With the pooled values centred, the difference of the means is proportional to the sum of one group.
        values = np.concatenate([first, second])
        values = values - values.mean()
        observed = abs(values[: len(first)].sum())
        rows, is_exact = _rearrange_groups(len(values), len(first), generator)
        sums = np.abs(values[rows].sum(axis=1))
    count = int((sums >= observed - ROUNDING * np.abs(values).sum()).sum())
    # Of drawn rearrangements the given one is always one more: a p-value is never 0.
    return count / len(sums) if is_exact else (count + 1) / (len(sums) + 1)


def _as_sample(values: Sequence[float]) -> NDArray[np.float64]:
    if len(values) == 0:
        raise ValueError('no values')
    return np.asarray(values, dtype=float)


def _assert_pairs(first: NDArray[np.float64], second: NDArray[np.float64], is_paired: bool) -> None:
    if is_paired and len(first) != len(second):
        raise ValueError(f'{len(first)} and {len(second)} values are no pairs')


def _draw_indices(count: int, generator: np.random.Generator | None = None) -> NDArray[np.int64]:
    """(R, n) which values each bootstrap resample holds."""
    return (generator or np.random.default_rng(SEED)).integers(count, size=(RESAMPLES, count))


def _rearrange_signs(count: int, generator: np.random.Generator) -> tuple[NDArray[np.int64], bool]:
    """(R, n) signs, and whether they are all there are."""
    if 2**count <= MAX_EXACT:
        return np.array(list(itertools.product((1, -1), repeat=count))), True
    return generator.choice((1, -1), size=(RESAMPLES, count)), False


def _rearrange_groups(total: int, size: int, generator: np.random.Generator) -> tuple[NDArray[np.int64], bool]:
    """(R, ``size``) which of ``total`` values are in the first group, and whether they are all there are."""
    # itertools.combinations is lazy: one more than allowed is enough to know.
    rows = list(itertools.islice(itertools.combinations(range(total), size), MAX_EXACT + 1))
    if len(rows) <= MAX_EXACT:
        return np.array(rows), True
    return generator.permuted(np.tile(np.arange(total), (RESAMPLES, 1)), axis=1)[:, :size], False
