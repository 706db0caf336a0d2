"""Tables 1 to 3 as rows: every model's numbers, then one row for each claim."""

from dataclasses import dataclass

from maelm_composer.reporting.artefacts import (
    ABLATIONS,
    MAE_LM,
    ROBERTA,
    SETTINGS,
    Model,
    Role,
    average_column,
    columns_of,
    tasks_of,
)
from maelm_composer.reporting.cells import Cell, average_score, finetuned_rank, rank, score, subtract
from maelm_composer.reporting.evidence import Evidence
from maelm_composer.reporting.rows import Row, trace_records
from maelm_composer.reporting.verdicts import is_comparable, judge_claim, judge_value

GAP = 'MAE-LM − RoBERTa'
PERCENT, POINTS, RANK = 'percent', 'points', 'rank'


@dataclass(frozen=True)
class Book:
    """What rows are made from: our evidence and the paper's numbers."""

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

    def value(self, artefact: str, row: str, column: str, unit: str, cell: Cell, paper: float | None = None) -> Row:
        """A measured number; its difference to the paper's only where the scale is the paper's."""
        found = cell.estimate
        verdict = '' if found is None else judge_value(self.scale, found, paper)
        return self._row((artefact, row, column, unit), cell, paper, verdict, is_comparable(self.scale))

    def claim(
        self,
        artefact: str,
        row: str,
        column: str,
        unit: str,
        cell: Cell,
        paper: float | None = None,
        expects_more: bool = True,
        repeats: str = 'fine-tuning seed',
    ) -> Row:
        """A difference between our models, beside the paper's difference between its own."""
        found = cell.estimate
        verdict = '' if found is None else judge_claim(self.scale, found, expects_more, repeats)
        return self._row((artefact, row, column, unit), cell, paper, verdict, is_compared=True)

    def _row(
        self, where: tuple[str, str, str, str], cell: Cell, paper: float | None, verdict: str, is_compared: bool
    ) -> Row:
        found = cell.estimate
        if found is None:
            return Row(self.scale, *where, paper=paper, note=cell.missing)
        return Row(
            self.scale,
            *where,
            value=found.value,
            low=found.low,
            high=found.high,
            count=found.count,
            paper=paper,
            difference=found.value - paper if is_compared and paper is not None else None,
            verdict=verdict,
            source='demo' if self.scale == 'demo' else 'measured',
            trace=trace_records(cell.runs, cell.records),
        )


def build_table1(book: Book) -> list[Row]:
    glue = columns_of(book.scale, Role.glue)
    found: dict[tuple[str, str], Cell] = {}
    for model in (ROBERTA, MAE_LM):
        for column in glue:
            found[model.label, column.name] = score(book.evidence, model, column)
        found[model.label, average_column(book.scale).name] = average_score(book.evidence, model)
        for column in columns_of(book.scale, Role.squad):
            found[model.label, column.name] = score(book.evidence, model, column)
    names = [name for label, name in found if label == MAE_LM.label]
    rows = [
        book.value('table1', model.label, name, PERCENT, found[model.label, name], book.paper_of(model, name))
        for model in (ROBERTA, MAE_LM)
        for name in names
    ]
    gaps = []
    for name in names:
        gap = subtract(found[MAE_LM.label, name], found[ROBERTA.label, name])
        gaps.append(book.claim('table1', GAP, name, POINTS, gap, _gap(book, name)))
    return rows + gaps


def build_table2(book: Book) -> list[Row]:
    name = average_column(book.scale).name
    reference = average_score(book.evidence, MAE_LM)
    published = book.paper_of(MAE_LM, name)
    rows, gaps = [], []
    for _, model in ABLATIONS:
        cell, paper = average_score(book.evidence, model), book.paper_of(model, name)
        rows.append(book.value('table2', model.label, name, PERCENT, cell, paper))
        if model is not MAE_LM:
            difference = None if paper is None or published is None else paper - published
            label = f'{model.label} − MAE-LM'
            gap = subtract(cell, reference)
            gaps.append(book.claim('table2', label, name, POINTS, gap, difference, expects_more=False))
    return rows + gaps


def build_table3(book: Book) -> list[Row]:
    stages = {'pretrained': 'pretrained'}  # column -> the paper's column
    stages |= dict(zip(tasks_of(book.scale, (Role.mnli, Role.squad)), ('mnli', 'squad2'), strict=True))
    rows, gaps = [], []
    for column, theirs in stages.items():
        cells = {}
        for model in (ROBERTA, MAE_LM):
            is_pretrained = column == 'pretrained'
            cell = (
                rank(book.evidence, model, 'rank_real')
                if is_pretrained
                else finetuned_rank(book.evidence, model, column)
            )
            cells[model.label] = cell
            rows.append(book.value('table3', model.label, column, RANK, cell, book.paper_of(model, theirs)))
        repeats = 'checkpoint' if is_pretrained else 'fine-tuning seed'
        gap = subtract(cells['MAE-LM'], cells['RoBERTa'])
        gaps.append(book.claim('table3', GAP, column, RANK, gap, _gap(book, theirs), repeats=repeats))
    return rows + gaps


def _gap(book: Book, column: str) -> float | None:
    ours, baseline = book.paper_of(MAE_LM, column), book.paper_of(ROBERTA, column)
    return None if ours is None or baseline is None else round(ours - baseline, 6)
