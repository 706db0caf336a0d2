"""The functions that a sweep runs in Ray workers."""

import dataclasses
import os
import traceback
from dataclasses import dataclass
from pathlib import Path

import ray
import torch
from filelock import Timeout

from maelm_composer.config import FinetuningConfig
from maelm_composer.errors import InputError, first_line
from maelm_composer.finetuning.identity import describe_run
from maelm_composer.finetuning.run import find_finished, finetune, load_encoder
from maelm_composer.precision import Choice, choose_in
from maelm_composer.records import EncoderIdentity, FailedFinetuning, Finetuning, write_record
from maelm_composer.sweep.lease import open_lease
from maelm_composer.tasks.catalogue import Task
from maelm_composer.tasks.sources import count_characters, load_task_data


@dataclass(frozen=True)
class Facts:
    """Properties of checkpoint and data that the scheduling of a task needs."""

    identity: EncoderIdentity
    data_hash: str
    training_size: int  # characters
    evaluation_size: int


def choose_precision(config: FinetuningConfig, folder: str) -> Choice:
    """Choose the precision of all runs in ``save_folder`` on a device like theirs."""
    _enter(config, folder)
    return choose_in(Path(config.save_folder), config.precision, 'precision')


def inspect_task(config: FinetuningConfig, task: Task, folder: str) -> Facts:
    _enter(config, folder)
    identity = load_encoder(config).identity
    data = load_task_data(task, config.data)
    evaluation = [row for rows in data.evaluation.values() for row in rows]
    return Facts(identity, data.hash, count_characters(data.train), count_characters(evaluation))


def make_run(config: FinetuningConfig, key: str, facts: Facts, folder: str) -> Finetuning | None:
    """Make one run and return its record, also of a failure; None if another sweep is making the run."""
    _enter(config, folder)
    if not ray.get_gpu_ids():  # our Ray leaves every GPU visible to a run that was given none
        os.environ['CUDA_VISIBLE_DEVICES'] = ''
    lease = open_lease(config.save_folder, key)
    try:
        lease.acquire()
    except Timeout:
        return None
    try:
        record = finetune(config, config.sweep.gpus_per_run if ray.get_gpu_ids() else 1.0)
        if record.key != key:
            raise InputError('the checkpoint or the data changed while the sweep ran: start it again')
        return record
    except InputError as error:
        return record_failure(config, key, facts, str(error))
    except Exception as error:
        reason = f'{type(error).__name__}: {first_line(error)}'
        return record_failure(config, key, facts, reason, traceback.format_exc())
    finally:
        lease.release()


def record_failure(
    config: FinetuningConfig, key: str, facts: Facts, reason: str, trace: str | None = None
) -> FailedFinetuning:
    """Write and return the record of a run that failed.

    A finished record stays: such a run was made again only to save its model.
    """
    run = describe_run(config, key, facts.identity, facts.data_hash)
    record = FailedFinetuning(**run, error=' '.join(reason.split()), traceback=trace)
    if find_finished(dataclasses.replace(config, saves_model=False), key) is None:
        write_record(Path(config.save_folder, f'{key}.json'), record)
    return record


def _enter(config: FinetuningConfig, folder: str) -> None:
    """Set a worker's working directory, and its number of threads to the cores that it was given."""
    try:
        os.chdir(folder)
    except OSError:
        raise InputError(f'{folder} is not on every machine: start the sweep in a folder that they share') from None
    threads = max(1, int(config.sweep.cpus_per_run))
    os.environ['RAYON_NUM_THREADS'] = str(threads)  # the tokenizer's
    torch.set_num_threads(threads)
