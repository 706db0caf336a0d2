"""A weighted sum of medians with its interval: a score, an average, a difference and a slope are all one."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from maelm_composer.statistics import TAILS, resample_medians


@dataclass(frozen=True)
class Estimate:
    """``low`` and ``high`` are None where a median rests on one seed: one value has no spread."""

    value: float
    low: float | None
    high: float | None
    count: int  # seeds of the median that has the fewest


Term = tuple[float, Sequence[float]]  # weight, values over seeds


def estimate(terms: Sequence[Term]) -> Estimate:
    """Σ weight × median(values), with the percentile-bootstrap interval of that sum.

    Of one term it is :func:`maelm_composer.statistics.summarize`, to the digit.
    """
    value = sum(weight * float(np.median(values)) for weight, values in terms)
    count = min(len(values) for _, values in terms)
    if count < 2:
        return Estimate(value, None, None, count)
    weights = np.array([weight for weight, _ in terms])
    low, high = np.percentile(resample_medians([values for _, values in terms]) @ weights, TAILS)
    return Estimate(value, float(low), float(high), count)


def slope_weights(x: Sequence[float]) -> list[float]:
    """Weights that make a weighted sum of y the least-squares slope of y over ``x``."""
    centred = np.asarray(x, float) - np.mean(x)
    return [float(weight) for weight in centred / np.sum(centred**2)]
