"""How the ranks of a run fail together."""

import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from composer.utils import dist

from maelm_composer.checkpoints.find import read_record
from maelm_composer.errors import InputError
from maelm_composer.training import ending, processes
from maelm_composer.training.ending import end_before_training
from maelm_composer.training.processes import RankWatch, start_rank
from tests.training.conftest import ISOLATED, count_rows, run_ranks, two_machines


@pytest.fixture
def hasty(monkeypatch):
    """The ranks, forks of this process, look for a failure of another node more often, and end sooner after one."""
    monkeypatch.setattr(processes, 'SECONDS_BETWEEN_LOOKS', 0.1)
    monkeypatch.setattr(processes, 'SECONDS_TO_END_BY_ITSELF', 0.3)


@pytest.mark.parametrize('fails_in', ['a collective', 'the last barrier'])
def test_a_rank_waits_for_the_end_of_the_one_that_closed_its_connections(tmp_path, monkeypatch, fails_in):
    def end(other: int, speaks: bool, tell: Callable[[str], None]) -> None:
        print(f'rank {other} has ended', file=sys.stderr, flush=True)
        os._exit(2 if speaks else 1)

    def run(rank: int) -> None:
        with RankWatch().acting(end):
            if rank == 0:
                time.sleep(0.5)  # the other rank waits for this one by now
                torch.distributed.destroy_process_group()
                time.sleep(2.8)  # more than the 2 s in which a failing rank looks for the cause of another error
                os._exit(3)
            if fails_in == 'a collective':
                dist.all_gather_object(rank)

    assert run_ranks(tmp_path, monkeypatch, run) == [3, 2], (tmp_path / '1').read_text()
    assert (tmp_path / '1').read_text() == 'rank 0 has ended\n'


def test_a_run_takes_no_more_threads_than_the_quota_of_its_container(recipe, monkeypatch):
    monkeypatch.delenv('OMP_NUM_THREADS', raising=False)
    monkeypatch.setattr('maelm_composer.training.processes.count_cores', lambda: 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        start_rank(recipe().training)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)


def test_torchrun_s_nodes_are_ours_and_processes_that_do_not_know_each_other_are_refused(recipe, monkeypatch):
    training = recipe().training
    monkeypatch.setenv('NODE_RANK', '')
    monkeypatch.delenv('NODE_RANK')
    monkeypatch.setenv('GROUP_RANK', '3')
    start_rank(training)
    assert dist.get_node_rank() == 3
    monkeypatch.setenv('SLURM_STEP_NUM_TASKS', '8')
    with pytest.raises(InputError, match='srun has started several processes that do not know each other'):
        start_rank(training)


@pytest.mark.usefixtures('hasty')
@pytest.mark.parametrize('failing', [0, 1])
def test_a_rank_that_waits_for_another_node_ends_with_the_line_of_that_node(tmp_path, monkeypatch, failing):
    def run(rank: int) -> None:
        with RankWatch().acting(end_before_training):
            if rank == failing:
                raise InputError('the disk is full')
            time.sleep(60)  # as in a collective of NCCL

    codes = run_ranks(tmp_path, monkeypatch, run, nodes=2, per_node=1)
    assert codes[1 - failing] == 2
    assert (tmp_path / f'{1 - failing}').read_text() in (
        f'error: node {failing} ended: the disk is full\n',
        'error: node 0 ended: its first rank has ended\n',  # the store ended with rank 0
    )


@pytest.mark.usefixtures('hasty')
def test_a_rank_that_is_killed_is_told_to_the_other_node_by_the_rank_beside_it(tmp_path, monkeypatch):
    def run(rank: int) -> None:
        with RankWatch().acting(end_before_training):
            dist.barrier()
            if rank == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)  # as in a collective of NCCL

    codes = run_ranks(tmp_path, monkeypatch, run, nodes=2)
    assert codes[2:] == [2, -signal.SIGKILL]
    assert codes[0] == 2
    assert (tmp_path / '0').read_text().startswith('error: node 1 ended: rank 3 ended before the training began; ')


@pytest.mark.parametrize('launcher', ['waits', 'sends SIGTERM'])
@pytest.mark.parametrize('killed', [0, 1])
def test_a_rank_killed_before_the_training_is_named_by_the_other(tmp_path, monkeypatch, killed, launcher):
    # Of two ranks no third one has to see which is left; long enough for a SIGTERM to come while that one speaks.
    monkeypatch.setattr(ending, 'time', SimpleNamespace(sleep=lambda _: time.sleep(0.5)))

    def run(rank: int) -> None:
        watch = RankWatch()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Composer does
        pids = dist.all_gather_object(os.getpid())
        with watch.acting(end_before_training):
            dist.barrier()  # both ranks have their handler of SIGTERM
            if rank == killed:
                time.sleep(0.5)
                if launcher == 'sends SIGTERM' and os.fork() == 0:
                    select.select([os.pidfd_open(pids[rank])], [], [])
                    os.kill(pids[1 - rank], signal.SIGTERM)
                    os._exit(0)
                os.kill(os.getpid(), signal.SIGKILL)
            for _ in range(200):
                time.sleep(0.1)

    codes = run_ranks(tmp_path, monkeypatch, run)
    assert codes[killed] == -signal.SIGKILL
    assert codes[1 - killed] == 2, (tmp_path / f'{1 - killed}').read_text()
    said = (tmp_path / f'{1 - killed}').read_text()
    assert said.startswith(f'error: rank {killed} ended before the training began; if it gave no reason, ')
    assert said.count('\n') == 1


@pytest.mark.slow
@two_machines
@pytest.mark.parametrize('full', [0, 1])
def test_an_error_of_one_node_ends_the_other_with_its_line(recipe, start_nodes, full):
    """The disk of one node's cache is full, which its loader meets in the first batch."""
    recipe()
    disk = f'mkdir -p cache{full} && mount -t tmpfs -o size=8k tmpfs cache{full}'
    own_cache = ('sh', '-c', f'[ $RANK != {full} ] || {{ {disk}; }}; MAELM_CACHE=cache$RANK exec "$@"', 'sh')
    for node, process in enumerate(start_nodes('save_folder=shared', before=(*ISOLATED, *own_cache))):
        out, _ = process.communicate(timeout=300)
        assert process.returncode == 2, out
        assert 'Traceback' not in out, out
        assert out.splitlines()[-1].startswith('error: ' if node == full else f'error: node {full} ended: '), out


@pytest.mark.slow
def test_ranks_whose_launcher_is_killed_save_and_end(recipe, start, wait_for):
    recipe()
    process = start('recipe.yaml', 'training.max_samples=8000', ranks=2)  # ranks that go on come to an end
    wait_for(lambda: count_rows('runs/recipe') > 2)
    ranks = psutil.Process(process.pid).children()
    process.kill()  # the launcher alone, which can tell nobody
    wait_for(lambda: read_record('runs/recipe').status != 'running')
    record = read_record('runs/recipe')
    assert record.status == 'stopped'
    assert re.match(r'SIGTERM: saved at \d+ samples; the same command resumes', record.ending)
    assert Path('runs/recipe/latest/progress.json').exists()
    assert len(ranks) == 2
    assert psutil.wait_procs(ranks, timeout=60)[1] == []
