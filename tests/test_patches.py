"""A workaround goes when its fault goes: these tests fail where a fault is no longer there."""

import errno
import gc
import importlib.metadata
import inspect
import itertools
import multiprocessing
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from composer.core import engine
from filelock import FileLock, Timeout
from streaming import StreamingDataset
from streaming.base import dataset
from streaming.base.format.base.reader import Reader
from streaming.base.sampling import get_sampling
from streaming.base.shared import SharedMemory
from torch.utils.data import DataLoader

from maelm_composer import patches
from maelm_composer.errors import InputError


def test_the_installed_releases_are_those_that_have_the_faults():
    assert {name: importlib.metadata.version(name) for name in patches.VERSIONS} == patches.VERSIONS


@pytest.mark.parametrize('use_epoch', [True, False])
@pytest.mark.parametrize('choose', [0, 1, 200, 254, 255, 256, 300])
def test_the_rows_of_an_epoch_are_those_that_streaming_chooses(choose, use_epoch):
    assert dataset.get_sampling is patches.choose_samples
    sizes = np.array([64, 1, 64, 0, 63, 64])
    for granularity, epoch in itertools.product((1, 3), range(4)):
        options = (granularity, 17, epoch, use_epoch)
        np.testing.assert_array_equal(
            patches.choose_samples(sizes, choose, *options), get_sampling(sizes, choose, *options)
        )


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


def test_a_job_that_waits_for_one_machine_does_not_hold_another(tmp_path, monkeypatch):
    """Else two jobs that start on the same two machines could wait for each other."""

    def is_free() -> bool:
        (path,) = tmp_path.iterdir()
        try:
            with FileLock(path, blocking=False):
                return True
        except Timeout:
            return False

    were_free, other_node_holds = [], iter([False, False, True])
    monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
    monkeypatch.setattr(torch.distributed, 'is_initialized', lambda: True)
    monkeypatch.setattr(patches, 'all_gather_object', lambda mine: [mine, next(other_node_holds)])
    monkeypatch.setattr(patches.time, 'sleep', lambda seconds: were_free.append(is_free()))
    with patches._one_job_at_a_time():
        assert not is_free()
    assert is_free()
    assert were_free == [True, True]


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
