"""Measured numbers that can be averaged and subtracted, keeping the records they rest on or the reason why not."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from maelm_composer.records import FinetuningRecord, PretrainingRecord, RankRecord, unpack_numbers
from maelm_composer.reporting.artefacts import Column, Model, Role, columns_of
from maelm_composer.reporting.estimate import (
    Estimate,
    Term,
    estimate,
    estimate_over_groups,
    find_common_seeds,
    sum_by_seed,
)
from maelm_composer.reporting.evidence import Evidence
from maelm_composer.tasks.catalogue import find_task


@dataclass(frozen=True)
class Cell:
    """A weighted sum of medians over fine-tuning seeds for each pretraining seed, or why it cannot be had."""

    terms: tuple[Term, ...] = ()
    runs: tuple[PretrainingRecord, ...] = ()
    records: tuple[FinetuningRecord | RankRecord, ...] = ()
    missing: str = ''
    note: str = ''  # what is to be said of a number that is there

    @cached_property
    def estimate(self) -> Estimate | None:
        return None if self.missing else estimate(self.terms)


@dataclass(frozen=True)
class Contrast(Cell):
    """Σ weight × cell over models of which no seed pairs one with another, as those of different sizes."""

    groups: tuple[tuple[float, tuple[Term, ...]], ...] = ()

    @cached_property
    def estimate(self) -> Estimate | None:
        return None if self.missing else estimate_over_groups(self.groups)


def score(evidence: Evidence, model: Model, column: Column, samples: int | None = None) -> Cell:
    """One score of ``model`` in percent, fine-tuned from its last checkpoint or the one at ``samples``.

    AVG is the mean over tasks, MNLI-m once, of the medians over fine-tuning seeds.
    """
    if column.is_average:
        averaged = [c for c in columns_of(evidence.scale, Role.glue) if c.is_averaged]
        return combine([(1 / len(averaged), score(evidence, model, c, samples)) for c in averaged])

    def read(record: FinetuningRecord) -> float:
        return float(100 * (record.score if column.metric is None else record.metrics[column.metric]))

    found = evidence.select_finetunings(model, column.task, samples)
    notes = [
        f'{column.task} from {run.run_name}: {failed} of {failed + len(records)} seeds failed'
        for run, records in found
        if (failed := evidence.count_failures(records))
    ]
    cell = _gather(
        evidence, model, column.task, [(run, records, [*map(read, records)]) for run, records in found], notes
    )
    metric = column.metric or find_task(column.task).metric
    if cell.missing or not all(metric in r.influences for _, records in found for r in records):
        return cell
    (term,) = cell.terms
    influences = {run.seed: _influence_of_median(records, read, metric) for run, records in found}
    sample = f'{column.task} {metric.rpartition("_")[0]} {found[0][1][0].data_hash}'
    return replace(cell, terms=(replace(term, sample=sample, influences=influences),))


def _influence_of_median(
    records: Sequence[FinetuningRecord], read: Callable[[FinetuningRecord], float], metric: str
) -> np.ndarray:
    """(examples,) in percent; of an even number of records the mean of the two in the middle."""
    ordered = sorted(records, key=read)
    middle = {(len(ordered) - 1) // 2, len(ordered) // 2}
    found: np.ndarray = np.mean([100 * unpack_numbers(ordered[i].influences[metric]) for i in middle], axis=0)
    return found


def measure_runs(
    evidence: Evidence, model: Model, what: str, read: Callable[[PretrainingRecord], float | None]
) -> Cell:
    """A number of ``model``'s pretraining runs; ``read`` gives None of a run that has none."""
    values = [(run, read(run)) for run in evidence.find_runs(model)]
    return _gather(evidence, model, what, [(run, (), [value]) for run, value in values if value is not None])


def constant_score(evidence: Evidence, model: Model, column: Column) -> Cell:
    """What the best constant answer scores in percent where ``model`` has :func:`score`; of a task's own metric."""
    if column.is_average:
        averaged = [c for c in columns_of(evidence.scale, Role.glue) if c.is_averaged]
        return combine([(1 / len(averaged), constant_score(evidence, model, c)) for c in averaged])
    cell = score(evidence, model, column)
    if cell.missing:
        return cell
    values, record = cell.terms[0].values, cell.records[0]
    assert isinstance(record, FinetuningRecord)
    return replace(cell, terms=(Term(1.0, {min(values): [100 * record.baseline]}),))  # no seed changes it


def rank(evidence: Evidence, model: Model, key: str, layer: int = -1, index: int | None = None) -> Cell:
    """One number of one layer (-1: the last) of the rank records of ``model``'s last checkpoints.

    Args:
        index: into the list that ``key`` names, where it is one.
    """

    def read(record: RankRecord) -> float:
        found = getattr(record.layers[layer], key)
        return float(found if index is None else found[index])

    found = [(run, [record], [read(record)]) for run, record in evidence.find_ranks(model)]
    return _gather(evidence, model, 'effective rank', found)


def finetuned_rank(evidence: Evidence, model: Model, task: str) -> Cell:
    """Effective rank of the last layer after fine-tuning, over seeds."""
    return list(finetuned_rank_curve(evidence, model, task).values())[-1]


def finetuned_rank_curve(evidence: Evidence, model: Model, task: str) -> dict[float, Cell]:
    """Epoch -> effective rank of the last layer during fine-tuning; one epoch, 0, with the reason, where there is none.

    Only the epochs that every record has.
    """
    found = evidence.select_finetunings(model, task)
    curves = [
        (run, records, [{p.epoch: float(p.effective_rank) for p in r.rank_curve} for r in records])
        for run, records in found
    ]
    epochs = set.intersection(*(set(curve) for *_, of_run in curves for curve in of_run)) if curves else set()
    if not epochs:
        reason = f'the records of {task} from {model.run_name(evidence.scale)} hold no rank during fine-tuning'
        return {0.0: Cell(missing=reason if found else explain_absence(evidence, model, task))}
    return {
        epoch: _gather(evidence, model, task, [(run, rs, [c[epoch] for c in of_run]) for run, rs, of_run in curves])
        for epoch in sorted(epochs)
    }


def combine(parts: Sequence[tuple[float, Cell]]) -> Cell:
    """Σ weight × cell, paired by pretraining seed; missing where one of them is, or where no seed has all of them."""
    terms = tuple(replace(term, weight=weight * term.weight) for weight, cell in parts for term in cell.terms)
    missing = [cell.missing for _, cell in parts if cell.missing]
    notes = [cell.note for _, cell in parts if cell.note]
    if not missing:
        common = find_common_seeds(terms)
        lacking = sorted(set().union(*(term.values for term in terms)) - set(common))
        if lacking:
            text = f'pretraining seeds {", ".join(map(str, lacking))} have only a part of it'
            (notes if common else missing).append(text)
    return Cell(
        terms,
        tuple(run for _, cell in parts for run in cell.runs),
        tuple(record for _, cell in parts for record in cell.records),
        '; '.join(dict.fromkeys(missing)),
        '; '.join(dict.fromkeys(notes)),
    )


def subtract(left: Cell, right: Cell) -> Cell:
    return combine([(1.0, left), (-1.0, right)])


def relate(left: Cell, right: Cell) -> Cell:
    """By how much ``left`` exceeds ``right`` in percent of it, within each pretraining seed."""
    both = subtract(left, right)
    if both.missing:
        return both
    bases, gaps = sum_by_seed(right.terms), sum_by_seed(both.terms)
    return replace(both, terms=(Term(1.0, {seed: [100 * gap / bases[seed]] for seed, gap in gaps.items()}),))


def contrast(parts: Sequence[tuple[float, Cell]]) -> Cell:
    """Σ weight × cell, not paired; missing where one of them is."""
    joined = [cell for _, cell in parts]
    return Contrast(
        runs=tuple(run for cell in joined for run in cell.runs),
        records=tuple(record for cell in joined for record in cell.records),
        missing='; '.join(dict.fromkeys(cell.missing for cell in joined if cell.missing)),
        note='; '.join(dict.fromkeys(cell.note for cell in joined if cell.note)),
        groups=tuple((weight, cell.terms) for weight, cell in parts),
    )


def explain_absence(evidence: Evidence, model: Model, what: str) -> str:
    """Why there is no number of ``what`` for ``model``."""
    runs = [run.run_name for run in evidence.find_runs(model)]
    if not runs:
        return f'no finished pretraining run {model.run_name(evidence.scale)}'
    failed = [r for r in evidence.failures if r.task == what and r.checkpoint.run_name in runs]
    if failed:
        return f'{what} from {failed[0].checkpoint.run_name} failed: {failed[0].error}'
    return f'{what} of {", ".join(runs)} is not recorded'


def _gather(
    evidence: Evidence,
    model: Model,
    what: str,
    found: Sequence[tuple[PretrainingRecord, Sequence[FinetuningRecord | RankRecord], Sequence[float]]],
    notes: Sequence[str] = (),
) -> Cell:
    """One number of ``model``.

    Args:
        what: it is a number of, for the reason where there is none.
        found: a pretraining run, its records, and their values, one a fine-tuning seed.
    """
    if not found:
        return Cell(missing=explain_absence(evidence, model, what))
    there = {run.run_name for run, *_ in found}
    lacking = [run.run_name for run in evidence.find_runs(model) if run.run_name not in there]
    return Cell(
        terms=(Term(1.0, {run.seed: values for run, _, values in found}),),
        runs=tuple(run for run, *_ in found),
        records=tuple(record for _, records, _ in found for record in records),
        note='; '.join([*notes, *(f'{what} of {name} is not recorded' for name in lacking)]),
    )
