"""Tables and claims of a report, printed. Imports no torch."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from maelm_composer.console import begin_table, open_console
from maelm_composer.reporting.artefacts import OWN, find_artefact, label_of
from maelm_composer.reporting.findings import format_interval, format_number
from maelm_composer.reporting.page import make_grid
from maelm_composer.reporting.report import Tables
from maelm_composer.reporting.rows import Row
from maelm_composer.reporting.verdicts import (
    FAILS,
    HOLDS,
    NO_DIFFERENCE,
    NOT_COMPARABLE,
    UNDECIDED,
    is_claim,
    is_comparable,
)

MINUS = ' − '  # in the label of a comparison
COLORS = {HOLDS: 'green', FAILS: 'red', NO_DIFFERENCE: 'cyan', UNDECIDED: 'yellow'}


def print_tables(scale: str, tables: Tables) -> None:
    """Print tables whole, and the claims of every figure."""
    console = open_console()
    for name, rows in tables.items():
        console.print(Text(find_artefact(name).title, 'bold'))
        claims = [row for row in rows if is_claim(row)]
        if name.startswith(('table', OWN.name)):  # comparisons without a number are in neither table
            console.print(_draw_values([row for row in rows if not is_claim(row) and MINUS not in row.row]))
        if claims:
            console.print(_draw_claims(claims))
        if missing := sum(row.value is None for row in rows):
            console.print(f'{name}: {missing} of {len(rows)} numbers are missing; the page says why')
        console.print()
    if not is_comparable(scale):
        console.print(f'Scale {scale}: {NOT_COMPARABLE}.')


def _draw_values(rows: Sequence[Row]) -> Table:
    grid = make_grid(rows)
    table = begin_table('', right=grid['titles'])
    for label, _, cells in grid['lines']:
        table.add_row(label, *('' if row is None else format_number(row.value, row.unit) for row in cells))
    return table


def _draw_claims(rows: Sequence[Row]) -> Table:
    table = begin_table('claim', 'score', right=('paper', 'ours'), last=('95 % interval', 'verdict'))
    for row in rows:
        word = row.verdict.split(':')[0]
        paper, ours = format_number(row.paper, row.unit), format_number(row.value, row.unit)
        table.add_row(row.row, label_of(row.column), paper, ours, format_interval(row), Text(word, COLORS[word]))
    return table
