"""How the host gives out memory, and what is said when it has none."""

import errno
import multiprocessing
import os
import resource
import socket
import subprocess
import sys
from multiprocessing.connection import Client
from multiprocessing.reduction import recv_handle

import pytest

from maelm_composer.device import explain_shortage, raise_file_limit
from maelm_composer.errors import InputError

KILLED = 'a loader worker was killed, most likely because memory ran out: lower'
PROGRAM = """
import ctypes, resource, torch
from maelm_composer.device import keep_freed_memory
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: a huge page is one fault for 512 pages
def count_faults(size):
    for step in range(20):
        if step == 10:  # the heap has settled
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(size)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
for keeps, size in ((False, 2**24), (True, 2**24), (False, 2**26)):  # at last larger than any piece that was kept
    keep_freed_memory(keeps)
    print(count_faults(size))
"""


def test_kept_memory_is_not_faulted_in_again():
    output = subprocess.run([sys.executable, '-c', PROGRAM], check=True, capture_output=True, text=True).stdout
    default, kept, default_again = map(int, output.split())
    assert default > 10 * 16_000  # 64 MiB are 16,384 pages
    assert kept < 1000
    assert default_again > 10 * 64_000


def test_the_limit_of_open_files_is_raised_to_what_the_system_allows():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (50, limits[1]))
    try:
        raise_file_limit()
        wanted = 65_536 if limits[1] == resource.RLIM_INFINITY else min(65_536, limits[1])
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (wanted, limits[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize(
    'error, message',
    [
        (RuntimeError('unable to open shared memory object </torch_1_2_0>: Too many open files (24)'), 'ulimit -n'),
        (RuntimeError('DataLoader worker (pid 1) is killed by signal: Bus error.'), 'since /dev/shm is full: enlarge'),
        (RuntimeError('DataLoader worker (pid 1) is killed by signal: Killed.'), KILLED),
        (RuntimeError('InvalidCxxCompiler: No working C++ compiler found in torch'), 'or give training.compile=false'),
    ],
)
def test_what_the_machine_lacks_is_told(error, message):
    with pytest.raises(InputError, match=message), explain_shortage(8):
        raise error


@pytest.mark.parametrize('sent', [b'', b'\0\0', b'\0\0\0\5abc'], ids=['nothing', 'half a length', 'half a message'])
def test_a_loader_worker_that_is_killed_while_it_sends_is_told(sent):
    ours, others = multiprocessing.Pipe()
    os.write(others.fileno(), sent)
    others.close()
    with pytest.raises(InputError, match=KILLED), explain_shortage(8):
        ours.recv()


@pytest.mark.parametrize('unread', [(), ('which tensor',)], ids=['the connection ended', 'it was reset'])
def test_a_loader_worker_that_is_killed_before_it_sends_a_tensor_is_told(unread):
    ours, others = multiprocessing.Pipe()
    for message in unread:
        ours.send(message)
    others.close()
    with pytest.raises(InputError, match=KILLED), explain_shortage(8):
        recv_handle(ours)


def test_a_loader_worker_that_cannot_be_reached_is_told(tmp_path):
    address = str(tmp_path / 'worker')
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)  # the file stays, as that of a killed process does
    with pytest.raises(InputError, match=KILLED), explain_shortage(8):
        Client(address)


@pytest.mark.parametrize(
    'error', [RuntimeError('shapes do not fit'), EOFError('a file ended'), ConnectionError('away')]
)
def test_other_errors_stay_what_they_are(error):
    with pytest.raises(type(error), match=str(error)), explain_shortage(8):
        raise error


def test_a_worker_that_cannot_be_started_was_not_killed(monkeypatch):
    def refuse() -> int:
        raise BlockingIOError(errno.EAGAIN, 'Resource temporarily unavailable')

    monkeypatch.setattr(os, 'fork', refuse)  # as at a limit of processes
    with pytest.raises(BlockingIOError), explain_shortage(8):
        multiprocessing.get_context('fork').Process().start()
