"""Figure 3 as rows: accuracy over pretraining time, and what MAE-LM needs for RoBERTa's final accuracy."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from maelm_composer.analysis.time_to_accuracy import Arrival, Axis, CheckpointScore, find_arrival
from maelm_composer.records import FinetuningRecord, PretrainingRecord
from maelm_composer.reporting.artefacts import MAE_LM, ROBERTA, Column, Model, Role, columns_of
from maelm_composer.reporting.cells import Cell, constant_score, explain_absence, score
from maelm_composer.reporting.estimate import Term, estimate_over_seeds, find_common_seeds
from maelm_composer.reporting.rows import Row, at
from maelm_composer.reporting.tables import CONSTANT, PERCENT, Book
from maelm_composer.reporting.verdicts import FAILS, UNDECIDED, judge_claim, qualify

UNITS = {Axis.hours: 'hours', Axis.samples: 'samples', Axis.flops: 'FLOPs'}
SHARE = 'share_of_time_to_target'


@dataclass(frozen=True)
class Race:
    """Of one pretraining seed, MAE-LM's checkpoints against RoBERTa's last one."""

    points: list[CheckpointScore]
    baseline: CheckpointScore

    def measure(self, axis: Axis) -> Arrival:
        """What RoBERTa's final score costs."""
        return find_arrival(self.points, self.baseline.median, axis)

    @property
    def share(self) -> float:
        """Hours to the target over RoBERTa's hours."""
        return self.measure(Axis.hours).interpolated / self.baseline.get_cost(Axis.hours)


def build_figure3(book: Book) -> list[Row]:
    """Every recorded checkpoint, its cost on every axis, and the cost of the target by the rules of the race."""
    column = columns_of(book.scale, Role.mnli)[0]
    rows = [book.value(CONSTANT, column.name, PERCENT, constant_score(book.evidence, ROBERTA, column))]
    for model in (ROBERTA, MAE_LM):
        found = _read_checkpoints(book, model, column)
        if not found:
            reason = explain_absence(book.evidence, model, column.task)
            rows.append(book.value(model.label, column.name, PERCENT, Cell(missing=reason)))
        for samples, cell in found.items():
            paper = book.paper_of(model, column.name) if samples == max(found) else None
            rows.append(at(book.value(model.label, column.name, PERCENT, cell, paper), samples, 'samples'))
            for axis in (Axis.hours, Axis.flops):
                costs = {run.seed: _read_cost(cell, run, samples, axis) for run in cell.runs}
                known = Cell((Term(1.0, {seed: [cost] for seed, cost in costs.items() if cost}),), cell.runs)
                if not all(costs.values()):
                    known = Cell(missing=f'a record of {model.run_name(book.scale)} holds no {axis.name}')
                rows.append(at(book.value(model.label, axis.name, UNITS[axis], known), samples, 'samples'))
    return rows + _judge(book, column)


def _judge(book: Book, column: Column) -> list[Row]:
    """What MAE-LM needs for RoBERTa's final accuracy, and as a share of RoBERTa's time: the claim."""
    label = "MAE-LM to RoBERTa's final accuracy"
    goal, curve = score(book.evidence, ROBERTA, column), _read_checkpoints(book, MAE_LM, column)
    races = _prepare(book, column, goal, curve)
    wanted = [(axis, way) for axis in Axis for way in ('first crossing', 'interpolated')]
    paper = book.paper((MAE_LM.label,), SHARE)
    if isinstance(races, str):
        missing = Cell(missing=races)
        rows = [book.value(label, f'{axis.name}, {way}', UNITS[axis], missing) for axis, way in wanted]
        return [*rows, book.value(label, SHARE, 'share', missing, paper)]
    cells = (goal, *curve.values())
    runs = tuple(run for cell in cells for run in cell.runs)
    records = tuple(record for cell in cells for record in cell.records)
    rows = []
    for axis, way in wanted:
        costs = {seed: [getattr(race.measure(axis), way.replace(' ', '_'))] for seed, race in races.items()}
        cell = Cell((Term(1.0, costs),), runs, records)
        if axis is Axis.flops and not all(run.flops for run in runs):
            cell = Cell(missing='a pretraining record holds no flops')
        rows.append(book.value(label, f'{axis.name}, {way}', UNITS[axis], cell))
    shares = [race.share for race in races.values()]
    count = min(len(race.baseline.scores) for race in races.values())
    over_one = estimate_over_seeds([share - 1 for share in shares], count)
    if any(race.baseline.median <= 100 * _records_of(goal, seed)[0].baseline for seed, race in races.items()):
        verdict = qualify(book.scale, f"{UNDECIDED}: RoBERTa's final accuracy is not above a constant answer's")
    elif any(map(math.isinf, shares)):
        missed = sum(map(math.isinf, shares))
        word = FAILS if missed == len(shares) > 1 else UNDECIDED
        text = f"{word}: of {len(shares)} pretraining seeds {missed} never reach RoBERTa's final accuracy"
        verdict = qualify(book.scale, text)
    else:
        verdict = judge_claim(book.scale, over_one, expects_more=False)
    if any(race.measure(Axis.hours).starts_above for race in races.values()):
        verdict += "; MAE-LM's first recorded checkpoint is there already, so it is an upper bound"
    row = book.value(label, SHARE, 'share', Cell((Term(1.0, {0: [1.0]}),), runs, records), paper)
    value, p = 1 + over_one.value, over_one.p
    low, high = (None if bound is None else 1 + bound for bound in (over_one.low, over_one.high))
    found = replace(over_one, value=value, low=low, high=high, p=p)
    return [*rows, replace(row, **vars(found), verdict=verdict, difference=None if paper is None else value - paper)]


def _prepare(book: Book, column: Column, goal: Cell, curve: dict[int, Cell]) -> dict[int, Race] | str:
    """The race of every pretraining seed that both models have, or why there is none."""
    if goal.missing:
        return goal.missing
    if not curve:
        return explain_absence(book.evidence, MAE_LM, column.task)
    if len(curve) == 1:
        return 'one checkpoint of MAE-LM is fine-tuned: when it was reached is in those before it'
    seeds = find_common_seeds([cell.terms[0] for cell in (goal, *curve.values())])
    if not seeds:
        return 'no pretraining seed has both models'
    races = {}
    for seed in seeds:
        (run,) = [run for run in goal.runs if run.seed == seed]
        cells = [(run.samples, goal), *curve.items()]
        common = set.intersection(*({record.seed for record in _records_of(cell, seed)} for _, cell in cells))
        if not common:
            return f'the checkpoints of pretraining seed {seed} have no fine-tuning seed in common'
        baseline, *points = (_place(cell, seed, samples, sorted(common)) for samples, cell in cells)
        races[seed] = Race(points, baseline)
    return races


def _place(cell: Cell, seed: int, samples: int, finetuning_seeds: Sequence[int]) -> CheckpointScore:
    """A checkpoint of the run with this pretraining ``seed``."""
    (run,) = [run for run in cell.runs if run.seed == seed]
    values = cell.terms[0].values[seed]
    scores = {record.seed: value for record, value in zip(_records_of(cell, seed), values, strict=True)}
    hours, flops = (_read_cost(cell, run, samples, axis) for axis in (Axis.hours, Axis.flops))
    assert hours is not None
    # Without recorded FLOPs their axis is not reported; the points still need a number that rises.
    return CheckpointScore(samples, hours * 3600, float(flops or samples), tuple(scores[s] for s in finetuning_seeds))


def _records_of(cell: Cell, seed: int) -> list[FinetuningRecord]:
    names = {run.run_name for run in cell.runs if run.seed == seed}
    found = [record for record in cell.records if isinstance(record, FinetuningRecord)]
    return [record for record in found if record.checkpoint.run_name in names]


def _read_checkpoints(book: Book, model: Model, column: Column) -> dict[int, Cell]:
    found = book.evidence.checkpoints_with(model, column.task)
    return {samples: score(book.evidence, model, column, samples) for samples in found}


def _read_cost(cell: Cell, run: PretrainingRecord, samples: int, axis: Axis) -> float | None:
    """Hours or FLOPs of pretraining up to a checkpoint; FLOPs grow evenly with samples."""
    if axis is Axis.hours:
        checkpoint = next(r.checkpoint for r in cell.records if r.checkpoint.run_name == run.run_name)
        return None if checkpoint.training_seconds is None else checkpoint.training_seconds / 3600
    return run.flops * samples / run.samples if run.flops else None
