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
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | limit, check=True)
    assert 'a worker was lost on every try, perhaps for want of memory' in found.stdout


@pytest.mark.parametrize('wait', ['time.sleep(60)', 'ray.get(ray.remote(lambda: time.sleep(60)).remote())'])
def test_a_sigterm_ends_a_command_that_uses_ray_without_a_stack(wait):
    source = f"""
import os, signal, threading, time
import ray
from maelm_composer.cluster import connect_ray
with connect_ray(num_cpus=1):
    pass
print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
with connect_ray(num_cpus=1):
    threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM)).start()
    try:
        {wait}
    finally:
        print('released')
"""
    ended = subprocess.run([sys.executable, '-c', source], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 128 + signal.SIGTERM
    assert ended.stdout.split() == ['True', 'released']
    assert 'SIGTERM' not in ended.stderr


def test_a_ctrl_c_that_a_call_of_ray_makes_an_exit_of_stays_a_ctrl_c(monkeypatch):
    monkeypatch.delenv('RAY_ADDRESS', raising=False)
    handler = signal.getsignal(signal.SIGINT)

    def call() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
        except KeyboardInterrupt:
            raise SystemExit(1) from None

    with pytest.raises(KeyboardInterrupt), connect_ray(num_cpus=1):
        call()
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_worker_that_is_lost_on_every_try_is_told(monkeypatch):
    monkeypatch.delenv('RAY_ADDRESS', raising=False)
    with connect_ray(num_cpus=1):
        killed = ray.remote(max_retries=1)(lambda: os.kill(os.getpid(), signal.SIGKILL))
        with pytest.raises(InputError, match=r'a worker was lost on every try, .*: let fewer run at once') as told:
            get_result(killed.remote())
    assert '\n' not in str(told.value)


@pytest.mark.parametrize('server', ['raylet', 'gcs_server', 'RuntimeEnvAgent'])
def test_a_dead_server_of_ray_ends_the_command_with_one_line(server):
    source = f"""
import contextlib, threading, time
import psutil, ray
from maelm_composer.cluster import connect_ray

def kill():
    time.sleep(5)  # the servers are being watched by then
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name().endswith('{server}'):
                process.kill()

with connect_ray(num_cpus=1):
    large = ray.put(b'x' * 1_000_000)
    with connect_ray():
        threading.Thread(target=kill).start()
        ray.get(ray.remote(lambda value: time.sleep(300)).remote(large))
"""
    ended = subprocess.run([sys.executable, '-c', source], capture_output=True, text=True, timeout=200)
    assert ended.returncode == 2
    assert not ended.stdout
    assert ended.stderr == f'error: {DEAD}\n'
