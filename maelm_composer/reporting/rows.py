"""The schema of every CSV file in results/<scale>/. results/README.md explains the columns."""

import csv
import io
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path

from maelm_composer.errors import InputError
from maelm_composer.records import write_text
from maelm_composer.reporting.evidence import Record, read_csv


@dataclass(frozen=True)
class Trace:
    """The provenance of a number. Several values are joined by ';'."""

    run_keys: str = ''
    recipe_hash: str = ''
    git_revision: str = ''
    data_hash: str = ''
    tokenizer_hash: str = ''
    seeds: str = ''
    versions: str = ''
    hardware: str = ''
    training_seconds: float | None = None
    device_hours: float | None = None


@dataclass(frozen=True)
class Row:
    """One number, or a missing one: ``value`` is None and ``note`` gives the reason."""

    scale: str
    artefact: str
    row: str
    column: str
    unit: str
    x: float | None = None  # where the point lies in a figure; x_unit says of what
    x_unit: str = ''
    value: float | None = None
    low: float | None = None
    high: float | None = None
    count: int = 0
    pretraining_seeds: int = 0
    examples: int = 0
    p: float | None = None
    detectable: float | None = None
    margin: float | None = None  # of a claim: a smaller difference is none
    paper: float | None = None
    difference: float | None = None
    verdict: str = ''
    note: str = ''
    source: str = ''
    trace: Trace = Trace()

    def at(self, x: float, x_unit: str) -> 'Row':
        """This row as a point of a figure."""
        return replace(self, x=x, x_unit=x_unit)


HEADER = [f.name for f in fields(Row) if f.name != 'trace'] + [f.name for f in fields(Trace)]


def trace_records(runs: Iterable[Record], others: Iterable[Record] = ()) -> Trace:
    """Provenance of a number computed from pretraining records ``runs`` and fine-tuning or rank records ``others``."""
    runs, others = _once(runs, 'run_name'), _once(others, 'key')
    provenances = [r['provenance'] for r in [*runs, *others]]
    return Trace(
        run_keys=_join([*(r['run_name'] for r in runs), *(r['key'] for r in others)]),
        recipe_hash=_join(r['provenance']['recipe_hash'] for r in runs),
        git_revision=_join(p['git_revision'] for p in provenances),
        data_hash=_join([*(r['identity']['content hash of data.remote'] for r in runs), *map(_data_hash, others)]),
        tokenizer_hash=_join(r.get('tokenizer_hash') for r in runs),
        seeds=_join([*(f'pretraining {r["identity"]["seed"]}' for r in runs), *(r.get('seed') for r in others)]),
        versions=_join(map(_versions, provenances)),
        hardware=_join(map(_hardware, [*runs, *others])),
        training_seconds=sum(r.get('training_seconds') or 0.0 for r in [*runs, *others]),
        device_hours=sum(r.get('device_hours') or 0.0 for r in [*runs, *others]),
    )


def write_rows(path: Path, rows: list[Row]) -> None:
    """Write ``rows`` as CSV, atomically."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator='\n')
    writer.writerow(HEADER)
    for row in rows:
        cells = {**vars(row), **vars(row.trace)}
        writer.writerow([format_cell(cells[name]) for name in HEADER])
    write_text(path, buffer.getvalue())


def format_cell(value: float | str | None) -> str:
    """Six significant digits; integers without a point; None is empty; infinity, a target never reached, is inf."""
    if value is None or isinstance(value, str):
        return value or ''
    if isinstance(value, int) or (math.isfinite(value) and value == int(value) and abs(value) < 1e15):
        return str(int(value))
    return f'{value:.6g}'


def load_published(folder: Path) -> dict[tuple[str, str, str], float]:
    """The paper's numbers from every CSV file in ``folder``: (setting, row, column) -> value.

    Raises:
        InputError: no such file.
    """
    paths = sorted(folder.glob('*.csv'))
    if not paths:
        raise InputError(f'no published numbers in {folder}: start in the checkout of the source')
    published: dict[tuple[str, str, str], float] = {}
    for path in paths:
        for line in read_csv(path):  # the GLUE averages that Tables 1 and 2 share agree
            published.setdefault((line['setting'], line['row'], line['column']), float(line['value']))
    return published


def _once(records: Iterable[Record], key: str) -> list[Record]:
    found = {record[key]: record for record in records}
    return [found[name] for name in sorted(found)]


def _join(values: Iterable[str | int | None]) -> str:
    return ';'.join(dict.fromkeys(str(value) for value in values if value is not None))


def _data_hash(record: Record) -> str | None:
    found = record.get('data_hash') or record.get('data', {}).get('hash')
    return None if found is None else str(found)


def _versions(provenance: Record) -> str:
    packages = {
        'maelm-composer': provenance['maelm_composer'],
        'python': provenance['python'],
        **provenance['packages'],
    }
    return ', '.join(f'{name} {version}' for name, version in packages.items())


def _hardware(record: Record) -> str:
    provenance = record['provenance']
    cpu = f'{provenance["cpu"]} × {provenance["cpu_count"]} cores'
    return f'{record["device"]}, {cpu}' if record.get('device') else cpu
