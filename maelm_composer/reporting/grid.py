"""Numbers as the paper lays them out: a row for each model, a column for each score, the paper's number beside ours."""

import math
from collections.abc import Sequence
from html import escape

from maelm_composer.reporting.artefacts import label_of
from maelm_composer.reporting.row_builder import CONSTANT
from maelm_composer.reporting.rows import Row

DIGITS = {
    'percent': 1,
    'points': 1,
    'rank': 1,
    'degrees': 1,
    'share': 3,
    'hours': 3,
    'nats': 3,
    'tokens': 0,
    'samples': 0,
}
HIGHER_IS_BETTER = 'percent'
REFERENCES = (CONSTANT,)  # never the best


def render_grid(rows: Sequence[Row]) -> str:
    """A table of all ``rows``; of a figure's a line for each x. The interval shows when a pointer rests on a cell."""
    cells = {(row.row, row.x, row.column): row for row in rows}
    names = list(dict.fromkeys(row.column for row in rows))
    units = {row.column: row.unit for row in rows}
    best = {name: _find_best([row for row in rows if row.column == name]) for name in names}
    axis = next((row.x_unit for row in rows if row.x is not None), '')
    head = ''.join(f'<th class="number">{escape(_title(name, units[name]))}</th>' for name in names)
    head = f'<th></th><th class="number">{escape(axis)}</th>{head}' if axis else f'<th></th>{head}'
    lines = []
    for label, x in dict.fromkeys((row.row, row.x) for row in rows):
        place = f'<td class="number">{x:,g}</td>' if axis and x is not None else '<td></td>' if axis else ''
        shown = ''.join(_render_cell(cells.get((label, x, name)), best[name]) for name in names)
        lines.append(f'<tr><th>{escape(label)}</th>{place}{shown}</tr>')
    body = '\n'.join(lines)
    return (
        f'<div class="scroll"><table class="grid"><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'
    )


def _title(name: str, unit: str) -> str:
    return label_of(name) if unit in ('percent', 'rank', 'share') else f'{label_of(name)} [{unit}]'


def _find_best(rows: Sequence[Row]) -> float | None:
    """The highest of the scores that are compared; None where nothing is."""
    values = [row.value for row in rows if row.row not in REFERENCES and row.x is None and row.value is not None]
    if len(values) < 2 or rows[0].unit != HIGHER_IS_BETTER:
        return None
    return max(values)


def _render_cell(row: Row | None, best: float | None) -> str:
    if row is None:
        return '<td></td>'
    paper = f' <small>{format_number(row.paper, row.unit)}</small>' if row.paper is not None else ''
    interval = format_interval(row)
    notes = [f'95 % interval {interval}' if interval else '', f'{row.pretraining_seeds} pretraining seeds', row.note]
    is_best = ' best' if best is not None and row.value == best and row.row not in REFERENCES else ''
    title = escape('; '.join(filter(None, notes)), quote=True)
    return f'<td class="number{is_best}" title="{title}">{format_number(row.value, row.unit)}{paper}</td>'


def format_interval(row: Row) -> str:
    return '' if row.low is None else f'{format_number(row.low, row.unit)} to {format_number(row.high, row.unit)}'


def format_number(value: float | None, unit: str, is_signed: bool = False) -> str:
    """With the digits that a reader of that unit expects; a real minus sign."""
    if value is None:
        return ''
    if math.isinf(value):
        return 'never' if value > 0 else '−∞'
    sign = '+' if is_signed else ''
    digits = 0 if unit == 'rank' and value == int(value) else DIGITS.get(unit.removesuffix(' a decade'))
    text = f'{value:{sign},.4g}' if digits is None else f'{value:{sign},.{digits}f}'
    return text.replace('-', '−')
