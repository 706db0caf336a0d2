"""One process at a time in a folder."""

import contextlib
import dataclasses
import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from maelm_composer.config import Precision
from maelm_composer.errors import InputError
from maelm_composer.files import LOCK, is_locked, lock_folder
from maelm_composer.suite.run import run_suite
from maelm_composer.suite.steps import load_suite

HOLDER = """
import os, sys, time
from pathlib import Path
from maelm_composer.files import lock_folder
with lock_folder(Path(sys.argv[1]), 'run'):
    child = os.fork()  # as a loader forks its workers
    if child:
        print(child, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def held(tmp_path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the folder, and has a child."""
    process = subprocess.Popen([sys.executable, '-c', HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    yield process
    for pid in (process.pid, child):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def test_a_second_process_is_refused_until_the_first_is_killed_though_its_workers_live_on(tmp_path, held):
    with pytest.raises(InputError, match=f'another run is at work in {tmp_path}'), lock_folder(tmp_path, 'run'):
        pass
    held.kill()
    held.wait()
    with lock_folder(tmp_path, 'run'):
        pass


def test_a_lock_that_cannot_be_opened_is_an_error_since_another_user_may_hold_it(tmp_path):
    (tmp_path / LOCK).mkdir()
    with pytest.raises(IsADirectoryError, match=LOCK), lock_folder(tmp_path, 'run'):
        pass


def test_a_lock_of_another_user_is_named(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, 'open', refuse)  # as root, who runs some of these tests, may open any file
    with pytest.raises(PermissionError, match=str(tmp_path)), lock_folder(tmp_path, 'run'):
        pass
    (tmp_path / LOCK).write_text('')
    with pytest.raises(InputError, match=r'/\.lock is of another user, whose run may'), lock_folder(tmp_path, 'run'):
        pass


def test_whoever_looks_for_a_lock_holds_none_for_others_who_look(tmp_path):
    (tmp_path / LOCK).write_text('')
    with (tmp_path / LOCK).open('rb') as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        assert not is_locked(tmp_path)


def test_a_file_system_without_locks_is_used_with_a_warning(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, 'flock', refuse)
    with (
        pytest.warns(UserWarning, match='cannot be locked .*start no other process in it'),
        lock_folder(tmp_path, 'run'),
    ):
        assert (tmp_path / LOCK).exists()


def test_the_suite_keeps_to_it(tmp_path, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[1])
    with lock_folder(tmp_path, 'run'), pytest.raises(InputError, match='another benchmark suite is at work'):
        run_suite(load_suite('demo', tmp_path, tmp_path / 'results'), [])
    assert sorted(path.name for path in tmp_path.iterdir()) == ['.lock']


def test_a_suite_keeps_to_that_of_its_results(tmp_path, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[1])
    with (
        lock_folder(tmp_path / 'results/demo', 'benchmark suite'),
        pytest.raises(InputError, match=r'results/demo.*another benchmark suite|another benchmark suite.*results/demo'),
    ):
        run_suite(load_suite('demo', tmp_path / 'work', tmp_path / 'results'), [])


def test_one_folder_may_hold_both_the_work_and_the_results(tmp_path, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[1])
    monkeypatch.setattr('maelm_composer.suite.run.list_steps', lambda *_: [])
    suite = dataclasses.replace(load_suite('demo', tmp_path / 'demo', tmp_path), precision=Precision.fp32)
    with pytest.raises(InputError, match='no records in'):  # not that another suite is at work
        run_suite(suite, [])
