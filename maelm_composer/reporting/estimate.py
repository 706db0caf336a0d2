"""A weighted sum of medians with its interval: a score, an average, a difference and a slope are all one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from maelm_composer.statistics import estimate_mean

Term = tuple[float, Mapping[int, Sequence[float]]]  # weight; by pretraining seed, values over fine-tuning seeds


@dataclass(frozen=True)
class Estimate:
    """A mean over pretraining seeds; what is None needs more than one."""

    value: float
    low: float | None = None  # 95 % interval
    high: float | None = None
    count: int = 1  # fine-tuning seeds of the median that has the fewest
    pretraining_seeds: int = 1
    p: float | None = None  # two-sided, of zero
    detectable: float | None = None  # difference from zero that so many seeds would find in 80 % of cases, about


def find_common_seeds(terms: Sequence[Term]) -> list[int]:
    """Pretraining seeds that every term has."""
    return sorted(set.intersection(*(set(values) for _, values in terms)))


def estimate(terms: Sequence[Term]) -> Estimate:
    """Mean over the common pretraining seeds of Σ weight × median(values): models are paired by seed."""
    seeds = find_common_seeds(terms)
    values = [sum(weight * float(np.median(of_seed[seed])) for weight, of_seed in terms) for seed in seeds]
    return estimate_over_seeds(values, min(len(of_seed[seed]) for _, of_seed in terms for seed in seeds))


def estimate_over_seeds(values: Sequence[float], count: int) -> Estimate:
    """Of ``values``, one a pretraining seed, each of ``count`` fine-tuning seeds or more."""
    found: dict[str, Any] = dict(vars(estimate_mean(values)))
    return Estimate(found.pop('mean'), count=count, pretraining_seeds=len(values), **found)


def slope_weights(x: Sequence[float]) -> list[float]:
    """Weights that make a weighted sum of y the least-squares slope of y over ``x``."""
    centred = np.asarray(x, float) - np.mean(x)
    return [float(weight) for weight in centred / np.sum(centred**2)]
