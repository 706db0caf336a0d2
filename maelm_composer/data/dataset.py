"""Rows of token ids in an order that is a function of (seed, epoch) alone, resumable in mid-epoch.

StreamingDataset keeps the order and the position; :class:`_VerifiedStream` gets the shards. The stock stream writes
into one temporary file from every job that shares a cache, refuses a cache that a killed job still seems to hold
('Reused local directory'), and lets an epoch end early when a download thread fails. Here a shard is fetched, compared
with its hash, unpacked and renamed into place in one atomic step, so any number of jobs, living or dead, can share it.
"""

import contextlib
import fcntl
import gc
import hashlib
import os
import tempfile
import weakref
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory as Segment
from pathlib import Path
from typing import Any

import streaming.base.dataset
import streaming.base.shared.array
import streaming.base.shared.prefix
from streaming import Stream, StreamingDataset
from streaming.base.compression import decompress
from streaming.base.constant import RESUME
from streaming.base.dataset import _ShardState
from streaming.base.distributed import barrier, get_local_rank, get_world_size
from streaming.base.hashing import get_hash
from streaming.base.shared import SharedMemory
from streaming.base.shared.prefix import _get_path

from maelm_composer.config import DataConfig
from maelm_composer.data import storage
from maelm_composer.data.manifest import Manifest
from maelm_composer.data.shards import HASH
from maelm_composer.errors import InputError


class _OwnedMemory(SharedMemory):
    """Shared memory that goes with the dataset that holds it.

    The stock class keeps all it has ever opened, every name it only tried included, until the process ends: a few runs
    in one process, or some hundreds that died on this machine, and there are 'Too many open files'.
    """

    def __init__(
        self, name: str | None = None, create: bool | None = None, size: int = 0, auto_cleanup: bool = True
    ) -> None:
        super().__init__(name, create, size, auto_cleanup=False)
        if auto_cleanup:  # those it opened close themselves
            weakref.finalize(self, _remove, self.created_shms, os.getpid())


def _remove(segments: list[Segment], owner: int) -> None:
    if os.getpid() != owner:  # a loader's worker only has a copy
        return
    for segment in segments:
        with contextlib.suppress(FileNotFoundError):  # someone was faster
            segment.unlink()
        segment.close()


for _module in (streaming.base.dataset, streaming.base.shared.array, streaming.base.shared.prefix):
    _module.__dict__['SharedMemory'] = _OwnedMemory


class _VerifiedStream(Stream):
    """Shards of ``source`` unpacked into ``local``, each compared with its hash when it is fetched."""

    def __init__(self, source: str, local: str) -> None:
        # No remote for the stock stream: it neither downloads nor claims the directory for one job.
        super().__init__(local=local, keep_zip=False)
        self.source = source
        content, cached = storage.read_file(storage.join(source, 'index.json')), os.path.join(local, 'index.json')
        if content is None:
            raise InputError(f'{source}/index.json is missing: run `maelm shards` again')
        if storage.read_file(cached) != content:  # the same rows may have been packed once more, to other bytes
            storage.write_file(cached, content)

    def set_up_local(self, shards: list[Any], cache_usage_per_shard: Any) -> None:
        """No shard counts as here before :meth:`_prepare_shard_part` has looked at it.

        The stock method deletes every unpacked shard without a packed one beside it, under the job that is reading it.
        """

    def _prepare_shard_part(self, raw_info: Any, zip_info: Any = None, compression: str | None = None) -> int:
        target = os.path.join(self.local, raw_info.basename)
        if os.path.isfile(target) and os.path.getsize(target) == raw_info.bytes:
            return 0
        Path(target).unlink(missing_ok=True)  # whoever finds no file fetches it; half a one would be read
        where = storage.join(self.source, zip_info.basename)
        packed = storage.read_file(where)
        if packed is None:
            raise InputError(f'shard {where} is missing: run `maelm shards` again')
        if get_hash(HASH, packed) != zip_info.hashes[HASH]:
            raise InputError(
                f'shard {where} is damaged: its {HASH} is not the one in index.json; make the shards again'
            )
        storage.write_file(target, decompress(compression, packed))
        return raw_info.bytes


class PretrainingRows(StreamingDataset):
    """The rows of a split in whole global batches: 'train' shuffled anew in every pass, 'validation' as they stand.

    Yields ``{'input_ids': (N,) uint16 or uint32, 'row': int, 'epoch': int}``.

    ``row`` is the index in the dataset and ``epoch`` the number of the pass, from 0: enough to draw a mask that depends
    on (seed, epoch, row) alone. The k-th global batch of an epoch holds the same rows for any number of ranks and
    loader workers; rank r has those at r, r + ranks, r + 2 ranks, ... of it.

    Args:
        batch_size: rows per step on this rank, as the DataLoader has it; the global batch is that times the ranks.

    Raises:
        InputError: an index or a shard is not there, or not what its hash says.
    """

    def __init__(self, config: DataConfig, manifest: Manifest, split: str, *, batch_size: int, seed: int) -> None:
        is_train = split == 'train'
        global_batch_size = batch_size * get_world_size()
        stream = _VerifiedStream(storage.join(config.remote, split), str(cache_folder(config, manifest) / split))
        with _take_turns():
            super().__init__(
                streams=[stream],
                # Whole batches, so that the rows of a pass do not depend on how the ranks would share a rest. In
                # training other rows are left out in each pass.
                epoch_size=manifest.splits[split].rows // global_batch_size * global_batch_size or None,
                batch_size=batch_size,
                shuffle=is_train,
                shuffle_seed=seed,
                shuffle_algo='py1e',
                shuffle_block_size=config.shuffle_block_size,
                num_canonical_nodes=1,
                sampling_method='balanced' if is_train else 'fixed',
            )
        self._epoch = -1
        self._failure: Exception | None = None
        self._here: set[int] = set()
        if self._unique_rank_world.is_local_leader:
            _forget_position(self._shm_prefix_int)
        barrier()

    def __getitem__(self, at: Any) -> Any:
        item = super().__getitem__(at)
        return {'input_ids': item['input_ids'].copy(), 'row': int(at), 'epoch': self._epoch}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        threads = None
        try:
            for item in super().__iter__():
                threads = self._iterator
                yield item
        except RuntimeError:
            if self._failure is None:
                raise
        finally:  # left in mid-epoch, they would wait for the next row, and keep all this, until the process ends
            if threads is not None:
                threads.non_blocking_exit()
        if self._failure is not None:  # StreamingDataset would end the epoch here, as if it were complete
            raise self._failure from None

    def prepare_shard(self, shard_id: int, blocking: bool = True) -> None:
        """Fetch a shard if it is not here. In a download thread a failure is kept for :meth:`__iter__` to raise."""
        # The stock method takes a file lock for every row. Blocking, it is called for a row whose shard is not there.
        if not blocking and shard_id in self._here:
            return
        try:
            super().prepare_shard(shard_id, blocking)
        except Exception as error:
            self._failure = InputError(str(error)) if isinstance(error, (InputError, OSError)) else error
            # Those who wait for it wait until it is here: they then miss it, fetch it themselves and fail as this one.
            self._shard_states[shard_id] = _ShardState.LOCAL
            if blocking:
                raise self._failure from None
            self._event.set()
            return
        if self._shard_states[shard_id] == _ShardState.LOCAL:
            self._here.add(shard_id)

    def load_state_dict(self, obj: dict[str, Any]) -> None:
        first = getattr(self, '_resume_shm', None)
        super().load_state_dict(obj)
        self._resume_shm = first or self._resume_shm  # a later call writes to the segment that the first one made

    def _resume_incr_epoch(self) -> tuple[int, int]:
        self._epoch, sample_in_epoch = super()._resume_incr_epoch()
        return self._epoch, sample_in_epoch


def cache_folder(config: DataConfig, manifest: Manifest) -> Path:
    """Where unpacked shards lie: ``config.local``, or a folder of $MAELM_CACHE (~/.cache/maelm) named by content."""
    root = Path(config.local or os.environ.get('MAELM_CACHE', '~/.cache/maelm')).expanduser()
    location = config.remote if storage.is_s3(config.remote) else os.path.abspath(config.remote)
    name = hashlib.sha256(f'{location}\n{manifest.content_hash}'.encode()).hexdigest()[:16]
    return root / name


@contextlib.contextmanager
def _take_turns() -> Iterator[None]:
    """One of a user's jobs on this machine at a time; called by every rank.

    StreamingDataset looks for a name in shared memory that is free and then takes it: two jobs that start at the same
    moment would find the same one.
    """
    gc.collect()  # names that an earlier dataset of this process held are free on every rank, or on none
    with contextlib.ExitStack() as held:
        if get_local_rank() == 0:
            path = Path(tempfile.gettempdir(), f'maelm-{os.getuid()}.lock')
            fcntl.flock(held.enter_context(path.open('w')), fcntl.LOCK_EX)
        barrier()  # no rank looks before its machine's turn has come
        yield


def _forget_position(prefix: int) -> None:
    """Drop a position in the epoch that a killed job left under the shared-memory prefix that is now ours."""
    with contextlib.suppress(FileNotFoundError):
        _remove([Segment(_get_path(prefix, RESUME))], os.getpid())
