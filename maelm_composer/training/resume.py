"""Finds the checkpoint from which a run resumes, checks that the run can load it, and loads it without running code.

A state may hold tensors, plain values and arrays of NumPy only.
"""

import contextlib
import os
import pickle
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from composer.utils import dist
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.checkpoint import CheckpointException, metadata
from torch.torch_version import TorchVersion

from maelm_composer.checkpoints.find import read_latest
from maelm_composer.checkpoints.names import METRICS, PROGRESS, SHARDED_STATE, STATE, WEIGHTS
from maelm_composer.checkpoints.pretrained import find_misfit
from maelm_composer.errors import InputError
from maelm_composer.files import hash_file, parse_json, write_text
from maelm_composer.training.checkpoints import METADATA, describe_cause
from maelm_composer.training.processes import raise_on_all_ranks, take_from_first_rank
from maelm_composer.training.run_folder import RunFolder

OLDER = 'point `latest` to an older checkpoint, or choose another run_name'
# What a state holds beside tensors and plain values: the version of torch, the time of training; before 0.2 NumPy's
# generator, too.
ARRAY = np.zeros(1, np.uint32)
STATE_TYPES: list[Any] = [np.ndarray, np.dtype, type(ARRAY.dtype), ARRAY.__reduce__()[0], TorchVersion, timedelta]
# What the metadata of a sharded state names beside the classes of torch.distributed.checkpoint.metadata.
METADATA_NAMES = {
    *('torch.distributed.checkpoint.filesystem._StorageInfo', 'torch.Size', 'torch.serialization._get_layout'),
    *('pathlib.PosixPath', 'pathlib._local.PosixPath'),
}
DATA_ONLY, ANYTHING = 'TORCH_FORCE_WEIGHTS_ONLY_LOAD', 'TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD'  # torch.load obeys these two


@dataclass(frozen=True)
class ResumePoint:
    """Where a run goes on: at a complete checkpoint, or, with the defaults, at its begin."""

    state: Path | None = None  # what the Trainer loads
    samples: int = 0
    training_seconds: float = 0.0
    device_seconds: float = 0.0  # training_seconds, summed over the ranks
    log: Path | None = None  # metrics.csv of the rows until there, on the first rank


def find_resume_point(folder: RunFolder, model: nn.Module, is_sharded: bool) -> ResumePoint:
    """The newest complete checkpoint of ``folder``, or the begin if there is none. Called by every rank.

    Raises:
        InputError: the checkpoint is damaged, its weights do not fit ``model``, or it has another sharding.
    """
    folder.recover()
    with raise_on_all_ranks():
        latest = read_latest(folder.uri) if dist.get_global_rank() == 0 else None
    latest = take_from_first_rank(latest)
    if latest is None:
        return ResumePoint()
    checkpoint = folder.fetch(latest)
    with raise_on_all_ranks():  # a node may not share the disk of the others
        progress = _read_progress(checkpoint)
        _assert_fits(checkpoint / WEIGHTS, model)
        state = checkpoint / (SHARDED_STATE if is_sharded else STATE)
        if not state.exists():
            raise InputError(
                f'{checkpoint} was written with training.sharding '
                f'{"ddp" if is_sharded else "shard_grad_op or full_shard"}: resume with it, or choose another run_name'
            )
        if state.is_file() and not zipfile.is_zipfile(state):
            raise InputError(f'{state} is damaged: {OLDER}')
        if state.is_dir():
            _assert_metadata_is_data(state)
        log = checkpoint / METRICS
        if not log.exists() and dist.get_global_rank() == 0:  # of version 0.1
            log = folder.local / METRICS
            write_text(log, folder.read(METRICS) or '')
    samples, seconds = progress['samples'], progress['training_seconds']
    device_seconds = progress.get('device_seconds', seconds * dist.get_world_size())  # version 0.1 has none
    return ResumePoint(state, samples, seconds, device_seconds, log)


@contextlib.contextmanager
def load_data_only(state: Path) -> Iterator[None]:
    """Have torch.load refuse, while the body loads ``state``, all but ``STATE_TYPES``, tensors and plain values.

    Composer, and torch for sharded checkpoints, ask torch.load for objects of every kind, which may run code.

    Raises:
        InputError: ``state`` holds something else, or is damaged.
    """
    before = {name: os.environ.pop(name, None) for name in (DATA_ONLY, ANYTHING)}
    os.environ[DATA_ONLY] = '1'
    try:
        with torch.serialization.safe_globals(STATE_TYPES):
            yield
    except CheckpointException as error:  # of every rank that failed, whatever its error was
        cause, _ = next(iter(error.failures.values()))
        if isinstance(cause, (OSError, MemoryError, torch.OutOfMemoryError, KeyboardInterrupt, SystemExit)):
            raise cause from None
        raise _refuse(state, error) from None
    except (pickle.UnpicklingError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and 'weights_only' not in str(error):  # that is about TorchScript
            raise  # memory ran out, or another rank ended
        raise _refuse(state, error) from None
    finally:
        del os.environ[DATA_ONLY]
        os.environ.update({name: value for name, value in before.items() if value is not None})


def _read_progress(checkpoint: Path) -> dict[str, Any]:
    """The content of progress.json; the other files are compared with the hashes in it."""
    path = checkpoint / PROGRESS
    if not path.exists():
        raise InputError(f'{path} is missing: {OLDER}')
    progress = parse_json(path.read_bytes(), str(path), ('samples', 'training_seconds'), OLDER)
    if dist.get_local_rank() == 0:
        for name, written in progress.get('hashes', {}).items():
            file = checkpoint / name
            if not file.exists() or hash_file(file) != written:
                state = 'is damaged: its SHA-256 is not the one in progress.json' if file.exists() else 'is missing'
                raise InputError(f'{file} {state}: {OLDER}')
    return progress


def _assert_fits(weights: Path, model: nn.Module) -> None:
    try:
        with safe_open(weights, 'pt') as file:
            saved = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 - not a dict
    except SafetensorError as error:
        raise InputError(f'{weights} is damaged ({error}): {OLDER}') from None
    if misfit := find_misfit(saved, model):
        raise InputError(f'{weights.parent} does not fit the recipe: {misfit}')


def _assert_metadata_is_data(shards: Path) -> None:
    """Raise InputError if the metadata of a sharded checkpoint cannot be read or names other types than torch's own.

    torch unpickles the file without a restriction.
    """
    try:
        with (shards / METADATA).open('rb') as file:
            _MetadataUnpickler(file).load()
    except Exception as error:  # another torch's classes raise errors of many kinds when they are unpickled
        raise _refuse(shards, error) from None


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_type = module == metadata.__name__ and getattr(vars(metadata).get(name), '__module__', None) == module
        is_dtype = module == 'torch' and isinstance(getattr(torch, name, None), torch.dtype)
        if not (is_type or is_dtype or f'{module}.{name}' in METADATA_NAMES):
            raise pickle.UnpicklingError(f'GLOBAL {module}.{name}')
        return super().find_class(module, name)


def _refuse(state: Path, error: BaseException) -> InputError:
    found = re.search(r'GLOBAL (\S+)', str(error))
    if found is None:
        reason = describe_cause(error) or type(error).__name__
        return InputError(
            f'{state} is damaged, or written by a torch whose checkpoints torch {torch.__version__} cannot read '
            f'({reason}): resume with that torch, or {OLDER}'
        )
    return InputError(f'{state} names {found[1]}, which no checkpoint of a run does and which might run code: {OLDER}')
