"""Saving and finding checkpoints so that a kill at any moment costs only the batches since the last one.

Composer 0.32.1 writes a checkpoint straight to its final name and removes the "latest" link before it makes the new
one, so a kill in between leaves half a file or no link; here a checkpoint is staged, then renamed, then linked.
"""

import contextlib
import copyreg
import ctypes
import json
import os
import pickle
import shutil
import signal
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist
from composer.utils.checkpoint import save_checkpoint
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from maelm_composer.checkpoints.names import METRICS, PROGRESS, SHARDED_STATE, STATE, WEIGHTS, name_checkpoint
from maelm_composer.config import TrainingConfig
from maelm_composer.errors import InputError
from maelm_composer.files import apply_umask, write_json
from maelm_composer.training.callbacks import TrainingClock
from maelm_composer.training.run_folder import RunFolder, refusing_together

METADATA = '.metadata'  # torch's name: where in the shards each tensor lies
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
ANOTHER = 'name an older checkpoint in `latest`, or choose another run_name'
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Checkpoints(Callback):
    """Saves at the first batch at or after every interval, at the end, and when told to stop."""

    def __init__(self, folder: RunFolder, clock: TrainingClock, training: TrainingConfig) -> None:
        self.folder, self.clock = folder, clock
        self.interval_samples, self.keep = training.checkpoint_interval_samples, training.checkpoints_to_keep
        self._signal = 0
        self._handlers: dict[int, Any] = {}

    def fit_start(self, state: State, logger: Logger) -> None:
        for number in STOP_SIGNALS:
            self._handlers[number] = signal.signal(number, self._note)

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        samples = state.timestamp.sample.value
        is_last = samples >= state.max_duration.value  # type: ignore[union-attr]
        stop = self._agree_on_signal(state)
        if stop or is_due(state, self.interval_samples):
            self._save(state)
        if stop and not is_last:
            if dist.get_global_rank() == 0:
                name = signal.Signals(stop).name
                print(f'{name}: saved at {samples:,} samples; the same command goes on from there', flush=True)
            raise SystemExit(128 + stop)

    def close(self, state: State, logger: Logger) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()

    def _note(self, number: int, frame: Any) -> None:
        """Leave the batch in hand whole; Ctrl-C once more ends the process at once.

        SIGTERM may come twice for one: to the whole process group, and from the launcher, which is in it.
        """
        self._signal = number
        if number == signal.SIGINT:
            signal.signal(number, self._handlers[number])

    def _agree_on_signal(self, state: State) -> int:
        """A signal reaches the ranks at different batches; all act on it at the same one."""
        if dist.get_world_size() == 1:
            return self._signal
        told = state.device.tensor_to_device(torch.tensor([self._signal]))
        dist.all_reduce(told, reduce_operation='MAX')
        return int(told.item())

    def _save(self, state: State) -> None:
        staged = self.folder.local / '.saving'
        name = name_checkpoint(state.timestamp.sample.value)
        try:
            if dist.get_local_rank() == 0:
                shutil.rmtree(staged, ignore_errors=True)
            dist.barrier()
            staged.mkdir(parents=True, exist_ok=True)  # several nodes may share the disk
            self._stage(state, staged)
        except (OSError, RuntimeError, CheckpointException, SafetensorError) as error:
            shutil.rmtree(staged, ignore_errors=True)
            before = self.folder.latest()
            raise InputError(
                f'checkpoint {name} could not be written to {self.folder.local}: {_reason(error)}; '
                + (f'the one before it ({before}) is whole' if before else 'there is none before it')
            ) from error
        self.folder.publish(staged, name, with_file=METRICS)
        if dist.get_global_rank() == 0 and self.keep > 0:
            # Later ones than this were never whole, or a kill came before they were named the latest.
            whole = [there for there in self.folder.checkpoints() if there <= name]
            for outdated in whole[: -self.keep]:
                self.folder.remove(outdated)

    def _stage(self, state: State, staged: Path) -> None:
        """Composer's state, the weights alone for whoever only wants those, and where the run stood."""
        save_checkpoint(state, str(staged / STATE), ignore_keys=drop_what_differs)
        dist.barrier()  # every rank has found its own shard where Composer looks for it
        if dist.get_local_rank() == 0:
            for shards in staged.glob('ep*-ba*'):
                with contextlib.suppress(FileNotFoundError):  # another node on the same disk was faster
                    shards.rename(staged / SHARDED_STATE)
        if dist.get_global_rank() == 0 and (metadata := staged / SHARDED_STATE / METADATA).exists():
            write_portably(metadata)
        weights: dict[str, Any] = get_model_state_dict(
            state.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
        )
        if dist.get_global_rank() == 0:
            plain = {key.removeprefix('model.'): value.contiguous() for key, value in weights.items()}
            save_file(plain, staged / WEIGHTS, metadata={'format': 'pt'})
            apply_umask(staged / WEIGHTS)
            at = state.timestamp
            seconds = self.clock.seconds
            progress = {'samples': at.sample.value, 'batch': at.batch.value, 'training_seconds': seconds}
            write_json(staged / PROGRESS, progress)
        if dist.get_local_rank() == 0:
            for path in staged.rglob('*'):
                if path.is_file():
                    with path.open('rb') as file:
                        os.fsync(file.fileno())


class _PortablePickler(pickle.Pickler):
    def reducer_override(self, thing: Any) -> Any:
        if type(thing) is not TensorProperties:
            return NotImplemented
        # The five that torch 2.7 takes, and every later one too; 2.15 adds the strides, of which nothing is read.
        return copyreg.__newobj__, (TensorProperties,), thing.__getstate__()[:5]  # type: ignore[attr-defined]


def write_portably(metadata: Path) -> None:
    """Write the metadata of a sharded checkpoint anew, such that other versions of torch can read them."""
    content = pickle.loads(metadata.read_bytes())  # written by this process
    with metadata.open('wb') as file:
        _PortablePickler(file).dump(content)


def _reason(error: BaseException) -> str:
    """torch.save on a full disk raises what its writer stumbled over; the operating system's word lies beneath."""
    beneath: BaseException | None = error
    while beneath is not None:
        if isinstance(beneath, OSError) and beneath.strerror:
            return beneath.strerror
        beneath = beneath.__cause__ or beneath.__context__
    return ' '.join(str(error).split())


def follow_launcher() -> None:
    """A launcher that is killed cannot tell its ranks: have the kernel send this one a SIGTERM then."""
    if 'LOCAL_RANK' in os.environ and sys.platform == 'linux':
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))


def is_due(state: State, interval_samples: int) -> bool:
    """Whether this is the first batch at or after an interval, or the last one of the run."""
    samples, before = state.timestamp.sample.value, state.previous_timestamp.sample.value  # type: ignore[union-attr]
    is_last = samples >= state.max_duration.value  # type: ignore[union-attr]
    return is_last or samples // interval_samples > before // interval_samples


def drop_what_differs(checkpoint: dict[str, Any]) -> None:
    """A checkpoint does not depend on what may differ from one start to the next: loggers, torch."""
    checkpoint['state'].pop('callbacks', None)
    for schedule in checkpoint['state'].get('schedulers', {}).values():
        schedule.pop('_is_initial', None)  # torch 2.7 has not got it, and it is False once a schedule is there


@dataclass(frozen=True)
class Checkpoint:
    """Where a run can go on from."""

    state: Path  # what the Trainer loads
    samples: int
    training_seconds: float


def find_checkpoint(folder: RunFolder, model: nn.Module, is_sharded: bool) -> Checkpoint | None:
    """The newest whole checkpoint, or None. Called by every rank.

    Raises:
        InputError: it holds other weights than this model's, or was written under another kind of sharding.
    """
    with refusing_together():
        names = [folder.latest() if dist.get_global_rank() == 0 else None]
    dist.broadcast_object_list(names, src=0)
    if names[0] is None:
        return None
    checkpoint = folder.fetch(names[0])
    with refusing_together():  # a node may not see the disk of the others
        _assert_fits(checkpoint / WEIGHTS, model)
        state = checkpoint / (SHARDED_STATE if is_sharded else STATE)
        if not state.exists():
            raise InputError(
                f'{checkpoint} was written with training.sharding '
                f'{"ddp" if is_sharded else "shard_grad_op or full_shard"}: go on with it, or choose another run_name'
            )
        if state.is_file() and not zipfile.is_zipfile(state):
            raise InputError(f'{state} is damaged: {ANOTHER}')
        if state.is_dir():
            _assert_readable(state)
        progress = json.loads((checkpoint / PROGRESS).read_text(encoding='utf-8'))
    return Checkpoint(state, progress['samples'], progress['training_seconds'])


def _assert_readable(shards: Path) -> None:
    try:
        FileSystemReader(shards).read_metadata()
    except Exception as error:  # unpickling raises whatever the other torch's classes make of it
        raise InputError(
            f'{shards} is damaged, or written by a torch whose checkpoints torch {torch.__version__} cannot read '
            f'({_reason(error) or type(error).__name__}): go on with that torch, or {ANOTHER}'
        ) from None


def _assert_fits(weights: Path, model: nn.Module) -> None:
    try:
        with safe_open(weights, 'pt') as file:
            saved = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 - not a dict
    except SafetensorError as error:
        raise InputError(f'{weights} is damaged ({error}): {ANOTHER}') from None
    wanted = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    for key in sorted(saved.keys() | wanted.keys()):
        if saved.get(key) != wanted.get(key):
            raise InputError(
                f'{weights.parent} does not fit the recipe: {key} is {saved.get(key, "not there")} in the checkpoint, '
                f'{wanted.get(key, "not there")} in the model'
            )
