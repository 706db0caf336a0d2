"""The order is a function of (seed, epoch) alone, and a killed run leaves nothing in the way of the next."""

import contextlib
import gc
import hashlib
import multiprocessing
import os
import re
import resource
import signal
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import zstandard
from streaming import StreamingDataLoader

from maelm_composer.config import DataConfig
from maelm_composer.data import storage
from maelm_composer.data.dataset import PretrainingRows
from maelm_composer.data.manifest import load_manifest
from maelm_composer.device import find_dead_segments
from maelm_composer.errors import InputError
from maelm_composer.files import parse_json, write_json
from tests.data.conftest import s3_at, serve_s3
from tests.tiny import find_free_port

GLOBAL_BATCH = 12

FORKS: Any = multiprocessing.get_context('forkserver')  # an import would take longer than a test
FORKS.set_forkserver_preload(['maelm_composer.data.dataset'])


def open_rows(remote: str, split: str = 'train', batch_size: int = 4, seed: int = 5) -> PretrainingRows:
    return PretrainingRows(DataConfig(remote=remote), load_manifest(remote), split, batch_size=batch_size, seed=seed)


def iterate(remote: str, epochs: int = 1, seed: int = 5, workers: int = 0, state: dict | None = None) -> list:
    rows = open_rows(remote, batch_size=GLOBAL_BATCH, seed=seed)
    loader = StreamingDataLoader(rows, batch_size=GLOBAL_BATCH, num_workers=workers, drop_last=True)
    if state is not None:
        loader.load_state_dict(state)
    return [[int(b['epoch'][0]), b['row'].tolist()] for _ in range(epochs) for b in loader]


def list_unpacked() -> dict[Path, int]:
    """The shards in the cache, and when each was written."""
    return {path: path.stat().st_mtime_ns for path in Path(os.environ['MAELM_CACHE']).rglob('*.mds')}


def list_entries(folder: str = '/dev/shm') -> set[tuple[str, int]]:
    """The name and inode of each file: another process may take a name that has become free."""
    with os.scandir(folder) as entries:
        return {(entry.name, entry.inode()) for entry in entries}


class Rank:
    """A process that reads batches and sends them as [epoch, rows, state]; after ``pause`` batches it waits."""

    def __init__(self, remote: str, batch_size: int, workers: int, epochs: int = 1, pause: int = 0, **environment: str):
        self.pipe, other_end = FORKS.Pipe(duplex=False)
        environment = {'MAELM_CACHE': os.environ['MAELM_CACHE']} | environment  # not that of the first test's server
        arguments = (other_end, environment, remote, batch_size, workers, epochs, pause)
        self.process = FORKS.Process(target=send_batches, args=arguments)
        self.process.start()
        other_end.close()

    def receive(self) -> list:
        """Everything that the process sends until it ends."""
        received = []
        with contextlib.suppress(EOFError):
            while self.pipe.poll(240):
                received.append(self.pipe.recv())
        self.process.join(240)
        return received

    def kill(self) -> None:
        """Kill the process and its loader workers; none holds shared memory any more."""
        workers = psutil.Process(self.process.pid).children(recursive=True)
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()
        deadline = time.monotonic() + 60
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                while worker.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
                    time.sleep(0.01)


def send_batches(
    pipe: Connection, environment: dict, remote: str, batch_size: int, workers: int, epochs: int, pause: int
) -> None:
    os.setsid()
    multiprocessing.set_start_method('fork', force=True)  # as in a process that nobody forked
    os.environ.update(environment)
    try:
        rows = open_rows(remote, batch_size=batch_size)
        loader = StreamingDataLoader(rows, batch_size=batch_size, num_workers=workers, drop_last=True)
        for _ in range(epochs):
            for count, batch in enumerate(loader, 1):
                pipe.send([int(batch['epoch'][0]), batch['row'].tolist(), loader.state_dict() if pause else None])
                if count == pause:
                    time.sleep(600)
    except InputError as error:
        pipe.send(str(error))
        raise SystemExit(2) from None


def test_rows_come_whole_with_their_index_and_epoch(shards):
    rows = open_rows(shards.remote)
    assert rows.num_canonical_nodes == 1  # of any number of nodes, so that all give one order
    first = next(iter(rows))
    assert first['input_ids'].shape == (32,)
    assert first['input_ids'].dtype == np.uint16
    assert first['input_ids'].flags.writeable
    np.testing.assert_array_equal(rows[first['row']]['input_ids'], first['input_ids'])
    assert (first['epoch'], first['input_ids'][0]) == (0, 0)


def test_every_pass_is_whole_batches_of_distinct_rows_in_another_order(shards):
    batches = iterate(shards.remote, epochs=2)
    assert batches[0][1][:2] == [647, 1289]  # the order of published runs, which a resumed one needs again
    count = load_manifest(shards.remote).splits['train'].rows
    passes = [[row for epoch, rows in batches if epoch == e for row in rows] for e in (0, 1)]
    for rows in passes:
        assert len(rows) == len(set(rows)) == count // GLOBAL_BATCH * GLOBAL_BATCH
        assert max(rows) < count
        assert rows != sorted(rows)
    assert count % GLOBAL_BATCH
    assert {*passes[0]} != {*passes[1]}  # each leaves out other rows
    assert iterate(shards.remote, epochs=2) == batches
    assert iterate(shards.remote, seed=6)[0] != batches[0]


def test_loader_workers_do_not_change_the_order(shards):
    assert iterate(shards.remote, epochs=2, workers=2) == iterate(shards.remote, epochs=2)


def test_ranks_do_not_change_the_global_batches(shards):
    whole = iterate(shards.remote, epochs=2)
    common = {'WORLD_SIZE': '2', 'LOCAL_WORLD_SIZE': '2'}
    common |= {'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(find_free_port())}
    ranks = [
        Rank(shards.remote, GLOBAL_BATCH // 2, workers=2, epochs=2, RANK=str(r), LOCAL_RANK=str(r), **common)
        for r in range(2)
    ]
    parts = [[batch[:2] for batch in rank.receive()] for rank in ranks]
    assert len(parts[0]) == len(parts[1]) == len(whole)
    for (epoch, rows), first, second in zip(whole, *parts, strict=True):
        assert first == [epoch, rows[0::2]]
        assert second == [epoch, rows[1::2]]


@pytest.mark.parametrize('end', [b'', b'\xff'])
def test_a_shard_cut_short_or_changed_in_the_cache_is_fetched_again(shards, end):
    whole, contents = iterate(shards.remote), {path: path.read_bytes() for path in list_unpacked()}
    for path, content in contents.items():
        path.write_bytes(content[:-1] + end)
    assert iterate(shards.remote) == whole
    assert {path: path.read_bytes() for path in list_unpacked()} == contents


@pytest.mark.parametrize('end', [b'', b'\xff'])
def test_a_damaged_shard_is_fetched_again_before_a_row_is_read_by_its_index(shards, end):
    def read_all() -> list[list[int]]:
        rows = open_rows(shards.remote)
        return [rows[at]['input_ids'].tolist() for at in range(rows.num_samples)]

    whole = read_all()
    for path in list_unpacked():
        path.write_bytes(path.read_bytes()[:-1] + end)
    assert read_all() == whole


def test_shared_memory_is_closed_with_its_dataset_and_no_other_is_kept_open(shards):
    def list_open() -> set[tuple[str, int]]:
        links = (Path('/proc/self/fd', name) for name in os.listdir('/proc/self/fd'))
        links = (link for link in links if link.is_symlink() and '/dev/shm' in str(link.readlink()))
        return {(link.readlink().name, link.stat().st_ino) for link in links}

    other = Rank(shards.remote, GLOBAL_BATCH, workers=0, pause=1)
    other.pipe.recv()  # it lives, and its names lie in our way
    gc.collect()
    before = list_open()
    rows = open_rows(shards.remote)
    assert len([*rows]) == len(rows)
    held = list_open() - before
    prefix = f'{rows._shm_prefix_int:06}'
    assert {name[:6] for name, _ in held} == {prefix}
    assert held <= list_entries()
    locks = {lock for lock in list_entries(tempfile.gettempdir()) if re.fullmatch(rf'{prefix}_\w+_filelock', lock[0])}
    pins = [os.open(Path(tempfile.gettempdir(), name), os.O_RDONLY) for name, _ in locks]  # their inodes stay theirs
    assert pins
    del rows
    gc.collect()
    assert list_open() <= before
    assert not held & list_entries()
    assert not locks & list_entries(tempfile.gettempdir())
    for pin in pins:
        os.close(pin)
    other.kill()


def test_a_run_killed_in_mid_epoch_goes_on_at_the_next_batch(shards):
    """SIGKILL of the process group, so that nothing is left to clean up the shared memory."""
    whole = iterate(shards.remote, epochs=2)
    killed = Rank(shards.remote, GLOBAL_BATCH, workers=2, epochs=2, pause=3)
    *_, last = [killed.pipe.recv() for _ in range(3)]
    unpacked = list_unpacked()
    assert unpacked
    assert iterate(shards.remote, epochs=2) == whole  # two live runs can share one cache
    assert list_unpacked() == unpacked  # and none takes the other's shards away
    maps = Path(f'/proc/{killed.process.pid}/maps').read_text()
    held = {(name, int(inode)) for inode, name in re.findall(r'(\d+) +/dev/shm/(\d{6}_\w+)', maps)}
    assert held
    assert not {name for name, _ in held} & {path.name for path in find_dead_segments()}
    killed.kill()
    left = held & list_entries()
    dead = {name for name, _ in left} & {path.name for path in find_dead_segments()}
    assert dead or left < held, 'dead, unless another job has taken the number'
    # Twice, the second time with the first's shared memory in the way too.
    for _ in range(2):
        rest = iterate(shards.remote, epochs=2, workers=2, state=last[2])
        assert rest[: len(whole) - 3] == whole[3:]
    for name, _ in left & list_entries():
        Path('/dev/shm', name).unlink(missing_ok=True)
    assert iterate(shards.remote, epochs=2) == whole


def test_of_two_positions_loaded_the_last_counts(shards):
    def open_loader() -> StreamingDataLoader:
        rows = open_rows(shards.remote, batch_size=GLOBAL_BATCH)
        return StreamingDataLoader(rows, batch_size=GLOBAL_BATCH, drop_last=True)

    loader, again = open_loader(), open_loader()
    batches = [(batch['row'].tolist(), loader.state_dict()) for batch in loader]
    for _, state in batches[:2]:
        again.load_state_dict(state)
    assert [batch['row'].tolist() for batch in again] == [rows for rows, _ in batches[2:]]


@pytest.mark.parametrize('workers', [0, 2])
def test_a_damaged_shard_is_named(shards, workers):
    path = next(Path(shards.remote, 'train', '00001').glob('*.zstd'))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match=r'shard \S+/train/00001/shard.00000.mds.zstd is damaged') as caught:
        iterate(shards.remote, workers=workers)
    assert 'Traceback' not in str(caught.value)
    path.unlink()
    with pytest.raises(InputError, match=r'train/00001/shard.00000.mds.zstd is missing'):
        iterate(shards.remote, workers=workers)


def test_a_shard_that_another_worker_could_not_fetch_is_named(shards):
    """A worker that waits for a shard hears that another one failed to fetch it, however late, and waits no longer."""
    left = {f'/corpus/{path.relative_to(shards.remote)}' for path in Path(shards.remote, 'train').glob('*[1-9]/*')}

    def answer(key: str) -> tuple[int, bytes]:
        left.discard(key)
        if '/train/00000/' in key:
            while left:
                time.sleep(0.01)
            time.sleep(0.5)  # the other worker has everything else by now
            return 404, b'<Error><Code>NoSuchKey</Code></Error>'
        return 200, Path(shards.remote, key.removeprefix('/corpus/')).read_bytes()

    with serve_s3(answer) as url:
        rank = Rank('s3://corpus', GLOBAL_BATCH, workers=2, **s3_at(url))
        *_, said = rank.receive()
    assert rank.process.exitcode == 2
    assert 'train/00000/shard.00000.mds.zstd is missing' in said


def test_a_cache_emptied_under_a_run_is_filled_again(shards):
    whole, again = list(open_rows(shards.remote)), []
    for item in open_rows(shards.remote):
        again.append(item)
        for path in list_unpacked() if len(again) % 16 == 0 else ():  # some 80 times, before rows of every shard
            path.unlink()
    assert [item['row'] for item in again] == [item['row'] for item in whole]
    assert all((a['input_ids'] == b['input_ids']).all() for a, b in zip(again, whole, strict=True))


def test_the_same_rows_packed_to_other_bytes_are_read_with_their_own_index(shards):
    whole = iterate(shards.remote)
    for path in list_unpacked():
        path.unlink()
    index = Path(shards.remote, 'train', 'index.json')
    listed = parse_json(index.read_text(), 'index.json')
    for entry in listed['shards']:
        packed = Path(shards.remote, 'train', entry['zip_data']['basename'])
        content = zstandard.compress(zstandard.decompress(packed.read_bytes()), level=1)
        packed.write_bytes(content)
        entry['zip_data'] |= {'bytes': len(content), 'hashes': {'sha1': hashlib.sha1(content).hexdigest()}}
    write_json(index, listed)
    assert iterate(shards.remote) == whole


def test_rows_are_read_from_s3_as_from_a_folder(shards, s3):
    local = iterate(shards.remote)
    for name in storage.list_names(shards.remote, recursive=True):  # the same files as `maelm shards` writes there
        storage.write_file(f's3://corpus/dataset/{name}', Path(shards.remote, name).read_bytes())
    assert iterate('s3://corpus/dataset', workers=2) == local


def test_too_many_open_files_are_one_line(shards):
    rows = open_rows(shards.remote)
    unlimited = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, unlimited[1]))
    try:
        with pytest.raises(InputError, match='Too many open files'):
            rows[0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, unlimited)


def test_the_remote_is_only_read(shards):
    def list_files() -> set[tuple]:
        return {(path, path.stat().st_mtime_ns, path.stat().st_size) for path in Path(shards.remote).rglob('*')}

    before = list_files()
    iterate(shards.remote)
    assert list_files() == before


def test_a_given_cache_is_used_and_other_content_has_another(shards, tmp_path):
    config, manifest = DataConfig(remote=shards.remote, local=str(tmp_path / 'mine')), load_manifest(shards.remote)
    PretrainingRows(config, manifest, 'train', batch_size=4, seed=0)
    assert len(list((tmp_path / 'mine').iterdir())) == 1
    manifest.content_hash = 'other'
    PretrainingRows(config, manifest, 'train', batch_size=4, seed=0)
    assert len(list((tmp_path / 'mine').iterdir())) == 2


def test_no_shards_and_another_manifest_are_said(shards, tmp_path):
    with pytest.raises(InputError, match=r'no shards at .*: run `maelm shards'):
        load_manifest(str(tmp_path / 'nowhere'))
    path = Path(shards.remote, 'manifest.json')
    fields = parse_json(path.read_bytes(), str(path))
    del fields['splits']['validation']
    for foreign in ({'vocab_size': 3}, fields):
        write_json(path, foreign)
        with pytest.raises(InputError, match='not a manifest'):
            load_manifest(shards.remote)
