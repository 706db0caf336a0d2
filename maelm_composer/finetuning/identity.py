"""Which run a fine-tuning run is: everything that decides its scores. Pure, no torch."""

import hashlib
import json
from typing import Any

from maelm_composer.config import FinetuningConfig
from maelm_composer.recipe import to_plain
from maelm_composer.records import collect_provenance
from maelm_composer.tasks.catalogue import GROUPS, SPAN, find_task

POINT = ('learning_rate', 'batch_size', 'max_epochs', 'warmup_proportion')
PROTOCOL = (
    *('evaluation', 'max_seq_len', 'precision', 'dropout', 'adam_beta1', 'adam_beta2', 'adam_eps', 'weight_decay'),
    *('clip_norm', 'measures_rank'),
)
KEY_LENGTH = 16


def run_key(config: FinetuningConfig, identity: dict[str, Any], data_hash: str) -> str:
    """The name of a run's record: the task, and a hash of everything that decides the scores.

    Args:
        identity: of the checkpoint, ``Pretrained.identity``; its content counts, not its address.
        data_hash: ``TaskData.hash``.
    """
    deciding = {
        'task': config.task,
        'seed': config.seed,
        'point': describe_point(config),
        'protocol': describe_protocol(config),
        'checkpoint': [identity['hash'], identity['implementation']],
        'data': data_hash,
    }
    digest = hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()
    return f'{config.task}-{digest[:KEY_LENGTH]}'


def describe_run(config: FinetuningConfig, key: str, identity: dict[str, Any], data_hash: str) -> dict[str, Any]:
    """What the record of a run says however it ended; ``identity`` and ``data_hash`` as in :func:`run_key`."""
    return {
        'kind': 'finetuning',
        'key': key,
        'status': 'finished',
        'error': None,
        'task': config.task,
        'seed': config.seed,
        'point': describe_point(config),
        'protocol': describe_protocol(config),
        'checkpoint': identity,
        'data_hash': data_hash,
        'provenance': collect_provenance(config),
    }


def describe_point(config: FinetuningConfig) -> dict[str, Any]:
    """Where in its search space the run is."""
    return {name: getattr(config, name) for name in POINT}


def check_names(config: FinetuningConfig) -> None:
    """Raise InputError where a key that should name a task, or a group of them, names none."""
    for name in (*config.data.max_train_examples_of, *(config.sweep.search.keys() - GROUPS)):
        find_task(name)


def describe_protocol(config: FinetuningConfig) -> dict[str, Any]:
    """What is the same for every run of a sweep over ``config.task``, and decides its scores too."""
    task, plain = find_task(config.task), to_plain(config)
    protocol = {name: plain[name] for name in PROTOCOL}
    protocol |= {'source': plain['data']['source'], 'max_train_examples': config.data.limit(task.name)}
    return protocol | ({'span': plain['span']} if task.kind == SPAN else {})
