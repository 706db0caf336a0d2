"""The record and the log of a pretraining run, and whether a folder belongs to a run. Imports no torch."""

import csv
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from maelm_composer.checkpoints.find import EncoderFolder, read_latest, read_recipe
from maelm_composer.config import PretrainingConfig
from maelm_composer.data.manifest import load_manifest
from maelm_composer.errors import InputError
from maelm_composer.recipe import to_plain
from maelm_composer.records import CONTENT_HASH, Pretraining, PretrainingRecord, UnfinishedPretraining
from maelm_composer.training.plan import Plan, count_samples

MAX_SAMPLES, EXTENDS = 'training.max_samples', 'training.extends'
# Keys that came after the first records. An identity holds such a key only if it is set: old records stay valid.
LATER_KEYS: dict[str, Any] = {'optimizer.schedule': 'linear', EXTENDS: [], 'init_from': None}

# Keys that decide no weights, but for rounding. Every other key belongs to the identity, a new one of any section too.
UNDECIDING = {
    *('run_name', 'save_folder', 'data.remote', 'data.local', 'data.num_workers'),
    *('training.device_train_microbatch_size', 'training.compile', 'training.activation_checkpointing'),
    *('training.attention', 'training.sharding', 'training.eval_interval_samples', 'training.eval_rows'),
    *('training.checkpoint_interval_samples', 'training.checkpoints_to_keep', 'training.max_outage_minutes'),
    'training.loggers',
}


def identify(config: PretrainingConfig, content_hash: str) -> dict[str, Any]:
    """All settings that decide the weights, flat; two runs with equal identities are the same run."""
    flat = {key: value for key, value in _flatten(to_plain(config)).items() if key not in UNDECIDING}
    identity = {key: value for key, value in flat.items() if key not in LATER_KEYS or value != LATER_KEYS[key]}
    return identity | {CONTENT_HASH: content_hash}


def is_run_of(record: Pretraining, config: PretrainingConfig) -> bool:
    """Whether ``record`` is of this recipe, on any data."""
    return record.identity == identify(config, record.data_hash)


def assert_same_run(
    folder: str,
    record: Pretraining | None,
    identity: dict[str, Any],
    remedy: str = 'choose another run_name or save_folder',
) -> None:
    """Raise InputError if the ``record`` in ``folder`` is of another recipe or other data.

    A finished run is also the run that extends it (``training.extends``). If the record was lost, the folder's recipe
    and manifest say whose checkpoints these are.
    """
    there = identity
    if record is not None:
        there = record.identity
    elif read_latest(folder) is not None:
        there = identify(read_recipe(EncoderFolder(folder, folder)), load_manifest(folder).content_hash)
    found, wanted = LATER_KEYS | there, LATER_KEYS | identity
    if isinstance(record, PretrainingRecord) and wanted[EXTENDS][-1:] == [found[MAX_SAMPLES]]:
        found |= {EXTENDS: [*found[EXTENDS], found[MAX_SAMPLES]], MAX_SAMPLES: wanted[MAX_SAMPLES]}
    for key in sorted(wanted.keys() | found.keys()):
        old, new = found.get(key), wanted.get(key)
        if old != new:
            longer = key == MAX_SAMPLES and bool(old and new and old < new)
            hint = f'to extend it once it is finished, set {EXTENDS}={[*found[EXTENDS], old]}; else ' * longer
            if key == EXTENDS and new == [*found[EXTENDS], found[MAX_SAMPLES]]:
                hint = f'finish it first, with {MAX_SAMPLES}={found[MAX_SAMPLES]} and {EXTENDS}={old}; else '
            raise InputError(f'{folder} holds a run with {key} = {old}, not {new}: {hint}{remedy}')


def assert_same_validation(folder: str, record: Pretraining | None, eval_rows: int) -> None:
    """Raise InputError if the run in ``folder`` was validated on other rows: its losses would jump."""
    if record is not None and record.eval_rows not in (None, eval_rows):
        raise InputError(
            f'{folder} holds a run with validations of {record.eval_rows} rows, not {eval_rows}: give '
            f'training.eval_rows={record.eval_rows}'
        )


def finish_record(
    begun: UnfinishedPretraining,
    plan: Plan,
    seconds: float,  # of training
    device_seconds: float,  # of training, summed over the ranks
    evaluation: Mapping[str, Any],  # results of the last validation
) -> PretrainingRecord:
    """The record of a run that has finished; ``begun`` is the record from its begin."""
    kept = {name: value for name, value in begun if name not in ('status', 'ending')}
    tokens = plan.batches * plan.tokens_per_batch
    return PretrainingRecord(
        **kept,
        samples=count_samples(plan.config.training),
        batches=plan.batches,
        tokens=tokens,
        training_seconds=seconds,
        device_hours=device_seconds / 3600,
        tokens_per_second=tokens / seconds if seconds else 0.0,
        **evaluation,
    )


def read_metrics(path: Path) -> Iterator[dict[str, str]]:
    """The complete rows of a metrics.csv, read one by one."""
    with path.open(encoding='utf-8') as file:
        yield from parse_metrics(file)


def parse_metrics(lines: Iterable[str]) -> Iterator[dict[str, str]]:
    """The complete rows of a metrics.csv; a last line that a kill truncated is dropped."""
    yield from csv.DictReader(line for line in lines if line.endswith('\n'))


def _flatten(nested: dict[str, Any], prefix: str = '') -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        flat |= _flatten(value, f'{prefix}{key}.') if isinstance(value, dict) else {f'{prefix}{key}': value}
    return flat
