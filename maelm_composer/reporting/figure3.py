"""Figure 3 as rows: accuracy over pretraining time, and MAE-LM's cost of reaching RoBERTa's final accuracy.

- The clock is training alone: ``training_seconds`` of the checkpoints; validation, saving and fine-tuning are off it.
- The first checkpoint whose median reaches the target counts, whatever later ones do. Its own cost is the first
  crossing; the interpolated one assumes a straight line from the checkpoint before it.
- A curve that starts at or above the target is charged its first checkpoint whole: nothing is known before it.
- A curve that never reaches the target costs infinity.
"""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from maelm_composer.errors import InputError
from maelm_composer.records import FinetuningRecord
from maelm_composer.reporting.artefacts import MAE_LM, ROBERTA, Column, Role, columns_of
from maelm_composer.reporting.cells import Cell, Term, average, estimate
from maelm_composer.reporting.rows import CONSTANT, FAILS, PERCENT, UNDECIDED, Row, RowBuilder, judge_claim, qualify

Axis = Enum('Axis', {'hours': 'hours', 'samples': 'samples', 'flops': 'FLOPs'})  # the value is the unit
SHARE = 'share_of_time_to_target'
ARRIVAL = "MAE-LM to RoBERTa's final accuracy"


@dataclass(frozen=True)
class ScoredCheckpoint:
    """The cost of one checkpoint from the beginning of its run, and its scores."""

    samples: int  # rows trained on
    hours: float  # of training
    flops: float | None  # None: not recorded, so the checkpoint has no place on this axis
    scores: Mapping[int, float]  # fine-tuning seed -> score

    @property
    def median(self) -> float:
        return statistics.median(self.scores.values())

    def get_cost(self, axis: Axis) -> float:
        return float(getattr(self, axis.name))


@dataclass(frozen=True)
class Arrival:
    """The cost of reaching a target, in units of the axis; infinity if the curve never reaches it."""

    first_crossing: float
    interpolated: float  # equal to or less than the first crossing
    starts_above: bool  # the first checkpoint had reached it: both figures are upper bounds


# RoBERTa's last checkpoint and MAE-LM's checkpoints, of one pretraining seed.
Pair = tuple[ScoredCheckpoint, list[ScoredCheckpoint]]


def build_figure3(builder: RowBuilder) -> list[Row]:
    """Score and cost of every recorded checkpoint, then the cost of RoBERTa's final accuracy on every axis."""
    column, evidence = columns_of(builder.scale, Role.mnli)[0], builder.evidence
    rows = [builder.value(CONSTANT, column.name, PERCENT, evidence.constant_score(ROBERTA, column))]
    curves = {
        model: {at: evidence.score(model, column, at) for at in evidence.checkpoints_with(model, column.task)}
        for model in (ROBERTA, MAE_LM)
    }
    for model, curve in curves.items():
        if not curve:
            rows.append(builder.value(model.label, column.name, PERCENT, evidence.score(model, column)))
        for samples, cell in curve.items():
            paper = builder.paper_of(model, column.name) if samples == max(curve) else None
            rows.append(builder.value(model.label, column.name, PERCENT, cell, paper).at(samples, 'samples'))
            for axis in (Axis.hours, Axis.flops):
                costs = {seed: getattr(found, axis.name) for seed, found in _read(cell, samples).items()}
                cost = Cell((Term(1.0, {seed: [cost] for seed, cost in costs.items()}),), cell.runs)
                if not all(costs.values()):
                    cost = Cell(missing=f'a record of {model.run_name(builder.scale)} holds no {axis.name}')
                rows.append(builder.value(model.label, axis.name, axis.value, cost).at(samples, 'samples'))
    return rows + _compare(builder, column, curves[MAE_LM])


def _compare(builder: RowBuilder, column: Column, curve: dict[int, Cell]) -> list[Row]:
    """MAE-LM's cost of RoBERTa's final accuracy, and as a share of RoBERTa's time: the claim."""
    goal = builder.evidence.score(ROBERTA, column)
    pairs, missing = _pair(builder, column, goal, curve)
    source = replace(average([goal, *curve.values()]), terms=(), missing=missing, note='')
    rows = []
    for axis in Axis:
        cell = source
        if axis is Axis.flops and not missing and not all(run.flops for run in source.runs):
            cell = Cell(missing='a pretraining record holds no flops')
        arrivals = {} if cell.missing else _find_arrivals(pairs, axis)
        for way in ('first_crossing', 'interpolated'):
            costs = {seed: [getattr(arrival, way)] for seed, arrival in arrivals.items()}
            column_name = f'{axis.name}, {way.replace("_", " ")}'
            rows.append(builder.value(ARRIVAL, column_name, axis.value, replace(cell, terms=(Term(1.0, costs),))))
    paper = builder.paper((MAE_LM.label,), SHARE)
    claim = Row(builder.scale, builder.artefact, ARRIVAL, SHARE, 'share', paper=paper)
    if missing:
        return [*rows, builder.make(claim, source, None)]
    hours = _find_arrivals(pairs, Axis.hours)
    shares = {seed: arrival.interpolated / pairs[seed][0].hours for seed, arrival in hours.items()}
    # The claim is about a share of one: its difference to one is tested.
    found = replace(
        estimate([Term(1.0, {seed: [share - 1] for seed, share in shares.items()})]),
        count=min(len(target.scores) for target, _ in pairs.values()),
    )
    record, missed = goal.records[0], sum(map(math.isinf, shares.values()))
    assert isinstance(record, FinetuningRecord)
    if any(target.median <= 100 * record.baseline for target, _ in pairs.values()):
        verdict = qualify(builder.scale, f"{UNDECIDED}: RoBERTa's final accuracy is not above a constant answer's")
    elif missed:
        word = FAILS if missed == len(pairs) > 1 else UNDECIDED
        seeds = f'of {len(pairs)} pretraining seeds {missed}'
        verdict = qualify(builder.scale, f"{word}: {seeds} never reach RoBERTa's final accuracy")
    else:
        verdict = judge_claim(builder.scale, found, expects_more=False)
    if any(arrival.starts_above for arrival in hours.values()):
        verdict += "; MAE-LM's first recorded checkpoint is there already, so it is an upper bound"
    low, high = (None if bound is None else 1 + bound for bound in (found.low, found.high))
    found = replace(found, value=1 + found.value, low=low, high=high)
    return [*rows, builder.make(claim, source, found, verdict, is_compared=True)]


def find_arrival(curve: Sequence[ScoredCheckpoint], target: float, axis: Axis) -> Arrival:
    """The first point of ``curve`` whose median is at least ``target``.

    Raises:
        InputError: the costs do not rise.
    """
    costs = [point.get_cost(axis) for point in curve]
    if not all(before < after for before, after in itertools.pairwise([0.0, *costs])):
        raise InputError(f'{axis.name} of the checkpoints must rise from above 0: {costs}')
    first = next((i for i, point in enumerate(curve) if point.median >= target), None)
    if first is None:
        return Arrival(math.inf, math.inf, starts_above=False)
    cost = costs[first]
    if first == 0:
        return Arrival(cost, cost, starts_above=True)
    before, start = curve[first - 1].median, costs[first - 1]
    way = (target - before) / (curve[first].median - before)
    # Rounding must not make the interpolated cost exceed the checkpoint's.
    return Arrival(cost, min(start + way * (cost - start), cost), starts_above=False)


def _find_arrivals(pairs: Mapping[int, Pair], axis: Axis) -> dict[int, Arrival]:
    return {seed: find_arrival(points, target.median, axis) for seed, (target, points) in pairs.items()}


def _pair(builder: RowBuilder, column: Column, goal: Cell, curve: dict[int, Cell]) -> tuple[dict[int, Pair], str]:
    """Pretraining seed -> both models' checkpoints, for the seeds that both have; and why there is no such seed."""
    if goal.missing:
        return {}, goal.missing
    if not curve:
        return {}, builder.evidence.explain_absence(MAE_LM, column.task)
    if len(curve) == 1:
        return {}, 'one checkpoint of MAE-LM is fine-tuned: its arrival can only be found from earlier ones, too'
    target, found = _read(goal), [_read(cell, samples) for samples, cell in curve.items()]
    pairs = {}
    for seed in sorted(set(target).intersection(*found)):
        checkpoints = [target[seed], *(of_seed[seed] for of_seed in found)]
        common = sorted(set.intersection(*(set(checkpoint.scores) for checkpoint in checkpoints)))
        if not common:
            return {}, f'the checkpoints of pretraining seed {seed} have no fine-tuning seed in common'
        last, *points = (replace(c, scores={s: c.scores[s] for s in common}) for c in checkpoints)
        pairs[seed] = last, points
    return pairs, '' if pairs else 'no pretraining seed has both models'


def _read(cell: Cell, samples: int | None = None) -> dict[int, ScoredCheckpoint]:
    """Pretraining seed -> the checkpoint at ``samples`` (None: the run's last) whose scores ``cell`` has."""
    found = {}
    for run in cell.runs:
        seed, at = run.seed, run.samples if samples is None else samples
        records = [record for record in cell.records if record.checkpoint.run_name == run.run_name]
        values = cell.terms[0].values[seed]
        found[seed] = ScoredCheckpoint(
            at,
            (records[0].checkpoint.training_seconds or 0.0) / 3600,
            run.flops * at / run.samples if run.flops else None,  # FLOPs grow evenly with samples
            {record.seed: value for record, value in zip(records, values, strict=True)},
        )
    return found
