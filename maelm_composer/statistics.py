"""What a handful of seeds says: median, spread, intervals. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

LEVEL = 0.95
POWER = 0.80


@dataclass(frozen=True)
class Summary:
    """Of one sample; ``std`` (n - 1 in the denominator), ``low`` and ``high`` are None where there is one value."""

    count: int
    median: float
    mean: float
    std: float | None
    low: float | None  # 95 % interval of the mean, as of :func:`estimate_mean`
    high: float | None


def summarize(values: Sequence[float]) -> Summary:
    """Summarize ``values``, one a seed.

    Raises:
        ValueError: no values.
    """
    if len(values) == 0:
        raise ValueError('no values')
    sample, interval = np.asarray(values, dtype=float), estimate_mean(values)
    std = float(sample.std(ddof=1)) if len(sample) > 1 else None
    return Summary(len(sample), float(np.median(sample)), interval.mean, std, interval.low, interval.high)


@dataclass(frozen=True)
class MeanInterval:
    """Student's t over independent values; all but ``mean`` are None where there is one value."""

    mean: float
    low: float | None  # 95 % interval of the mean
    high: float | None
    p: float | None  # two-sided, of a mean of zero
    detectable: float | None  # true mean of which an experiment alike would find p < 0.05 in 80 % of cases, about


def estimate_mean(values: Sequence[float]) -> MeanInterval:
    """The mean of ``values``, one a pretraining seed, with its interval; infinite where one of them is.

    Differences that are paired by seed are given as differences. Of normal values the interval covers what it says from
    two of them up, where a bootstrap over three covers 75 % at most and over five 94 %.
    """
    return estimate_contrast([(1.0, values)])


@dataclass(frozen=True)
class ExampleVariance:
    """Of Σ weight × mean over seeds that were all measured on the same examples."""

    own: float  # because the examples are a sample
    shared: float  # of that, what the variance over seeds holds too: what a seed makes of an example
    count: int


def estimate_contrast(
    groups: Sequence[tuple[float, Sequence[float]]], examples: Sequence[ExampleVariance] = ()
) -> MeanInterval:
    """Σ weight × mean over ``groups`` (weight, values) that are independent of each other, each with its own variance.

    Degrees of freedom are Welch's and Satterthwaite's: n - 1 of one group.

    Args:
        examples: of every sample of examples that the values were measured on. The variance is then that of seeds and
            examples, their common part counted once, and never below that of either. Without it the interval is about
            these very examples.
    """
    samples = [(weight, np.asarray(values, dtype=float)) for weight, values in groups]
    mean = float(sum(weight * sample.mean() for weight, sample in samples))
    if any(len(sample) == 1 or not np.isfinite(sample).all() for _, sample in samples):
        return MeanInterval(mean, None, None, None, None)
    parts = [(weight**2 * float(sample.var(ddof=1)) / len(sample), len(sample) - 1) for weight, sample in samples]
    of_seeds, own = sum(part for part, _ in parts), sum(found.own for found in examples)
    variance = max(of_seeds + own - sum(found.shared for found in examples), of_seeds, own)
    parts += [(found.own, found.count - 1) for found in examples]
    error = variance**0.5
    freedom = variance**2 / sum(part**2 / n for part, n in parts) if error else len(samples[0][1]) - 1
    student = stats.t(freedom)
    half = float(student.ppf((1 + LEVEL) / 2)) * error
    p = 2 * float(student.sf(abs(mean) / error)) if error else float(mean == 0)
    detectable = half + float(student.ppf(POWER)) * error
    return MeanInterval(mean, mean - half, mean + half, p, detectable)


def measure_example_variance(groups: Sequence[tuple[float, np.ndarray]]) -> ExampleVariance:
    """Of Σ weight × mean; seeds and examples are crossed: every seed is measured on the same examples.

    Args:
        groups: (weight, (seeds, examples) influences), independent but for their common examples.
    """
    count = groups[0][1].shape[1]
    mean = sum(weight * influences.mean(0) for weight, influences in groups)
    shared = 0.0
    for weight, influences in groups:
        seeds = len(influences)
        if seeds > 1:
            rest = influences - influences.mean(0) - influences.mean(1, keepdims=True) + influences.mean()
            shared += weight**2 * float((rest**2).sum()) / ((seeds - 1) * (count - 1)) / (seeds * count)
    return ExampleVariance(float(np.var(mean, ddof=1)) / count, shared, count)


def adjust_holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction: the p-values, adjusted so that all may be held against one level."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted
