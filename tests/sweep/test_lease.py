"""Only one process holds a lease, and none after its death; a machine that does not share the folder makes no run."""

import errno
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Timer

import pytest
from filelock import Timeout

from maelm_composer.config import FinetuningConfig
from maelm_composer.errors import InputError
from maelm_composer.sweep.lease import is_free, open_lease, take
from maelm_composer.sweep.run import Place, choose_precision

HOLD = """
import sys, time
from maelm_composer.sweep.lease import open_lease
try:
    with open_lease(sys.argv[1], 'run'):
        print(True, flush=True)
        time.sleep(100)
except TimeoutError:
    print(False, flush=True)
"""


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path / 'folder')


@pytest.fixture
def holder(folder):
    with subprocess.Popen([sys.executable, '-c', HOLD, folder], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == 'True\n'
        yield process
        process.kill()


def test_one_at_a_time(folder):
    with open_lease(folder, 'run'):
        for _ in range(2):  # looking does not take the lease away
            assert not is_free(open_lease(folder, 'run'))
        assert is_free(open_lease(folder, 'another'))
    assert is_free(open_lease(folder, 'run'))
    assert os.listdir(folder) == []
    with pytest.raises(RuntimeError), open_lease(folder, 'run'):
        raise RuntimeError
    assert is_free(open_lease(folder, 'run'))


def test_a_killed_process_holds_nothing(folder, holder):
    lease = open_lease(folder, 'run')
    with pytest.raises(Timeout):
        lease.acquire()
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert os.listdir(folder) == ['.run.lease']
    assert is_free(lease)


def test_another_hosts_lease_ends_once_it_is_not_refreshed(folder, holder, monkeypatch):
    path = Path(folder, '.run.lease')
    lines = path.read_text().splitlines()
    holder.kill()
    holder.wait()
    monkeypatch.setattr('maelm_composer.sweep.lease.LEASE_SECONDS', 0.5)
    monkeypatch.setattr('maelm_composer.sweep.lease.HEARTBEAT_SECONDS', 0.1)
    changes = {'host': 'elsewhere', 'duration': '0.5'}
    names = [line.partition('=')[0] for line in lines]
    lines = [f'{name}={changes[name]}' if name in changes else line for name, line in zip(names, lines, strict=True)]
    path.write_text('\n'.join(lines) + '\n')
    lease = open_lease(folder, 'run')
    assert not is_free(lease)
    time.sleep(0.3)
    path.touch()
    time.sleep(0.3)
    assert not is_free(lease)  # refreshed in between
    time.sleep(0.6)
    assert is_free(lease)


@pytest.fixture
def without_exchange(monkeypatch):
    """A folder as on NFS, where two names cannot be exchanged in one step."""
    module = 'filelock._filesystem._exchange' if find_spec('filelock._filesystem') else 'filelock._util'  # before 4.3
    monkeypatch.setattr(f'{module}._rename_call', lambda: ((lambda *_: errno.EINVAL), 2))


def test_a_killed_process_holds_nothing_for_long_on_nfs(folder, holder, monkeypatch, without_exchange):
    lease = open_lease(folder, 'run')
    assert not is_free(lease)
    holder.kill()
    holder.wait()
    assert not is_free(lease)
    monkeypatch.setattr('maelm_composer.sweep.lease.LEASE_SECONDS', 0)
    assert is_free(lease)
    assert not any(Path(folder).iterdir())


def test_a_lease_is_taken_from_a_dead_holder_and_left_to_a_living_one(folder, holder, monkeypatch, without_exchange):
    monkeypatch.setattr('maelm_composer.sweep.lease.SECONDS_BETWEEN_LOOKS', 0.05)
    refreshed = Event()

    def refresh() -> None:
        refreshed.set()  # before the file changes, as the next look may come before this thread has ended
        Path(folder, '.run.lease').touch()

    Timer(0.5, refresh).start()
    lease = open_lease(folder, 'run')
    assert not take(lease)
    assert refreshed.is_set()  # nothing is known before
    holder.kill()
    monkeypatch.setattr('maelm_composer.sweep.lease.LEASE_SECONDS', 0.5)
    assert take(lease)
    lease.release()


def test_of_many_processes_one_gets_it(folder):
    command = [sys.executable, '-c', HOLD, folder]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(8)]
    try:
        assert sorted(process.stdout.readline() for process in processes) == ['False\n'] * 7 + ['True\n']
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_a_machine_that_does_not_share_the_folder_of_records_makes_no_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config, mark = FinetuningConfig(checkpoint='x', save_folder='records'), str(tmp_path / 'mark')
    message = f'records in {tmp_path} is not one folder for all machines: start the sweep in a shared one'
    with pytest.raises(InputError, match=message):
        choose_precision(config, Place(str(tmp_path), mark))
    with pytest.raises(InputError, match=f'{mark} is not one folder for all machines'):
        choose_precision(config, Place(mark))
