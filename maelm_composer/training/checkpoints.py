"""Writes checkpoints such that a kill at any moment loses only the batches since the last one.

Composer 0.32.1 writes a checkpoint under its final name and removes the "latest" link before it makes the new one, so a
kill leaves a truncated file or no link. Here a checkpoint is written to a temporary folder, which is renamed and then
linked.
"""

import contextlib
import copyreg
import os
import pickle
import re
import shutil
import time
from collections import ChainMap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed import checkpoint as distributed
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from maelm_composer.checkpoints.find import list_outdated, read_latest
from maelm_composer.checkpoints.names import METRICS, PROGRESS, SHARDED_STATE, STATE, WEIGHTS, name_checkpoint
from maelm_composer.config import TrainingConfig
from maelm_composer.data.storage import Outage, OutageError
from maelm_composer.errors import InputError, Stopped, explain
from maelm_composer.files import apply_umask, hash_file, write_json
from maelm_composer.training.callbacks import MetricsLog, TrainingClock
from maelm_composer.training.ending import FAILED, StopSignals
from maelm_composer.training.processes import raise_on_all_ranks, take_from_first_rank
from maelm_composer.training.run_folder import RunFolder

STAGED = '.saving'  # begins the name of a checkpoint that is being written
METADATA = '.metadata'  # torch's file about the tensors in the shards


class CheckpointSaver(Callback):
    """Saves at the first batch at or after every interval, at the end, and on a stop signal."""

    def __init__(
        self,
        folder: RunFolder,
        clock: TrainingClock,
        log: MetricsLog,
        training: TrainingConfig,
        say: Callable[[str], None],
    ) -> None:
        self.folder, self.clock, self.log, self.say = folder, clock, log, say
        self.max_outage_minutes, self.outage = training.max_outage_minutes, Outage(training.max_outage_minutes)
        self.interval_samples, self.keep = training.checkpoint_interval_samples, training.checkpoints_to_keep
        self.signals = StopSignals()

    def fit_start(self, state: State, logger: Logger) -> None:
        self.signals.install()
        if dist.get_global_rank() == 0 or (self.folder.is_remote and dist.get_local_rank() == 0):
            for left in self.folder.local.glob(f'{STAGED}*'):  # by a killed process
                shutil.rmtree(left, ignore_errors=True)

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        samples = state.timestamp.sample.value
        stop = self.signals.agree(state.device, has_failed=self.log.error is not None)
        if stop == FAILED:
            with raise_on_all_ranks():
                if error := self.log.error:
                    raise InputError(f'{self.log.path} could not be written: {describe_cause(error)}{self._hint()}')
        if stop or is_due(state, self.interval_samples):
            self._save(state)
        if self.folder.unsent:
            self._send(state, now=stop > 0)
        while is_last(state) and self.folder.unsent and not stop:
            time.sleep(0.5)
            stop = self.signals.agree(state.device)
            self._send(state)
        if is_last(state) and not stop:  # the last save and upload take the longest
            stop = self.signals.agree(state.device)
        if stop:  # after the last batch, too: the caller, as a suite, must not go on
            where = f' in {self.folder.local}, not yet in {self.folder.uri}' if self.folder.unsent else ''
            raise Stopped(stop, f'saved at {samples:,} samples{where}')

    def close(self, state: State, logger: Logger) -> None:
        self.signals.restore()

    def _save(self, state: State) -> None:
        name = name_checkpoint(state.timestamp.sample.value)
        # Not one name for all checkpoints: on NFS another node may still take the last one's new place for it.
        staged = self.folder.local / f'{STAGED}-{name}'
        try:
            self._stage(state, staged)
        except InputError as error:
            shutil.rmtree(staged, ignore_errors=True)
            where = f'could not be written to {self.folder.local}'
            raise InputError(f'checkpoint {name} {where}: {error}{self._hint()}') from error
        self.folder.publish(staged, name)
        if not self.folder.is_remote:
            self._remove_outdated()

    def _hint(self) -> str:
        with contextlib.suppress(InputError):  # as of an outage
            before = read_latest(self.folder.uri)
            return f'; the previous checkpoint ({before}) is complete' if before else '; there is no previous one'
        return ''

    def _send(self, state: State, now: bool = False) -> None:
        """Upload the checkpoints that wait, if another try is due or ``now``, since the run is to stop.

        Raises:
            InputError: the outage has lasted for ``training.max_outage_minutes``.
        """
        if not take_from_first_rank(now or self.outage.is_due):  # every rank has its own clock
            return
        folder = self.folder
        try:
            folder.send()
        except OutageError as error:
            is_first = self.outage.note()
            if take_from_first_rank(self.outage.is_over_limit):
                samples = state.timestamp.sample.value
                if folder.unsent[-1] != name_checkpoint(samples):
                    self._save(state)
                raise InputError(
                    f'{error}; no answer for {self.max_outage_minutes:g} minutes (training.max_outage_minutes): saved '
                    f'at {samples:,} samples in {folder.local}; the same command resumes the run'
                ) from None
            if is_first and not now:
                goes_on = 'is over' if is_last(state) else 'goes on'
                self.say(
                    f'{error}: training {goes_on}, the upload is tried again for {self.max_outage_minutes:g} minutes '
                    f'(training.max_outage_minutes)'
                )
        else:
            if self.outage.since is not None:
                self.say(f'{folder.uri} answers after {self.outage.seconds:.0f} s: every checkpoint is uploaded')
            self.outage = Outage(self.max_outage_minutes)
            self._remove_outdated()

    def _remove_outdated(self) -> None:
        if dist.get_global_rank() == 0 and self.keep > 0:
            try:
                for outdated in list_outdated(self.folder.uri, self.keep):
                    self.folder.remove(outdated)
            except (OSError, InputError) as error:  # as on NFS while another process reads one, or in an outage
                self.say(f'outdated checkpoints are to be removed at the next one: {explain(error)}')

    def _stage(self, state: State, staged: Path) -> None:
        """Write Composer's state, the weights alone (for fine-tuning and analysis) and the progress into ``staged``."""
        is_first = dist.get_global_rank() == 0
        with fail_together():
            staged.mkdir(parents=True, exist_ok=True)  # several nodes may share the disk
        # Not by Composer's save_checkpoint, which leaves the other ranks in a barrier if one cannot write.
        content = {'state': state.state_dict()}
        drop_unportable(content)
        with fail_together():
            if state.fsdp_sharded_state_dict_enabled:
                planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
                distributed.save(content, storage_writer=FileSystemWriter(staged / SHARDED_STATE), planner=planner)
            elif is_first:
                with (staged / STATE).open('wb') as file:
                    torch.save(content, file)
        weights: dict[str, Any] = get_model_state_dict(
            state.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
        )
        with fail_together():
            if is_first:
                if (metadata := staged / SHARDED_STATE / METADATA).exists():
                    make_portable(metadata)
                plain = {key.removeprefix('model.'): value.contiguous() for key, value in weights.items()}
                save_file(plain, staged / WEIGHTS, metadata={'format': 'pt'})
                apply_umask(staged / WEIGHTS)
                shutil.copyfile(self.folder.local / METRICS, staged / METRICS)
        hashes = {}
        with fail_together():
            for path in staged.rglob('*'):
                if path.is_file() and find_writer(path) == dist.get_global_rank():
                    hashes[str(path.relative_to(staged))] = hash_file(path)
                    _flush(path)
        parts = dist.all_gather_object(hashes)
        with fail_together():
            if is_first:
                progress = {
                    'samples': state.timestamp.sample.value,
                    'batch': state.timestamp.batch.value,
                    'training_seconds': self.clock.seconds,
                    'device_seconds': self.clock.device_seconds,
                    'hashes': dict(sorted(ChainMap(*parts).items())),
                }
                write_json(staged / PROGRESS, progress)
                _flush(staged / PROGRESS)


@contextlib.contextmanager
def fail_together() -> Iterator[None]:
    """Raise an error that keeps one rank from writing as InputError on every rank. Called by every rank."""
    with raise_on_all_ranks():
        try:
            yield
        except (OSError, RuntimeError, CheckpointException, SafetensorError) as error:
            if str(error).startswith('DataLoader worker'):  # torch's handler of SIGCHLD raises wherever the rank is
                raise
            raise InputError(describe_cause(error)) from error


def find_writer(path: Path) -> int:
    """The rank that wrote a file of a checkpoint: torch names the shards of rank 3 __3_0.distcp, __3_1.distcp, ..."""
    shard = re.match(r'__(\d+)_', path.name)
    return int(shard[1]) if shard else 0


def _flush(path: Path) -> None:
    with path.open('rb') as file:
        os.fsync(file.fileno())


class _PortablePickler(pickle.Pickler):
    def reducer_override(self, thing: Any) -> Any:
        if type(thing) is not TensorProperties:
            return NotImplemented
        # torch 2.7 and every later version read these five values; 2.15 writes the strides too, but never reads them.
        return copyreg.__newobj__, (TensorProperties,), thing.__getstate__()[:5]  # type: ignore[attr-defined]


def make_portable(metadata: Path) -> None:
    """Rewrite the metadata file of a sharded checkpoint so that every tested version of torch can read it."""
    content = pickle.loads(metadata.read_bytes())  # written by this process
    with metadata.open('wb') as file:
        _PortablePickler(file).dump(content)


def is_last(state: State) -> bool:
    """Whether the run has seen all of its rows."""
    return bool(state.timestamp.sample.value >= state.max_duration.value)  # type: ignore[union-attr]


def is_due(state: State, interval_samples: int) -> bool:
    """Whether this is the first batch at or after an interval, or the last one of the run."""
    samples, before = state.timestamp.sample.value, state.previous_timestamp.sample.value  # type: ignore[union-attr]
    return is_last(state) or samples // interval_samples > before // interval_samples


def drop_unportable(checkpoint: dict[str, Any]) -> None:
    """Remove entries that depend on the loggers, the version of torch or the device, which may change between starts.

    Nothing needs those of the device: fp32 weights have no loss scale, and every batch is seeded anew (``rng`` is of
    earlier checkpoints).
    """
    checkpoint.pop('rng', None)
    checkpoint['state'].pop('callbacks', None)
    checkpoint['state'].pop('scaler', None)  # without entries on a CPU, which a GPU refuses
    for schedule in checkpoint['state'].get('schedulers', {}).values():
        schedule.pop('_is_initial', None)  # torch 2.7 lacks it; it is always False once the schedule exists


def describe_cause(error: BaseException) -> str:
    """The operating system's message if an OSError caused ``error``, as in torch.save on a full disk."""
    if isinstance(error, CheckpointException):  # whose own text holds the traceback of every rank that failed
        (error, _), *_ = error.failures.values()
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    text = ' '.join(str(error).split())
    # PyTorch's words where a write failed; a shard's error comes without the system's reason from another rank.
    return f'a write failed, as on a full disk ({text})' if 'unexpected pos' in text else text
