"""What a handful of seeds says: median, spread, bootstrap intervals. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 10_000
SEED = 17
TAILS = (2.5, 97.5)  # percentiles: a 95 % interval


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
    low, high = np.percentile(_resample_medians(sample, np.random.default_rng(SEED)), TAILS)
    return Summary(
        len(sample), float(np.median(sample)), float(sample.mean()), float(sample.std(ddof=1)), float(low), float(high)
    )


def bootstrap_difference(ours: Sequence[float], theirs: Sequence[float]) -> Difference:
    """median(ours) - median(theirs), with its interval; each sample is drawn on its own.

    Raises:
        ValueError: no values.
    """
    first, second = _as_sample(ours), _as_sample(theirs)
    value = float(np.median(first) - np.median(second))
    if min(len(first), len(second)) == 1:
        return Difference(value, None, None)
    generator = np.random.default_rng(SEED)
    ours_resampled, theirs_resampled = _resample_medians(first, generator), _resample_medians(second, generator)
    low, high = np.percentile(ours_resampled - theirs_resampled, TAILS)
    return Difference(value, float(low), float(high))


def _as_sample(values: Sequence[float]) -> NDArray[np.float64]:
    if len(values) == 0:
        raise ValueError('no values')
    return np.asarray(values, dtype=float)


def _resample_medians(sample: NDArray[np.float64], generator: np.random.Generator) -> NDArray[np.float64]:
    """(R,) medians of bootstrap resamples."""
    return np.median(sample[generator.integers(len(sample), size=(RESAMPLES, len(sample)))], axis=1)
