"""A claim holds while its process lives, and not longer."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from maelm_composer.sweep import claims
from maelm_composer.sweep.claims import claim, is_claimed

HOLD = """
import sys, time
from pathlib import Path
from maelm_composer.sweep.claims import claim
with claim(Path(sys.argv[1])) as is_mine:
    print(is_mine, flush=True)
    time.sleep(100 if is_mine else 0)
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / 'folder/.run.claim'


@pytest.fixture
def holder(path):
    with subprocess.Popen([sys.executable, '-c', HOLD, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == 'True\n'
        yield process
        process.kill()


def test_one_at_a_time(path):
    with claim(path) as first:
        assert first
        assert is_claimed(path)
        with claim(path) as second:
            assert not second
        assert is_claimed(path)  # the second did not take it away
    assert not path.exists()
    with pytest.raises(RuntimeError), claim(path):
        raise RuntimeError
    assert not is_claimed(path)


@pytest.mark.parametrize('is_reaped', [True, False])
def test_a_killed_process_holds_nothing(path, holder, is_reaped):
    with claim(path) as is_mine:
        assert not is_mine
    holder.send_signal(signal.SIGKILL)
    if is_reaped:
        holder.wait()
    else:  # a zombie, as in a container whose first process does not wait for orphans
        os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
    assert path.exists()
    with claim(path) as is_mine:
        assert is_mine


def test_another_process_under_the_same_number_is_not_the_holder(path, holder):
    path.write_text(json.dumps(json.loads(path.read_text()) | {'started': '1'}))
    assert not is_claimed(path)


def test_another_hosts_claim_counts_while_it_is_touched(path):
    path.parent.mkdir()
    path.write_text(json.dumps({'host': 'elsewhere', 'pid': 1, 'started': '1'}))
    assert is_claimed(path)
    long_ago = time.time() - claims.STALE_SECONDS - 1
    os.utime(path, (long_ago, long_ago))
    with claim(path) as is_mine:
        assert is_mine


def test_a_holder_touches_its_claim_and_leaves_a_successors_alone(path, monkeypatch):
    monkeypatch.setattr(claims, 'BEAT_SECONDS', 0.01)
    with claim(path):
        os.utime(path, (0, 0))
        deadline = time.time() + 5
        while path.stat().st_mtime == 0 and time.time() < deadline:
            time.sleep(0.01)
        assert path.stat().st_mtime > 0
        path.write_text(json.dumps({'host': 'elsewhere', 'pid': 1, 'started': '1'}))
    assert path.exists()


def test_of_many_processes_one_gets_it(path):
    command = [sys.executable, '-c', HOLD, str(path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(8)]
    try:
        assert sorted(process.stdout.readline() for process in processes) == ['False\n'] * 7 + ['True\n']
    finally:
        for process in processes:
            process.kill()
            process.communicate()
