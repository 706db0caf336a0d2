"""The ladder as rows: both models at every rung, their difference, and its change with compute."""

import math
from collections.abc import Callable
from functools import partial

from maelm_composer.checkpoints.names import METRICS
from maelm_composer.records import PretrainingRecord
from maelm_composer.reporting.artefacts import MAE_LM, QUICK_AVERAGE, QUICK_COLUMNS, ROBERTA, RUNGS, Model, Rung
from maelm_composer.reporting.cells import Cell, measure_runs, rank, score, slope, subtract, subtract_relative
from maelm_composer.reporting.curves import MASKS, REAL, WITH_MASKS
from maelm_composer.reporting.evidence import Evidence
from maelm_composer.reporting.row_builder import GAP, PERCENT, POINTS, RANK, Claim, RowBuilder
from maelm_composer.reporting.rows import Row
from maelm_composer.reporting.verdicts import MARGIN_RANK_SHARE

TREND = 'change with ten times the compute'
RELATIVE = 'real_rank_excess'
DEPARTURE = 'departure'
DEPARTURE_NATS, WINDOW = 1.0, 20  # lines of metrics.csv
Read = Callable[[Evidence, Model], Cell]


def build_ladder(builder: RowBuilder) -> list[Row]:
    """Both models' numbers at every rung; then MAE-LM − RoBERTa, and the slope of that over log compute."""
    rows: list[Row] = []
    cells: dict[str, dict[Rung, tuple[Cell, Cell]]] = {}
    for name, (unit, read) in NUMBERS.items():
        cells[name] = {r: (read(builder.evidence, r.mae_lm), read(builder.evidence, r.roberta)) for r in RUNGS}
        for rung, both in cells[name].items():
            for model, cell in zip((MAE_LM, ROBERTA), both, strict=True):
                rows.append(_at(builder.value(model.label, name, unit, cell), rung))
    for rung, both in cells['eval_loss'].items():  # the paper claims nothing about the loss
        rows.append(_at(builder.value(GAP, 'eval_loss', 'nats', subtract(*both)), rung))
    ours, theirs = (builder.paper_of(model, 'pretrained') for model in (MAE_LM, ROBERTA))
    paper = None if ours is None or theirs is None else round(100 * (ours / theirs - 1), 2)
    excess = {rung: subtract_relative(*both) for rung, both in cells[REAL].items()}
    rows += _claim(builder, RELATIVE, PERCENT, excess, paper, 100 * MARGIN_RANK_SHARE)
    for name, (unit, _) in NUMBERS.items():
        if unit == PERCENT:
            gaps = {rung: subtract(*both) for rung, both in cells[name].items()}
            rows += _claim(builder, name, POINTS, gaps, builder.paper_gap(name))
    return rows


def _measure_loss(evidence: Evidence, model: Model) -> Cell:
    return measure_runs(evidence, model, 'validation loss', lambda run: run.eval_loss)


def _measure_departure(evidence: Evidence, model: Model) -> Cell:
    return measure_runs(evidence, model, METRICS, lambda run: _find_departure(evidence, run))


NUMBERS: dict[str, tuple[str, Read]] = {  # column -> unit, and how a model's number is read
    'eval_loss': ('nats', _measure_loss),
    **{key: (RANK, partial(rank, key=key)) for key in (REAL, WITH_MASKS, MASKS)},
    DEPARTURE: ('tokens', _measure_departure),
    **{column.name: (PERCENT, partial(score, column=column)) for column in (*QUICK_COLUMNS, QUICK_AVERAGE)},
}


def _find_departure(evidence: Evidence, run: PretrainingRecord) -> float | None:
    """Tokens until the mean training loss of a window is a nat below that of the first window; inf: never.

    The head's bias starts at the unigram distribution, so the first window's loss is the unigram entropy.
    """
    curve = evidence.curves.get(run.run_name, [])
    losses = [float(row['train_loss']) for row in curve]
    means = [sum(losses[start : start + WINDOW]) / WINDOW for start in range(len(losses) - WINDOW + 1)]
    if not means:
        return None
    first = next((start for start, mean in enumerate(means) if mean < means[0] - DEPARTURE_NATS), None)
    if first is None:
        return math.inf
    return int(curve[first + WINDOW - 1]['samples']) * run.tokens / run.samples


def _claim(
    builder: RowBuilder,
    name: str,
    unit: str,
    gaps: dict[Rung, Cell],
    paper: float | None,
    margin: float | None = None,
) -> list[Row]:
    """The difference at every rung, one family for Holm's correction, then its slope over log10(FLOPs)."""
    claims = builder.claims(unit, *(Claim(GAP, name, cell, paper, margin) for cell in gaps.values()))
    there = [(math.log10(rung.flops), cell) for rung, cell in gaps.items() if not cell.missing]
    trend = Cell(missing='a slope needs two rungs')
    if len(there) > 1:
        trend = slope(there, is_paired=False)  # rungs are models of different sizes
    trends = builder.claims(f'{unit} a decade', Claim(f'{GAP}, {TREND}', name, trend))
    return [*(_at(claim, rung) for rung, claim in zip(gaps, claims, strict=True)), *trends]


def _at(row: Row, rung: Rung) -> Row:
    return row.at(rung.flops, 'FLOPs')
