"""Copies records from the folder of work to results/<scale>/records, which holds the records of one experiment."""

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from maelm_composer.records import write_json, write_text

Record = dict[str, Any]
CURVE_ROWS = 2000  # rows without a validation loss that are kept of a metrics.csv; figures draw 120


def collect_run(folder: Path, records: Path) -> None:
    """Copy the record and the log of the finished run in ``folder``.

    Fine-tuning and rank records of an earlier run of that name are removed, even if the recipe is the same.
    """
    record = read_json(folder / 'record.json')
    name = record['run_name']
    path = records / 'pretraining' / f'{name}.json'
    if path.exists() and read_json(path) != record:
        for kind in ('finetuning', 'rank'):
            _remove(records / kind, lambda other: other['checkpoint']['run_name'] == name)
    curve = (folder / 'metrics.csv').read_text(encoding='utf-8')
    write_text(path.with_suffix('.csv'), thin_curve(curve))
    write_json(path, record)


def collect_finetunings(found: Iterable[Record], records: Path, run_name: str, samples: int, task: str) -> None:
    """Write the records of a search. Other records of this checkpoint and task, of another protocol, are removed."""
    keys = set()
    for record in found:
        keys.add(record['key'])
        write_json(records / 'finetuning' / f'{record["key"]}.json', drop_places(record))

    def is_stale(record: Record) -> bool:
        checkpoint = record['checkpoint']
        is_here = (record['task'], checkpoint['run_name'], checkpoint['samples']) == (task, run_name, samples)
        return is_here and record['key'] not in keys

    _remove(records / 'finetuning', is_stale)


def collect_rank(record: Record, records: Path) -> None:
    """Write ``record``; other rank records of the same run are removed."""
    name, key = record['checkpoint']['run_name'], record['key']
    _remove(records / 'rank', lambda other: other['checkpoint']['run_name'] == name and other['key'] != key)
    write_json(records / 'rank' / f'{key}.json', drop_places(record))


def drop_places(record: Record) -> Record:
    """``record`` with file names in place of paths. Results are published, and hashes identify the files."""
    named = {'checkpoint': record['checkpoint'] | {'uri': Path(record['checkpoint']['uri']).name}}
    if 'remote' in record.get('data', {}):
        named['data'] = record['data'] | {'remote': Path(record['data']['remote']).name}
    return record | named


def thin_curve(text: str) -> str:
    """A metrics.csv, thinned to every row with a validation loss and about ``CURVE_ROWS`` evenly spaced other rows."""
    head, *rows = text.splitlines()
    stride = math.ceil(len(rows) / CURVE_ROWS)
    if stride <= 1:
        return text
    column = head.split(',').index('eval_loss')
    kept = [row for i, row in enumerate(rows) if i % stride == 0 or row.split(',')[column]]
    return '\n'.join([head, *kept]) + '\n'


def read_json(path: Path) -> Record:
    record: Record = json.loads(path.read_text(encoding='utf-8'))
    return record


def _remove(folder: Path, is_stale: Callable[[Record], bool]) -> None:
    for path in sorted(folder.glob('*.json')):
        if is_stale(read_json(path)):
            path.unlink()
