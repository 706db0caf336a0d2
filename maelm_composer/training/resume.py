"""Finds the checkpoint from which a run resumes, and checks that the run can load it."""

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer.utils import dist
from safetensors import SafetensorError, safe_open
from torch import nn

from maelm_composer.checkpoints.names import METRICS, PROGRESS, SHARDED_STATE, STATE, WEIGHTS
from maelm_composer.errors import InputError
from maelm_composer.files import hash_file, parse_json
from maelm_composer.training.ranks import raise_on_all_ranks
from maelm_composer.training.run_folder import RunFolder
from maelm_composer.training.safe_state import OLDER, assert_metadata_is_data


@dataclass(frozen=True)
class ResumePoint:
    """Where a run goes on: at a complete checkpoint, or, with the defaults, at its begin."""

    state: Path | None = None  # what the Trainer loads
    samples: int = 0
    training_seconds: float = 0.0
    device_seconds: float = 0.0  # training_seconds, summed over the ranks
    log: str = ''  # metrics.csv up to there


def find_resume_point(folder: RunFolder, model: nn.Module, is_sharded: bool) -> ResumePoint:
    """The newest complete checkpoint of ``folder``, or the begin if there is none. Called by every rank.

    Raises:
        InputError: the checkpoint is damaged, its weights do not fit ``model``, or it has another sharding.
    """
    folder.recover()
    with raise_on_all_ranks():
        latest = folder.latest() if dist.get_global_rank() == 0 else None
    latest = dist.all_gather_object(latest)[0]
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
            assert_metadata_is_data(state)
        log = checkpoint / METRICS
        # Checkpoints of version 0.1 hold no log.
        text = log.read_text(encoding='utf-8') if log.exists() else folder.read(METRICS) or ''
    seconds = progress['training_seconds']
    device_seconds = progress.get('device_seconds', seconds * dist.get_world_size())  # version 0.1 has none
    return ResumePoint(state, progress['samples'], seconds, device_seconds, text)


def _read_progress(checkpoint: Path) -> dict[str, Any]:
    """The content of progress.json; the other files are compared with the hashes in it."""
    path = checkpoint / PROGRESS
    if not path.exists():
        raise InputError(f'{path} is missing: {OLDER}')
    progress = parse_json(path.read_text(encoding='utf-8'), str(path), ('samples', 'training_seconds'), OLDER)
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
    expected = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    for key in sorted(saved.keys() | expected.keys()):
        if saved.get(key) != expected.get(key):
            raise InputError(
                f'{weights.parent} does not fit the recipe: {key} is {saved.get(key, "missing")} in the checkpoint, '
                f'{expected.get(key, "missing")} in the model'
            )
