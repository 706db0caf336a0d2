"""Which Ray a command joins."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import ray

from maelm_composer.cluster import DEAD, connect_ray, get_result
from maelm_composer.errors import InputError


@pytest.mark.parametrize('scheme', ['', 'ray://'])
def test_a_cluster_that_does_not_answer_is_told_at_once(monkeypatch, scheme):
    with socket.socket() as closed:
        closed.bind(('127.0.0.1', 0))
        address = f'{scheme}127.0.0.1:{closed.getsockname()[1]}'
        monkeypatch.setenv('RAY_ADDRESS', address)
        with (
            pytest.raises(InputError, match=f'RAY_ADDRESS {address}: .*refused; start Ray there') as told,
            connect_ray(),
        ):
            pass
    assert '\n' not in str(told.value)


@pytest.mark.parametrize(
    'error',
    [
        Exception('The current node timed out during startup. This could happen because'),
        RuntimeError('Failed to start GCS.  Last 0 lines of error files:\n'),  # its log cannot be written (ulimit -f 2)
    ],
)
def test_a_machine_on_which_ray_cannot_start_is_told_after_a_second_try(monkeypatch, error):
    tries = []

    def time_out(**options: object) -> None:
        tries.append(options)
        raise error

    monkeypatch.delenv('RAY_ADDRESS', raising=False)
    monkeypatch.setattr(ray, 'init', time_out)
    with pytest.raises(InputError, match='Ray did not start within 30 s, twice'), connect_ray():
        pass
    assert len(tries) == 2


def test_a_folder_too_long_for_the_sockets_of_ray_is_told(monkeypatch, tmp_path):
    monkeypatch.delenv('RAY_ADDRESS', raising=False)
    monkeypatch.setenv('RAY_TMPDIR', str(tmp_path / ('long' * 20)))
    with pytest.raises(InputError, match=r'AF_UNIX path length .* set RAY_TMPDIR to a short path'), connect_ray():
        pass


def test_a_task_that_ray_kills_for_its_memory_ends(monkeypatch):
    """Ray's memory monitor, here with a limit that a machine with Ray exceeds, counts no retries of its own accord."""
    source = """
import ray
from maelm_composer import cluster
cluster.MEMORY_RETRIES = 1
with cluster.connect_ray(num_cpus=1):
    try:
        cluster.get_result(ray.remote(max_retries=2)(lambda: __import__('time').sleep(60)).remote())
    except cluster.LostWorkerError as error:
        print(error)
"""
    monkeypatch.delenv('RAY_task_oom_retries', raising=False)  # of another test's Ray
    limit = {'RAY_memory_usage_threshold': '0.0001'}  # of the machine's memory: 100 MB of a terabyte
    command = [sys.executable, '-c', source]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | limit, check=True)
    assert 'a worker was lost on every try, perhaps for want of memory' in found.stdout


def test_a_sigterm_ends_a_command_that_uses_ray_without_a_stack():
    """In a call of Python and in one of Ray, which makes a SystemExit of code 1 of every other."""
    source = """
import os, signal, threading, time
import ray
from maelm_composer.cluster import connect_ray

def wait(call):
    with connect_ray(num_cpus=1):
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        try:
            call()
        finally:
            print('released')

try:
    wait(lambda: time.sleep(60))
except SystemExit as ending:
    print(ending.code)
print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
wait(lambda: ray.get(ray.remote(lambda: time.sleep(60)).remote()))
"""
    ended = subprocess.run([sys.executable, '-c', source], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 128 + signal.SIGTERM
    assert ended.stdout.split() == ['released', str(128 + signal.SIGTERM), 'True', 'released']
    assert 'SIGTERM' not in ended.stderr


def test_a_lost_worker_is_told_and_a_ctrl_c_that_a_call_of_ray_makes_an_exit_of_stays_a_ctrl_c(monkeypatch):
    """One Ray, which takes seconds to start, for both: the Ctrl-C ends its block."""

    def use_ray() -> None:
        with connect_ray(num_cpus=1):
            killed = ray.remote(max_retries=1)(lambda: os.kill(os.getpid(), signal.SIGKILL))
            with pytest.raises(InputError, match=r'a worker was lost on every try, .*: let fewer run at once') as told:
                get_result(killed.remote())
            assert '\n' not in str(told.value)
            try:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(60)
            except KeyboardInterrupt:
                raise SystemExit(1) from None

    monkeypatch.delenv('RAY_ADDRESS', raising=False)
    interrupt, before = signal.getsignal(signal.SIGINT), signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with pytest.raises(KeyboardInterrupt):
            use_ray()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is interrupt
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


@pytest.mark.parametrize('server', ['raylet', 'gcs_server', 'RuntimeEnvAgent'])
def test_a_dead_server_of_ray_ends_the_command_with_one_line(server, tmp_path):
    """It dies once all servers are watched (/proc names the process of each descriptor) and the task has begun."""
    begun = tmp_path / 'begun'
    source = f"""
import contextlib, pathlib, threading, time
import psutil, ray
from maelm_composer.cluster import _list_servers, connect_ray

def is_ready():
    watched = set()
    for file in pathlib.Path('/proc/self/fdinfo').iterdir():
        with contextlib.suppress(FileNotFoundError):
            watched |= {{line for line in file.read_text().splitlines() if line.startswith('Pid:')}}
    servers = {{f'Pid:\\t{{process.pid}}': process.name() for process in _list_servers()}}
    is_there = any(name.endswith('{server}') for name in servers.values())
    return is_there and servers.keys() <= watched and pathlib.Path({str(begun)!r}).exists()

def work(value):
    pathlib.Path({str(begun)!r}).touch()
    time.sleep(300)

def kill():
    last = time.monotonic() + 20
    while not is_ready() and time.monotonic() < last:
        time.sleep(0.05)
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name().endswith('{server}'):
                process.kill()

with connect_ray(num_cpus=1):
    large = ray.put(b'x' * 1_000_000)
    with connect_ray():
        threading.Thread(target=kill).start()
        ray.get(ray.remote(work).remote(large))
"""
    ended = subprocess.run([sys.executable, '-c', source], capture_output=True, text=True, timeout=200)
    assert ended.returncode == 2
    assert not ended.stdout
    assert ended.stderr == f'error: {DEAD}\n'
