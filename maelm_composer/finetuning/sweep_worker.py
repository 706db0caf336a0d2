"""What a worker of a sweep does: read a task's facts, or make one run and record how it ended."""

import os
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maelm_composer.config import FinetuningConfig
from maelm_composer.errors import InputError
from maelm_composer.finetuning.claims import claim
from maelm_composer.finetuning.search import Record
from maelm_composer.finetuning.sources import TextExample
from maelm_composer.finetuning.tasks import Task
from maelm_composer.records import collect_provenance, write_json


@dataclass(frozen=True)
class Facts:
    """What the planning needs to know of a task and cannot know without reading checkpoint and data."""

    identity: dict[str, Any]
    data_hash: str
    training_size: int  # characters
    evaluation_size: int


def inspect_task(config: FinetuningConfig, task: Task, folder: str) -> Facts:
    _enter(config, folder)
    from maelm_composer.finetuning.pretrained import load_pretrained
    from maelm_composer.finetuning.sources import load_task_data

    pretrained = load_pretrained(config.checkpoint, config.implementation, config.dropout)
    data = load_task_data(task, config.data)
    evaluation = [row for rows in data.evaluation.values() for row in rows]
    return Facts(pretrained.identity, data.hash, _count_characters(data.train), _count_characters(evaluation))


def make_run(config: FinetuningConfig, key: str, facts: Facts, folder: str) -> Record | None:
    """One run in a worker: its record, of a failure too; None where another sweep is at it."""
    _enter(config, folder)
    from maelm_composer.finetuning.run import finetune

    records = Path(config.save_folder)
    with claim(locate_claim(records, key)) as is_mine:
        if not is_mine:
            return None
        try:
            record = finetune(config)
            if record['key'] != key:
                raise InputError('the checkpoint or the data changed while the sweep ran: start it again')
        except Exception as error:
            is_clear = isinstance(error, InputError)
            reason = str(error) if is_clear else f'{type(error).__name__}: {first_line(error)}'
            record = describe_failure(config, key, facts, reason)
            if not is_clear:
                record['traceback'] = traceback.format_exc()
            write_json(records / f'{key}.json', record)
        return record


def locate_claim(folder: Path, key: str) -> Path:
    return folder / f'.{key}.claim'


def describe_failure(config: FinetuningConfig, key: str, facts: Facts, reason: str) -> Record:
    from maelm_composer.finetuning.run import describe_point, describe_protocol

    return {
        'kind': 'finetuning',
        'key': key,
        'status': 'failed',
        'error': ' '.join(reason.split()),
        'task': config.task,
        'seed': config.seed,
        'point': describe_point(config),
        'protocol': describe_protocol(config),
        'checkpoint': facts.identity,
        'data_hash': facts.data_hash,
        'provenance': collect_provenance(config),
    }


def _enter(config: FinetuningConfig, folder: str) -> None:
    """Make a worker's process ready: where relative paths start, and no more threads than it was given."""
    try:
        os.chdir(folder)
    except OSError:
        raise InputError(f'{folder} is not on every machine: start the sweep in a folder that they share') from None
    threads = max(1, int(config.sweep.cpus_per_run))
    os.environ['RAYON_NUM_THREADS'] = str(threads)  # the tokenizer's
    import torch

    torch.set_num_threads(threads)


def _count_characters(rows: list[Any]) -> int:
    texts = (row.texts if isinstance(row, TextExample) else (row.question, row.context) for row in rows)
    return sum(len(text) for of_row in texts for text in of_row)


def first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
