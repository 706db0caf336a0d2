"""The rows of every CSV file in results/<scale>/, measured values and judged claims, each beside the paper's number.

docs/schema.md explains the columns.
"""

import csv
import io
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from maelm_composer.files import write_text
from maelm_composer.records import FinetuningRecord, PretrainingRecord, Provenance, RankRecord
from maelm_composer.reporting.artefacts import DEMO, MAE_LM, PAPER_SETTINGS, ROBERTA, Column, Model
from maelm_composer.reporting.cells import ENOUGH_SEEDS, NEVER, Cell, Estimate
from maelm_composer.reporting.evidence import Evidence
from maelm_composer.statistics import ALPHA, adjust_holm

MINUS, SLOPE = ' − ', 'slope in δ'  # what the label of a comparison contains, or is
GAP = f'MAE-LM{MINUS}RoBERTa'
CONSTANT = 'a constant answer'
PERCENT, POINTS, RANK = 'percent', 'points', 'rank'
NOT_COMPARABLE = "not comparable with the paper's absolute numbers"
HOLDS, FAILS, NO_DIFFERENCE, UNDECIDED = WORDS = ('holds', 'fails', 'no difference', 'undecided')
# NO_DIFFERENCE: the interval is within ±margin. Both were fixed before the ladder's first run.
MARGIN_POINTS = 1.0
MARGIN_RANK_SHARE = 0.05  # of the baseline's rank
FEW = {1: 'from one pretraining seed', 2: 'from two pretraining seeds'}  # fewer than ENOUGH_SEEDS


def lacks_seeds(note: str) -> bool:
    """Whether a note says more than that some seeds never reached a target."""
    return any(not part.startswith(NEVER) for part in note.split('; ') if part)


@dataclass(frozen=True)
class Row:
    """One number, or a missing one: ``value`` is None and ``note`` gives the reason."""

    scale: str
    artefact: str
    row: str
    column: str
    unit: str
    x: float | None = None  # position of the point on a figure's x axis, in x_unit
    x_unit: str = ''
    value: float | None = None
    low: float | None = None
    high: float | None = None
    count: int = 0
    pretraining_seeds: int = 0
    examples: int = 0
    p: float | None = None
    detectable: float | None = None
    margin: float | None = None  # of a claim: the bound for NO_DIFFERENCE
    paper: float | None = None
    difference: float | None = None
    verdict: str = ''
    note: str = ''
    source: str = ''
    # The provenance of the number; several values are joined by ';'.
    run_keys: str = ''
    recipe_hash: str = ''
    git_revision: str = ''
    data_hash: str = ''
    tokenizer_hash: str = ''
    seeds: str = ''
    versions: str = ''
    hardware: str = ''
    training_seconds: float | None = None
    device_hours: float | None = None

    def at(self, x: float, x_unit: str) -> 'Row':
        """This row as a point of a figure."""
        return replace(self, x=x, x_unit=x_unit)

    @property
    def is_missing(self) -> bool:
        """Whether the value or one of its seeds is missing. Infinity, for a target never reached, is a value."""
        return self.value is None or lacks_seeds(self.note)

    @property
    def is_claim(self) -> bool:
        """Whether the row has a verdict about a claim of the paper or of ours: a difference, a slope or a share."""
        return self.value is not None and self.verdict.startswith(WORDS)

    @property
    def word(self) -> str:
        """The verdict without its reasons; of a claim, one of :data:`WORDS`."""
        return self.verdict.split(':')[0]

    @property
    def drawn_interval(self) -> tuple[float, float] | None:
        """The interval as figures show it: from three pretraining seeds on."""
        if self.low is None or self.high is None or self.pretraining_seeds < ENOUGH_SEEDS:
            return None
        return self.low, self.high


HEADER = [field.name for field in fields(Row)]


@dataclass(frozen=True)
class Claim:
    """A difference or a slope that is expected to be above zero, or below: a claim of the paper or of ours."""

    row: str
    column: str
    unit: str
    cell: Cell
    paper: float | None = None  # the paper's own difference
    margin: float | None = None  # NO_DIFFERENCE needs an interval in it; of points always MARGIN_POINTS
    flops: float | None = None  # of a rung
    rungs: str = ''  # of a slope: those that it is computed from


@dataclass(frozen=True)
class RowBuilder:
    """The evidence of one scale and the paper's numbers, as rows of the CSV file of one artefact."""

    artefact: str
    evidence: Evidence
    published: dict[tuple[str, str, str], float]  # (setting, row, column) -> the paper's number

    @property
    def scale(self) -> str:
        return self.evidence.scale

    def paper(self, rows: tuple[str, ...], column: str) -> float | None:
        """The paper's number for the first of ``rows`` that has one, in this scale's setting, else in base."""
        setting = PAPER_SETTINGS.get(self.scale, 'base')
        return next((self.published[k] for r in rows if (k := (setting, r, column)) in self.published), None)

    def paper_of(self, model: Model, column: str) -> float | None:
        return self.paper(model.published or (model.label,), column)

    def paper_gap(self, column: str, baseline: Model = ROBERTA, model: Model = MAE_LM) -> float | None:
        """The paper's ``model`` minus its ``baseline``."""
        ours, theirs = self.paper_of(model, column), self.paper_of(baseline, column)
        return None if ours is None or theirs is None else round(ours - theirs, 6)

    def value(self, row: str, column: str, unit: str, cell: Cell, paper: float | None = None) -> Row:
        """A measured number; its difference to the paper's is given only at the paper's own scales."""
        found, verdict = cell.estimate, ''
        if found is not None:
            verdict = judge_value(self.scale, found, paper, 2 if unit == 'share' else 1)
            found = replace(found, p=None, detectable=None)  # whether a score is 0 is not a question
        return self.make(Row(self.scale, self.artefact, row, column, unit, paper=paper), cell, found, verdict)

    def score(self, model: Model, column: Column, cell: Cell) -> Row:
        return self.value(model.label, column.name, PERCENT, cell, self.paper_of(model, column.name))

    def by_layer(self, model: Model, column: str, unit: str, cells: Iterable[Cell]) -> list[Row]:
        """One row for each of ``cells``, those of the layers from the embeddings on, or one that has no value."""
        rows = [self.value(model.label, column, unit, cell) for cell in cells]
        return [row if row.value is None else row.at(layer, 'layer') for layer, row in enumerate(rows)]

    def claims(self, *claims: Claim, expects_more: bool = True) -> list[Row]:
        """A row with a verdict for each of ``claims`` (above zero, or below), one family for Holm's correction."""
        tested = {i: e.p for i, c in enumerate(claims) if (e := c.cell.estimate) is not None and e.p is not None}
        adjusted = dict(zip(tested, adjust_holm(list(tested.values())), strict=True))
        rows = []
        for i, claim in enumerate(claims):
            row = Row(self.scale, self.artefact, claim.row, claim.column, claim.unit, paper=claim.paper)
            row = row if claim.flops is None else row.at(claim.flops, 'FLOPs')
            found, verdict = claim.cell.estimate, ''
            if found is not None:
                margin = MARGIN_POINTS if row.unit == POINTS else claim.margin
                row, found = replace(row, margin=margin), replace(found, p=adjusted.get(i))
                verdict = judge_claim(self.scale, found, expects_more, margin, len(tested), claim.rungs)
            # Ranks are not compared below base, whose models have more dimensions.
            rows.append(self.make(row, claim.cell, found, verdict, is_compared=row.unit != RANK))
        return rows

    @staticmethod
    def rank_margin(baseline: Cell) -> float | None:
        """The margin of a difference from the rank ``baseline``."""
        return None if baseline.estimate is None else MARGIN_RANK_SHARE * baseline.estimate.value

    def make(self, row: Row, cell: Cell, found: Estimate | None, verdict: str = '', is_compared: bool = False) -> Row:
        """``row`` with the estimate ``found`` and the records of ``cell``, or the reason why there is none.

        Args:
            is_compared: also below base, the difference to the paper's number is given.
        """
        if found is None:
            return replace(row, note=cell.missing)
        is_compared = row.paper is not None and (is_compared or self.scale in PAPER_SETTINGS)
        return replace(
            row,
            **vars(found),
            difference=found.value - (row.paper or 0.0) if is_compared else None,
            verdict=verdict,
            note=cell.note,
            source='demo' if self.scale == DEMO else 'measured',
            **trace_records(cell.runs, cell.records),
        )


def judge_value(scale: str, found: Estimate, paper: float | None, digits: int) -> str:
    """Where the paper's number lies relative to ``found``; below base, that the two are not comparable.

    Args:
        digits: of the paper's number, after the point.
    """
    if scale not in PAPER_SETTINGS:
        return NOT_COMPARABLE
    if paper is None:
        return ''
    if found.low is None or found.high is None or found.pretraining_seeds < ENOUGH_SEEDS:
        lack = FEW.get(found.pretraining_seeds, 'no interval')
        return f"{lack}: {found.value - paper:+.3g} from the paper's"
    if round(found.low, digits) <= paper <= round(found.high, digits):
        return "the interval holds the paper's number"
    return f"{'above' if found.value > paper else 'below'} the paper's number, which lies outside the interval"


def judge_claim(
    scale: str,
    found: Estimate,
    expects_more: bool,
    margin: float | None = None,
    among: int = 1,
    rungs: str = '',
) -> str:
    """The verdict on a difference or a slope; undecided with fewer than ENOUGH_SEEDS pretraining seeds.

    Args:
        expects_more: whether the claim is that it is above zero, or below.
        margin: NO_DIFFERENCE needs an interval within it.
        among: the size of the family of claims for which ``found.p`` was corrected by Holm's method.
        rungs: those that a slope is computed from.
    """
    sign, where = 1 if expects_more else -1, f' over {rungs}' if rungs else ''
    if found.p is None or found.low is None or found.high is None or found.pretraining_seeds < ENOUGH_SEEDS:
        agrees = 'with' if sign * found.value > 0 else 'without'
        why = FEW.get(found.pretraining_seeds, 'without a variance over the seeds')
        return qualify(scale, f'{UNDECIDED}: {agrees} the sign of the claim, but {why}{where}')
    if found.p < ALPHA:
        word = HOLDS if sign * found.value > 0 else FAILS
    elif margin is not None and -margin < found.low <= 0 <= found.high < margin:
        word = NO_DIFFERENCE
    else:
        word = UNDECIDED
    # The interval decides that there is no difference, and it is not corrected.
    corrected = f', one of {among} by Holm' if among > 1 and word != NO_DIFFERENCE else ''
    return qualify(scale, f'{word}: {found.pretraining_seeds} pretraining seeds{where}{corrected}')


def qualify(scale: str, text: str) -> str:
    """``text`` with the reservation that ``scale`` needs; the demo decides nothing."""
    if scale == DEMO:
        text = f'{UNDECIDED}: the demo is evidence of nothing'
    return text if scale in PAPER_SETTINGS else f'{text}; {NOT_COMPARABLE}'


def trace_records(runs: Iterable[PretrainingRecord], others: Iterable[FinetuningRecord | RankRecord]) -> dict[str, Any]:
    """The provenance of a number computed from pretraining ``runs`` and ``others``, as fields of its row."""
    trained = [run for _, run in sorted({run.run_name: run for run in runs}.items())]
    found = [record for _, record in sorted({record.key: record for record in others}.items())]
    both: list[PretrainingRecord | FinetuningRecord | RankRecord] = [*trained, *found]
    ran = [*(process for run in trained for process in run.processes), *found]
    timed = [record for record in both if not isinstance(record, RankRecord)]
    return {
        'run_keys': _join([*(run.run_name for run in trained), *(record.key for record in found)]),
        'recipe_hash': _join(run.provenance.recipe_hash for run in trained),
        'git_revision': _join(each.provenance.git_revision for each in ran),
        'data_hash': _join(record.data_hash for record in both),
        'tokenizer_hash': _join(run.tokenizer_hash for run in trained),
        'seeds': _join(
            [
                *(f'pretraining {run.seed}' for run in trained),
                *(f'{"masks" if isinstance(record, RankRecord) else "fine-tuning"} {record.seed}' for record in found),
            ]
        ),
        'versions': _join(_versions(each.provenance) for each in ran),
        'hardware': _join(f'{each.device}, {each.provenance.cpu} × {each.provenance.cpu_count} cores' for each in ran),
        'training_seconds': sum(record.training_seconds for record in timed),
        'device_hours': sum(record.device_hours for record in timed),
    }


def write_rows(path: Path, rows: list[Row]) -> None:
    """Write ``rows`` as CSV, atomically."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator='\n')
    writer.writerow(HEADER)
    for row in rows:
        writer.writerow(map(format_cell, vars(row).values()))
    write_text(path, buffer.getvalue())


def format_cell(value: float | str | None) -> str:
    """Six significant digits; integers without a point; None is empty; infinity, a target never reached, is inf."""
    if value is None or isinstance(value, str):
        return value or ''
    if isinstance(value, int) or (math.isfinite(value) and value == int(value) and abs(value) < 1e15):
        return str(int(value))
    return f'{value:.6g}'


def _join(values: Iterable[str | int | None]) -> str:
    return ';'.join(dict.fromkeys(str(value) for value in values if value is not None))


def _versions(provenance: Provenance) -> str:
    packages = {'maelm-composer': provenance.maelm_composer, 'python': provenance.python, **provenance.packages}
    return ', '.join(f'{name} {version}' for name, version in packages.items())
