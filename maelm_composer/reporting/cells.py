"""Measured numbers with their intervals: scores, averages, differences and slopes are weighted sums of medians.

Each number keeps the records that it is computed from, or the reason why it is missing.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import numpy as np

from maelm_composer.errors import InputError
from maelm_composer.recipe import read_keys
from maelm_composer.records import FinetuningRecord, PretrainingRecord, RankRecord
from maelm_composer.reporting.artefacts import ABLATIONS, DELTAS
from maelm_composer.statistics import ExampleVariance, estimate_contrast, measure_example_variance

NEVER = 'never in'  # begins the note of a value that is infinite in some seeds
ENOUGH_SEEDS = 3  # for a verdict, a trend or a drawn interval: of two seeds, Student's t interval is very wide

OF_ROUNDING = 1 / 12  # variance of rounding to a whole number, as of ranks: the error is uniform on [-1/2, 1/2]


@dataclass(frozen=True, eq=False)
class Term:
    """``weight`` times the median of one number of one model."""

    weight: float
    values: Mapping[int, Sequence[float]]  # pretraining seed -> one value for each fine-tuning seed
    # Of scores: the name of a development set; pretraining seed -> (examples,) influence of each on the median.
    sample: str = ''
    influences: Mapping[int, np.ndarray] = field(default_factory=dict)
    rounding: float = 0.0  # variance that rounding gives a value
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
    p: float | None = None  # two-sided test that the value is zero; None with fewer than ENOUGH_SEEDS seeds
    detectable: float | None = None  # the true value that so many seeds would find in about 80 % of cases


def estimate(terms: Sequence[Term]) -> Estimate:
    """Σ weight × median over fine-tuning seeds, averaged over pretraining seeds.

    Seeds that a term of a group lacks are left out of the group. ``pretraining_seeds`` is the least of all groups.
    """
    groups = [[term for term in terms if term.group == group] for group in sorted({term.group for term in terms})]
    sums = [sum_by_seed(of_group) for of_group in groups]
    examples = _measure_examples(groups)
    rounding = [_measure_rounding(of_group) for of_group in groups]
    found = estimate_contrast([list(of_group.values()) for of_group in sums], examples, rounding)
    num_seeds = min(map(len, sums))
    medians = [(term, seed) for group, seeds in zip(groups, sums, strict=True) for term in group for seed in seeds]
    return Estimate(
        found.mean,
        found.low,
        found.high,
        count=min(len(term.values[seed]) for term, seed in medians),
        pretraining_seeds=num_seeds,
        examples=sum(variance.count for variance in examples),
        p=found.p if num_seeds >= ENOUGH_SEEDS else None,
        detectable=found.detectable if num_seeds >= ENOUGH_SEEDS else None,
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


def _measure_rounding(terms: Sequence[Term]) -> float:
    """The variance of the sum of ``terms`` due to rounding, whose errors are independent."""
    return sum(term.weight**2 * term.rounding for term in terms)


def _measure_examples(groups: Sequence[Sequence[Term]]) -> list[ExampleVariance]:
    """The variance that each set of examples contributes; empty where a term has no influences, or one example."""
    samples: dict[str, list[np.ndarray]] = {}
    for terms in groups:
        seeds, of_group = find_common_seeds(terms), dict[str, np.ndarray]()
        for term in terms:
            if not all(seed in term.influences and len(term.influences[seed]) > 1 for seed in seeds):
                return []
            influences = term.weight * np.stack([term.influences[seed] for seed in seeds])
            of_group[term.sample] = of_group.get(term.sample, 0) + influences
        for sample, influences in of_group.items():
            samples.setdefault(sample, []).append(influences)
    return [measure_example_variance(found) for found in samples.values()]


@dataclass(frozen=True)
class Cell:
    """A weighted sum of medians over fine-tuning seeds, or the reason why it cannot be computed."""

    terms: tuple[Term, ...] = ()
    runs: tuple[PretrainingRecord, ...] = ()
    records: tuple[FinetuningRecord | RankRecord, ...] = ()
    missing: str = ''  # why there is no number; empty: there is one
    note: str = ''  # a remark on a number that is there

    @cached_property
    def estimate(self) -> Estimate | None:
        return None if self.missing else estimate(self.terms)


Parts = Sequence[tuple[float, Cell]]  # weights of a sum


def combine(parts: Parts, are_rungs: bool = False) -> Cell:
    """Σ weight × cell, paired by pretraining seed; missing where a cell is missing, or no seed is common to all cells.

    Args:
        are_rungs: the parts are models of different sizes, trained on different rows. They are paired by seed if they
            share ENOUGH_SEEDS seeds, else they are independent groups with all their seeds.

    Raises:
        InputError: models of one size were not trained on the same rows, masks and schedule.
    """
    missing = [cell.missing for _, cell in parts if cell.missing]
    notes = [cell.note for _, cell in parts if cell.note]
    is_paired = True
    if not missing:
        terms = [term for _, cell in parts for term in cell.terms]
        common = find_common_seeds(terms)
        if are_rungs:
            is_paired = len(common) >= ENOUGH_SEEDS
        else:
            _assert_same_rows([run for _, cell in parts for run in cell.runs])
        lacking = sorted(set().union(*(term.values for term in terms)) - set(common))
        if lacking and is_paired:
            text = f'pretraining seeds {", ".join(map(str, lacking))} lack a part of the comparison'
            if not common:
                missing.append(text)
            elif not are_rungs:  # a rung may have been planned with fewer seeds
                notes.append(text)
            parts = [(weight, restrict(cell, common)) for weight, cell in parts]
    return Cell(
        tuple(
            replace(term, weight=weight * term.weight, group=term.group if is_paired else number)
            for number, (weight, cell) in enumerate(parts)
            for term in cell.terms
        ),
        tuple(run for _, cell in parts for run in cell.runs),
        tuple(record for _, cell in parts for record in cell.records),
        '; '.join(dict.fromkeys(missing)),
        '; '.join(dict.fromkeys(notes)),
    )


def restrict(cell: Cell, seeds: Collection[int]) -> Cell:
    """``cell`` of these pretraining seeds alone, with their records."""
    runs = tuple(run for run in cell.runs if run.seed in seeds)
    names = {run.run_name for run in runs}
    return replace(
        cell,
        terms=tuple(replace(t, values={s: v for s, v in t.values.items() if s in seeds}) for t in cell.terms),
        runs=runs,
        records=tuple(record for record in cell.records if record.checkpoint.run_name in names),
    )


def note_never(cell: Cell) -> Cell:
    """``cell`` with a note on how many of its pretraining seeds never reached the value, which is infinite there."""
    values = [of_seed[0] for term in cell.terms for of_seed in term.values.values()]
    if not (never := sum(map(math.isinf, values))):
        return cell
    return replace(cell, note='; '.join(filter(None, (f'{NEVER} {never} of {len(values)} seeds', cell.note))))


def _assert_same_rows(runs: Sequence[PretrainingRecord]) -> None:
    first: dict[int, PretrainingRecord] = {}
    for run in runs:
        other = first.setdefault(run.seed, run)
        here, there = _describe_training(run), _describe_training(other)
        for name in list_differences(here, there):
            if not (name == 'eval_rows' and None in (here[name], there[name])):
                raise InputError(
                    f'{other.run_name} and {run.run_name} are compared, but differ in {name}: '
                    f'{there.get(name)} and {here.get(name)}: keep the records of one experiment, or list the overlay '
                    'that sets it (docs/variants.md)'
                )


def list_differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The keys, sorted, that only one of two settings has, or that differ."""
    return sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))


@cache
def find_varied() -> set[str]:
    """The settings in which the paper's variants differ: the keys of their overlays."""
    models = (*ABLATIONS, *(model for _, model in DELTAS))
    return {key for model in models for path in model.overlays for key in read_keys(path)}


def _describe_training(run: PretrainingRecord) -> dict[str, Any]:
    """The settings that compared runs of one seed share."""
    varied = find_varied()
    of_recipe = {k: v for k, v in run.identity.items() if not k.startswith('model.decoder') and k not in varied}
    shared = ('data_hash', 'tokenizer_hash', 'samples', 'batches', 'eval_rows')
    return of_recipe | {name: getattr(run, name) for name in shared}


def average(cells: Sequence[Cell]) -> Cell:
    return combine([(1 / len(cells), cell) for cell in cells])


def slope(points: Sequence[tuple[float, Cell]], are_rungs: bool = False) -> Cell:
    """Least-squares slope over (x, cell)."""
    x = np.array([x for x, _ in points])
    weights = (x - x.mean()) / np.sum((x - x.mean()) ** 2)
    return combine([(float(weight), cell) for weight, (_, cell) in zip(weights, points, strict=True)], are_rungs)


def subtract(left: Cell, right: Cell) -> Cell:
    return combine([(1.0, left), (-1.0, right)])


def subtract_relative(left: Cell, right: Cell, base: Cell | None = None) -> Cell:
    """(left − right) / base in percent, within each pretraining seed; ``base`` is ``right`` if not given."""
    return relate([(1.0, left), (-1.0, right)], [(1.0, right if base is None else base)])


def relate(gap: Parts, base: Parts, are_rungs: bool = False) -> Cell:
    """Σ ``gap`` / Σ ``base`` in percent, within each pretraining seed; the arguments are those of :func:`combine`."""
    both = combine([*gap, *((0.0, cell) for _, cell in base)], are_rungs)
    if both.missing:
        return both
    if any(term.group for term in both.terms):
        return Cell(missing=f'a ratio needs {ENOUGH_SEEDS} pretraining seeds that both rungs have')
    bases, gaps = sum_by_seed(combine(base, are_rungs).terms), sum_by_seed(both.terms)
    values = {seed: [100 * gap / bases[seed]] for seed, gap in gaps.items()}
    scale = 100 / float(np.mean([bases[seed] for seed in gaps]))
    share = float(np.mean([gap / bases[seed] for seed, gap in gaps.items()]))
    # The derivative of gap / base: the base's own rounding moves the ratio, too.
    linear: dict[int, tuple[float, Cell]] = {}
    for weight, cell in (*gap, *((-share * weight, cell) for weight, cell in base)):
        linear[id(cell)] = linear.get(id(cell), (0.0, cell))[0] + weight, cell
    rounding = scale**2 * _measure_rounding(combine([*linear.values()], are_rungs).terms)
    return replace(both, terms=(Term(1.0, values, rounding=rounding),))
