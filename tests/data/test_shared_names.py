"""The shared memory of a dataset has a name that no other job of the machine has, the same on every rank."""

import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier

import streaming.base.shared.prefix

from tests.data.test_dataset import FORKS, open_rows
from tests.tiny import find_free_port


def run_all(target: Callable, arguments: Sequence[tuple]) -> list[int | None]:
    """Run a process for each of ``arguments``; returns their exit codes, None of one that did not end."""
    processes = [FORKS.Process(target=target, args=own) for own in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()  # one that is still alive, for which pytest would wait
    return codes


def start_job(gate: Barrier, remote: str, cache: str) -> None:
    os.environ['MAELM_CACHE'] = cache
    gate.wait()
    rows = open_rows(remote)
    gate.wait()  # all live at once
    rows._locals_shm.cleanup()


def test_jobs_that_start_at_the_same_moment_do_not_take_the_same_name(shards):
    for _ in range(3):
        gate = FORKS.Barrier(3, timeout=200)
        assert run_all(start_job, [(gate, shards.remote, os.environ['MAELM_CACHE'])] * 3) == [0] * 3


def find_prefix(pipe: Connection, remote: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    look = streaming.base.shared.prefix._check_and_find
    later = int(environment['RANK'])  # the later look of rank 1, as if a job had begun since rank 0's
    streaming.base.shared.prefix._check_and_find = lambda *arguments: look(*arguments) + later
    pipe.send(open_rows(remote)._shm_prefix_int)


def test_ranks_take_the_same_name_though_another_job_comes_between_their_looks(shards):
    common = {'WORLD_SIZE': '2', 'LOCAL_WORLD_SIZE': '2', 'MASTER_ADDR': '127.0.0.1'}
    common |= {'MASTER_PORT': str(find_free_port()), 'MAELM_CACHE': os.environ['MAELM_CACHE']}
    pipe, other_end = FORKS.Pipe(duplex=False)
    ranks = [common | {'RANK': str(rank), 'LOCAL_RANK': str(rank)} for rank in range(2)]
    assert run_all(find_prefix, [(other_end, shards.remote, rank) for rank in ranks]) == [0, 0]
    assert pipe.recv() == pipe.recv()
