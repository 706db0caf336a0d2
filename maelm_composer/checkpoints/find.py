"""Where a checkpoint of our own lies, and what lies beside it.

A run folder of pretraining (its newest checkpoint), one checkpoint in it, both local or s3://, or the folder of a
fine-tuned model.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from maelm_composer.config import ModelConfig, PretrainingConfig
from maelm_composer.data.storage import is_s3, join, list_names, read_file
from maelm_composer.errors import InputError
from maelm_composer.recipe import load_config

# As training/ names them, which is not imported, as it brings Composer.
WEIGHTS, PROGRESS = 'model.safetensors', 'progress.json'
RECIPE, RECORD, TOKENIZER, LATEST = 'recipe.yaml', 'record.json', 'tokenizer', 'latest'
FINETUNED, HUGGING_FACE_CONFIG = 'finetuned.json', 'config.json'
_BLOCK_BYTES = 1 << 24


@dataclass(frozen=True)
class Checkpoint:
    uri: str  # folder of the weights, no link
    run: str | None  # folder of its pretraining run; None: a fine-tuned model

    @property
    def tokenizer(self) -> str:
        return join(self.run or self.uri, TOKENIZER)

    def read_json(self, name: str) -> dict[str, Any]:
        """A file beside the weights, or of the run; empty where it is not there."""
        folder = self.run if name == RECORD and self.run is not None else self.uri
        content = read_file(join(folder, name))
        return {} if content is None else json.loads(content)


def find_checkpoint(checkpoint: str) -> Checkpoint | None:
    """The checkpoint of ours that ``checkpoint`` names, or None where it can only be one of Hugging Face.

    Raises:
        InputError: a run without checkpoints, or nothing at an s3:// address.
    """
    uri = checkpoint.rstrip('/')
    is_remote = is_s3(uri)
    if not is_remote and Path(uri).is_symlink():
        uri = os.path.join(os.path.dirname(uri) or '.', os.readlink(uri))
    names = list_names(uri)
    if FINETUNED in names:
        return Checkpoint(uri, None)
    if WEIGHTS in names and HUGGING_FACE_CONFIG not in names:
        return Checkpoint(uri, os.path.dirname(uri) or '.')
    parent, _, name = uri.rpartition('/')
    run = parent if is_remote and name == LATEST else uri
    if RECIPE in names or run != uri:
        newest = _read_latest(run)
        if newest is None:
            raise InputError(f'{run} holds no checkpoint yet')
        return Checkpoint(join(run, newest), run)
    if is_remote:
        raise InputError(f'{checkpoint} holds neither a run nor a checkpoint')
    return None


def read_model_config(checkpoint: Checkpoint) -> ModelConfig:
    """The model section of a run's recipe, or of a fine-tuned model's description."""
    if checkpoint.run is None:
        plain: dict[str, Any] = checkpoint.read_json(FINETUNED)['config'] | {'decoder': None}
        for field in dataclasses.fields(ModelConfig):
            if isinstance(field.default, Enum):
                plain[field.name] = type(field.default)[plain[field.name]]
        return ModelConfig(**plain)
    return read_recipe(checkpoint).model


def read_weights(checkpoint: Checkpoint, prefix: str) -> tuple[dict[str, Tensor], str]:
    """Tensors whose name begins with ``prefix``, without it, and the SHA-256 (hex) of the whole file."""
    uri = join(checkpoint.uri, WEIGHTS)
    with _as_local_file(uri) as path:
        digest = hashlib.sha256()
        with path.open('rb') as content:
            while block := content.read(_BLOCK_BYTES):
                digest.update(block)
        try:
            with safe_open(path, 'pt') as file:
                names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118 - not a dict
                weights = {name.removeprefix(prefix): file.get_tensor(name) for name in names}
        except SafetensorError as error:
            raise InputError(f'{uri} is not a whole safetensors file: {error}') from None
    return weights, digest.hexdigest()


def read_recipe(checkpoint: Checkpoint) -> PretrainingConfig:
    """The recipe of a pretraining run."""
    assert checkpoint.run is not None
    with _as_local_file(join(checkpoint.run, RECIPE)) as path:
        return load_config(PretrainingConfig, [str(path)])


def _read_latest(run: str) -> str | None:
    if is_s3(run):
        content = read_file(join(run, LATEST))
        return None if content is None else content.decode().strip()
    link = Path(run, LATEST)
    return os.readlink(link) if link.is_symlink() else None


@contextlib.contextmanager
def _as_local_file(uri: str) -> Iterator[Path]:
    path = Path(uri)
    with tempfile.TemporaryDirectory() as scratch:
        if is_s3(uri):
            path = Path(scratch, path.name)
            if (content := read_file(uri)) is not None:
                path.write_bytes(content)
                del content  # it may be gigabytes
        if not path.exists():
            raise InputError(f'{uri} is not there')
        yield path
