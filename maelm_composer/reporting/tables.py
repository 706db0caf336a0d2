"""Tables 1 to 3 as rows: every model's numbers, then one row for each claim."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from maelm_composer.reporting.artefacts import (
    ABLATIONS,
    DEMO,
    MAE_LM,
    ROBERTA,
    SETTINGS,
    Model,
    Role,
    average_column,
    columns_of,
    tasks_of,
)
from maelm_composer.reporting.cells import Cell, constant_score, finetuned_rank, rank, score, subtract
from maelm_composer.reporting.estimate import Estimate
from maelm_composer.reporting.evidence import Evidence
from maelm_composer.reporting.rows import Row, trace_records
from maelm_composer.reporting.verdicts import MARGIN_POINTS, MARGIN_RANK_SHARE, is_comparable, judge_claim, judge_value
from maelm_composer.statistics import adjust_holm

GAP = 'MAE-LM − RoBERTa'
CONSTANT = 'a constant answer'
PERCENT, POINTS, RANK = 'percent', 'points', 'rank'


@dataclass(frozen=True)
class Book:
    """What the rows of one artefact are made from: our evidence and the paper's numbers."""

    artefact: str
    evidence: Evidence
    published: dict[tuple[str, str, str], float]  # (setting, row, column)

    @property
    def scale(self) -> str:
        return self.evidence.scale

    def paper(self, rows: tuple[str, ...], column: str) -> float | None:
        """The paper's number in the setting that the scale is set beside, from the first of ``rows`` that has it."""
        setting = SETTINGS.get(self.scale, 'base')
        return next((self.published[k] for r in rows if (k := (setting, r, column)) in self.published), None)

    def paper_of(self, model: Model, column: str) -> float | None:
        return self.paper(model.published or (model.label,), column)

    def paper_gap(self, column: str, baseline: Model = ROBERTA, model: Model = MAE_LM) -> float | None:
        """The paper's ``model`` minus its ``baseline``."""
        ours, theirs = self.paper_of(model, column), self.paper_of(baseline, column)
        return None if ours is None or theirs is None else round(ours - theirs, 6)

    def value(self, row: str, column: str, unit: str, cell: Cell, paper: float | None = None) -> Row:
        """A measured number; its difference to the paper's only where the scale is the paper's."""
        found = cell.estimate
        verdict = '' if found is None else judge_value(self.scale, found, paper)
        # A p-value of zero means nothing of a score.
        known = None if found is None else replace(found, p=None, detectable=None)
        return self._row((row, column, unit), cell, known, paper, verdict, is_comparable(self.scale))

    def claim(
        self,
        row: str,
        column: str,
        unit: str,
        cell: Cell,
        paper: float | None = None,
        expects_more: bool = True,
        margin: float | None = None,
    ) -> Row:
        """A difference between our models, beside the paper's difference between its own.

        Args:
            margin: within which a difference is none; the default is that of points.
        """
        return self.claims([(row, column, cell, paper)], unit, expects_more, margin)[0]

    def claims(
        self,
        claims: Sequence[tuple[str, str, Cell, float | None]],
        unit: str,
        expects_more: bool = True,
        margin: float | None = None,
    ) -> list[Row]:
        """As :meth:`claim`, of (row, column, cell, the paper's number); Holm's correction counts all of them."""
        margin = MARGIN_POINTS if unit == POINTS else margin
        found = {
            i: e for i, (_, _, cell, _) in enumerate(claims) if (e := cell.estimate) is not None and e.p is not None
        }
        adjusted = dict(zip(found, adjust_holm([e.p for e in found.values() if e.p is not None]), strict=True))
        rows = []
        for i, (row, column, cell, paper) in enumerate(claims):
            known, verdict = cell.estimate, ''
            if known is not None:
                known = replace(known, p=adjusted.get(i))
                verdict = judge_claim(self.scale, known, expects_more, margin, len(found))
            # A rank is a number of the model's dimensions, which are fewer below base.
            is_compared = unit != RANK or is_comparable(self.scale)
            made = self._row((row, column, unit), cell, known, paper, verdict, is_compared)
            rows.append(replace(made, margin=None if known is None else margin))
        return rows

    def _row(
        self,
        where: tuple[str, str, str],
        cell: Cell,
        found: Estimate | None,
        paper: float | None,
        verdict: str,
        is_compared: bool,
    ) -> Row:
        if found is None:
            return Row(self.scale, self.artefact, *where, paper=paper, note=cell.missing)
        return Row(
            self.scale,
            self.artefact,
            *where,
            **vars(found),
            paper=paper,
            difference=found.value - paper if is_compared and paper is not None else None,
            verdict=verdict,
            note=cell.note,
            source='demo' if self.scale == DEMO else 'measured',
            trace=trace_records(cell.runs, cell.records),
        )


def build_table1(book: Book) -> list[Row]:
    glue, squad = (columns_of(book.scale, role) for role in (Role.glue, Role.squad))
    columns = [*glue, average_column(book.scale), *squad]
    cells = {(model, c): score(book.evidence, model, c) for model in (ROBERTA, MAE_LM) for c in columns}
    rows = [
        book.value(model.label, c.name, PERCENT, cell, book.paper_of(model, c.name))
        for (model, c), cell in cells.items()
    ]
    for c in columns:
        if c.is_average or c.is_averaged or c == squad[0]:  # whose score is the task's own metric
            rows.append(book.value(CONSTANT, c.name, PERCENT, constant_score(book.evidence, ROBERTA, c)))
    gaps = {c: subtract(cells[MAE_LM, c], cells[ROBERTA, c]) for c in columns}
    average, tasks = [c for c in columns if c.is_average], [c for c in columns if not c.is_average]
    for group in (tasks, average):  # AVG is one claim of its own
        rows += book.claims([(GAP, c.name, gaps[c], book.paper_gap(c.name)) for c in group], POINTS)
    return rows


def build_table2(book: Book) -> list[Row]:
    average = average_column(book.scale)
    cells = {model: score(book.evidence, model, average) for model in ABLATIONS}
    rows = [
        book.value(model.label, average.name, PERCENT, cell, book.paper_of(model, average.name))
        for model, cell in cells.items()
    ]
    claims = []
    for model in [model for model in cells if model is not MAE_LM]:
        gap, paper = subtract(cells[model], cells[MAE_LM]), book.paper_gap(average.name, MAE_LM, model)
        claims.append((f'{model.label} − MAE-LM', average.name, gap, paper))
    return rows + book.claims(claims, POINTS, expects_more=False)


def build_table3(book: Book) -> list[Row]:
    mnli, squad = tasks_of(book.scale, (Role.mnli, Role.squad))
    rows, gaps = [], []
    for column, theirs in (('pretrained', 'pretrained'), (mnli, 'mnli'), (squad, 'squad2')):  # ours, the paper's
        is_pretrained = column == 'pretrained'
        cells = {}
        for model in (ROBERTA, MAE_LM):
            cells[model] = (
                rank(book.evidence, model, 'rank_real')
                if is_pretrained
                else finetuned_rank(book.evidence, model, column)
            )
            rows.append(book.value(model.label, column, RANK, cells[model], book.paper_of(model, theirs)))
        gap, margin = subtract(cells[MAE_LM], cells[ROBERTA]), rank_margin(cells[ROBERTA])
        gaps.append(book.claim(GAP, column, RANK, gap, book.paper_gap(theirs), margin=margin))
    return rows + gaps


def rank_margin(baseline: Cell) -> float | None:
    """Within which a difference to ``baseline``'s rank is none."""
    found = baseline.estimate
    return None if found is None else MARGIN_RANK_SHARE * found.value
