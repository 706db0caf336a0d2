"""Means, intervals and tests over a few seeds. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtr, stdtrit  # Student's t: its distribution function and the inverse

LEVEL = 0.95
POWER = 0.80
EQUAL = 1e-9  # values that differ by a smaller part are equal, but for the rounding of floating-point numbers


@dataclass(frozen=True)
class MeanInterval:
    """A mean with Student's t interval; all fields but ``mean`` are None for a single value, and for equal ones."""

    mean: float
    low: float | None  # 95 % interval of the mean
    high: float | None
    p: float | None  # two-sided test of a mean of zero
    detectable: float | None  # the true mean for which about 80 % of such experiments find p < 0.05


def estimate_mean(values: Sequence[float]) -> MeanInterval:
    """The mean of ``values``, one for each pretraining seed, with its interval.

    Paired samples are given as differences. For normal values the coverage is exact from two values on; a bootstrap
    over three values covers at most 75 %, over five at most 94 %. If a value is infinite, so is the mean.
    """
    return estimate_contrast([values])


@dataclass(frozen=True)
class ExampleVariance:
    """The variance that the choice of examples contributes to a mean over seeds."""

    own: float  # variance due to the examples being a sample
    shared: float  # the part of it that the variance over seeds contains, too: the interaction of seed and example
    count: int  # examples


def estimate_contrast(
    groups: Sequence[Sequence[float]], examples: Sequence[ExampleVariance] = (), rounding: Sequence[float] = ()
) -> MeanInterval:
    """The sum of the means of independent ``groups``, each with a variance of its own.

    Degrees of freedom are those of Welch and Satterthwaite; for one group they are n − 1.

    Args:
        examples: one entry for every set of examples that the values were measured on. The variance is then that of
            seeds plus that of examples, with the common part counted once, and at least the larger of the two. Without
            it the interval is about these very examples.
        rounding: for each group, the variance that rounding gives a value. The variance over seeds is at least that:
            whole numbers that happen to be equal are no certainty.
    """
    samples = [np.asarray(values, dtype=float) for values in groups]
    mean = float(sum(sample.mean() for sample in samples))
    if any(len(sample) == 1 or not np.isfinite(sample).all() for sample in samples):
        return MeanInterval(mean, None, None, None, None)
    floors = rounding or [0.0] * len(samples)
    spreads = [max(float(sample.var(ddof=1)), floor) for sample, floor in zip(samples, floors, strict=True)]
    parts = [(spread / len(sample), len(sample) - 1) for spread, sample in zip(spreads, samples, strict=True)]
    of_seeds, own = sum(part for part, _ in parts), sum(found.own for found in examples)
    variance = max(of_seeds + own - sum(found.shared for found in examples), of_seeds, own)
    parts += [(found.own, found.count - 1) for found in examples]
    if variance <= (EQUAL * max(abs(sample).max() for sample in samples)) ** 2:  # which is no certainty about the mean
        return MeanInterval(mean, None, None, None, None)
    error = variance**0.5
    freedom = variance**2 / sum(part**2 / n for part, n in parts)
    half = float(stdtrit(freedom, (1 + LEVEL) / 2)) * error
    p = 2 * float(stdtr(freedom, -abs(mean) / error))
    detectable = half + float(stdtrit(freedom, POWER)) * error
    return MeanInterval(mean, mean - half, mean + half, p, detectable)


def measure_example_variance(groups: Sequence[np.ndarray]) -> ExampleVariance:
    """The variance of the sum of the means of ``groups`` due to the examples.

    Args:
        groups: (seeds, examples) influences, crossed: every seed is measured on the same examples, and groups have
            nothing else in common.
    """
    count = groups[0].shape[1]
    mean = sum(influences.mean(0) for influences in groups)
    shared = 0.0
    for influences in groups:
        seeds = len(influences)
        if seeds > 1:
            rest = influences - influences.mean(0) - influences.mean(1, keepdims=True) + influences.mean()
            shared += float((rest**2).sum()) / ((seeds - 1) * (count - 1)) / (seeds * count)
    return ExampleVariance(float(np.var(mean, ddof=1)) / count, shared, count)


def adjust_holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction: adjusted p-values, to be compared with one level."""
    found = np.asarray(p_values, dtype=float)
    order, adjusted = np.argsort(found, kind='stable'), np.empty_like(found)
    adjusted[order] = np.maximum.accumulate(np.arange(len(found), 0, -1) * found[order]).clip(max=1)
    return adjusted.tolist()
