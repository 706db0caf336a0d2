"""What a worker of a sweep does: read a task's facts, or make one run and record how it ended."""

import dataclasses
import os
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch

from maelm_composer.checkpoints.pretrained import load_pretrained
from maelm_composer.config import FinetuningConfig
from maelm_composer.errors import InputError
from maelm_composer.finetuning.identity import describe_run
from maelm_composer.finetuning.run import assert_savable, find_finished, finetune
from maelm_composer.precision import Choice, choose_in
from maelm_composer.records import write_json
from maelm_composer.sweep.claims import claim
from maelm_composer.sweep.search import Record
from maelm_composer.tasks.catalogue import Task
from maelm_composer.tasks.sources import TextExample, load_task_data


@dataclass(frozen=True)
class Facts:
    """What the planning needs to know of a task and cannot know without reading checkpoint and data."""

    identity: dict[str, Any]
    data_hash: str
    training_size: int  # characters
    evaluation_size: int


def choose_precision(config: FinetuningConfig, folder: str) -> Choice:
    """For all runs in ``save_folder``, on a device as theirs."""
    _enter(config, folder)
    return choose_in(Path(config.save_folder), config.precision, 'precision')


def inspect_task(config: FinetuningConfig, task: Task, folder: str) -> Facts:
    _enter(config, folder)
    pretrained = load_pretrained(config.checkpoint, config.implementation, config.dropout)
    assert_savable(config, pretrained)
    data = load_task_data(task, config.data)
    evaluation = [row for rows in data.evaluation.values() for row in rows]
    return Facts(pretrained.identity, data.hash, _count_characters(data.train), _count_characters(evaluation))


def make_run(config: FinetuningConfig, key: str, facts: Facts, folder: str) -> Record | None:
    """One run in a worker: its record, of a failure too; None where another sweep is at it."""
    _enter(config, folder)
    if not ray.get_gpu_ids():  # our Ray leaves every GPU visible to a run that was given none
        os.environ['CUDA_VISIBLE_DEVICES'] = ''
    with claim(locate_claim(config, key)) as is_mine:
        if not is_mine:
            return None
        try:
            record = finetune(config, config.sweep.gpus_per_run if ray.get_gpu_ids() else 1.0)
            if record['key'] != key:
                raise InputError('the checkpoint or the data changed while the sweep ran: start it again')
            return record
        except InputError as error:
            return record_failure(config, key, facts, str(error))
        except Exception as error:
            reason = f'{type(error).__name__}: {first_line(error)}'
            return record_failure(config, key, facts, reason, traceback=traceback.format_exc())


def locate_claim(config: FinetuningConfig, key: str) -> Path:
    return Path(config.save_folder, f'.{key}.claim')


def record_failure(config: FinetuningConfig, key: str, facts: Facts, reason: str, **more: str) -> Record:
    """The record of a run that ended for ``reason``; a finished one, made again for its model, is not overwritten."""
    record = describe_run(config, key, facts.identity, facts.data_hash)
    record |= {'status': 'failed', 'error': ' '.join(reason.split()), **more}
    if find_finished(dataclasses.replace(config, saves_model=False), key) is None:
        write_json(Path(config.save_folder, f'{key}.json'), record)
    return record


def first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _enter(config: FinetuningConfig, folder: str) -> None:
    """Make a worker's process ready: where relative paths start, and no more threads than it was given."""
    try:
        os.chdir(folder)
    except OSError:
        raise InputError(f'{folder} is not on every machine: start the sweep in a folder that they share') from None
    threads = max(1, int(config.sweep.cpus_per_run))
    os.environ['RAYON_NUM_THREADS'] = str(threads)  # the tokenizer's
    torch.set_num_threads(threads)


def _count_characters(rows: list[Any]) -> int:
    texts = (row.texts if isinstance(row, TextExample) else (row.question, row.context) for row in rows)
    return sum(len(text) for of_row in texts for text in of_row)
