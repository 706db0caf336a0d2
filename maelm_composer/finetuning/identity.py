"""The settings that decide the scores of a fine-tuning run, and its record by name. Imports no torch."""

import dataclasses
from pathlib import Path
from typing import Any

from maelm_composer.config import FinetuningConfig, Precision
from maelm_composer.errors import InputError
from maelm_composer.files import hash_json
from maelm_composer.recipe import to_plain
from maelm_composer.records import (
    EncoderIdentity,
    FinetuningRecord,
    Point,
    collect_provenance,
    load_record,
    parse_finetuning,
)
from maelm_composer.tasks.catalogue import GROUPS, SPAN, find_task
from maelm_composer.tasks.examples import fit_span

PROTOCOL = (
    *('evaluation', 'max_seq_len', 'precision', 'dropout', 'adam_beta1', 'adam_beta2', 'adam_eps', 'weight_decay'),
    *('clip_norm', 'measures_rank'),  # the rank decides no score, but a run without it must be made again
)
UNDECIDING = ('files', 'group')  # in no key or record: the data hash covers the files, a group names a search space
KEY_LENGTH = 16


def run_key(config: FinetuningConfig, identity: EncoderIdentity, data_hash: str) -> str:
    """The name of a run's record: the task and a hash of everything that decides the scores.

    Of ``identity``, the hash and the implementation decide, the address does not. ``data_hash`` is ``TaskData.hash``.
    """
    deciding = {
        'task': config.task,
        'seed': config.seed,
        'point': dataclasses.asdict(read_point(config)),
        'protocol': describe_protocol(config),
        'checkpoint': [identity.hash, identity.implementation],
        'data': data_hash,
    }
    return f'{config.task}-{hash_json(deciding)[:KEY_LENGTH]}'


def limit_length(config: FinetuningConfig, max_seq_len: int) -> FinetuningConfig:
    """``config`` with rows no longer than the encoder's ``max_seq_len``, so that equal runs have equal keys."""
    longest = min(config.max_seq_len, max_seq_len)
    return dataclasses.replace(config, max_seq_len=longest, span=fit_span(config.span, longest))


def find_finished(config: FinetuningConfig, key: str, identity: EncoderIdentity) -> FinetuningRecord | None:
    """The record of a run that finished and left everything that ``config`` asks for, or None.

    Its ``checkpoint`` is ``identity``: the same weights, whose address may be new.

    Raises:
        InputError: the file is no fine-tuning record.
    """
    path = Path(config.save_folder, f'{key}.json')
    if config.saves_model and not path.with_suffix('').exists():
        return None
    try:
        record = load_record(path, parse_finetuning)
    except FileNotFoundError:
        return None
    return record.model_copy(update={'checkpoint': identity}) if isinstance(record, FinetuningRecord) else None


def describe_run(config: FinetuningConfig, key: str, identity: EncoderIdentity, data_hash: str) -> dict[str, Any]:
    """The fields that a finished and a failed run's record share, except ``error``; arguments as in :func:`run_key`."""
    return {
        'key': key,
        'task': config.task,
        'seed': config.seed,
        'point': read_point(config),
        'protocol': describe_protocol(config),
        'checkpoint': identity,
        'data_hash': data_hash,
        'provenance': collect_provenance(config),
    }


def read_point(config: FinetuningConfig) -> Point:
    """The point of the search space that ``config`` is."""
    return Point(**{field.name: getattr(config, field.name) for field in dataclasses.fields(Point)})


def check_names(config: FinetuningConfig) -> None:
    """Raise InputError for a key that names no task (or, in ``sweep.search``, group) or declares no usable task."""
    for name in (*config.tasks, *config.data.max_train_examples_of):
        find_task(name, config.tasks)
    for name in config.sweep.search.keys() - GROUPS:
        try:
            find_task(name, config.tasks)
        except InputError as error:
            raise InputError(f'sweep.search.{name}: {error}; the groups are {", ".join(sorted(GROUPS))}') from None


def describe_protocol(config: FinetuningConfig) -> dict[str, Any]:
    """The settings that decide the scores and that all runs of a sweep over ``config.task`` share."""
    task, plain = find_task(config.task, config.tasks), to_plain(config)
    protocol = {name: plain[name] for name in PROTOCOL}
    source = task.find_source(config.data.source)
    protocol |= {'source': source.name, 'max_train_examples': config.data.limit(task.name)}
    if config.data.max_dev_examples is not None:
        protocol['max_dev_examples'] = config.data.max_dev_examples
    if config.device_train_microbatch_size is not None:  # dropout draws for each microbatch
        protocol['device_train_microbatch_size'] = config.device_train_microbatch_size
    if config.precision == Precision.bf16:
        protocol['scores'] = 'fp32'  # earlier versions computed them in bf16
    if task.is_own:
        declaration = plain['tasks'][task.name].items()
        protocol['declaration'] = {key: value for key, value in declaration if value and key not in UNDECIDING}
        if task.dataset is not None and Path(task.dataset).exists():  # a local folder, whose place is private
            protocol['declaration']['dataset'] = Path(task.dataset).name
    return protocol | ({'span': plain['span']} if task.kind == SPAN else {})
