"""Figure 3 as rows: accuracy over pretraining time, and what MAE-LM needs for RoBERTa's final accuracy."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from maelm_composer.analysis.time_to_accuracy import Arrival, Axis, Point, find_arrival
from maelm_composer.reporting.artefacts import MAE_LM, ROBERTA, Column, Model, Role, columns_of
from maelm_composer.reporting.cells import Cell, constant_score, explain_absence, score
from maelm_composer.reporting.estimate import Estimate
from maelm_composer.reporting.rows import Row, at
from maelm_composer.reporting.tables import CONSTANT, PERCENT, Book
from maelm_composer.reporting.verdicts import FAILS, UNDECIDED, judge_claim, qualify
from maelm_composer.statistics import TAILS, resample_medians

RESAMPLED_RACES = 1000
UNITS = {Axis.hours: 'hours', Axis.samples: 'samples', Axis.flops: 'FLOPs'}
SHARE = 'share_of_time_to_target'


@dataclass(frozen=True)
class Race:
    """MAE-LM's checkpoints against RoBERTa's last one, on the seeds that all of them have."""

    points: list[Point]
    baseline: Point
    cells: list[Cell]

    def measure(self, axis: Axis) -> Arrival:
        """What RoBERTa's final score costs."""
        return find_arrival(self.points, self.baseline.median, axis)

    def estimate_share(self) -> Estimate:
        """Hours to the target over RoBERTa's hours, with the interval over resampled seeds."""
        whole, count = self.baseline.get_cost(Axis.hours), len(self.baseline.scores)
        value = self.measure(Axis.hours).interpolated / whole
        if count < 2:
            return Estimate(value, None, None, count)
        medians = resample_medians([point.scores for point in (self.baseline, *self.points)])[:RESAMPLED_RACES]
        shares = []
        for target, *scores in medians.tolist():
            drawn = [replace(point, scores=(score,)) for point, score in zip(self.points, scores, strict=True)]
            shares.append(find_arrival(drawn, target, Axis.hours).interpolated / whole)
        low, high = np.percentile(shares, TAILS, method='inverted_cdf')  # no mean with infinity
        return Estimate(value, float(low), float(high), count)


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
                cost = _read_cost(cell, samples, axis)
                reason = f'the record of {model.run_name(book.scale)} holds no {axis.name}'
                known = Cell(missing=reason) if cost is None else Cell(((1.0, [cost]),), cell.runs)
                rows.append(at(book.value(model.label, axis.name, UNITS[axis], known), samples, 'samples'))
    return rows + _judge(book, column)


def _judge(book: Book, column: Column) -> list[Row]:
    """What MAE-LM needs for RoBERTa's final accuracy, and as a share of RoBERTa's time: the claim."""
    label = "MAE-LM to RoBERTa's final accuracy"
    race = _prepare(book, column)
    wanted = [(axis, way) for axis in Axis for way in ('first crossing', 'interpolated')]
    paper = book.paper((MAE_LM.label,), SHARE)
    if isinstance(race, str):
        missing = Cell(missing=race)
        rows = [book.value(label, f'{axis.name}, {way}', UNITS[axis], missing) for axis, way in wanted]
        return [*rows, book.value(label, SHARE, 'share', missing, paper)]
    runs = tuple(run for cell in race.cells for run in cell.runs)
    records = tuple(record for cell in race.cells for record in cell.records)
    rows = []
    for axis, way in wanted:
        cost = getattr(race.measure(axis), way.replace(' ', '_'))
        cell = Cell(((1.0, [cost]),), runs, records)
        if axis is Axis.flops and not all(run.get('flops') for run in runs):
            cell = Cell(missing='a pretraining record holds no flops')
        rows.append(book.value(label, f'{axis.name}, {way}', UNITS[axis], cell))
    found = race.estimate_share()
    if race.baseline.median <= 100 * race.cells[0].records[0]['baseline']:
        verdict = qualify(book.scale, f"{UNDECIDED}: RoBERTa's final accuracy is not above a constant answer's")
    elif math.isinf(found.value):
        word = FAILS if found.low is not None and found.low > 1 else UNDECIDED
        text = f"{word}: no recorded checkpoint reaches RoBERTa's final accuracy, fine-tuning seeds: {found.count}"
        verdict = qualify(book.scale, text)
    else:
        low, high = (None if bound is None else bound - 1 for bound in (found.low, found.high))
        verdict = judge_claim(book.scale, Estimate(found.value - 1, low, high, found.count), expects_more=False)
    if race.measure(Axis.hours).starts_above:
        verdict += "; MAE-LM's first recorded checkpoint is there already, so it is an upper bound"
    row = book.value(label, SHARE, 'share', Cell(((1.0, [found.value]),), runs, records), paper)
    difference = None if paper is None else found.value - paper
    return [*rows, replace(row, **vars(found), verdict=verdict, difference=difference)]


def _prepare(book: Book, column: Column) -> Race | str:
    """The race, or why it cannot be run."""
    goal = score(book.evidence, ROBERTA, column)
    curve = _read_checkpoints(book, MAE_LM, column)
    if goal.missing:
        return goal.missing
    if not curve:
        return explain_absence(book.evidence, MAE_LM, column.task)
    if len(curve) == 1:
        return 'one checkpoint of MAE-LM is fine-tuned: when it was reached is in those before it'
    cells = [goal, *curve.values()]
    seeds = sorted(set.intersection(*({record['seed'] for record in cell.records} for cell in cells)))
    if not seeds:
        return 'the checkpoints of Figure 3 have no fine-tuning seed in common'
    samples = [goal.runs[0]['samples'], *curve]
    points = [_place(cell, count, seeds) for cell, count in zip(cells, samples, strict=True)]
    return Race(points[1:], points[0], cells)


def _place(cell: Cell, samples: int, seeds: Sequence[int]) -> Point:
    scores = {record['seed']: value for record, value in zip(cell.records, cell.terms[0][1], strict=True)}
    hours, flops = (_read_cost(cell, samples, axis) for axis in (Axis.hours, Axis.flops))
    assert hours is not None
    # Without recorded FLOPs their axis is not reported; the points still need a number that rises.
    return Point(samples, hours * 3600, float(samples) if flops is None else flops, tuple(scores[s] for s in seeds))


def _read_checkpoints(book: Book, model: Model, column: Column) -> dict[int, Cell]:
    found = book.evidence.checkpoints_with(model, column.task)
    return {samples: score(book.evidence, model, column, samples) for samples in found}


def _read_cost(cell: Cell, samples: int, axis: Axis) -> float | None:
    """Hours or FLOPs of pretraining up to a checkpoint; FLOPs grow evenly with samples."""
    if axis is Axis.hours:
        return float(cell.records[0]['checkpoint']['training_seconds']) / 3600
    run = cell.runs[0]
    return float(run['flops']) * samples / run['samples'] if run.get('flops') else None
