"""Finding an encoder of our own on disk, and reading its weights and the files beside them."""

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from maelm_composer.checkpoints.names import CHECKPOINT_PREFIX, FINETUNED, LATEST, PROGRESS, RECIPE, RECORD, WEIGHTS
from maelm_composer.config import ModelConfig, PretrainingConfig
from maelm_composer.data.manifest import TOKENIZER
from maelm_composer.data.storage import download, is_s3, join, list_names, read_file
from maelm_composer.errors import InputError
from maelm_composer.files import hash_file, parse_json
from maelm_composer.recipe import load_config
from maelm_composer.records import Pretraining, parse_pretraining

if TYPE_CHECKING:
    from torch import Tensor

HUGGING_FACE_CONFIG = 'config.json'
REMEDY = 'restore the file, or choose another checkpoint'


@dataclass(frozen=True)
class EncoderFolder:
    """A checkpoint of a pretraining run, local or in an object store, or a fine-tuned model."""

    uri: str  # folder of the weights; of a link, the folder to which it points
    run: str | None  # folder of the pretraining run; None for a fine-tuned model

    @property
    def tokenizer(self) -> str:
        return join(self.run or self.uri, TOKENIZER)

    def read_description(self) -> dict[str, Any]:
        """The content of finetuned.json, or of progress.json beside the weights of a pretraining run.

        Raises:
            InputError: the file is missing or damaged.
        """
        name, needs = (FINETUNED, []) if self.run is None else (PROGRESS, ['samples'])
        uri = join(self.uri, name)
        if (content := read_file(uri)) is None:
            raise InputError(f'{uri} is missing: {REMEDY}')
        return parse_json(content, uri, needs, REMEDY)

    def read_record(self) -> Pretraining | None:
        """The record of the pretraining run; None for a fine-tuned model.

        Raises:
            InputError: a run has no record, or a damaged one.
        """
        record = read_record(self.run) if self.run else None
        if self.run and record is None:
            uri = join(self.run, RECORD)
            raise InputError(f'{uri} is missing: restore the file, since records of this checkpoint name its run')
        return record


def find_encoder(checkpoint: str) -> EncoderFolder | None:
    """The folder of our own encoder that ``checkpoint`` names, or None if only Hugging Face can know that name.

    Args:
        checkpoint: a run folder, which stands for its newest checkpoint, one of its checkpoints, or the folder of a
            fine-tuned model.

    Raises:
        InputError: the name is empty, the run has no checkpoint, a checkpoint has no weights, or the s3:// address is
            empty.
    """
    if not checkpoint:  # of an unset variable of the shell
        raise InputError('the checkpoint is an empty name: name a run folder or a checkpoint')
    uri = checkpoint.rstrip('/') or '/'
    is_remote, seen = is_s3(uri), set[str]()
    if not is_remote and os.path.basename(uri) in ('.', '..'):
        uri = os.path.abspath(uri)  # the parent of a checkpoint is its run
    while not is_remote and Path(uri).is_symlink() and uri not in seen:  # a link may lead to `latest`
        seen.add(uri)
        parent = os.path.dirname(uri) or '.'
        if os.path.basename(uri) == LATEST and RECIPE in list_names(parent):
            read_latest(parent)  # raises if it leads to another run
        uri = os.path.join(parent, os.readlink(uri)).rstrip('/')
    names = list_names(uri)
    if FINETUNED in names:
        return EncoderFolder(uri, None)
    if PROGRESS in names and WEIGHTS not in names:
        raise InputError(f'{join(uri, WEIGHTS)} is missing: {REMEDY}')
    if WEIGHTS in names and HUGGING_FACE_CONFIG not in names:
        return EncoderFolder(uri, os.path.dirname(uri) or '.')
    parent, name = os.path.split(uri)
    run = (parent or '.') if name == LATEST and (is_remote or Path(uri).is_file()) else uri
    if RECIPE in names or run != uri:
        newest = read_latest(run)
        if newest is None:
            raise InputError(f'{run} holds no checkpoint yet')
        return EncoderFolder(join(run, newest), run)
    if is_remote:
        raise InputError(f'{checkpoint} holds neither a run nor a checkpoint')
    return None


def read_latest(run: str) -> str | None:
    """Name of the newest complete checkpoint of a pretraining run; None if there is none yet.

    A copy of a local run, made by a tool that skips links, has no ``latest``; its checkpoints are whole.

    Raises:
        InputError: ``latest`` is a folder, as in a copy made by a tool that follows links, or has another name than
            that of a checkpoint in ``run``.
    """
    uri, is_remote = join(run, LATEST), is_s3(run)
    name = None
    if not is_remote and os.path.islink(uri):
        target = os.path.normpath(os.path.join(run, os.readlink(uri)))
        is_own = os.path.realpath(os.path.dirname(target)) == os.path.realpath(run)
        name = os.path.basename(target) if is_own else target
    elif is_remote or Path(uri).is_file():  # a file: copied from an object store
        content = read_file(uri)
        name = None if content is None else content.decode(errors='replace').strip()
    if name is not None:
        if not name.startswith(CHECKPOINT_PREFIX) or '/' in name:
            raise InputError(f'{uri} must hold the name of a checkpoint in {run}, not {name!r}: look there')
        return name
    if list_names(uri):
        raise InputError(f'{uri} is a folder: replace it by a file that holds the name of the newest checkpoint')
    whole = [] if is_remote else [path.parent.name for path in Path(run).glob(f'{CHECKPOINT_PREFIX}*/{PROGRESS}')]
    return max(whole, default=None)


def list_checkpoints(run: str) -> list[EncoderFolder]:
    """The checkpoints of a pretraining run, oldest first.

    Left out are those later than ``latest``, which may be incomplete, and in a bucket those without progress.json, the
    last file to be sent.
    """
    return [EncoderFolder(join(run, name), run) for name, is_whole in _find_checkpoints(run).items() if is_whole]


def list_outdated(run: str, keep: int) -> list[str]:
    """The names of the checkpoints before the newest ``keep`` ones, and of what is left of one before them."""
    found = _find_checkpoints(run)
    kept = [name for name, is_whole in found.items() if is_whole][-keep:]
    return [name for name in found if kept and name < kept[0]]


def _find_checkpoints(run: str) -> dict[str, bool]:
    """The names of the checkpoints up to ``latest``, sorted, and whether they are whole."""
    newest = read_latest(run) or ''
    if is_s3(run):
        files = {name for name in list_names(run, recursive=True) if name.startswith(CHECKPOINT_PREFIX)}
        found = {name: f'{name}/{PROGRESS}' in files for name in {file.split('/')[0] for file in files}}
    else:
        found = {path.name: True for path in Path(run).glob(f'{CHECKPOINT_PREFIX}*')}
    return {name: found[name] for name in sorted(found) if name <= newest}


def read_record(run: str) -> Pretraining | None:
    """The record in the folder ``run``, local or s3://; None if no run has begun there.

    Raises:
        InputError: the file is no pretraining record.
    """
    uri = join(run, RECORD)
    content = read_file(uri)
    return None if content is None else parse_pretraining(content, uri)


def read_model_config(checkpoint: EncoderFolder) -> ModelConfig:
    """The model section of a run's recipe, or of a fine-tuned model's description. Raises as :func:`read_recipe`."""
    if checkpoint.run is None:
        try:
            plain: dict[str, Any] = checkpoint.read_description()['config'] | {'decoder': None}
            for field in dataclasses.fields(ModelConfig):
                if isinstance(field.default, Enum) and field.name in plain:  # a later key has its default
                    plain[field.name] = type(field.default)[plain[field.name]]
            return ModelConfig(**plain)
        except (KeyError, TypeError) as error:
            where = join(checkpoint.uri, FINETUNED)
            raise InputError(f'{where} describes no model of this version ({error}): fine-tune it again') from None
    return read_recipe(checkpoint).model


def read_weights(checkpoint: EncoderFolder) -> tuple[dict[str, 'Tensor'], str]:
    """The tensors by name, and the file's SHA-256 (hex).

    Raises:
        InputError: the file is missing or damaged.
    """
    uri = join(checkpoint.uri, WEIGHTS)
    hashes = checkpoint.read_description().get('hashes', {})
    with _as_local_file(uri) as path:
        digest = hash_file(path)
        if digest != hashes.get(WEIGHTS, digest):
            raise InputError(f'{uri} is damaged: its SHA-256 is not the one written beside it; {REMEDY}')
        try:
            with safe_open(path, 'pt') as file:
                weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        except SafetensorError as error:
            raise InputError(f'{uri} is not a whole safetensors file: {error}; {REMEDY}') from None
    return weights, digest


def take_part(weights: Mapping[str, 'Tensor'], part: str) -> dict[str, 'Tensor']:
    """The ``weights`` of ``part`` ("encoder", "decoder", "head") by their names in it."""
    return {name.removeprefix(f'{part}.'): value for name, value in weights.items() if name.startswith(f'{part}.')}


def read_recipe(checkpoint: EncoderFolder) -> PretrainingConfig:
    """The recipe of a pretraining run.

    Raises:
        InputError: the recipe is missing or cannot be read, or has an interpolation, which a run's own recipe never has
            and which could send a variable of the environment to the place of the shards.
    """
    assert checkpoint.run is not None
    uri = join(checkpoint.run, RECIPE)
    with _as_local_file(uri) as path:
        if b'${' in path.read_bytes():
            raise InputError(f'{uri} contains ${{...}}: a recipe that a run has written does not')
        try:
            return load_config(PretrainingConfig, [str(path)])
        except InputError as error:
            raise InputError(f'{uri}: {str(error).removeprefix(f"{path}: ")}') from None


@contextlib.contextmanager
def _as_local_file(uri: str) -> Iterator[Path]:
    path = Path(uri)
    with tempfile.TemporaryDirectory() as scratch:
        if is_s3(uri):
            path = Path(scratch, path.name)
            if path.name in list_names(os.path.dirname(uri)):
                download(uri, path)
        if not path.exists():
            raise InputError(f'{uri} is missing: {REMEDY}')
        yield path
