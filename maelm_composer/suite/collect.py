"""Copies records from the folder of work to results/<scale>/records, which holds the records of one experiment."""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from maelm_composer.checkpoints.names import METRICS, RECORD
from maelm_composer.files import write_text
from maelm_composer.records import (
    Finetuning,
    RankRecord,
    load_record,
    parse_finetuning,
    parse_pretraining,
    parse_rank,
    write_record,
)

CURVE_ROWS = 2000  # rows without a validation loss that are kept of a metrics.csv; figures draw 120


def collect_run(folder: Path, records: Path) -> None:
    """Copy the record and the log of the finished run in ``folder``.

    Fine-tuning and rank records of an earlier run of that name are removed, even if the recipe is the same.
    """
    record = load_record(folder / RECORD, parse_pretraining)
    path = records / 'pretraining' / f'{record.run_name}.json'
    if path.exists() and load_record(path, parse_pretraining) != record:
        _remove(records, lambda other: other.checkpoint.run_name == record.run_name)
    curve = (folder / METRICS).read_text(encoding='utf-8')
    write_text(path.with_suffix('.csv'), thin_curve(curve))
    write_record(path, record)


def collect_finetunings(found: Iterable[Finetuning], records: Path, run_name: str, samples: int, task: str) -> None:
    """Write the records of a search. Other records of this checkpoint and task, of another protocol, are removed."""
    keys = set()
    for record in found:
        keys.add(record.key)
        named = replace(record, checkpoint=replace(record.checkpoint, uri=Path(record.checkpoint.uri).name))
        write_record(records / 'finetuning' / f'{record.key}.json', named)

    def is_stale(record: Finetuning | RankRecord) -> bool:
        if isinstance(record, RankRecord) or record.key in keys:
            return False
        return (record.task, record.checkpoint.run_name, record.checkpoint.samples) == (task, run_name, samples)

    _remove(records, is_stale)


def collect_rank(record: RankRecord, records: Path) -> None:
    """Write ``record``; other rank records of the same run are removed.

    Results are published, so paths are reduced to file names; hashes identify the files.
    """
    checkpoint = replace(record.checkpoint, uri=Path(record.checkpoint.uri).name)
    data = {name: Path(value).name if name == 'remote' else value for name, value in record.data.items()}

    def is_stale(other: Finetuning | RankRecord) -> bool:
        is_same_run = other.checkpoint.run_name == checkpoint.run_name
        return isinstance(other, RankRecord) and is_same_run and other.key != record.key

    _remove(records, is_stale)
    write_record(records / 'rank' / f'{record.key}.json', replace(record, checkpoint=checkpoint, data=data))


def thin_curve(text: str) -> str:
    """A metrics.csv, thinned to every row with a validation loss and about ``CURVE_ROWS`` evenly spaced other rows."""
    head, *rows = text.splitlines()
    stride = math.ceil(len(rows) / CURVE_ROWS)
    if stride <= 1:
        return text
    column = head.split(',').index('eval_loss')
    kept = [row for i, row in enumerate(rows) if i % stride == 0 or row.split(',')[column]]
    return '\n'.join([head, *kept]) + '\n'


def _remove(records: Path, is_stale: Callable[[Finetuning | RankRecord], bool]) -> None:
    found: dict[Path, Finetuning | RankRecord] = {}
    found |= {path: load_record(path, parse_finetuning) for path in (records / 'finetuning').glob('*.json')}
    found |= {path: load_record(path, parse_rank) for path in (records / 'rank').glob('*.json')}
    for path, record in found.items():
        if is_stale(record):
            path.unlink()
