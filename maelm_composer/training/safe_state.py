"""Reading Composer's state without running code: pickles that hold tensors, plain values and arrays of NumPy only."""

import contextlib
import os
import pickle
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import CheckpointException
from torch.torch_version import TorchVersion

from maelm_composer.errors import InputError
from maelm_composer.training.checkpoints import METADATA, describe_cause

OLDER = 'name an older checkpoint in `latest`, or choose another run_name'
# What the state holds beside tensors and plain values: NumPy's generator, the version of torch, the time of training.
ARRAY = np.zeros(1, np.uint32)
STATE_TYPES: list[Any] = [np.ndarray, np.dtype, type(ARRAY.dtype), ARRAY.__reduce__()[0], TorchVersion, timedelta]
METADATA_TYPES = {
    *('Metadata', 'BytesStorageMetadata', 'TensorStorageMetadata', 'ChunkStorageMetadata', 'TensorProperties'),
    *('MetadataIndex', 'StorageMeta', '_MEM_FORMAT_ENCODING'),
}
OTHER_NAMES = {
    *('torch.distributed.checkpoint.filesystem._StorageInfo', 'torch.Size', 'torch.serialization._get_layout'),
    *('pathlib.PosixPath', 'pathlib._local.PosixPath'),
}
DATA_ONLY, ANYTHING = 'TORCH_FORCE_WEIGHTS_ONLY_LOAD', 'TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD'  # torch.load obeys these two


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
    except (pickle.UnpicklingError, CheckpointException, RuntimeError) as error:
        if type(error) is RuntimeError and 'weights_only' not in str(error):  # that is about TorchScript
            raise
        raise _refuse(state, error) from None
    finally:
        del os.environ[DATA_ONLY]
        os.environ.update({name: value for name, value in before.items() if value is not None})


def assert_metadata_is_data(shards: Path) -> None:
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
        is_type = module == 'torch.distributed.checkpoint.metadata' and name in METADATA_TYPES
        is_dtype = module == 'torch' and isinstance(getattr(torch, name, None), torch.dtype)
        if not (is_type or is_dtype or f'{module}.{name}' in OTHER_NAMES):
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
    return InputError(f'{state} names {found[1]}, which no checkpoint of a run does; it might run code: {OLDER}')
