"""What the verdicts of a scale say, in sentences, and what its records lack. Computes no number."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from maelm_composer.reporting.artefacts import JUDGES, OWN, ROBERTA, average_of, find_artefact, label_of
from maelm_composer.reporting.cells import ENOUGH_SEEDS
from maelm_composer.reporting.formatting import (
    format_interval,
    format_number,
    format_value,
    format_x,
    name_claim,
    name_unit,
)
from maelm_composer.reporting.ladder import TREND
from maelm_composer.reporting.rows import GAP, MINUS, SLOPE, UNDECIDED, WORDS, Row

NAMED = 4  # up to so many claims of one verdict are named, more are counted
# (artefact, column) of claims about ranks and energy that the ladder judges, too, in one family with its other rungs.
OF_LADDER = {
    ('table3', 'pretrained'),
    ('figure1', 'rank with − without [MASK], last layer'),
    ('figure4', 'rank_real'),
    ('subspace', 'mask_outside_excess, last layer'),
}


def describe_findings(tables: Mapping[str, Sequence[Row]]) -> list[tuple[str, str, dict[str, Any]]]:
    """(label, sentences, table) for every artefact with a judged claim.

    The sentences are the claim, one about its main number, and the verdicts on the others by kind. Where claims have an
    x, a table has all verdicts, the paper's comparisons alone are counted, and the main number is the first trend.
    """
    found = []
    for name, rows in tables.items():
        if claims := [row for row in rows if row.is_claim]:
            artefact, table = find_artefact(name), _lay_out_verdicts(claims)
            main = _find_main(claims, bool(table))
            sentences = [f'Claim: {artefact.claim}', *([_describe_main(main)] if main else [])]
            papers = [row for row in claims if row.row in (GAP, ROBERTA.label)] if table else []
            if others := papers or [row for row in claims if row is not main]:
                sentences.append(_count(others, is_rest=main is not None and not table) + ' (table)' * bool(table))
            found.append((artefact.label, '. '.join(sentences) + '.', table))
    return found


def describe_lacks(tables: Mapping[str, Sequence[Row]]) -> str:
    """The lines and the columns without any number, by table or figure; '' if there are none, and for a ladder."""
    parts = []
    for name, rows in tables.items():
        values = [row for row in rows if is_wanted(row) and row.x_unit != 'FLOPs']
        lines = _list_empty(values, 'row')
        columns = _list_empty([row for row in values if row.row not in lines], 'column')
        if len(lines) > NAMED:
            lines = [f'{len(lines)} lines']
        if named := [*lines, *map(label_of, columns)]:
            parts.append(f'{find_artefact(name).label}: {"; ".join(named)}')
    return '. '.join(parts)


def is_wanted(row: Row) -> bool:
    """Whether a table or figure has a place for ``row``: for a number, and for none where the paper has one.

    Comparisons have a list of their own. In a figure a point without a number has a place, too.
    """
    if row.is_claim or row.value is not None:
        return not row.is_claim
    return MINUS not in row.row and row.row != SLOPE and (row.paper is not None or not is_table(row.artefact))


def is_table(artefact: str) -> bool:
    """Whether the artefact of that name is one of scores by models, and no figure."""
    return artefact.startswith(('table', OWN.name))


def _list_empty(rows: Sequence[Row], group: str) -> list[str]:
    """The values of the field ``group`` whose rows have no number."""
    known = {getattr(row, group) for row in rows if row.value is not None}
    return [name for name in dict.fromkeys(getattr(row, group) for row in rows) if name not in known]


def _find_main(claims: Sequence[Row], has_table: bool) -> Row | None:
    """The claim about the mean of the tasks, or the first, of those from enough pretraining seeds for a verdict."""
    judged = [row for row in claims if row.drawn_interval and has_table == row.row.endswith(TREND)]
    means = [row for row in judged if row.column == average_of(row.scale).name]
    return next(iter(means or judged), None)


def _describe_main(row: Row) -> str:
    """``row`` with its interval, where the paper's difference lies, and which difference would have been seen."""
    extent = f'{format_interval(row)}; {row.pretraining_seeds} pretraining seeds'
    parts = [f'Here, {_name(row)} ({extent}): {_judge(row)}']
    if row.paper is not None and row.difference is not None and row.drawn_interval:
        low, high = (round(bound, 1) for bound in row.drawn_interval)  # as the paper's number is rounded
        where = 'in' if low <= row.paper <= high else 'outside'
        parts.append(f'the paper’s {format_number(row.paper, row.unit, is_signed=True)} lies {where} the interval')
    reason = row.verdict.partition(': ')[2].split('; ')[0]
    if row.word == UNDECIDED and not reason.startswith(f'{row.pretraining_seeds} pretraining seeds'):
        parts.append(reason)
    elif row.word == UNDECIDED and row.detectable is not None:
        size = f'{format_number(row.detectable, row.unit)} {name_unit(row)}'
        before = ' (before Holm’s correction)' * ('by Holm' in reason)
        parts.append(f'a true difference of {size} would be found in four of five such experiments{before}')
    return '; '.join(parts)


def _judge(row: Row) -> str:
    return row.word + ' by itself, but the ladder’s verdict counts' * _is_of_ladder(row)


def _is_of_ladder(row: Row) -> bool:
    return row.scale in JUDGES and (row.artefact, row.column) in OF_LADDER and row.row != SLOPE


def _count(claims: Sequence[Row], is_rest: bool) -> str:
    """The verdicts by kind; claims that decide something are named, unless these are many."""
    few = [row for row in claims if row.pretraining_seeds < ENOUGH_SEEDS]
    if len(claims) == 1:
        reason = ' for want of pretraining seeds' * len(few)
        return f'{"The other" if is_rest else "Here"}, {_name(claims[0])}: {_judge(claims[0])}{reason}'
    parts = []
    for word in WORDS:
        if of_word := [row for row in claims if row.word == word and row not in few]:
            names = _group(of_word) if word != UNDECIDED else []
            parts.append(f'{word} for {len(of_word)}' + f' ({"; ".join(names)})' * (0 < len(names) <= NAMED))
    parts += [f'undecided for {len(few)} for want of pretraining seeds'] * bool(few)
    return f'Of {"the " * is_rest}{len(claims)} {"others" if is_rest else "comparisons"}: {", ".join(parts)}'


def _group(claims: Sequence[Row]) -> list[str]:
    """The names of ``claims`` with their values; those that differ in x alone have one name, without values."""
    groups = defaultdict[tuple[str, str], list[Row]](list)
    for row in claims:
        groups[row.row, row.column].append(row)
    return [
        _name(rows[0]) + ' by itself' * _is_of_ladder(rows[0])
        if len(rows) == 1
        else f'{name_claim(replace(rows[0], x=None), "")} at {_list_places(rows)}'
        for rows in groups.values()
    ]


def _list_places(rows: Sequence[Row]) -> str:
    return f'{", ".join(format_x(row.x or 0.0) for row in rows)} {rows[0].x_unit}'


def _name(row: Row) -> str:
    unit = '' if math.isinf(row.value or 0.0) else f' {name_unit(row)}'
    return f'{name_claim(row, " at ")} {format_value(row)}{unit}'


def _lay_out_verdicts(claims: Sequence[Row]) -> dict[str, Any]:
    """A line for each score of a comparison, a column for each x and one for the trends; empty if no claim has an x."""
    if all(row.x is None for row in claims):
        return {}
    trend = f', {TREND}'
    lines: dict[tuple[str, str, str], dict[float, Row]] = defaultdict(dict)
    places: dict[float, str] = {}  # x -> title; the trend is last
    for row in claims:
        x = math.inf if row.row.endswith(trend) else row.x or 0.0
        places[x] = TREND if math.isinf(x) else f'{format_x(x)} {row.x_unit}'
        lines[row.row.removesuffix(trend), label_of(row.column), name_unit(row)][x] = row
    return {
        'titles': [places[x] for x in sorted(places)],
        'lines': [(*key, [found.get(x) for x in sorted(places)]) for key, found in lines.items()],
    }
