"""Means, intervals and tests over a few seeds. Imports no torch."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit  # the inverse of Student's t distribution function

ALPHA = 0.05  # of tests; intervals cover the rest, 95 %
POWER = 0.80
EQUAL = 1e-9  # values that differ by less, absolutely or relatively, are equal but for floating-point rounding


@dataclass(frozen=True)
class MeanInterval:
    """A mean with its interval; all fields but ``mean`` are None for one value, equal or infinite ones."""

    mean: float
    low: float | None  # 95 % interval of the mean
    high: float | None
    p: float | None  # two-sided, of a mean of zero
    detectable: float | None  # true mean with p < 0.05 in 80 % of experiments with this spread; of two seeds, 73 %


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

    half² = Σ v·t² over the parts: each group, and each set of examples. v is the variance that the part contributes to
    the mean, t Student's quantile with the part's own degrees of freedom. With one group and no examples
    this is the t interval. With several parts it covers at least as much as it says, if they are normal and
    independent (Banerjee, Sankhya 22, 1960): P(Z² ≤ x) of a normal Z is concave in x. p is the level at which the
    interval ends at zero.

    Args:
        examples: one entry for every set of examples that the values were measured on. The variance is then that of
            seeds plus that of examples, with the common part counted once, and the interval is at least that of the
            examples alone. Without it the interval is about these very examples.
        rounding: for each group, the variance that rounding gives a value. The variance over seeds is at least that:
            whole numbers that happen to be equal are no certainty.
    """
    samples = [np.asarray(values, dtype=float) for values in groups]
    mean = float(sum(sample.mean() for sample in samples))
    if any(len(sample) == 1 or not np.isfinite(sample).all() for sample in samples):
        return MeanInterval(mean, None, None, None, None)
    floors = rounding or [0.0] * len(samples)
    spreads = [max(float(sample.var(ddof=1)), floor) for sample, floor in zip(samples, floors, strict=True)]
    of_seeds = [(spread / len(sample), len(sample) - 1) for spread, sample in zip(spreads, samples, strict=True)]
    of_examples = [(found.own, found.count - 1) for found in examples]
    of_examples_alone = [(max(found.own - found.shared, 0.0), found.count - 1) for found in examples]

    def reach(tail: float) -> float:
        return max(_reach(of_seeds + of_examples_alone, tail), _reach(of_examples, tail))

    half = reach(ALPHA / 2)
    least = EQUAL * max(1.0, *(abs(sample).max() for sample in samples))
    if not least < half < math.inf:  # equal values are no certainty about the mean; influences may have overflowed
        return MeanInterval(mean, None, None, None, None)
    return MeanInterval(mean, mean - half, mean + half, _find_p(mean, reach), half + reach(1 - POWER))


def _reach(parts: Sequence[tuple[float, int]], tail: float) -> float:
    """The distance from a mean that leaves at most ``tail`` of the probability on each side.

    Args:
        parts: variances of independent contributions to the mean, each with its degrees of freedom
    """
    return sum(variance * float(stdtrit(freedom, tail)) ** 2 for variance, freedom in parts) ** 0.5


def _find_p(mean: float, reach: Callable[[float], float]) -> float:
    """Twice the tail whose ``reach`` is ``mean``, by bisection."""
    low, high = -230.0, float(np.log(0.5))  # logarithms of the tail; the lower one is about 1e-100
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if reach(float(np.exp(middle))) > abs(mean) else (low, middle)
    return 2 * float(np.exp(high))


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
