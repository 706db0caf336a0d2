"""A weighted sum of medians with its interval: a score, an average, a difference and a slope are all one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from maelm_composer.statistics import (
    ExampleVariance,
    MeanInterval,
    estimate_contrast,
    estimate_mean,
    measure_example_variance,
)


@dataclass(frozen=True, eq=False)
class Term:
    """``weight`` times a number of one model."""

    weight: float
    values: Mapping[int, Sequence[float]]  # by pretraining seed, over fine-tuning seeds
    # Of a score: which development examples, and by pretraining seed the influences of the median, (examples,).
    sample: str = ''
    influences: Mapping[int, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class Estimate:
    """A mean over pretraining seeds; what is None needs more than one."""

    value: float
    low: float | None = None  # 95 % interval
    high: float | None = None
    count: int = 1  # fine-tuning seeds of the median that has the fewest
    pretraining_seeds: int = 1
    examples: int = 0  # of development sets, of which other ones are covered by the interval, too
    p: float | None = None  # two-sided, of zero
    detectable: float | None = None  # difference from zero that so many seeds would find in 80 % of cases, about


def find_common_seeds(terms: Sequence[Term]) -> list[int]:
    """Pretraining seeds that every term has."""
    return sorted(set.intersection(*(set(term.values) for term in terms)))


def estimate(terms: Sequence[Term]) -> Estimate:
    """Mean over the common pretraining seeds of Σ weight × median(values): models are paired by seed and by example."""
    return estimate_over_groups([(1.0, terms)])


def estimate_over_groups(groups: Sequence[tuple[float, Sequence[Term]]]) -> Estimate:
    """Σ weight × the mean of a group, where no seed pairs one group with another; the fewest seeds are counted."""
    values = [(weight, list(sum_by_seed(terms).values())) for weight, terms in groups]
    examples = _measure_examples(groups)
    return _describe(
        estimate_contrast(values, examples),
        min(count_finetunings(terms) for _, terms in groups),
        min(len(of_group) for _, of_group in values),
        sum(found.count for found in examples),
    )


def estimate_over_seeds(values: Sequence[float], count: int) -> Estimate:
    """Of ``values``, one a pretraining seed, each of ``count`` fine-tuning seeds or more."""
    return _describe(estimate_mean(values), count, len(values))


def sum_by_seed(terms: Sequence[Term]) -> dict[int, float]:
    """Pretraining seed -> Σ weight × median(values), of the seeds that every term has."""
    return {
        seed: sum(term.weight * float(np.median(term.values[seed])) for term in terms)
        for seed in find_common_seeds(terms)
    }


def count_finetunings(terms: Sequence[Term]) -> int:
    """Values of the median that has the fewest."""
    return min(len(term.values[seed]) for term in terms for seed in find_common_seeds(terms))


def slope_weights(x: Sequence[float]) -> list[float]:
    """Weights that make a weighted sum of y the least-squares slope of y over ``x``."""
    centred = np.asarray(x, float) - np.mean(x)
    return [float(weight) for weight in centred / np.sum(centred**2)]


def _measure_examples(groups: Sequence[tuple[float, Sequence[Term]]]) -> list[ExampleVariance]:
    """Of every sample of examples; none where a term has no influences."""
    samples: dict[str, list[tuple[float, np.ndarray]]] = {}
    for weight, terms in groups:
        seeds, of_group = find_common_seeds(terms), dict[str, np.ndarray]()
        for term in terms:
            if not all(seed in term.influences for seed in seeds):
                return []
            influences = term.weight * np.stack([term.influences[seed] for seed in seeds])
            of_group[term.sample] = of_group.get(term.sample, 0) + influences
        for sample, influences in of_group.items():
            samples.setdefault(sample, []).append((weight, influences))
    return [measure_example_variance(found) for found in samples.values()]


def _describe(interval: MeanInterval, count: int, pretraining_seeds: int, examples: int = 0) -> Estimate:
    found: dict[str, Any] = dict(vars(interval))
    return Estimate(found.pop('mean'), count=count, pretraining_seeds=pretraining_seeds, examples=examples, **found)
