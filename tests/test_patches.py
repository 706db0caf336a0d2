"""A workaround goes when its fault goes: these tests fail where a fault is no longer there."""

import errno
import gc
import importlib.metadata
import inspect
import multiprocessing
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from composer.core import engine
from streaming import StreamingDataset
from streaming.base import dataset
from streaming.base.format.base.reader import Reader
from streaming.base.shared import SharedMemory
from torch.utils.data import DataLoader

from maelm_composer import patches
from maelm_composer.errors import InputError


def test_the_installed_releases_are_those_that_have_the_faults():
    assert {name: importlib.metadata.version(name) for name in patches.VERSIONS} == patches.VERSIONS


@pytest.mark.parametrize('memory, is_left', [(SharedMemory, True), (patches.OwnedMemory, False)])
def test_shared_memory_outlives_its_owner_only_without_the_patch(memory, is_left):
    path = Path(f'/dev/shm/maelm-test-{os.getpid()}-{is_left}')
    segment = memory(path.name, create=True, size=1)
    cleanup = segment.cleanup if is_left else lambda: None
    assert path.exists()
    del segment
    gc.collect()
    assert path.exists() is is_left
    cleanup()


def test_shared_memory_that_is_full_is_one_line():
    """Streaming's own class gives a segment whose first access kills the process."""
    path = Path(f'/dev/shm/maelm-test-{os.getpid()}-full')
    size = shutil.disk_usage('/dev/shm').total + 2**20
    with pytest.raises(InputError, match=r'bytes of shared memory: No space left on device; enlarge /dev/shm'):
        patches.OwnedMemory(path.name, create=True, size=size)
    assert not path.exists()


@pytest.mark.parametrize(
    'owner, sign',
    [
        (engine.Engine.__init__, 'atexit.register(self._close'),  # keeps the trainer until exit
        (Reader.set_up_local, 'self._evict_raw()'),  # deletes shards that another job may read
        (StreamingDataset.load_state_dict, 'self._resume_shm = SharedMemory('),  # a new segment in every call
        (StreamingDataset.prepare_shard, '_cache_filelock'),  # locks a file for every row
        (dataset._Iterator, '_register_atexit'),  # ends its threads at exit only
    ],
)
def test_the_fault_is_still_in_the_source(owner, sign):
    assert sign in inspect.getsource(owner)


@pytest.mark.parametrize('there_is_room_for', range(4))
def test_a_loader_without_room_for_its_queues_is_one_line(monkeypatch, there_is_room_for):
    """torch's own iterator is freed with a traceback on standard error, and kills the worker that it has."""
    context, made, freed = multiprocessing.get_context(), [], []

    def make(kind: str) -> Any:
        def make_or_fail() -> Any:
            if len(made) == there_is_room_for:
                raise OSError(errno.ENOSPC, 'No space left on device')
            made.append(kind)
            return getattr(context, kind)()

        return make_or_fail

    for kind in ('Queue', 'Event'):
        monkeypatch.setattr(torch.multiprocessing, kind, make(kind))
    monkeypatch.setattr(sys, 'unraisablehook', freed.append)
    others = {*multiprocessing.active_children()}
    with pytest.raises(InputError, match='loader workers: No space left on device; enlarge /dev/shm') as error:
        iter(DataLoader(range(4), num_workers=2))
    workers = {*multiprocessing.active_children()} - others
    del error  # and with its traceback the iterator
    gc.collect()
    assert [worker.exitcode for worker in workers] == [0] * (there_is_room_for == 3)
    assert made == ['Queue', 'Event', 'Queue', 'Queue'][:there_is_room_for]
    assert freed == []
