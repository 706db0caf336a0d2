"""The schema of every CSV file in results/<scale>/. results/README.md explains the columns."""

import csv
import io
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from maelm_composer.errors import InputError
from maelm_composer.files import write_text
from maelm_composer.records import FinetuningRecord, PretrainingRecord, RankRecord, Record
from maelm_composer.reporting.evidence import read_csv


@dataclass(frozen=True)
class Row:
    """One number, or a missing one: ``value`` is None and ``note`` gives the reason."""

    scale: str
    artefact: str
    row: str
    column: str
    unit: str
    x: float | None = None  # position of the point on a figure's x axis, in x_unit
    x_unit: str = ''
    value: float | None = None
    low: float | None = None
    high: float | None = None
    count: int = 0
    pretraining_seeds: int = 0
    examples: int = 0
    p: float | None = None
    detectable: float | None = None
    margin: float | None = None  # of a claim: a smaller difference counts as none
    paper: float | None = None
    difference: float | None = None
    verdict: str = ''
    note: str = ''
    source: str = ''
    # The provenance of the number; several values are joined by ';'.
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

    def at(self, x: float, x_unit: str) -> 'Row':
        """This row as a point of a figure."""
        return replace(self, x=x, x_unit=x_unit)


HEADER = [field.name for field in fields(Row)]


def trace_records(runs: Iterable[PretrainingRecord], others: Iterable[FinetuningRecord | RankRecord]) -> dict[str, Any]:
    """The provenance of a number computed from pretraining ``runs`` and ``others``, as fields of its row."""
    trained = [run for _, run in sorted({run.run_name: run for run in runs}.items())]
    found = [record for _, record in sorted({record.key: record for record in others}.items())]
    both: list[PretrainingRecord | FinetuningRecord | RankRecord] = [*trained, *found]
    timed = [record for record in both if not isinstance(record, RankRecord)]
    return {
        'run_keys': _join([*(run.run_name for run in trained), *(record.key for record in found)]),
        'recipe_hash': _join(run.provenance.recipe_hash for run in trained),
        'git_revision': _join(record.provenance.git_revision for record in both),
        'data_hash': _join(record.data_hash for record in both),
        'tokenizer_hash': _join(run.tokenizer_hash for run in trained),
        'seeds': _join([*(f'pretraining {run.seed}' for run in trained), *(record.seed for record in found)]),
        'versions': _join(map(_versions, both)),
        'hardware': _join(f'{r.device}, {r.provenance.cpu} × {r.provenance.cpu_count} cores' for r in both),
        'training_seconds': sum(record.training_seconds for record in timed),
        'device_hours': sum(record.device_hours for record in timed),
    }


def write_rows(path: Path, rows: list[Row]) -> None:
    """Write ``rows`` as CSV, atomically."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator='\n')
    writer.writerow(HEADER)
    for row in rows:
        writer.writerow(map(format_cell, vars(row).values()))
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
        raise InputError(f'no published numbers in {folder}: without that folder, those of the package are used')
    published: dict[tuple[str, str, str], float] = {}
    for path in paths:
        for line in read_csv(path):  # Tables 1 and 2 print the same GLUE averages
            published.setdefault((line['setting'], line['row'], line['column']), float(line['value']))
    return published


def _join(values: Iterable[str | int | None]) -> str:
    return ';'.join(dict.fromkeys(str(value) for value in values if value is not None))


def _versions(record: Record) -> str:
    provenance = record.provenance
    packages = {'maelm-composer': provenance.maelm_composer, 'python': provenance.python, **provenance.packages}
    return ', '.join(f'{name} {version}' for name, version in packages.items())
