"""Makes the rows of one artefact: measured values and judged claims, each beside the paper's number."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from maelm_composer.reporting.artefacts import DEMO, MAE_LM, PAPER_SETTINGS, ROBERTA, Model
from maelm_composer.reporting.cells import Cell, Estimate, subtract
from maelm_composer.reporting.evidence import Evidence
from maelm_composer.reporting.rows import Row, trace_records
from maelm_composer.reporting.verdicts import MARGIN_POINTS, MARGIN_RANK_SHARE, is_comparable, judge_claim, judge_value
from maelm_composer.statistics import adjust_holm

GAP = 'MAE-LM − RoBERTa'
CONSTANT = 'a constant answer'
BOTH = (ROBERTA, MAE_LM)
PERCENT, POINTS, RANK = 'percent', 'points', 'rank'


@dataclass(frozen=True)
class Claim:
    """A difference or a slope of ours that the paper claims to be above zero, or below."""

    row: str
    column: str
    cell: Cell
    paper: float | None = None  # the paper's own difference
    margin: float | None = None  # a smaller difference counts as none; None: no such margin, or that of points


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
            verdict = judge_value(self.scale, found, paper)
            found = replace(found, p=None, detectable=None)  # whether a score is 0 is not a question
        return self.make(Row(self.scale, self.artefact, row, column, unit, paper=paper), cell, found, verdict)

    def claims(self, unit: str, *claims: Claim, expects_more: bool = True) -> list[Row]:
        """A row with a verdict for each of ``claims`` (above zero, or below), one family for Holm's correction."""
        tested = {i: e.p for i, c in enumerate(claims) if (e := c.cell.estimate) is not None and e.p is not None}
        adjusted = dict(zip(tested, adjust_holm(list(tested.values())), strict=True))
        rows = []
        for i, claim in enumerate(claims):
            row = Row(self.scale, self.artefact, claim.row, claim.column, unit, paper=claim.paper)
            found, verdict = claim.cell.estimate, ''
            if found is not None:
                margin = MARGIN_POINTS if unit == POINTS else claim.margin
                row, found = replace(row, margin=margin), replace(found, p=adjusted.get(i))
                verdict = judge_claim(self.scale, found, expects_more, margin, len(tested))
            # Ranks are not compared below base, whose models have more dimensions.
            rows.append(self.make(row, claim.cell, found, verdict, is_compared=unit != RANK))
        return rows

    def make(self, row: Row, cell: Cell, found: Estimate | None, verdict: str = '', is_compared: bool = False) -> Row:
        """``row`` with the estimate ``found`` and the records of ``cell``, or the reason why there is none.

        Args:
            is_compared: the difference to the paper's number is given at the other scales, too.
        """
        if found is None:
            return replace(row, note=cell.missing)
        is_compared = row.paper is not None and (is_compared or is_comparable(self.scale))
        return replace(
            row,
            **vars(found),
            difference=found.value - (row.paper or 0.0) if is_compared else None,
            verdict=verdict,
            note=cell.note,
            source='demo' if self.scale == DEMO else 'measured',
            **trace_records(cell.runs, cell.records),
        )


def claim_more_dimensions(column: str, both: Sequence[Cell], paper: float | None) -> Claim:
    """That MAE-LM's rank exceeds RoBERTa's; ``both`` as in :data:`BOTH`. The margin is a share of RoBERTa's rank."""
    theirs, ours = both
    margin = None if theirs.estimate is None else MARGIN_RANK_SHARE * theirs.estimate.value
    return Claim(GAP, column, subtract(ours, theirs), paper, margin)
