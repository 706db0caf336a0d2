"""Figure 3 as rows: accuracy over pretraining time, MAE-LM's cost of RoBERTa's final accuracy, and who is earlier.

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

import numpy as np

from maelm_composer.errors import InputError
from maelm_composer.records import FinetuningRecord
from maelm_composer.reporting.artefacts import MAE_LM, ROBERTA, Column, Model, Role, columns_of
from maelm_composer.reporting.cells import Cell, Term, average, note_never
from maelm_composer.reporting.rows import (
    CONSTANT,
    GAP,
    PERCENT,
    UNDECIDED,
    Claim,
    Row,
    RowBuilder,
    qualify,
)

Axis = Enum('Axis', {'hours': 'hours', 'samples': 'samples', 'flops': 'FLOPs'})  # the value is the unit
SHARE = 'share_of_time_to_target'
LEAD = 'time_to_target'
MAX_STALLS = 0.05  # of a run's training time
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


@dataclass(frozen=True)
class Race:
    """Both models' arrivals, in hours, at an accuracy that both reach."""

    target: float
    roberta: Arrival
    maelm: Arrival
    hours: float  # RoBERTa's whole time

    @property
    def lead(self) -> float:
        """Time from RoBERTa's arrival to MAE-LM's as a share of RoBERTa's whole; less than 0: MAE-LM is earlier."""
        return (self.maelm.interpolated - self.roberta.interpolated) / self.hours


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
                term = Term(1.0, {seed: [cost] for seed, cost in costs.items()})
                cost = replace(cell, terms=(term,), records=())
                if not all(costs.values()):
                    cost = Cell(missing=f'a record of {model.run_name(builder.scale)} holds no {axis.name}')
                rows.append(builder.value(model.label, axis.name, axis.value, cost).at(samples, 'samples'))
    return rows + _compare(builder, column, curves)


def _compare(builder: RowBuilder, column: Column, curves: Mapping[Model, dict[int, Cell]]) -> list[Row]:
    """MAE-LM's cost of RoBERTa's final accuracy on every axis and as a share of RoBERTa's time, and the claim."""
    pairs, missing = _pair(builder, column, curves)
    cells = [cell for curve in curves.values() for cell in curve.values()]
    source = replace(average(cells or [Cell(missing=missing)]), terms=(), missing=missing)
    rows = []
    for axis in Axis:
        costed = _require(source, pairs, axis)
        arrivals = {} if costed.missing else {seed: _find_maelm(pair, axis) for seed, pair in pairs.items()}
        for way in ('first_crossing', 'interpolated'):
            cost = {seed: getattr(arrival, way) for seed, arrival in arrivals.items()}
            name = f'{axis.name}, {way.replace("_", " ")}'
            rows.append(builder.value(ARRIVAL, name, axis.value, _fill(costed, pairs, cost)))
    costed = _require(source, pairs, Axis.hours)
    whole = {} if costed.missing else {seed: theirs[-1].get_cost(Axis.hours) for seed, (theirs, _) in pairs.items()}
    shares = {seed: _find_maelm(pairs[seed], Axis.hours).interpolated / hours for seed, hours in whole.items()}
    share = _fill(costed, pairs, shares)
    rows.append(builder.value(ARRIVAL, SHARE, 'share', share, builder.paper((MAE_LM.label,), SHARE)))
    races = {seed: race(pairs[seed]) for seed in whole}
    leads = {seed: each.lead for seed, each in races.items()}
    return [*rows, _judge(builder, _fill(costed, pairs, leads), list(races.values()))]


def _find_maelm(pair: Pair, axis: Axis) -> Arrival:
    """MAE-LM's arrival at RoBERTa's final accuracy."""
    theirs, ours = pair
    return find_arrival(ours, theirs[-1].median, axis)


def _require(source: Cell, pairs: Mapping[int, Pair], axis: Axis) -> Cell:
    """``source``, or what is missing on ``axis``."""
    points = [point for pair in pairs.values() for curve in pair for point in curve]
    if source.missing or all(getattr(point, axis.name) for point in points):
        return source
    return Cell(missing=f'a record holds no {axis.name} of a checkpoint')


def _fill(source: Cell, pairs: Mapping[int, Pair], values: Mapping[int, float]) -> Cell:
    """``source`` with one value for each pretraining seed, which its medians over fine-tuning seeds gave."""
    if source.missing:
        return source
    by_seed = {seed: [value] * len(pairs[seed][0][-1].scores) for seed, value in values.items()}
    return note_never(replace(source, terms=(Term(1.0, by_seed),)))


def _judge(builder: RowBuilder, leads: Cell, races: Sequence[Race]) -> Row:
    """The claim: at the lower of both final accuracies, MAE-LM is the earlier one."""
    claim = Claim(GAP, LEAD, 'share', leads)  # of RoBERTa the paper has the end alone
    (row,) = builder.claims(claim, expects_more=False)
    if leads.missing:
        return row
    record = leads.records[0]
    assert isinstance(record, FinetuningRecord)
    reason = explain_undecided(races, 100 * record.baseline)
    processes = [(run.seed, process) for run in leads.runs for process in run.processes]
    machines = {(seed, process.device, process.world_size, process.provenance.cpu) for seed, process in processes}
    if not reason and len(machines) > len({run.seed for run in leads.runs}):
        reason = 'the runs of one seed were trained on different machines'
    logs = {run.run_name: builder.evidence.curves.get(run.run_name, []) for run in leads.runs}
    if not reason and (without := [name for name, log in logs.items() if not log]):
        reason = f'the log of {without[0]}, which would show stalls, is not recorded'
    stalls = {name: measure_stalls(log) for name, log in logs.items()}
    longest = max(stalls, key=lambda name: stalls[name])
    if not reason and stalls[longest] > MAX_STALLS:
        reason = f'{stalls[longest]:.0%} of the time of {longest} are stalls, as when other jobs take the processor'
    return replace(row, verdict=qualify(builder.scale, f'{UNDECIDED}: {reason}')) if reason else row


def measure_stalls(log: Sequence[Mapping[str, str]]) -> float:
    """The share of a run's training time that slow stretches took more than the median stretch would have.

    A stretch is the time between two rows of ``log``, metrics.csv; it is slow beyond three times the median a sample.
    """
    at = np.array([[0, 0], *([float(row['samples']), float(row['training_seconds'])] for row in log)])
    at = at[[True, *(np.diff(at[:, 1]) > 0)]]  # the clock adds the first batches of a process to the next
    if len(at) < 2:
        return 0.0
    samples, seconds = np.diff(at, axis=0).T
    pace = seconds / samples
    is_slow = pace > 3 * np.median(pace)
    return float(((pace - np.median(pace)) * samples)[is_slow].sum() / seconds.sum())


def race(pair: Pair) -> Race:
    """When each model reaches the lower of both final accuracies.

    If MAE-LM ends higher, this is RoBERTa's final accuracy, as in the paper. If MAE-LM ends lower, it need never reach
    RoBERTa's; at its own final accuracy the two still compare, so that no seed is lost that speaks against the claim.
    MAE-LM is compared with RoBERTa's own arrival and not with RoBERTa's whole time: a noisy curve reaches its final
    accuracy before its end, so a model that equals RoBERTa would seem faster.
    """
    theirs, ours = pair
    target = min(theirs[-1].median, ours[-1].median)
    roberta, maelm = (find_arrival(curve, target, Axis.hours) for curve in pair)
    return Race(target, roberta, maelm, hours=theirs[-1].get_cost(Axis.hours))


def explain_undecided(races: Sequence[Race], constant: float) -> str:
    """Why the mean lead decides nothing, whatever its interval; empty: it may.

    Args:
        constant: the score of the constant answer.
    """
    if any(each.target <= constant for each in races):
        return "the lower final accuracy is not above a constant answer's"
    is_later = sum(each.lead for each in races) > 0
    # The later model may have arrived before its first checkpoint, and then be the earlier one.
    if any((each.maelm if is_later else each.roberta).starts_above for each in races):
        later = MAE_LM if is_later else ROBERTA
        return f"{later.label}'s first recorded checkpoint is there already, so its time is an upper bound"
    return ''


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
