"""Measured numbers that can be averaged and subtracted. Each keeps its records, or the reason why it is missing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from maelm_composer.records import FinetuningRecord, PretrainingRecord, RankRecord, unpack_numbers
from maelm_composer.reporting.artefacts import Column, Model
from maelm_composer.reporting.estimate import Estimate, Term, estimate, find_common_seeds, slope_weights, sum_by_seed
from maelm_composer.reporting.evidence import Evidence
from maelm_composer.tasks.catalogue import find_task


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


def score(evidence: Evidence, model: Model, column: Column, samples: int | None = None) -> Cell:
    """One score of ``model`` in percent: the median over fine-tuning seeds, or the mean of such medians.

    Args:
        samples: the checkpoint that was fine-tuned; None: the last one.
    """
    if column.parts:
        return average([score(evidence, model, part, samples) for part in column.parts])

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
    """(examples,) influences of the median record in percent, or the mean of those of the two middle records."""
    ordered = sorted(records, key=read)
    middle = {(len(ordered) - 1) // 2, len(ordered) // 2}
    return np.mean([100 * unpack_numbers(ordered[i].influences[metric]) for i in middle], axis=0)


def measure_runs(
    evidence: Evidence, model: Model, what: str, read: Callable[[PretrainingRecord], float | None]
) -> Cell:
    """A number of each pretraining run of ``model``; ``read`` returns None where a run lacks the number."""
    values = [(run, read(run)) for run in evidence.find_runs(model)]
    return _gather(evidence, model, what, [(run, (), [value]) for run, value in values if value is not None])


def constant_score(evidence: Evidence, model: Model, column: Column) -> Cell:
    """The score of the best constant answer in percent, from the records of ``model``; only of main metrics."""
    if column.parts:
        return average([constant_score(evidence, model, part) for part in column.parts])
    cell = score(evidence, model, column)
    if cell.missing:
        return cell
    values, record = cell.terms[0].values, cell.records[0]
    assert isinstance(record, FinetuningRecord)
    return replace(cell, terms=(Term(1.0, {min(values): [100 * record.baseline]}),))  # the same for every seed


def rank(evidence: Evidence, model: Model, key: str, layer: int = -1, index: int | None = None) -> Cell:
    """The value ``key`` of one layer in the rank records of ``model``'s last checkpoints.

    Args:
        layer: -1 is the last.
        index: position in the value, where it is a list.
    """

    def read(record: RankRecord) -> float:
        found = getattr(record.layers[layer], key)
        return float(found if index is None else found[index])

    found = [(run, [record], [read(record)]) for run, record in evidence.find_ranks(model)]
    return _gather(evidence, model, 'effective rank', found)


def finetuned_rank(evidence: Evidence, model: Model, task: str) -> Cell:
    """Effective rank of the last layer after fine-tuning."""
    return list(finetuned_rank_curve(evidence, model, task).values())[-1]


def finetuned_rank_curve(evidence: Evidence, model: Model, task: str) -> dict[float, Cell]:
    """Epoch -> effective rank of the last layer during fine-tuning, for the epochs that every record has.

    Without records, epoch 0 has a cell that says why.
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


def combine(parts: Sequence[tuple[float, Cell]], is_paired: bool = True) -> Cell:
    """Σ weight × cell; missing where a cell is missing, or where paired cells have no seed in common.

    Args:
        is_paired: by pretraining seed; cells of models of different sizes are independent.
    """
    terms = tuple(
        replace(term, weight=weight * term.weight, group=term.group if is_paired else number)
        for number, (weight, cell) in enumerate(parts)
        for term in cell.terms
    )
    missing = [cell.missing for _, cell in parts if cell.missing]
    notes = [cell.note for _, cell in parts if cell.note]
    if is_paired and not missing:
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


def average(cells: Sequence[Cell]) -> Cell:
    return combine([(1 / len(cells), cell) for cell in cells])


def slope(points: Sequence[tuple[float, Cell]], is_paired: bool = True) -> Cell:
    """Least-squares slope over (x, cell)."""
    weights = slope_weights([x for x, _ in points])
    return combine([(weight, cell) for weight, (_, cell) in zip(weights, points, strict=True)], is_paired)


def subtract(left: Cell, right: Cell) -> Cell:
    return combine([(1.0, left), (-1.0, right)])


def subtract_relative(left: Cell, right: Cell) -> Cell:
    """(left − right) / right in percent, within each pretraining seed."""
    both = subtract(left, right)
    if both.missing:
        return both
    bases, gaps = sum_by_seed(right.terms), sum_by_seed(both.terms)
    return replace(both, terms=(Term(1.0, {seed: [100 * gap / bases[seed]] for seed, gap in gaps.items()}),))


def explain_absence(evidence: Evidence, model: Model, what: str) -> str:
    """Why ``model`` has no number of ``what``, a task or a kind of measurement."""
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
    """The cell of one number of ``model``; ``what`` names the number in messages.

    Args:
        found: for each pretraining run its record, its other records, and one value for each fine-tuning seed.
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
