"""What only real processes show: SIGKILL, the launcher, two ranks."""

import gc
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import composer.core.engine
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from maelm_composer.checkpoints.find import read_record
from maelm_composer.checkpoints.names import name_checkpoint
from maelm_composer.cli import runs as compare_runs
from maelm_composer.errors import InputError
from maelm_composer.files import is_locked, lock_folder
from maelm_composer.records import load_record, parse_pretraining
from maelm_composer.training import checkpoints
from maelm_composer.training.ending import STOP_SIGNALS, StopSignals
from maelm_composer.training.loaders import follow_trainer
from maelm_composer.training.run import _Run, pretrain
from tests.training.conftest import APART, ISOLATED, count_rows, two_machines

# So many samples that a poll does not come after the end.
EXACT = ('model.hidden_dropout_prob=0', 'model.attention_probs_dropout_prob=0', 'training.max_samples=1024')


def test_a_second_ctrl_c_ends_at_once():
    before, signals = signal.signal(signal.SIGINT, signal.default_int_handler), StopSignals()
    signals.install()
    try:
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.received == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signals.restore()
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize('number', STOP_SIGNALS)
def test_a_signal_before_the_first_batch_is_told_and_recorded(recipe, monkeypatch, capsys, number):
    monkeypatch.setattr(_Run, '_build_trainer', lambda *_: signal.raise_signal(number))
    before = signal.signal(number, composer.core.engine.sigterm_handler)
    try:
        with pytest.raises(SystemExit) as caught:
            pretrain(recipe())
    finally:
        signal.signal(number, before)
    assert caught.value.code == 128 + number
    record = read_record('runs/recipe')
    line = f'{signal.Signals(number).name}: ended at once; the same command resumes the run'
    assert (record.status, record.ending) == ('stopped', line)
    assert line in capsys.readouterr().out


def test_killed_at_any_moment_a_run_ends_as_if_never_killed(recipe, start, wait_for, assert_same_run, capsys):
    def show_status() -> str:
        capsys.readouterr()
        compare_runs(['killed'])
        return re.search(r'killed +(\w+)', capsys.readouterr().out)[1]

    long = 'training.max_samples=1536'  # so that no poll comes after the end
    pretrain(recipe('save_folder=whole', long))
    folder = Path('killed')
    moments = [
        lambda: any(folder.glob('.saving*')),  # in the middle of a checkpoint
        lambda: (folder / 'latest').is_symlink() and count_rows('killed') > 10,
    ]
    for moment in moments:
        (folder / 'metrics.csv').unlink(missing_ok=True)  # the log that the next start restores is waited for
        process = start('recipe.yaml', 'save_folder=killed', long)
        wait_for(lambda moment=moment: moment() and is_locked(folder))
        os.killpg(process.pid, signal.SIGSTOP)
        with pytest.raises(InputError, match='another run is at work in'):
            pretrain(recipe('save_folder=killed', long))
        assert show_status() == 'running'
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert show_status() == 'dead'
    pretrain(recipe('save_folder=killed', long))
    assert 'the run was killed before; if because memory ran out, lower' in capsys.readouterr().out
    assert show_status() == 'finished'
    assert_same_run('whole', 'killed')


@pytest.mark.usefixtures('workspace')
def test_a_sigterm_to_the_whole_process_group_loses_no_batch(start, wait_for):
    """As from a scheduler; a loader worker that died of it would end the run before the batch is saved."""
    process = start('recipe.yaml', 'data.num_workers=1', 'training.max_samples=20000', threads=None)
    wait_for(lambda: count_rows('runs/recipe') > 2)
    os.killpg(process.pid, signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, out
    assert 'Traceback' not in out
    record = read_record('runs/recipe')
    assert record.status == 'stopped'
    said = re.fullmatch(r'SIGTERM: saved at ([\d,]+) samples; the same command resumes the run', record.ending)
    assert os.readlink('runs/recipe/latest') == name_checkpoint(int(said[1].replace(',', '')))


def test_a_loader_worker_ends_by_a_signal_of_its_trainer_alone(tmp_path, wait_for):
    def load() -> None:
        follow_trainer(0)
        (tmp_path / 'ready').touch()
        signal.pause()

    worker = multiprocessing.get_context('fork').Process(target=load)
    worker.start()
    try:
        wait_for(lambda: (tmp_path / 'ready').exists())
        subprocess.run(['kill', '-INT', str(worker.pid)], check=True)  # of another process
        worker.join(0.5)
        assert worker.is_alive()
        worker.terminate()
        worker.join(60)
        assert worker.exitcode == 0
    finally:
        worker.kill()


def test_a_loader_worker_says_nothing_of_a_connection_that_its_killed_trainer_broke(tmp_path, wait_for):
    forks = multiprocessing.get_context('fork')

    def load() -> None:
        with (tmp_path / 'said').open('w') as sys.stderr:
            follow_trainer(0)
            sys.excepthook(ConnectionResetError, ConnectionResetError('of a trainer that lives'), None)
            (tmp_path / 'ready').touch()
            multiprocessing.parent_process().join()
            sys.excepthook(ConnectionResetError, ConnectionResetError('of the killed trainer'), None)
            sys.excepthook(ValueError, ValueError('another'), None)
        (tmp_path / 'done').touch()

    def train() -> None:
        forks.Process(target=load).start()
        signal.pause()

    trainer = forks.Process(target=train)
    trainer.start()
    wait_for(lambda: (tmp_path / 'ready').exists())
    trainer.kill()
    wait_for(lambda: (tmp_path / 'done').exists())
    assert (tmp_path / 'said').read_text().splitlines() == [
        'ConnectionResetError: of a trainer that lives',
        'ValueError: another',
    ]


def test_a_loader_worker_that_is_killed_while_the_trainer_closes_prints_no_traceback(recipe, monkeypatch, caplog):
    """torch raises an error wherever it learns of the death, and Composer logs the errors of callbacks that close."""
    restore, others = StopSignals.restore, {child.pid for child in multiprocessing.active_children()}

    def kill_and_restore(signals: StopSignals) -> None:
        workers = [child for child in multiprocessing.active_children() if child.pid not in others]
        (worker,) = workers  # of training; validation has none
        worker.kill()
        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)  # not collected, as torch looks for it itself
        restore(signals)

    monkeypatch.setattr(StopSignals, 'restore', kill_and_restore)
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    assert pretrain(recipe('data.num_workers=1')).status == 'finished'
    assert caplog.text == ''
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
    assert callable(signal.getsignal(signal.SIGCHLD))  # torch's
    gc.collect()  # the loader, without which torch's handler would tell of its worker in another test
    multiprocessing.active_children()  # collects the worker


def test_a_killed_loader_worker_is_told(recipe, wait_for):
    config = recipe('data.num_workers=1', 'training.max_samples=20000')
    others = multiprocessing.active_children()  # a loader of an earlier test may not have been collected yet

    def kill() -> None:
        wait_for(lambda: count_rows('runs/recipe') > 2 and set(multiprocessing.active_children()) - set(others))
        for worker in set(multiprocessing.active_children()) - set(others):
            worker.kill()

    threading.Thread(target=kill, daemon=True).start()
    with pytest.raises(InputError, match='a loader worker was killed, most likely because memory ran out: lower'):
        pretrain(config)


def test_a_loader_worker_killed_while_a_checkpoint_is_written_is_told(recipe, monkeypatch):
    others = set(multiprocessing.active_children())

    def kill_and_save(*arguments, **named) -> None:
        for worker in set(multiprocessing.active_children()) - others:
            worker.kill()
            os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)  # not collected, as torch looks for it itself
        save_file(*arguments, **named)

    monkeypatch.setattr(checkpoints, 'save_file', kill_and_save)
    with pytest.raises(InputError, match='a loader worker was killed, most likely because memory ran out: lower'):
        pretrain(recipe('data.num_workers=1'))


@pytest.mark.slow
@pytest.mark.parametrize('sharding', ['ddp', 'full_shard'])
def test_two_ranks_train_and_resume_as_one(recipe, start, wait_for, sharding):
    pretrain(recipe('save_folder=one', *EXACT))
    arguments = ('recipe.yaml', 'save_folder=two', f'training.sharding={sharding}', *EXACT)
    process = start(*arguments, ranks=2)
    wait_for(lambda: count_rows('two') >= 3)
    assert process.poll() is None
    if sharding == 'full_shard':
        process.terminate()  # the launcher alone
    else:
        os.killpg(process.pid, signal.SIGTERM)  # of which each rank gets one more, from the launcher
    process.wait()
    wait_for(lambda: Path('two/latest').is_symlink())
    if sharding == 'full_shard':
        assert len(list(Path('two/latest/state').glob('*.distcp'))) == 2
    process = start(*arguments, ranks=2)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    assert 'resuming from' in out
    ours, theirs = (load_file(f'{folder}/latest/model.safetensors') for folder in ('one', 'two'))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_bad_input_is_one_line_and_exit_code_2_under_the_launcher(workspace, start):
    process = start('recipe.yaml', 'training.global_train_batch_size=31', ranks=2)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 2
    assert out.count('error: training.global_train_batch_size 31 is not divisible by 2 ranks') >= 1
    assert 'Traceback' not in out


@pytest.mark.slow
@pytest.mark.parametrize('rank', [0, 1])
def test_a_killed_rank_ends_the_run_with_one_line(recipe, start, wait_for, rank):
    recipe()
    process = start('recipe.yaml', 'training.max_samples=100000', ranks=2)
    wait_for(lambda: count_rows('runs/recipe') > 2)
    ranks = psutil.Process(process.pid).children()
    os.kill(sorted(child.pid for child in ranks)[rank], signal.SIGKILL)
    out, _ = process.communicate(timeout=300)
    assert process.returncode != 0
    line = f'rank {rank} was killed, most likely because memory ran out: lower training.device_train_microbatch_size'
    assert out.count(f'error: {line}') == 1, out
    assert 'Traceback' not in out
    record = load_record(Path('runs/recipe/record.json'), parse_pretraining)
    assert record.status == 'failed'
    assert record.ending.startswith(line)


@pytest.mark.slow
@two_machines
@pytest.mark.parametrize('sharding', ['ddp', 'full_shard'])
def test_two_nodes_save_to_one_disk(recipe, start_nodes, sharding):
    recipe()
    often = ('training.max_samples=256', 'training.checkpoint_interval_samples=16', f'training.sharding={sharding}')
    for process in start_nodes('save_folder=shared', *often, before=ISOLATED):
        out, _ = process.communicate(timeout=400)
        assert process.returncode == 0, out
    saved = sorted(Path('shared').glob('samples-*'))
    assert len(saved) == 16
    wanted = {'metrics.csv', 'model.safetensors', 'progress.json', 'state.pt' if sharding == 'ddp' else 'state'}
    assert all({path.name for path in checkpoint.iterdir()} == wanted for checkpoint in saved)
    assert not list(Path('shared').glob('.saving*'))


@pytest.mark.slow
@two_machines
def test_nodes_without_a_common_disk_are_refused_a_local_folder(recipe, start_nodes):
    recipe()
    for node, process in enumerate(start_nodes('save_folder=own', before=(*ISOLATED, *APART))):
        out, _ = process.communicate(timeout=300)
        assert process.returncode == 2, out
        assert out.count(f'{Path("node1/own").absolute()} of node 1 is not that of node 0') == 1
        assert 'Traceback' not in out
        assert not list(Path(f'node{node}').glob('own/.probe*'))


@pytest.mark.slow
@two_machines
@pytest.mark.parametrize('sharding, full', [('ddp', 0), ('full_shard', 0), ('full_shard', 1)])
def test_a_full_disk_of_one_node_ends_all_nodes(recipe, start_nodes, sharding, full):
    recipe()
    limited = ('bash', '-c', f'[ $RANK != {full} ] || ulimit -f 100; exec "$@"', 'bash')  # in KiB
    for process in start_nodes('save_folder=shared', f'training.sharding={sharding}', before=(*ISOLATED, *limited)):
        out, _ = process.communicate(timeout=300)
        assert process.returncode == 2, out
        assert 'Traceback' not in out
        said = out.splitlines()[-1]
        assert said.startswith('error: checkpoint samples-000000000128 could not be written to '), out
        assert re.search('(: File too large|a write failed, as on a full disk .*); there is no previous one$', said)
    assert not list(Path('shared').glob('*samples-*'))
    assert not list(Path('shared').glob('.saving*'))


@pytest.mark.slow
@two_machines
def test_a_signal_to_one_node_before_the_first_batch_ends_the_other(recipe, start_nodes, wait_for):
    recipe()
    nodes = start_nodes('save_folder=shared', before=ISOLATED)
    wait_for(Path('shared/record.json').exists)
    os.kill(nodes[1].pid, signal.SIGTERM)
    out = [node.communicate(timeout=300)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [2, 128 + signal.SIGTERM], out
    assert out[0].count('error: node 1 ended: a signal stopped it') == 1, out[0]
    assert 'Traceback' not in ''.join(out)


@pytest.mark.slow
@pytest.mark.parametrize(
    'save_folder, reason',
    [('busy', 'another run is at work in'), ('file', '{folder}/file: File exists; move that file away')],
)
def test_what_one_node_refuses_ends_all_nodes(recipe, start_nodes, save_folder, reason):
    Path('file').touch()
    with lock_folder(Path('busy').absolute(), 'run'):
        for process in start_nodes(f'save_folder={save_folder}'):
            out, _ = process.communicate(timeout=300)
            assert process.returncode == 2, out
            assert out.count(f'error: {reason.format(folder=Path.cwd())}') == 1
            assert 'Traceback' not in out
