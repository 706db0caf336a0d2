"""The findings of a scale in sentences, the cost of its records, and how numbers are printed."""

import math
from collections.abc import Mapping, Sequence

from maelm_composer.records import FinetuningRecord, PretrainingRecord
from maelm_composer.reporting.artefacts import find_artefact, label_of
from maelm_composer.reporting.evidence import Evidence
from maelm_composer.reporting.row_builder import GAP
from maelm_composer.reporting.rows import Row
from maelm_composer.reporting.verdicts import FAILS, HOLDS, NO_DIFFERENCE, UNDECIDED, is_claim

NAMED = 4  # up to so many claims of one verdict are named, more are counted
DIGITS = {'percent': 1, 'points': 1, 'rank': 1, 'degrees': 1, 'tokens': 0, 'samples': 0}
DIGITS |= {'share': 3, 'hours': 3, 'nats': 3}
CORE_WATTS, GPU_WATTS = 10.0, 700.0  # assumed, of a busy CPU core with its share of the machine, and of an H100 or H200


def describe_findings(tables: Mapping[str, Sequence[Row]]) -> list[tuple[str, str]]:
    """(label, sentence) for every artefact with a judged claim: the paper's claim, and the verdicts by kind."""
    found = []
    for name, rows in tables.items():
        if claims := [row for row in rows if is_claim(row)]:
            artefact = find_artefact(name)
            parts = [
                _describe_verdict(word, [row for row in claims if row.verdict.startswith(word)], len(claims))
                for word in (HOLDS, FAILS, NO_DIFFERENCE, UNDECIDED)
            ]
            found.append((artefact.label, f'{artefact.claim}: {"; ".join(filter(None, parts))}.'))
    return found


def _describe_verdict(word: str, claims: Sequence[Row], total: int) -> str:
    if not claims:
        return ''
    count = f'{word} ({len(claims)} of {total})'
    if len(claims) > NAMED or (word == UNDECIDED and len(claims) == total):
        return count
    return f'{count} in ' + ', '.join(_name(row) for row in claims)


def _name(row: Row) -> str:
    return f'{name_claim(row, " at ")} ({format_number(row.value, row.unit, is_signed=row.unit != "share")})'


def name_claim(row: Row, before_x: str) -> str:
    """The claim without its artefact; MAE-LM − RoBERTa is left out."""
    comparison = '' if row.row == GAP else row.row.removeprefix(f'{GAP}, ') + ', '
    name = comparison + label_of(row.column)
    return name + ('' if row.x is None else f'{before_x}{row.x:g} {row.x_unit}')


def format_interval(row: Row) -> str:
    return '' if row.low is None else f'{format_number(row.low, row.unit)} to {format_number(row.high, row.unit)}'


def format_number(value: float | None, unit: str, is_signed: bool = False) -> str:
    """``value`` with the digits that suit ``unit``, thousands separators and a typographic minus sign."""
    if value is None:
        return ''
    if math.isinf(value):
        return 'never' if value > 0 else '−∞'
    sign = '+' if is_signed else ''
    digits = 0 if unit == 'rank' and value == int(value) else DIGITS.get(unit.removesuffix(' a decade'))
    text = f'{value:{sign},.4g}' if digits is None else f'{value:{sign},.{digits}f}'
    return text.replace('-', '−')


def describe_cost(evidence: Evidence) -> str:
    """Core-hours and GPU-hours of all recorded pretraining and fine-tuning runs, with an estimate of their energy."""
    cores = gpus = 0.0
    records: list[PretrainingRecord | FinetuningRecord] = [*evidence.runs.values(), *evidence.finetunings]
    for record in records:
        if record.device.startswith('CPU'):
            cores += record.device_hours * int(record.device.split()[1])
        else:
            gpus += record.device_hours
    watts = (cores, 'hours of a CPU core', CORE_WATTS), (gpus, 'GPU-hours', GPU_WATTS)
    parts = [f'{hours:,.1f} {name}' for hours, name, _ in watts if hours]
    energy = sum(hours * power for hours, _, power in watts) / 1000
    return (
        f'The recorded pretraining and fine-tuning runs took {" and ".join(parts) or "no recorded time"}: about '
        f'{energy:,.2g} kWh at an assumed {CORE_WATTS:g} W a core and {GPU_WATTS:g} W a GPU. Runs that were not kept, '
        'and effective ranks, are not in it.'
    )
