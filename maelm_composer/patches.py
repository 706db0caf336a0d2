"""Workarounds for faults of Streaming, Composer and torch. No other module touches their private names
(but ``training/processes.py``: the store through which torch's ranks have met, and ``training/loaders.py``: the start
of torch's loader workers).

Each workaround says which fault it is for; ``tests/test_patches.py`` fails once a version of Composer or Streaming is
another one, or a fault of theirs that the source shows is gone. torch's faults are not looked for.
"""

import atexit
import contextlib
import errno
import gc
import os
import random
import signal
import socket
import tempfile
import time
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from multiprocessing.shared_memory import SharedMemory as Segment
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import streaming.base.dataset
import streaming.base.shared.array
import streaming.base.shared.prefix
import torch.distributed
import torch.utils.data.dataloader
from filelock import FileLock, Timeout
from numpy.typing import NDArray
from streaming import StreamingDataset
from streaming.base.constant import BARRIER_FILELOCK, CACHE_FILELOCK, RESUME
from streaming.base.dataset import _ShardState
from streaming.base.distributed import all_gather_object, barrier, get_local_rank, get_rank
from streaming.base.shared import SharedMemory
from streaming.base.shared.prefix import _get_path
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from maelm_composer.device import MORE_SHARED_MEMORY
from maelm_composer.errors import InputError, explain

if TYPE_CHECKING:  # shards are read without Composer, whose import takes longer than many a use of them
    from composer import Trainer

SECONDS_OF_SILENCE = 30
BOOT_ID = Path('/proc/sys/kernel/random/boot_id')  # Linux; of a machine until it starts again
VERSIONS = {'mosaicml': '0.32.1', 'mosaicml-streaming': '0.13.0'}  # the releases that have the faults


class OwnedMemory(SharedMemory):
    """Shared memory that is released together with the dataset that created it.

    Streaming keeps every segment that a process has ever opened until the process ends, even those that it opened only
    to see whether their name is free. A few runs in one process, or the segments that some hundred killed jobs left
    behind, then exhaust the open files.

    Raises:
        InputError: /dev/shm is full; without its pages, the first access to the segment would kill the process.
    """

    def __init__(
        self, name: str | None = None, create: bool | None = None, size: int = 0, auto_cleanup: bool = True
    ) -> None:
        super().__init__(name, create, size, auto_cleanup=False)
        if self.created_shms and hasattr(os, 'posix_fallocate'):
            try:
                os.posix_fallocate(self.shm._fd, 0, self.shm.size)  # type: ignore[attr-defined]
            except OSError as error:
                _remove_segments(self.created_shms)
                raise InputError(f'{size:,} bytes of shared memory: {error.strerror}; {MORE_SHARED_MEMORY}') from None
        if auto_cleanup:  # opened segments are closed by their own destructors
            weakref.finalize(self, _run_in, os.getpid(), _remove_segments, self.created_shms)


def _run_in(owner: int, function: Callable[..., None], *arguments: Any) -> None:
    if os.getpid() == owner:  # a forked loader worker holds only a copy
        function(*arguments)


def _remove_segments(segments: list[Segment]) -> None:
    for segment in segments:
        with contextlib.suppress(FileNotFoundError):  # another rank has removed it
            segment.unlink()
        segment.close()


for _module in (streaming.base.dataset, streaming.base.shared.array, streaming.base.shared.prefix):
    _module.__dict__['SharedMemory'] = OwnedMemory


class RobustLoaderIterator(_MultiProcessingDataLoaderIter):
    """The iterator of a DataLoader with workers: if its queues cannot be made, its workers end without a traceback.

    torch kills the workers of a half-made iterator by SIGTERM. A worker that has just been forked still has its
    parent's handler: if this raises, as Ray's does, the worker goes on with its parent's program.

    Raises:
        InputError: /dev/shm is full.
    """

    def __init__(self, loader: DataLoader) -> None:
        # torch sets it last; by it, a worker is asked to end.
        self._workers_status = defaultdict(lambda: True)  # type: ignore[assignment]
        try:
            super().__init__(loader)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise InputError(f'the queues of the loader workers: {error.strerror}; {MORE_SHARED_MEMORY}') from None

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # which __init__ has not come to
            super().__del__()


torch.utils.data.dataloader._MultiProcessingDataLoaderIter = RobustLoaderIterator  # type: ignore[misc]


def _find_prefix_together(*arguments: Any, **named: Any) -> int:
    """The shared-memory prefix that the local leader finds free: another job may end between two ranks' looks."""
    return all_gather_object(_find_prefix(*arguments, **named))[get_rank() - get_local_rank()]


_find_prefix = streaming.base.shared.prefix._check_and_find_retrying
streaming.base.shared.prefix._check_and_find_retrying = _find_prefix_together


def choose_samples(
    samples_per_shard: NDArray[np.int64], choose: int, granularity: int, seed: int, epoch: int, use_epoch: bool
) -> NDArray[np.int64]:
    """How many rows of each shard an epoch has, as Streaming chooses them: by a permutation of all rows.

    Streaming counts the permutation in a loop of Python, for a minute at 70 million rows, while all ranks wait.
    """
    sizes = samples_per_shard
    if granularity != 1 or not 0 < choose < sizes.sum():
        return _choose_samples(sizes, choose, granularity, seed, epoch, use_epoch)
    order = np.random.default_rng(seed + epoch if use_epoch else seed).permutation(int(sizes.sum()))
    left_out = np.searchsorted(sizes.cumsum(), order[choose:], 'right')
    return sizes - np.bincount(left_out, minlength=len(sizes))


_choose_samples = streaming.base.dataset.get_sampling
streaming.base.dataset.get_sampling = choose_samples


class RobustStreamingDataset(StreamingDataset):
    """StreamingDataset that reports failed downloads and leaves nothing behind.

    Streaming 0.13.0 has these faults: two jobs that start at the same moment choose the same shared-memory prefix; a
    job takes over the position that a killed job left under its prefix; an epoch whose download thread fails ends
    early, as if it were complete; the threads of an abandoned epoch wait until the process ends; every row takes a file
    lock; the locks' files stay, and every further dataset looks at all of them; a second ``load_state_dict`` writes to
    a segment that nobody reads; a row read by its index comes from a file that nobody has compared with its hash.
    """

    def __init__(self, **arguments: Any) -> None:
        with _one_job_at_a_time():
            super().__init__(**arguments)
        self.current_epoch = -1
        self._failure: Exception | None = None
        self._present_shards: set[int] = set()
        if self._unique_rank_world.is_local_leader:
            with contextlib.suppress(FileNotFoundError):
                _remove_segments([Segment(_get_path(self._shm_prefix_int, RESUME))])
            for name in (BARRIER_FILELOCK, CACHE_FILELOCK):
                lock = Path(self._filelock_root, _get_path(self._shm_prefix_int, name))
                weakref.finalize(self, _run_in, os.getpid(), lock.unlink, True)
        barrier()

    def __iter__(self) -> Iterator[Any]:
        threads = None
        try:
            for item in super().__iter__():
                threads = self._iterator
                yield item
        except RuntimeError:
            if self._failure is None:
                raise
        finally:
            if threads is not None:
                threads.non_blocking_exit()
        if self._failure is not None:
            raise self._failure from None

    def prepare_shard(self, shard_id: int, blocking: bool = True) -> None:
        """Fetch a shard that is not present. A failure in a download thread is raised by :meth:`__iter__`."""
        # A blocking call means that a row was just found missing, so the shard must be looked for again.
        if not blocking and shard_id in self._present_shards:
            return
        try:
            super().prepare_shard(shard_id, blocking)
        except Exception as error:
            self._failure = InputError(explain(error)) if isinstance(error, (InputError, OSError)) else error
            # Workers that wait for this shard wait for the state LOCAL; they then miss the file, try to fetch the shard
            # themselves, and raise the same error.
            self._shard_states[shard_id] = _ShardState.LOCAL
            if blocking:
                raise self._failure from None
            self._event.set()
            return
        if self._shard_states[shard_id] == _ShardState.LOCAL:
            self._present_shards.add(shard_id)

    def get_item(self, sample_id: int, retry: int = 7) -> Any:
        shard_id, _ = self.spanner[sample_id]
        if shard_id not in self._present_shards:
            self.prepare_shard(shard_id)
        return super().get_item(sample_id, retry)

    def load_state_dict(self, obj: dict[str, Any]) -> None:
        first = getattr(self, '_resume_shm', None)
        super().load_state_dict(obj)
        self._resume_shm = first or self._resume_shm

    def _resume_incr_epoch(self) -> tuple[int, int]:
        self.current_epoch, sample_in_epoch = super()._resume_incr_epoch()
        return self.current_epoch, sample_in_epoch


@contextlib.contextmanager
def _one_job_at_a_time() -> Iterator[None]:
    """Let one of the user's jobs on these machines choose its shared-memory prefix at a time. Called by every rank."""
    gc.collect()  # so that the prefix of an earlier dataset of this process is free on every rank or on none
    # Machines may share TMPDIR, but not their memory. Containers of a machine may share both.
    machine = BOOT_ID.read_text().strip() if BOOT_ID.exists() else socket.gethostname()
    lock = FileLock(Path(tempfile.gettempdir(), f'maelm-{os.getuid()}-{machine}.lock'), blocking=False)
    start: float | None = time.monotonic()
    try:
        while True:
            if get_local_rank() == 0:
                with contextlib.suppress(Timeout):
                    lock.acquire()
            holds = get_local_rank() != 0 or lock.is_locked
            if all(all_gather_object(holds) if torch.distributed.is_initialized() else [holds]):
                break
            # A job that waited for one machine while it held another could meet a job that does the reverse.
            lock.release()
            time.sleep(random.uniform(0.02, 0.2))
            if start is not None and get_local_rank() == 0 and time.monotonic() - start > SECONDS_OF_SILENCE:
                print(f'waiting for another job of yours, which opens its data: it holds {lock.lock_file}', flush=True)
                start = None
        yield
    finally:
        lock.release()


def release_trainer(trainer: 'Trainer') -> None:
    """Close ``trainer`` and drop the references that Composer (an exit handler) and torch 2.7 (a cache) keep to it.

    torch's handler of SIGCHLD raises an error where a loader worker has died, and Composer prints a traceback of every
    error while it closes. The training has ended by then, or has failed because of that death.
    """
    from torch.distributed.checkpoint import state_dict

    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        trainer.engine.close()  # Trainer.close() also waits for the other ranks, which may have failed
    finally:
        signal.signal(signal.SIGCHLD, handler)
    atexit.unregister(trainer.engine._close)
    if hasattr(state_dict._get_fqns, 'cache_clear'):
        state_dict._get_fqns.cache_clear()


def keep_buffers_from_ddp(model: torch.nn.Module) -> None:
    """DDP sends a model's buffers from the first rank at every step; ours are constants, equal on all ranks."""
    model._ddp_params_and_buffers_to_ignore = [name for name, _ in model.named_buffers()]  # type: ignore[assignment]


def allow_graphs() -> None:
    """Let torch.compile make up to 32 graphs of one function; after 8, torch runs the function uncompiled.

    Where FSDP2 breaks the graph of a model, the layers of the encoder, those of the decoder and its last one share a
    function, with a graph each for training and validation, whole batches and smaller last ones: 12.
    """
    from torch import _dynamo  # whose import takes a second

    _dynamo.config.recompile_limit = 32  # type: ignore[attr-defined]


def silence_warnings() -> None:
    """Filter warnings of Composer and torch that a user can do nothing about."""
    for message in (
        'FSDP2 Config/APIs are experimental',
        'TypedStorage is deprecated',
        'No batches were trained',  # a run that resumes at the very end of an epoch
        'Cannot split tensor of length',  # the last microbatch may be smaller
    ):
        warnings.filterwarnings('ignore', message=f'.*{message}')
