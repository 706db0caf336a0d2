"""Numbers and names of rows as the page, the figures and the terminal write them."""

import itertools
import math
import re
from collections import defaultdict

from maelm_composer.reporting.artefacts import label_of
from maelm_composer.reporting.rows import GAP, Row
from maelm_composer.statistics import ALPHA

DIGITS = {
    **dict.fromkeys(('percent', 'points', 'rank', 'degrees'), 1),
    **dict.fromkeys(('share', 'hours', 'nats'), 3),
    **dict.fromkeys(('tokens', 'samples'), 0),
}
MOST_DIGITS = 5


def name_claim(row: Row, before_x: str) -> str:
    """The claim without its artefact; MAE-LM − RoBERTa is left out."""
    comparison = '' if row.row == GAP else row.row.removeprefix(f'{GAP}, ') + ', '
    return comparison + name_score(row, before_x)


def name_score(row: Row, before_x: str = ' at ') -> str:
    """The score and, of a figure, where: ``QQP at 3e13 FLOPs``."""
    if row.x is None:
        return label_of(row.column)
    x, unit = format_x(row.x), row.x_unit
    return f'{label_of(row.column)}{before_x}' + (f'{unit} {x}' if unit in ('δ', 'layer', 'epoch') else f'{x} {unit}')


def shorten_note(note: str) -> str:
    """``note`` with one part for all records that the same runs lack, instead of one for each record of each run."""
    lacks = [re.fullmatch(r'(.+) of (\S+(?:, \S+)*) is not recorded', part) for part in note.split('; ')]
    runs_of, whats_of = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    for what, runs in (lack.groups() for lack in lacks if lack):
        runs_of[what].append(runs)
    for what, runs_lacking in runs_of.items():
        whats_of[', '.join(dict.fromkeys(runs_lacking))].append(what)
    others = [part for part, lack in zip(note.split('; '), lacks, strict=True) if not lack]
    return '; '.join(others + [f'{", ".join(whats)} of {runs} is not recorded' for runs, whats in whats_of.items()])


def format_x(x: float) -> str:
    return f'{x:g}'.replace('e+', 'e') if x >= 1e10 else f'{x:,.10g}'


def name_unit(row: Row) -> str:
    """The unit of a comparison."""
    unit = row.unit.removesuffix(' a decade')
    return {'rank': 'dimensions', 'percent': "% of RoBERTa's rank"}.get(unit, unit)


def format_interval(row: Row) -> str:
    """``low to high``, both with the digits of :func:`_count_digits`."""
    if row.low is None or row.high is None:
        return ''
    digits = _count_digits(row, row.low, row.high)
    return ' to '.join(format_number(bound, row.unit, digits=digits) for bound in (row.low, row.high))


def _count_digits(row: Row, *numbers: float) -> int | None:
    """The fewest digits with which a number close to zero, or to the margin of ``row``, is not printed as that."""
    margin, digits = row.margin, DIGITS.get(row.unit.removesuffix(' a decade'))

    def misleads(number: float) -> bool:
        is_at_margin = margin is not None and abs(number) != margin == round(abs(number), digits)
        return is_at_margin or (number != 0 and round(number, digits) == 0)

    while digits is not None and digits < MOST_DIGITS and any(map(misleads, numbers)):
        digits += 1
    return digits


def format_p(p: float) -> str:
    """``= 0.012``: two digits, or as many as keep a p close to the level from being printed as the level."""
    digits = next(n for n in itertools.count(2) if float(f'{p:.{n}g}') != ALPHA or n > MOST_DIGITS)
    return '< 0.001' if p < 0.001 else f'= {p:.{digits}g}'


def format_value(row: Row) -> str:
    """The value, of a claim with its sign; if infinite, the note on the seeds that never reached the target."""
    if row.value is not None and math.isinf(row.value) and row.note:
        return row.note
    digits = None  # a whole rank has none after the point
    if row.is_claim and row.value and row.value % 1 and (row.low or 0.0) * (row.high or 0.0) > 0:
        digits = _count_digits(row, row.value)  # a difference whose interval excludes zero does not look like zero
    return format_number(row.value, row.unit, row.is_claim, digits)


def format_number(value: float | None, unit: str, is_signed: bool = False, digits: int | None = None) -> str:
    """``value`` with the digits that suit ``unit``, thousands separators and a typographic minus sign."""
    if value is None:
        return ''
    if unit == 'tokens' and value >= 1e6:
        return f'{value / 1e6:,.2f} million'
    sign = '+' if is_signed else ''
    if digits is None:
        digits = 0 if unit == 'rank' and value == int(value) else DIGITS.get(unit.removesuffix(' a decade'))
    text = f'{value:{sign},.4g}' if digits is None else f'{value:{sign},.{digits}f}'
    return (text if text.strip('+-0.') else text.lstrip('+-')).replace('-', '−').replace('e+', 'e')
