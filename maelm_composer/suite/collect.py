"""Records from where the work is done to results/<scale>/records, which holds those of one experiment and no others."""

import csv
import io
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from maelm_composer.records import write_json, write_text

Record = dict[str, Any]
CURVE_ROWS = 2000  # of a metrics.csv, beside those with a validation loss: figures draw 120


def collect_run(folder: Path, records: Path, facts: Record) -> None:
    """Copy the record and the log of the finished run in ``folder``.

    Fine-tuning and rank records of another run of that name, which are about other weights, are removed.

    Args:
        facts: what the record does not say itself.
    """
    record = facts | json.loads((folder / 'record.json').read_text(encoding='utf-8'))
    name = record['run_name']
    path = records / 'pretraining' / f'{name}.json'
    if path.exists() and json.loads(path.read_text(encoding='utf-8'))['identity'] != record['identity']:
        for kind in ('finetuning', 'rank'):
            _remove(records / kind, lambda other: other['checkpoint']['run_name'] == name)
    curve = (folder / 'metrics.csv').read_text(encoding='utf-8')
    write_text(records / 'pretraining' / f'{name}.csv', thin_curve(curve))
    write_json(path, record)


def collect_finetunings(
    folder: Path, keys: Iterable[str], records: Path, run_name: str, samples: int, task: str
) -> None:
    """Copy the records ``keys`` of a search; others of the same checkpoint and task go: another protocol made them."""
    wanted = set(keys)
    for key in sorted(wanted):
        source = folder / f'{key}.json'
        if source.exists():  # a repeat of a grid that failed is planned and never made
            write_json(
                records / 'finetuning' / f'{key}.json', drop_places(json.loads(source.read_text(encoding='utf-8')))
            )
    place = run_name, samples

    def is_stale(record: Record) -> bool:
        checkpoint = record['checkpoint']
        is_here = record['task'] == task and (checkpoint['run_name'], checkpoint['samples']) == place
        return is_here and record['key'] not in wanted

    _remove(records / 'finetuning', is_stale)


def collect_rank(record: Record, records: Path) -> None:
    """Write ``record``; another of the same run goes."""
    checkpoint = record['checkpoint']
    _remove(
        records / 'rank',
        lambda other: other['checkpoint']['run_name'] == checkpoint['run_name'] and other['key'] != record['key'],
    )
    write_json(records / 'rank' / f'{record["key"]}.json', drop_places(record))


def drop_places(record: Record) -> Record:
    """Names instead of paths: results are published, and hashes say what lay there."""
    named = {'checkpoint': record['checkpoint'] | {'uri': Path(record['checkpoint']['uri']).name}}
    if 'remote' in record.get('data', {}):
        named['data'] = record['data'] | {'remote': Path(record['data']['remote']).name}
    return record | named


def thin_curve(text: str) -> str:
    """A metrics.csv with every validation and at most ``CURVE_ROWS`` evenly spaced other rows."""
    head, *rows = text.splitlines()
    stride = -(-len(rows) // CURVE_ROWS)
    if stride <= 1:
        return text
    column = next(csv.reader([head])).index('eval_loss')
    kept = [row for i, row in enumerate(rows) if i % stride == 0 or next(csv.reader(io.StringIO(row)))[column]]
    return '\n'.join([head, *kept]) + '\n'


def _remove(folder: Path, is_stale: Callable[[Record], bool]) -> None:
    for path in sorted(folder.glob('*.json')):
        if is_stale(json.loads(path.read_text(encoding='utf-8'))):
            path.unlink()
