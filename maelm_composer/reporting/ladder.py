"""The ladder as rows: both models at every rung, what lies between them, and how that changes with compute."""

import math
from collections.abc import Callable
from functools import partial

from maelm_composer.checkpoints.names import METRICS
from maelm_composer.records import PretrainingRecord
from maelm_composer.reporting.artefacts import MAE_LM, ROBERTA, RUNGS, Model, Role, Rung, columns_of
from maelm_composer.reporting.cells import Cell, combine, contrast, measure_runs, rank, relate, score, subtract
from maelm_composer.reporting.curves import MASKS, REAL, WITH_MASKS
from maelm_composer.reporting.estimate import slope_weights
from maelm_composer.reporting.evidence import Evidence
from maelm_composer.reporting.rows import Row, at
from maelm_composer.reporting.tables import GAP, PERCENT, POINTS, RANK, Book
from maelm_composer.reporting.verdicts import MARGIN_RANK_SHARE

TREND = 'change with ten times the compute'
RELATIVE = 'real_rank_excess'
AVERAGE, DEPARTURE = 'quick_avg', 'departure'
DEPARTURE_NATS, WINDOW = 1.0, 20  # lines of metrics.csv
Read = Callable[[Evidence, Model], Cell]


def build_ladder(book: Book) -> list[Row]:
    """Both models' numbers at every rung; then by how much MAE-LM's exceed RoBERTa's, and how that grows."""
    rows: list[Row] = []
    cells: dict[str, dict[Rung, tuple[Cell, Cell]]] = {}
    numbers = _list_numbers(book.scale)
    for name, (unit, read) in numbers.items():
        cells[name] = {r: (read(book.evidence, r.mae_lm), read(book.evidence, r.roberta)) for r in RUNGS}
        for rung, both in cells[name].items():
            for model, cell in zip((MAE_LM, ROBERTA), both, strict=True):
                rows.append(_at(book.value(model.label, name, unit, cell), rung))
    for rung, both in cells['eval_loss'].items():  # the paper claims nothing about it
        rows.append(_at(book.value(GAP, 'eval_loss', 'nats', subtract(*both)), rung))
    ours, theirs = (book.paper_of(model, 'pretrained') for model in (MAE_LM, ROBERTA))
    paper = None if ours is None or theirs is None else round(100 * (ours / theirs - 1), 2)
    excess = {rung: relate(*both) for rung, both in cells[REAL].items()}
    rows += _claim(book, RELATIVE, PERCENT, excess, paper, 100 * MARGIN_RANK_SHARE)
    for name, (unit, _) in numbers.items():
        if unit == PERCENT:
            gaps = {rung: subtract(*both) for rung, both in cells[name].items()}
            rows += _claim(book, name, POINTS, gaps, book.paper_gap(name))
    return rows


def _list_numbers(scale: str) -> dict[str, tuple[str, Read]]:
    """Name -> unit and how it is read."""
    columns = columns_of(scale, Role.quick)

    def average(evidence: Evidence, model: Model) -> Cell:
        return combine([(1 / len(columns), score(evidence, model, column)) for column in columns])

    def loss(evidence: Evidence, model: Model) -> Cell:
        return measure_runs(evidence, model, 'validation loss', lambda run: run.eval_loss)

    def departure(evidence: Evidence, model: Model) -> Cell:
        return measure_runs(evidence, model, METRICS, lambda run: _find_departure(evidence, run))

    return {
        'eval_loss': ('nats', loss),
        **{key: (RANK, partial(rank, key=key)) for key in (REAL, WITH_MASKS, MASKS)},
        DEPARTURE: ('tokens', departure),
        **{column.name: (PERCENT, partial(score, column=column)) for column in columns},
        AVERAGE: (PERCENT, average),
    }


def _find_departure(evidence: Evidence, run: PretrainingRecord) -> float | None:
    """Tokens after which the training loss, over windows of its curve, is a nat below its beginning; inf: never.

    The head begins with the unigram distribution, so the first window is its entropy.
    """
    curve = evidence.curves.get(run.run_name, [])
    losses = [float(row['train_loss']) for row in curve]
    means = [sum(losses[start : start + WINDOW]) / WINDOW for start in range(len(losses) - WINDOW + 1)]
    below = (start for start, mean in enumerate(means) if mean < means[0] - DEPARTURE_NATS)
    if not means:
        return None
    first = next(below, None)
    if first is None:
        return math.inf
    return int(curve[first + WINDOW - 1]['samples']) * run.tokens / run.samples


def _claim(
    book: Book, name: str, unit: str, gaps: dict[Rung, Cell], paper: float | None, margin: float | None = None
) -> list[Row]:
    """The difference at every rung, by Holm's correction for all of them, then its slope over log10(FLOPs)."""
    claims = book.claims([(GAP, name, cell, paper) for cell in gaps.values()], unit, margin=margin)
    there = {rung: cell for rung, cell in gaps.items() if not cell.missing}
    slope = Cell(missing='a slope needs two rungs')
    if len(there) > 1:
        weights = slope_weights([math.log10(rung.flops) for rung in there])
        slope = contrast(list(zip(weights, there.values(), strict=True)))
    trend = book.claim(f'{GAP}, {TREND}', name, f'{unit} a decade', slope)
    return [*(_at(claim, rung) for rung, claim in zip(gaps, claims, strict=True)), trend]


def _at(row: Row, rung: Rung) -> Row:
    return at(row, rung.flops, 'FLOPs')
