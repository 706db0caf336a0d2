"""Measured numbers that can be averaged and subtracted, keeping the records they rest on or the reason why not."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from maelm_composer.reporting.artefacts import Column, Model, Role, columns_of
from maelm_composer.reporting.estimate import Estimate, Term, estimate
from maelm_composer.reporting.evidence import Evidence, Record


@dataclass(frozen=True)
class Cell:
    """A weighted sum of medians over seeds, or why it cannot be had."""

    terms: tuple[Term, ...] = ()
    runs: tuple[Record, ...] = ()  # pretraining
    records: tuple[Record, ...] = ()  # fine-tuning and rank
    missing: str = ''
    note: str = ''  # what is to be said of a number that is there

    @cached_property
    def estimate(self) -> Estimate | None:
        return None if self.missing else estimate(self.terms)


def score(evidence: Evidence, model: Model, column: Column, samples: int | None = None) -> Cell:
    """One score of ``model`` in percent, fine-tuned from its last checkpoint or the one at ``samples``.

    AVG is the mean over tasks, MNLI-m once, of the medians over seeds.
    """
    if column.is_average:
        averaged = [c for c in columns_of(evidence.scale, Role.glue) if c.is_averaged]
        return combine([(1 / len(averaged), score(evidence, model, c, samples)) for c in averaged])
    records = evidence.select_finetunings(model, column.task, samples)
    if not records:
        return Cell(missing=explain_absence(evidence, model, column.task))
    values = [100 * (r['score'] if column.metric is None else r['metrics'][column.metric]) for r in records]
    failed = evidence.count_failures(model, column.task, records)
    note = f'{column.task}: {failed} of {failed + len(records)} seeds failed' if failed else ''
    return Cell(((1.0, values),), _runs(evidence, model), tuple(records), note=note)


def constant_score(evidence: Evidence, model: Model, column: Column) -> Cell:
    """What the best constant answer scores in percent where ``model`` has :func:`score`; of a task's own metric."""
    if column.is_average:
        averaged = [c for c in columns_of(evidence.scale, Role.glue) if c.is_averaged]
        return combine([(1 / len(averaged), constant_score(evidence, model, c)) for c in averaged])
    cell = score(evidence, model, column)
    return cell if cell.missing else replace(cell, terms=((1.0, [100 * cell.records[0]['baseline']]),))


def rank(evidence: Evidence, model: Model, key: str, layer: int = -1, index: int | None = None) -> Cell:
    """One number of one layer (-1: the last) of the rank record of ``model``'s last checkpoint.

    Args:
        index: into the list that ``key`` names, where it is one.
    """
    record = evidence.find_rank(model)
    if record is None:
        return Cell(missing=explain_absence(evidence, model, 'effective rank'))
    found = record['layers'][layer][key]
    value = float(found if index is None else found[index])
    return Cell(((1.0, [value]),), _runs(evidence, model), (record,))


def finetuned_rank(evidence: Evidence, model: Model, task: str) -> Cell:
    """Effective rank of the last layer after fine-tuning, over seeds."""
    return list(finetuned_rank_curve(evidence, model, task).values())[-1]


def finetuned_rank_curve(evidence: Evidence, model: Model, task: str) -> dict[float, Cell]:
    """Epoch -> effective rank of the last layer during fine-tuning; one epoch, 0, with the reason, where there is none.

    Only the epochs that every seed's record has.
    """
    records = evidence.select_finetunings(model, task)
    curves = [{p['epoch']: p['effective_rank'] for p in r['rank_curve']} for r in records if r.get('rank_curve')]
    if not curves:
        reason = f'the records of {task} from {model.run_name(evidence.scale)} hold no rank during fine-tuning'
        return {0.0: Cell(missing=reason if records else explain_absence(evidence, model, task))}
    epochs = sorted(set.intersection(*(set(curve) for curve in curves)))
    runs = _runs(evidence, model)
    return {e: Cell(((1.0, [float(curve[e]) for curve in curves]),), runs, tuple(records)) for e in epochs}


def combine(parts: Sequence[tuple[float, Cell]]) -> Cell:
    """Σ weight × cell; missing where one of them is."""
    return Cell(
        tuple((weight * w, values) for weight, cell in parts for w, values in cell.terms),
        tuple(run for _, cell in parts for run in cell.runs),
        tuple(record for _, cell in parts for record in cell.records),
        '; '.join(dict.fromkeys(cell.missing for _, cell in parts if cell.missing)),
        '; '.join(dict.fromkeys(cell.note for _, cell in parts if cell.note)),
    )


def subtract(left: Cell, right: Cell) -> Cell:
    return combine([(1.0, left), (-1.0, right)])


def explain_absence(evidence: Evidence, model: Model, what: str) -> str:
    """Why there is no number of ``what`` for ``model``."""
    name = model.run_name(evidence.scale)
    if evidence.find_run(model) is None:
        return f'no finished pretraining run {name}'
    failed = [r for r in evidence.failures if r['task'] == what and r['checkpoint'].get('run_name') == name]
    if failed:
        return f'{what} from {name} failed: {failed[0].get("error")}'
    return f'{what} of {name} is not recorded'


def _runs(evidence: Evidence, model: Model) -> tuple[Record, ...]:
    run = evidence.find_run(model)
    return () if run is None else (run,)
