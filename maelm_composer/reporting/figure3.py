"""Figure 3 as rows: accuracy over pretraining time, and both models' cost of reaching RoBERTa's final accuracy.

- The clock is training alone: ``training_seconds`` of the checkpoints; validation, saving and fine-tuning are off it.
- The first checkpoint whose median reaches the target counts, whatever later ones do. Its own cost is the first
  crossing; the interpolated one assumes a straight line from the checkpoint before it.
- A curve that starts at or above the target is charged its first checkpoint whole: nothing is known before it.
- A curve that never reaches the target costs infinity.
"""

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from maelm_composer.errors import InputError
from maelm_composer.records import FinetuningRecord
from maelm_composer.reporting.artefacts import MAE_LM, ROBERTA, Column, Model, Role, columns_of
from maelm_composer.reporting.cells import Cell, Term, average, estimate
from maelm_composer.reporting.rows import (
    CONSTANT,
    FAILS,
    GAP,
    PERCENT,
    UNDECIDED,
    Row,
    RowBuilder,
    judge_claim,
    qualify,
)

Axis = Enum('Axis', {'hours': 'hours', 'samples': 'samples', 'flops': 'FLOPs'})  # the value is the unit
SHARE = 'share_of_time_to_target'
LEAD = 'time_to_target'
ARRIVAL = "MAE-LM to RoBERTa's final accuracy"


@dataclass(frozen=True)
class ScoredCheckpoint:
    """The cost of one checkpoint from the beginning of its run, and its scores."""

    samples: int  # rows trained on
    hours: float | None  # of training; None: not recorded, so the checkpoint has no place on this axis
    flops: float | None
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


# RoBERTa's checkpoints and MAE-LM's, of one pretraining seed.
Pair = tuple[list[ScoredCheckpoint], list[ScoredCheckpoint]]


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
            paper = builder.paper_of(model, column.name) if cell.runs and samples == cell.runs[0].samples else None
            rows.append(builder.value(model.label, column.name, PERCENT, cell, paper).at(samples, 'samples'))
            for axis in (Axis.hours, Axis.flops):
                costs = {seed: getattr(found, axis.name) for seed, found in _read(cell, samples).items()}
                cost = Cell((Term(1.0, {seed: [cost] for seed, cost in costs.items()}),), cell.runs)
                if not all(costs.values()):
                    cost = Cell(missing=f'a record of {model.run_name(builder.scale)} holds no {axis.name}')
                rows.append(builder.value(model.label, axis.name, axis.value, cost).at(samples, 'samples'))
    return rows + _compare(builder, column, curves)


def _compare(builder: RowBuilder, column: Column, curves: Mapping[Model, dict[int, Cell]]) -> list[Row]:
    """MAE-LM's cost of RoBERTa's final accuracy on every axis, then what _compare_hours says."""
    pairs, missing = _pair(builder, column, curves)
    cells = [cell for curve in curves.values() for cell in curve.values()]
    source = replace(average(cells or [Cell(missing=missing)]), terms=(), missing=missing)
    counts = {seed: len(theirs[-1].scores) for seed, (theirs, _) in pairs.items()}  # fine-tuning seeds
    by_axis: dict[Axis, tuple[Cell, dict[int, tuple[Arrival, Arrival]]]] = {}
    rows = []
    for axis in Axis:
        points = [point for pair in pairs.values() for curve in pair for point in curve]
        cell = source
        if not missing and not all(getattr(point, axis.name) for point in points):
            cell = Cell(missing=f'a record holds no {axis.name} of a checkpoint')
        arrivals = {} if cell.missing else {seed: find_arrivals(pair, axis) for seed, pair in pairs.items()}
        if missed := _count_missed(arrivals.values()):
            text = f'never in {missed} of {len(arrivals)} seeds'
            cell = replace(cell, note='; '.join(filter(None, (text, cell.note))))
        for way in ('first_crossing', 'interpolated'):
            costs = {seed: [getattr(mine, way)] * counts[seed] for seed, (_, mine) in arrivals.items()}
            name = f'{axis.name}, {way.replace("_", " ")}'
            rows.append(builder.value(ARRIVAL, name, axis.value, replace(cell, terms=(Term(1.0, costs),))))
        by_axis[axis] = cell, arrivals
    return rows + _compare_hours(builder, pairs, counts, *by_axis[Axis.hours])


def _compare_hours(
    builder: RowBuilder,
    pairs: Mapping[int, Pair],
    counts: Mapping[int, int],
    source: Cell,
    hours: Mapping[int, tuple[Arrival, Arrival]],
) -> list[Row]:
    """MAE-LM's time to RoBERTa's final accuracy as a share of RoBERTa's, and the claim.

    The claim is that MAE-LM gets there earlier than RoBERTa itself, whose noisy curve may do so before its end: against
    RoBERTa's whole time, a model would seem faster than one that equals it.
    """
    paper = builder.paper((MAE_LM.label,), SHARE)
    claim = Row(builder.scale, builder.artefact, GAP, LEAD, 'share')  # of RoBERTa the paper has the end alone
    if source.missing:
        return [builder.value(ARRIVAL, SHARE, 'share', source, paper), builder.make(claim, source, None)]
    shares, leads = dict[int, list[float]](), dict[int, list[float]]()
    for seed, (own, mine) in hours.items():
        whole = pairs[seed][0][-1].get_cost(Axis.hours)  # RoBERTa's
        shares[seed] = [mine.interpolated / whole] * counts[seed]
        leads[seed] = [(mine.interpolated - own.interpolated) / whole] * counts[seed]
    found = estimate([Term(1.0, leads)])
    verdict = judge_claim(builder.scale, found, expects_more=False)
    record = source.records[0]
    assert isinstance(record, FinetuningRecord)
    reason = explain_undecided(pairs.values(), hours.values(), 100 * record.baseline)
    if not reason and verdict.startswith(FAILS) and any(mine.starts_above for _, mine in hours.values()):
        reason = "MAE-LM's first recorded checkpoint is there already, so its time is an upper bound"
    machines = {(run.seed, run.device, run.world_size, run.provenance.cpu) for run in source.runs}
    if not reason and len(machines) > len({run.seed for run in source.runs}):
        reason = 'two runs of one seed were trained on different machines'
    if reason:
        verdict = qualify(builder.scale, f'{UNDECIDED}: {reason}')
    share = builder.value(ARRIVAL, SHARE, 'share', replace(source, terms=(Term(1.0, shares),)), paper)
    return [share, builder.make(claim, source, found, verdict)]


def explain_undecided(pairs: Iterable[Pair], hours: Iterable[tuple[Arrival, Arrival]], constant: float) -> str:
    """Why the arrivals of RoBERTa and MAE-LM decide nothing, whatever their difference; empty: they may.

    Args:
        constant: the score of the constant answer.
    """
    arrivals = list(hours)
    if any(theirs[-1].median <= constant for theirs, _ in pairs):
        return "RoBERTa's final accuracy is not above a constant answer's"
    if missed := _count_missed(arrivals):
        return f"{missed} of {len(arrivals)} pretraining seeds never reach RoBERTa's final accuracy"
    if any(own.starts_above for own, _ in arrivals):
        return "RoBERTa's first recorded checkpoint is at its final accuracy already"
    return ''


def _count_missed(arrivals: Iterable[tuple[Arrival, Arrival]]) -> int:
    """In how many seeds MAE-LM never gets there."""
    return sum(math.isinf(mine.interpolated) for _, mine in arrivals)


def find_arrival(curve: Sequence[ScoredCheckpoint], target: float, axis: Axis) -> Arrival:
    """The first point of ``curve`` whose median is at least ``target``.

    Raises:
        InputError: the costs do not rise.
    """
    costs = [point.get_cost(axis) for point in curve]
    if not all(before < after for before, after in itertools.pairwise([0.0, *costs])):
        raise InputError(
            f'{axis.name} of the checkpoints must rise from above 0, but are {costs}: keep the records of one run alone'
        )
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


def find_arrivals(pair: Pair, axis: Axis) -> tuple[Arrival, Arrival]:
    """Of RoBERTa and of MAE-LM at RoBERTa's final accuracy."""
    theirs, ours = pair
    target = theirs[-1].median
    return find_arrival(theirs, target, axis), find_arrival(ours, target, axis)


def _pair(builder: RowBuilder, column: Column, curves: Mapping[Model, dict[int, Cell]]) -> tuple[dict[int, Pair], str]:
    """Pretraining seed -> both models' checkpoints, for the seeds that both have; and why there is no such seed."""
    goal = builder.evidence.score(ROBERTA, column)
    if goal.missing:
        return {}, goal.missing
    if not curves[MAE_LM]:
        return {}, builder.evidence.explain_absence(MAE_LM, column.task)
    if (last := builder.evidence.score(MAE_LM, column)).missing:
        return {}, last.missing
    if len(curves[MAE_LM]) == 1:
        return {}, 'one checkpoint of MAE-LM is fine-tuned: time to accuracy needs earlier checkpoints, too'
    theirs, ours = ([_read(cell, at) for at, cell in curves[model].items()] for model in (ROBERTA, MAE_LM))
    pairs = {}
    for seed in sorted(set.intersection(*map(set, (*theirs, *ours)))):
        checkpoints = [of_seed[seed] for of_seed in (*theirs, *ours)]
        common = sorted(set.intersection(*(set(checkpoint.scores) for checkpoint in checkpoints)))
        if not common:
            return {}, f'the checkpoints of pretraining seed {seed} have no fine-tuning seed in common'
        points = [replace(c, scores={s: c.scores[s] for s in common}) for c in checkpoints]
        pairs[seed] = points[: len(theirs)], points[len(theirs) :]
    return pairs, '' if pairs else 'no pretraining seed has both models'


def _read(cell: Cell, at: int) -> dict[int, ScoredCheckpoint]:
    """Pretraining seed -> the checkpoint at ``at`` samples, whose scores ``cell`` has."""
    found = {}
    for run in cell.runs:
        records = [record for record in cell.records if record.checkpoint.run_name == run.run_name]
        values, seconds = cell.terms[0].values[run.seed], records[0].checkpoint.training_seconds
        found[run.seed] = ScoredCheckpoint(
            at,
            seconds / 3600 if seconds else None,
            run.flops * at / run.samples if run.flops else None,  # FLOPs grow evenly with samples
            {record.seed: value for record, value in zip(records, values, strict=True)},
        )
    return found
