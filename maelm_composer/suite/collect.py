"""Copies records from the folder of work to results/<scale>/records, which holds the records of one experiment."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from maelm_composer.checkpoints.names import METRICS, RECORD
from maelm_composer.files import write_text
from maelm_composer.records import (
    AnyRecord,
    EncoderIdentity,
    Finetuning,
    Parser,
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
        _remove(records / 'finetuning', parse_finetuning, lambda old: old.checkpoint.run_name == record.run_name)
        _remove(records / 'rank', parse_rank, lambda old: old.checkpoint.run_name == record.run_name)
    write_text(path.with_suffix('.csv'), thin_curve((folder / METRICS).read_text(encoding='utf-8')))
    _publish(path, record, parse_pretraining)


def collect_finetunings(found: Sequence[Finetuning], records: Path, run_name: str, samples: int, task: str) -> None:
    """Write the records of a search. Other records of this checkpoint and task, of another protocol, are removed."""
    for record in found:
        named = record.model_copy(update={'checkpoint': _hide_path(record.checkpoint)})
        _publish(records / 'finetuning' / f'{record.key}.json', named, parse_finetuning)
    keys = {record.key for record in found}

    def is_stale(old: Finetuning) -> bool:
        where = old.task, old.checkpoint.run_name, old.checkpoint.samples
        return old.key not in keys and where == (task, run_name, samples)

    _remove(records / 'finetuning', parse_finetuning, is_stale)


def collect_rank(record: RankRecord, records: Path) -> None:
    """Write ``record``; other rank records of the same run are removed."""
    run_name = record.checkpoint.run_name
    _remove(records / 'rank', parse_rank, lambda old: old.checkpoint.run_name == run_name and old.key != record.key)
    data = {name: Path(value).name if name == 'remote' else value for name, value in record.data.items()}
    named = record.model_copy(update={'checkpoint': _hide_path(record.checkpoint), 'data': data})
    _publish(records / 'rank' / f'{record.key}.json', named, parse_rank)


def thin_curve(text: str) -> str:
    """A metrics.csv, thinned to every row with a validation loss and about ``CURVE_ROWS`` evenly spaced other rows."""
    head, *rows = text.splitlines()
    stride = math.ceil(len(rows) / CURVE_ROWS)
    if stride <= 1:
        return text
    column = head.split(',').index('eval_loss')
    kept = [row for i, row in enumerate(rows) if i % stride == 0 or row.split(',')[column]]
    return '\n'.join([head, *kept]) + '\n'


def _publish(path: Path, record: AnyRecord, parse: Parser[AnyRecord]) -> None:
    """Write ``record``; a file that holds the same values, perhaps in another order, is left as it is."""
    if not path.exists() or load_record(path, parse) != record:
        write_record(path, record)


def _hide_path(checkpoint: EncoderIdentity) -> EncoderIdentity:
    """Reduce the path to a file name, since results are published; the hash identifies the file."""
    return replace(checkpoint, uri=Path(checkpoint.uri).name)


def _remove(folder: Path, parse: Parser[AnyRecord], is_stale: Callable[[AnyRecord], bool]) -> None:
    stale = [path for path in folder.glob('*.json') if is_stale(load_record(path, parse))]
    for path in stale:  # after all files have been read, as one that is no record raises
        path.unlink()
