"""The record beside the checkpoints: what ran, from what, and how it ended; and whether a folder is this run's."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from maelm_composer.config import Precision, PretrainingConfig
from maelm_composer.data.storage import join, list_names, read_file
from maelm_composer.errors import InputError
from maelm_composer.recipe import to_plain, to_yaml
from maelm_composer.records import collect_provenance
from maelm_composer.training.plan import Plan

if TYPE_CHECKING:  # which brings torch, and a plan reads records without
    from maelm_composer.training.run_folder import RunFolder

RECORD = 'record.json'
RECIPE = 'recipe.yaml'
TOKENIZER = 'tokenizer'


def identify(config: PretrainingConfig, content_hash: str) -> dict[str, Any]:
    """Everything that decides the weights, flat: two runs equal in these are one."""
    plain = to_plain(config)
    identity = _flatten({section: plain[section] for section in ('seed', 'masking', 'model', 'optimizer')})
    for key in ('max_samples', 'global_train_batch_size', 'precision'):
        identity[f'training.{key}'] = plain['training'][key]
    return identity | {
        'data.shuffle_block_size': config.data.shuffle_block_size,
        'content hash of data.remote': content_hash,
    }


def is_run_of(record: Mapping[str, Any], config: PretrainingConfig) -> bool:
    """Whether ``record`` is of this recipe, whatever its data."""
    found: dict[str, Any] = record['identity']
    return found == identify(config, found['content hash of data.remote'])


def read_record(folder: 'RunFolder') -> dict[str, Any]:
    """The record that lies in ``folder``, empty where no run has been."""
    text = folder.read(RECORD)
    record: dict[str, Any] = json.loads(text) if text is not None else {}
    return record


def find_begun_precision(record: Mapping[str, Any]) -> Precision | None:
    """In which the run of ``record`` was begun; None where no run has been."""
    return Precision[record['identity']['training.precision']] if record else None


def assert_same_run(folder: 'RunFolder', record: Mapping[str, Any], identity: dict[str, Any]) -> None:
    """Raise InputError where another recipe or other data made the ``record`` in ``folder``."""
    found = record['identity'] if record else identity
    for key in sorted(identity.keys() | found.keys()):
        there, here = found.get(key), identity.get(key)
        if there != here:
            raise InputError(
                f'{folder.uri} holds a run with {key} = {there}, not {here}: choose another run_name or save_folder'
            )


def begin_record(
    folder: 'RunFolder', config: PretrainingConfig, identity: dict[str, Any], numbers: dict[str, Any]
) -> dict[str, Any]:
    """Write the resolved recipe, the tokenizer and the record of a run that has begun; returns the record."""
    record = {
        'status': 'running',
        'run_name': config.run_name,
        'provenance': collect_provenance(config),
        'identity': identity,
        **numbers,
    }
    folder.write(RECIPE, to_yaml(config))
    for name in list_names(join(config.data.remote, TOKENIZER)):  # whoever gets the checkpoint can read its ids
        content = read_file(join(config.data.remote, TOKENIZER, name))
        assert content is not None
        folder.write(f'{TOKENIZER}/{name}', content.decode())
    _write(folder, record)
    return record


def finish_record(
    folder: 'RunFolder', record: dict[str, Any], plan: Plan, seconds: float, evaluation: Mapping[str, float]
) -> dict[str, Any]:
    """Add what a whole run gave, its ``seconds`` of training and its last ``evaluation``; returns the record."""
    tokens = plan.batches * plan.tokens_per_batch
    record = record | {
        'status': 'finished',
        'samples': plan.batches * plan.global_batch_size,
        'batches': plan.batches,
        'tokens': tokens,
        'training_seconds': seconds,
        'device_hours': seconds * record['world_size'] / 3600,
        'tokens_per_second': tokens / seconds if seconds else 0.0,
        **evaluation,
    }
    _write(folder, record)
    return record


def _write(folder: 'RunFolder', record: dict[str, Any]) -> None:
    folder.write(RECORD, json.dumps(record, indent=2) + '\n')


def _flatten(nested: dict[str, Any], prefix: str = '') -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        flat |= _flatten(value, f'{prefix}{key}.') if isinstance(value, dict) else {f'{prefix}{key}': value}
    return flat
