"""The record of a pretraining run in its folder, and whether a folder belongs to a run."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from maelm_composer.checkpoints.names import MANIFEST, RECIPE, RECORD, TOKENIZER
from maelm_composer.config import PretrainingConfig
from maelm_composer.data.manifest import read_tokenizer_files
from maelm_composer.data.storage import join, read_file
from maelm_composer.errors import InputError
from maelm_composer.files import format_json
from maelm_composer.recipe import to_plain, to_yaml
from maelm_composer.records import (
    CONTENT_HASH,
    Pretraining,
    PretrainingRecord,
    UnfinishedPretraining,
    format_record,
    parse_pretraining,
)
from maelm_composer.training.plan import Plan

if TYPE_CHECKING:  # which brings torch, and a plan reads records without
    from maelm_composer.training.run_folder import RunFolder


MAX_SAMPLES, EXTENDS = 'training.max_samples', 'training.extends'
# Keys that came after the first records. An identity holds such a key only if it is set: old records stay valid.
LATER_KEYS: dict[str, Any] = {'optimizer.schedule': 'linear', EXTENDS: [], 'init_from': None}


def identify(config: PretrainingConfig, content_hash: str) -> dict[str, Any]:
    """All settings that decide the weights, flat; two runs with equal identities are the same run."""
    plain = to_plain(config)
    identity = _flatten({section: plain[section] for section in ('seed', 'init_from', 'masking', 'model', 'optimizer')})
    for key in ('max_samples', 'extends', 'global_train_batch_size', 'precision'):
        identity[f'training.{key}'] = plain['training'][key]
    identity = {key: value for key, value in identity.items() if LATER_KEYS.get(key, ...) != value}
    return identity | {'data.shuffle_block_size': config.data.shuffle_block_size, CONTENT_HASH: content_hash}


def is_run_of(record: Pretraining, config: PretrainingConfig) -> bool:
    """Whether ``record`` is of this recipe, on any data."""
    return record.identity == identify(config, record.data_hash)


def read_record(folder: 'RunFolder') -> Pretraining | None:
    """The record in ``folder``; None if no run has begun there.

    Raises:
        InputError: the file is no pretraining record.
    """
    text = folder.read(RECORD)
    return None if text is None else parse_pretraining(text, f'{folder.uri}/{RECORD}')


def assert_same_run(folder: 'RunFolder', record: Pretraining | None, identity: dict[str, Any]) -> None:
    """Raise InputError if the ``record`` in ``folder`` is of another recipe or other data.

    A finished run is also the run that extends it (``training.extends``).
    """
    found, wanted = LATER_KEYS | (identity if record is None else record.identity), LATER_KEYS | identity
    if isinstance(record, PretrainingRecord) and found[MAX_SAMPLES] == next(reversed(wanted[EXTENDS]), None):
        found |= {EXTENDS: [*found[EXTENDS], found[MAX_SAMPLES]], MAX_SAMPLES: wanted[MAX_SAMPLES]}
    for key in sorted(wanted.keys() | found.keys()):
        there, here = found.get(key), wanted.get(key)
        if there != here:
            longer = key == MAX_SAMPLES and bool(there and here and there < here)
            hint = f'to extend it once it is finished, set {EXTENDS}={[*found[EXTENDS], there]}; else ' * longer
            raise InputError(
                f'{folder.uri} holds a run with {key} = {there}, not {here}: '
                f'{hint}choose another run_name or save_folder'
            )


def begin_record(folder: 'RunFolder', config: PretrainingConfig, record: UnfinishedPretraining) -> None:
    """Write recipe, tokenizer, the shards' manifest and the record of a run that begins."""
    folder.write(RECIPE, to_yaml(config))
    # Copies, so that the checkpoints can be used without the shards.
    for name, content in read_tokenizer_files(join(config.data.remote, TOKENIZER)).items():
        folder.write(f'{TOKENIZER}/{name}', content.decode())
    manifest = read_file(join(config.data.remote, MANIFEST))
    assert manifest is not None
    folder.write(MANIFEST, manifest.decode())
    _write(folder, record)


def end_record(folder: 'RunFolder', status: Literal['stopped', 'failed'], ending: str) -> None:
    """Note how a run ended before its end. Only the first rank's word is kept: the others end because of that one."""
    record = read_record(folder)
    if isinstance(record, UnfinishedPretraining) and record.status == 'running':
        _write(folder, dataclasses.replace(record, status=status, ending=' '.join(ending.split())))


def finish_record(
    folder: 'RunFolder',
    record: Pretraining,
    plan: Plan,
    seconds: float,  # of training
    device_seconds: float,  # of training, summed over the ranks
    evaluation: Mapping[str, Any],  # results of the last validation
) -> PretrainingRecord:
    """Write and return the record of a run that has finished; ``record`` was written when the run began."""
    shared = {field.name for field in dataclasses.fields(PretrainingRecord)} - {'status'}
    begun = {field.name: getattr(record, field.name) for field in dataclasses.fields(record) if field.name in shared}
    tokens = plan.batches * plan.tokens_per_batch
    finished = PretrainingRecord(
        **begun,
        samples=plan.batches * plan.global_batch_size,
        batches=plan.batches,
        tokens=tokens,
        training_seconds=seconds,
        device_hours=device_seconds / 3600,
        tokens_per_second=tokens / seconds if seconds else 0.0,
        **evaluation,
    )
    _write(folder, finished)
    return finished


def _write(folder: 'RunFolder', record: Pretraining) -> None:
    folder.write(RECORD, format_json(format_record(record)))


def _flatten(nested: dict[str, Any], prefix: str = '') -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        flat |= _flatten(value, f'{prefix}{key}.') if isinstance(value, dict) else {f'{prefix}{key}': value}
    return flat
