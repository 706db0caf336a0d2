"""Finds the checkpoint from which a run resumes, and checks that the run can load it."""

import json
import zipfile
from dataclasses import dataclass
from pathlib import Path

from composer.utils import dist
from safetensors import SafetensorError, safe_open
from torch import nn

from maelm_composer.checkpoints.names import PROGRESS, SHARDED_STATE, STATE, WEIGHTS
from maelm_composer.errors import InputError
from maelm_composer.training.ranks import raise_on_all_ranks
from maelm_composer.training.run_folder import RunFolder
from maelm_composer.training.safe_state import OLDER, assert_metadata_is_data


@dataclass(frozen=True)
class ResumePoint:
    """A complete checkpoint from which a run resumes."""

    state: Path  # what the Trainer loads
    samples: int
    training_seconds: float


def find_resume_point(folder: RunFolder, model: nn.Module, is_sharded: bool) -> ResumePoint | None:
    """The newest complete checkpoint of ``folder``, or None. Called by every rank.

    Raises:
        InputError: the checkpoint is damaged, its weights do not fit ``model``, or it has another sharding.
    """
    folder.recover()
    with raise_on_all_ranks():
        names = [folder.latest() if dist.get_global_rank() == 0 else None]
    dist.broadcast_object_list(names, src=0)
    if names[0] is None:
        return None
    checkpoint = folder.fetch(names[0])
    with raise_on_all_ranks():  # a node may not share the disk of the others
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
        progress = json.loads((checkpoint / PROGRESS).read_text(encoding='utf-8'))
    return ResumePoint(state, progress['samples'], progress['training_seconds'])


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
