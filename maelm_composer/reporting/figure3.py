"""Figure 3 as rows: accuracy over pretraining time, and MAE-LM's cost of reaching RoBERTa's final accuracy."""

import math
from dataclasses import dataclass, replace

from maelm_composer.analysis.time_to_accuracy import Arrival, Axis, ScoredCheckpoint, find_arrival
from maelm_composer.records import FinetuningRecord
from maelm_composer.reporting.artefacts import MAE_LM, ROBERTA, Column, Role, columns_of
from maelm_composer.reporting.cells import Cell, constant_score, explain_absence, score
from maelm_composer.reporting.estimate import Term, estimate
from maelm_composer.reporting.row_builder import BOTH, CONSTANT, PERCENT, RowBuilder
from maelm_composer.reporting.rows import Row
from maelm_composer.reporting.verdicts import FAILS, UNDECIDED, judge_claim, qualify

UNITS = {Axis.hours: 'hours', Axis.samples: 'samples', Axis.flops: 'FLOPs'}
SHARE = 'share_of_time_to_target'
ARRIVAL = "MAE-LM to RoBERTa's final accuracy"


@dataclass(frozen=True)
class _Pair:
    """MAE-LM's checkpoints and RoBERTa's last one, of one pretraining seed."""

    points: list[ScoredCheckpoint]
    baseline: ScoredCheckpoint

    def find_arrival(self, axis: Axis) -> Arrival:
        return find_arrival(self.points, self.baseline.median, axis)

    @property
    def share(self) -> float:
        """MAE-LM's hours to RoBERTa's final score over RoBERTa's hours."""
        return self.find_arrival(Axis.hours).interpolated / self.baseline.hours


def build_figure3(builder: RowBuilder) -> list[Row]:
    """Score and cost of every recorded checkpoint, then the cost of RoBERTa's final accuracy on every axis."""
    column, evidence = columns_of(builder.scale, Role.mnli)[0], builder.evidence
    rows = [builder.value(CONSTANT, column.name, PERCENT, constant_score(evidence, ROBERTA, column))]
    curves = {
        model: {at: score(evidence, model, column, at) for at in evidence.checkpoints_with(model, column.task)}
        for model in BOTH
    }
    for model, curve in curves.items():
        if not curve:
            rows.append(builder.value(model.label, column.name, PERCENT, score(evidence, model, column)))
        for samples, cell in curve.items():
            paper = builder.paper_of(model, column.name) if samples == max(curve) else None
            rows.append(builder.value(model.label, column.name, PERCENT, cell, paper).at(samples, 'samples'))
            for axis in (Axis.hours, Axis.flops):
                costs = {seed: getattr(found, axis.name) for seed, found in _read(cell, samples).items()}
                cost = Cell((Term(1.0, {seed: [cost] for seed, cost in costs.items()}),), cell.runs)
                if not all(costs.values()):
                    cost = Cell(missing=f'a record of {model.run_name(builder.scale)} holds no {axis.name}')
                rows.append(builder.value(model.label, axis.name, UNITS[axis], cost).at(samples, 'samples'))
    return rows + _compare(builder, column, curves[MAE_LM])


def _compare(builder: RowBuilder, column: Column, curve: dict[int, Cell]) -> list[Row]:
    """MAE-LM's cost of RoBERTa's final accuracy, and as a share of RoBERTa's time: the claim."""
    goal = score(builder.evidence, ROBERTA, column)
    pairs, missing = _pair(builder, column, goal, curve)
    paper = builder.paper((MAE_LM.label,), SHARE)
    cells = (goal, *curve.values())
    source = Cell(
        runs=tuple(run for cell in cells for run in cell.runs),
        records=tuple(record for cell in cells for record in cell.records),
        missing=missing,
    )
    rows = []
    for axis in Axis:
        for way in ('first crossing', 'interpolated'):
            cell = source
            if pairs and axis is Axis.flops and not all(run.flops for run in source.runs):
                cell = Cell(missing='a pretraining record holds no flops')
            elif pairs:
                attribute = way.replace(' ', '_')
                costs = {seed: [getattr(pair.find_arrival(axis), attribute)] for seed, pair in pairs.items()}
                cell = replace(source, terms=(Term(1.0, costs),))
            rows.append(builder.value(ARRIVAL, f'{axis.name}, {way}', UNITS[axis], cell))
    if missing:
        return [*rows, builder.value(ARRIVAL, SHARE, 'share', source, paper)]
    # The claim is about a share of one: its difference to one is tested.
    found = replace(
        estimate([Term(1.0, {seed: [pair.share - 1] for seed, pair in pairs.items()})]),
        count=min(len(pair.baseline.scores) for pair in pairs.values()),
    )
    record = goal.records[0]
    assert isinstance(record, FinetuningRecord)
    constant = 100 * record.baseline
    verdict = _judge(builder.scale, list(pairs.values()), constant) or judge_claim(builder.scale, found, False)
    if any(pair.find_arrival(Axis.hours).starts_above for pair in pairs.values()):
        verdict += "; MAE-LM's first recorded checkpoint is there already, so it is an upper bound"
    low, high = (None if bound is None else 1 + bound for bound in (found.low, found.high))
    found = replace(found, value=1 + found.value, low=low, high=high)
    return [*rows, builder.make((ARRIVAL, SHARE, 'share'), source, found, paper, verdict, True)]


def _judge(scale: str, pairs: list[_Pair], constant: float) -> str:
    """The verdict where no test can be made: the target is no better than ``constant``, or was not reached."""
    if any(pair.baseline.median <= constant for pair in pairs):
        return qualify(scale, f"{UNDECIDED}: RoBERTa's final accuracy is not above a constant answer's")
    if missed := sum(math.isinf(pair.share) for pair in pairs):
        word = FAILS if missed == len(pairs) > 1 else UNDECIDED
        return qualify(
            scale, f"{word}: of {len(pairs)} pretraining seeds {missed} never reach RoBERTa's final accuracy"
        )
    return ''


def _pair(builder: RowBuilder, column: Column, goal: Cell, curve: dict[int, Cell]) -> tuple[dict[int, _Pair], str]:
    """Pretraining seed -> both models' checkpoints, for the seeds that both have; and why there is no such seed."""
    if goal.missing:
        return {}, goal.missing
    if not curve:
        return {}, explain_absence(builder.evidence, MAE_LM, column.task)
    if len(curve) == 1:
        return {}, 'one checkpoint of MAE-LM is fine-tuned: its arrival can only be found from earlier ones, too'
    target, found = _read(goal), [_read(cell, samples) for samples, cell in curve.items()]
    pairs = {}
    for seed in sorted(set(target).intersection(*found)):
        checkpoints = [target[seed], *(of_seed[seed] for of_seed in found)]
        common = sorted(set.intersection(*(set(checkpoint.scores) for checkpoint in checkpoints)))
        if not common:
            return {}, f'the checkpoints of pretraining seed {seed} have no fine-tuning seed in common'
        baseline, *points = (replace(c, scores={s: c.scores[s] for s in common}) for c in checkpoints)
        pairs[seed] = _Pair(points, baseline)
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
