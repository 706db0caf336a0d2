"""Tables 1 to 3 as rows: every model's numbers, then one row for each claim."""

from dataclasses import dataclass

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
from maelm_composer.reporting.evidence import Evidence
from maelm_composer.reporting.rows import Row, trace_records
from maelm_composer.reporting.verdicts import CHECKPOINT, SEED, is_comparable, judge_claim, judge_value

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
        return self._row((row, column, unit), cell, paper, verdict, is_comparable(self.scale))

    def claim(
        self,
        row: str,
        column: str,
        unit: str,
        cell: Cell,
        paper: float | None = None,
        expects_more: bool = True,
        repeats: str = SEED,
    ) -> Row:
        """A difference between our models, beside the paper's difference between its own."""
        found = cell.estimate
        verdict = '' if found is None else judge_claim(self.scale, found, expects_more, repeats)
        # A rank is a number of the model's dimensions, which are fewer below base.
        return self._row((row, column, unit), cell, paper, verdict, unit != RANK or is_comparable(self.scale))

    def _row(
        self, where: tuple[str, str, str], cell: Cell, paper: float | None, verdict: str, is_compared: bool
    ) -> Row:
        found = cell.estimate
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
    for c in columns:
        gap = subtract(cells[MAE_LM, c], cells[ROBERTA, c])
        rows.append(book.claim(GAP, c.name, POINTS, gap, book.paper_gap(c.name)))
    return rows


def build_table2(book: Book) -> list[Row]:
    average = average_column(book.scale)
    cells = {model: score(book.evidence, model, average) for model in ABLATIONS}
    rows = [
        book.value(model.label, average.name, PERCENT, cell, book.paper_of(model, average.name))
        for model, cell in cells.items()
    ]
    for model in [model for model in cells if model is not MAE_LM]:
        gap, paper = subtract(cells[model], cells[MAE_LM]), book.paper_gap(average.name, MAE_LM, model)
        rows.append(book.claim(f'{model.label} − MAE-LM', average.name, POINTS, gap, paper, expects_more=False))
    return rows


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
        gap, repeats = subtract(cells[MAE_LM], cells[ROBERTA]), CHECKPOINT if is_pretrained else SEED
        gaps.append(book.claim(GAP, column, RANK, gap, book.paper_gap(theirs), repeats=repeats))
    return rows + gaps
