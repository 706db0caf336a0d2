"""What the verdicts of a scale say, artefact by artefact in a sentence, and what the records cost."""

from collections.abc import Mapping, Sequence

from maelm_composer.records import FinetuningRecord, PretrainingRecord
from maelm_composer.reporting.artefacts import find_artefact, label_of
from maelm_composer.reporting.evidence import Evidence
from maelm_composer.reporting.grid import format_number
from maelm_composer.reporting.rows import Row
from maelm_composer.reporting.tables import GAP
from maelm_composer.reporting.verdicts import FAILS, HOLDS, NO_DIFFERENCE, UNDECIDED, is_claim

NAMED = 4  # claims of one verdict; more are counted
CORE_WATTS, GPU_WATTS = 10.0, 700.0  # assumed, of a busy CPU core with its share of the machine, and of an H100 or H200


def describe_findings(tables: Mapping[str, Sequence[Row]]) -> list[tuple[str, str]]:
    """(title, sentence) for every artefact that has a claim with a value: what was claimed, and what holds of it."""
    found = []
    for name, rows in tables.items():
        if claims := [row for row in rows if is_claim(row)]:
            artefact = find_artefact(name)
            parts = [
                _describe_verdict(word, [row for row in claims if row.verdict.startswith(word)], len(claims))
                for word in (HOLDS, FAILS, NO_DIFFERENCE, UNDECIDED)
            ]
            found.append((artefact.title.split(':')[0], f'{artefact.claim}: {"; ".join(filter(None, parts))}.'))
    return found


def _describe_verdict(word: str, claims: Sequence[Row], total: int) -> str:
    if not claims:
        return ''
    count = f'{word} ({len(claims)} of {total})'
    if len(claims) > NAMED or (word == UNDECIDED and len(claims) == total):
        return count
    return f'{count} in ' + ', '.join(_name(row) for row in claims)


def _name(row: Row) -> str:
    name = label_of(row.column) if row.row == GAP else f'{row.row}, {label_of(row.column)}'
    where = f' at {row.x:g} {row.x_unit}' if row.x is not None else ''
    return f'{name}{where} ({format_number(row.value, row.unit, is_signed=row.unit != "share")})'


def describe_cost(evidence: Evidence) -> str:
    """Hours of cores and GPUs of all recorded runs, and an estimate of their energy."""
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
