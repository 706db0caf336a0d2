"""Tables and claims of a report as text, for a terminal. No torch."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from maelm_composer.reporting.artefacts import find_artefact, label_of
from maelm_composer.reporting.report import build_tables
from maelm_composer.reporting.rows import Row
from maelm_composer.reporting.verdicts import FAILS, HOLDS, NO_DIFFERENCE, NOT_COMPARABLE, UNDECIDED, is_comparable

MINUS = ' − '  # in the label of a comparison
WIDTH_OF_A_FILE = 140  # characters; a terminal has its own
COLORS = {HOLDS: 'green', FAILS: 'red', NO_DIFFERENCE: 'cyan', UNDECIDED: 'yellow'}
DIGITS = {'percent': 1, 'points': 1, 'rank': 0, 'share': 3}


def print_report(scale: str, results: Path) -> None:
    """As :func:`print_tables`, of the recorded results; raises as :func:`maelm_composer.reporting.report.report`."""
    print_tables(scale, build_tables(scale, results))


def print_tables(scale: str, tables: Mapping[str, Sequence[Row]]) -> None:
    """Tables 1 to 3 whole, of every figure its claims, of rows by artefact; the page has all of it."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH_OF_A_FILE)
    for name, rows in tables.items():
        console.print(Text(find_artefact(name).title, 'bold'))
        # A comparison that cannot be made yet is neither.
        values = [row for row in rows if row.x is None and not _read_verdict(row) and MINUS not in row.row]
        claims = [row for row in rows if _read_verdict(row)]
        if name.startswith('table'):
            console.print(_draw_values(values))
        if claims:
            console.print(_draw_claims(claims))
        if missing := sum(row.value is None for row in rows):
            console.print(f'{name}: {missing} of {len(rows)} numbers are missing; the page says why')
        console.print()
    if not is_comparable(scale):
        console.print(f'Scale {scale}: {NOT_COMPARABLE}.')


def _draw_values(rows: Sequence[Row]) -> Table:
    """The paper's layout: a model a line, a score a column."""
    columns = list(dict.fromkeys(row.column for row in rows))
    cells = {(row.row, row.column): _show(row.value, row.unit) for row in rows}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column('')
    for column in columns:
        table.add_column(label_of(column), justify='right')
    for label in dict.fromkeys(row.row for row in rows):
        table.add_row(Text(label), *(cells.get((label, column), '') for column in columns))  # [MASK] is no markup
    return table


def _draw_claims(rows: Sequence[Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ('claim', 'score', 'paper', 'ours', '95 % interval', 'verdict'):
        table.add_column(name, justify='right' if name in ('paper', 'ours') else 'left')
    for row in rows:
        interval = '' if row.low is None else f'{_show(row.low, row.unit)} to {_show(row.high, row.unit)}'
        verdict = Text(_read_verdict(row), COLORS[_read_verdict(row)])
        numbers = _show(row.paper, row.unit), _show(row.value, row.unit)
        table.add_row(Text(row.row), Text(label_of(row.column)), *numbers, interval, verdict)
    return table


def _read_verdict(row: Row) -> str:
    """The first word where the row is about a claim."""
    word = row.verdict.split(':')[0].split(';')[0]
    return word if word in COLORS else ''


def _show(value: float | None, unit: str) -> str:
    if value is None:
        return ''
    digits = DIGITS.get(unit)
    return 'never' if value == float('inf') else f'{value:.4g}' if digits is None else f'{value:.{digits}f}'
