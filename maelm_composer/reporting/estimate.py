"""A weighted sum of medians with its interval: scores, averages, differences and slopes are all of this form."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from maelm_composer.statistics import ExampleVariance, estimate_contrast, measure_example_variance


@dataclass(frozen=True, eq=False)
class Term:
    """``weight`` times the median of one number of one model."""

    weight: float
    values: Mapping[int, Sequence[float]]  # pretraining seed -> one value for each fine-tuning seed
    # Of scores: the name of a development set; pretraining seed -> (examples,) influence of each on the median.
    sample: str = ''
    influences: Mapping[int, np.ndarray] = field(default_factory=dict)
    group: int = 0  # terms of one group are paired by pretraining seed; groups are independent of each other


@dataclass(frozen=True)
class Estimate:
    """A mean over pretraining seeds; the fields that are None need more than one seed."""

    value: float
    low: float | None = None  # 95 % interval
    high: float | None = None
    count: int = 1  # fine-tuning seeds of the median that has the fewest
    pretraining_seeds: int = 1
    examples: int = 0  # number of development examples; 0: the interval does not cover the choice of examples
    p: float | None = None  # two-sided test that the value is zero
    detectable: float | None = None  # the true value that so many seeds would find in about 80 % of cases


def estimate(terms: Sequence[Term]) -> Estimate:
    """Σ weight × median over fine-tuning seeds, averaged over pretraining seeds.

    Seeds that a term of a group lacks are left out of the group. ``pretraining_seeds`` is the least of all groups.
    """
    groups = [[term for term in terms if term.group == group] for group in sorted({term.group for term in terms})]
    sums = [sum_by_seed(of_group) for of_group in groups]
    examples = _measure_examples(groups)
    found = estimate_contrast([(1.0, list(of_group.values())) for of_group in sums], examples)
    counts = [
        len(term.values[seed])
        for of_group, seeds in zip(groups, sums, strict=True)
        for term in of_group
        for seed in seeds
    ]
    return Estimate(
        found.mean,
        found.low,
        found.high,
        count=min(counts),
        pretraining_seeds=min(map(len, sums)),
        examples=sum(variance.count for variance in examples),
        p=found.p,
        detectable=found.detectable,
    )


def find_common_seeds(terms: Sequence[Term]) -> list[int]:
    """Pretraining seeds that every term has."""
    return sorted(set.intersection(*(set(term.values) for term in terms)))


def sum_by_seed(terms: Sequence[Term]) -> dict[int, float]:
    """Pretraining seed -> Σ weight × median(values), of the seeds that every term has."""
    return {
        seed: sum(term.weight * float(np.median(term.values[seed])) for term in terms)
        for seed in find_common_seeds(terms)
    }


def slope_weights(x: Sequence[float]) -> list[float]:
    """Weights that make a weighted sum of y the least-squares slope of y over ``x``."""
    centred = np.asarray(x, float) - np.mean(x)
    return (centred / np.sum(centred**2)).tolist()


def _measure_examples(groups: Sequence[Sequence[Term]]) -> list[ExampleVariance]:
    """The variance that each set of examples contributes; empty where a term has no influences."""
    samples: dict[str, list[tuple[float, np.ndarray]]] = {}
    for terms in groups:
        seeds, of_group = find_common_seeds(terms), dict[str, np.ndarray]()
        for term in terms:
            if not all(seed in term.influences for seed in seeds):
                return []
            influences = term.weight * np.stack([term.influences[seed] for seed in seeds])
            of_group[term.sample] = of_group.get(term.sample, 0) + influences
        for sample, influences in of_group.items():
            samples.setdefault(sample, []).append((1.0, influences))
    return [measure_example_variance(found) for found in samples.values()]
