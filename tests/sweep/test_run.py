"""The sweep on a real Ray, with real runs: nothing twice, nothing lost, whatever is killed."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from transformers import MPNetConfig, MPNetModel

from maelm_composer.cluster import connect_ray
from maelm_composer.config import FinetuningConfig
from maelm_composer.errors import InputError
from maelm_composer.recipe import load_config
from maelm_composer.sweep.run import sweep
from tests.tiny import SIZES, N, V

LEARNING_RATES = 'sweep.search.glue_small.learning_rate'
RECIPE = """
checkpoint: {checkpoint}
precision: fp32
batch_size: 16
max_epochs: 1
data: {{source: files, folder: {tasks}}}
sweep:
  tasks: [rte, cola]
  seeds: [1, 2, 3]
  search:
    glue_small: {{learning_rate: [3e-3, 1e-3], warmup_proportion: [0.06, 0.10]}}
"""
DRIVER = """
import sys
from maelm_composer.config import FinetuningConfig
from maelm_composer.sweep.run import sweep_and_print
from maelm_composer.recipe import load_config
sys.exit(sweep_and_print(load_config(FinetuningConfig, ['recipe.yaml'], sys.argv[1:])))
"""
WITH_ONE_GPU = """
import ray
ray.init(address='local', num_cpus=2, num_gpus=1, include_dashboard=False, log_to_driver=False)
"""
ONE_POINT = (f'{LEARNING_RATES}=[1e-3]', 'sweep.search.glue_small.warmup_proportion=[0.06]', 'sweep.tasks=[cola]')


@pytest.fixture(scope='module')
def folder(tmp_path_factory, checkpoint, task_folder):
    """A folder with a recipe, and a Ray of two cores: the session's, where another test has started one."""
    path = tmp_path_factory.mktemp('sweep')
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        Path('recipe.yaml').write_text(RECIPE.format(checkpoint=checkpoint, tasks=task_folder))
        with connect_ray(num_cpus=2):
            yield path


@pytest.fixture
def recipe(folder) -> Callable[..., FinetuningConfig]:
    return lambda *overrides: load_config(FinetuningConfig, ['recipe.yaml'], overrides)


@pytest.fixture(scope='module')
def undisturbed(folder):
    """What the recipe's sweep comes to when nothing happens to it."""
    return sweep(load_config(FinetuningConfig, ['recipe.yaml'], ['save_folder=undisturbed']))


@pytest.fixture
def start(folder):
    """Start a driver as another process: in the Ray at ``cluster``, or in one that it brings up itself."""
    processes = []

    def start_driver(*overrides: str, cluster: str | None = None, before: str = '') -> subprocess.Popen:
        environment = {key: value for key, value in os.environ.items() if key != 'RAY_ADDRESS'}
        if cluster is not None:
            environment['RAY_ADDRESS'] = cluster
        command = [sys.executable, '-c', before + DRIVER, *overrides]
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        processes.append(process)
        return process

    yield start_driver
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def load_records(folder: str | Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(Path(folder).glob('*.json'))]


def outcomes(folder: str | Path) -> dict[str, tuple]:
    """By key, all of a run that does not depend on how long things took."""
    found = {}
    for record in load_records(folder):
        predictions = Path(folder, f'{record["key"]}.predictions.jsonl')
        text = predictions.read_text() if predictions.exists() else None
        found[record['key']] = (record['status'], record['seed'], record['point'], record.get('metrics'), text)
    return found


def test_records_in_object_storage_are_refused(folder):
    config = load_config(FinetuningConfig, ['recipe.yaml'], ['save_folder=s3://bucket/tuned'])
    with pytest.raises(InputError, match='save_folder s3://bucket/tuned: must be a local or shared folder'):
        sweep(config)


def test_a_sweep_settles_auto_once_for_its_folder(recipe):
    Path('settled').mkdir()
    Path('settled/precision.txt').write_text('bf16 (auto: chosen on another machine)\n')
    one_point = (f'{LEARNING_RATES}=[1e-3]', 'sweep.search.glue_small.warmup_proportion=[0.06]')
    few = ('sweep.tasks=[rte]', 'sweep.seeds=[1]', *one_point, 'save_folder=settled')
    sweep(recipe('precision=auto', *few))
    assert {record['protocol']['precision'] for record in load_records('settled')} == {'bf16'}
    sweep(recipe('precision=auto', *few, 'save_folder=unsettled'))
    word = Path('unsettled/precision.txt').read_text().split()[0]
    assert {record['protocol']['precision'] for record in load_records('unsettled')} == {word}


def count_finished(folder: str | Path) -> int:
    return sum(record['status'] == 'finished' for record in load_records(folder))


def find_workers(folder: str | Path) -> list[int]:
    """Processes that are at a run."""
    pids = []
    for path in Path(folder).glob('.*.lease'):
        try:
            pids.append(int(re.search(r'^pid=(\d+)$', path.read_text(), re.M)[1]))
        except (FileNotFoundError, TypeError):
            continue  # it has just ended, or is just beginning
    return pids


def kill_workers(folder: str, count: int) -> threading.Thread:
    """In the background, kill as many workers, one after another, each in the middle of a run."""

    def kill() -> None:
        killed: set[int] = set()
        while len(killed) < count:
            # The sweep itself holds a lease for an instant, to see if it is free.
            for pid in set(find_workers(folder)) - killed - {os.getpid()}:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
                break
            time.sleep(0.01)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    return thread


def test_a_grid_on_one_seed_then_the_best_point_on_all(undisturbed, recipe, folder, capsys):
    assert [result.task.name for result in undisturbed.tasks] == ['rte', 'cola']
    records = load_records('undisturbed')
    assert len(records) == 2 * (4 + 2)
    for result in undisturbed.tasks:
        grid = [r for r in records if r['task'] == result.task.name and r['seed'] == 1]
        assert len(grid) == 4
        best = max(record['score'] for record in grid)
        assert vars(result.point) in [record['point'] for record in grid if record['score'] == best]
        assert [record.seed for record in result.records] == [1, 2, 3]
        assert (len(result.finished), result.num_planned) == (6, 6)
    assert undisturbed.failures == []
    assert undisturbed.average is None
    assert not list(Path('undisturbed').glob('.*'))  # no lease, no half of a file

    written = {path: path.stat().st_mtime_ns for path in Path('undisturbed').iterdir()}
    again = sweep(recipe('save_folder=undisturbed'))
    assert {path: path.stat().st_mtime_ns for path in Path('undisturbed').iterdir()} == written
    assert again == undisturbed
    assert capsys.readouterr().err == ''  # a line a run, and there was none


def test_own_tasks_are_swept_beside_built_in_ones(undisturbed, recipe, task_folder):
    files = {split: f'{task_folder}/glue/sst2/{split}.parquet' for split in ('train', 'dev')}
    own = {'kind': 'classification', 'text_columns': ['sentence'], 'label_names': ['negative', 'positive']}
    overrides = (f'tasks.own={json.dumps(own | {"files": files})}', 'sweep.tasks=[rte,own]')
    search = 'sweep.search.own={learning_rate: [1e-3], warmup_proportion: [0.06]}'
    rte, of_own = sweep(recipe('save_folder=undisturbed', *overrides, search)).tasks
    assert rte == undisturbed.tasks[0]
    assert (of_own.task.name, of_own.point.learning_rate, of_own.num_planned) == ('own', 1e-3, 3)
    assert [record.seed for record in of_own.records] == [1, 2, 3]
    for path in Path('undisturbed').glob('own-*'):  # the other tests count records
        path.unlink()
    with pytest.raises(InputError, match=r'unknown task owm; did you mean own\?'):
        sweep(recipe(*overrides, 'sweep.search.owm={max_epochs: [1]}'))


@pytest.mark.parametrize('task', ['rte', 'stsb', 'squad2'])
def test_a_hugging_face_encoder_and_its_import_train_to_the_same_loss(recipe, checkpoint, task):
    """Through the sweep: the stock class as it is, and our encoder with its weights.

    MPNet, as RoBERTa's token-type vector is part of the positions after import, and so has no step of its own.
    """
    torch.manual_seed(0)
    stock = MPNetModel(MPNetConfig(vocab_size=V, max_position_embeddings=N + 2, **SIZES))
    stock.save_pretrained('stock')
    shutil.copytree(checkpoint / 'tokenizer', 'stock', dirs_exist_ok=True)
    found = {}
    for implementation in ('huggingface', 'ours'):
        folder = f'{implementation}-{task}'
        result = sweep(
            recipe(
                *('checkpoint=stock', f'implementation={implementation}', f'save_folder={folder}', 'dropout=0'),
                *(f'sweep.tasks=[{task}]', 'sweep.seeds=[1]', 'sweep.search.squad2={max_epochs: [1]}'),
                *(f'{LEARNING_RATES}=[1e-3]', 'sweep.search.glue_small.warmup_proportion=[0.06]'),
            )
        )
        (record,) = result.tasks[0].records
        assert record.checkpoint.implementation == implementation
        found[implementation] = record.train_loss
    assert found['ours'] == pytest.approx(found['huggingface'], abs=1e-4)


def test_a_killed_workers_run_is_made_again(undisturbed, recipe):
    killer = kill_workers('worker', count=1)
    result = sweep(recipe('save_folder=worker', 'sweep.tasks=[cola]'))
    assert not killer.is_alive()
    assert result.failures == []
    expected = {key: value for key, value in outcomes('undisturbed').items() if key.startswith('cola')}
    assert outcomes('worker') == expected


@pytest.mark.slow
def test_a_run_whose_worker_dies_too_often_is_named_and_made_by_the_next_call(undisturbed, recipe):
    overrides = ('save_folder=lost', 'sweep.tasks=[cola]', 'sweep.max_retries=0')
    killer = kill_workers('lost', count=1)
    result = sweep(recipe(*overrides))
    assert not killer.is_alive()
    (failure,) = result.failures
    assert failure.error.startswith('a worker was lost on every try')
    assert count_finished('lost') >= 5 - 2  # the best point may have been lost, and so be another's
    assert sweep(recipe(*overrides)).failures == []
    wanted = {key: value for key, value in outcomes('undisturbed').items() if key.startswith('cola')}
    assert outcomes('lost').items() >= wanted.items()


def test_a_run_that_fails_is_recorded_and_the_others_go_on(recipe, capsys):
    overrides = ('save_folder=failing', 'sweep.tasks=[cola]', f'{LEARNING_RATES}=[1e-3,1e30]')
    overrides += ('sweep.search.glue_small.warmup_proportion=[0.06]', 'max_epochs=3')
    result = sweep(recipe(*overrides))
    (failure,) = result.failures
    assert failure.point.learning_rate == 1e30
    assert failure.error.startswith('the loss is not finite at step')
    assert 'lr 1e+30' in capsys.readouterr().err
    (of_task,) = result.tasks
    assert (of_task.point.learning_rate, len(of_task.records), len(of_task.finished)) == (1e-3, 3, 3)
    path = Path('failing', f'{failure.key}.json')
    before = path.stat().st_mtime_ns
    assert len(sweep(recipe(*overrides)).failures) == 1
    assert path.stat().st_mtime_ns > before  # it was tried again


@pytest.mark.parametrize(
    'override, message',
    [
        ('checkpoint=./nowhere', 'nowhere: there is no such checkpoint'),
        ('data.folder=.', 'glue is not there'),
        ('sweep.tasks=[rte,squad2]', 'sweep.search has neither squad2 nor'),
        ('sweep.cpus_per_run=3', r'sweep.cpus_per_run 3: no machine of Ray has as much \(2 CPU\)'),
    ],
)
def test_bad_input_is_said_before_any_run(recipe, override, message):
    with pytest.raises(InputError, match=message):
        sweep(recipe('save_folder=never', override))
    assert not Path('never').exists()


@pytest.mark.slow
def test_a_killed_driver_loses_no_more_than_the_runs_in_flight(undisturbed, start, recipe, wait_for):
    for least in (2, 6):
        driver = start('save_folder=driver')
        wait_for(lambda least=least: count_finished('driver') >= least, every=0.02)
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()
        assert driver.returncode == -signal.SIGKILL
    assert len(load_records('driver')) < 12
    written = {path: path.stat().st_mtime_ns for path in Path('driver').glob('*.json')}
    sweep(recipe('save_folder=driver'))
    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert outcomes('driver') == outcomes('undisturbed')


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason='torch can use a GPU here')
def test_a_gpu_that_torch_cannot_use_fails_every_run(start):
    driver = start('save_folder=without', *ONE_POINT, before=WITH_ONE_GPU)
    out, _ = driver.communicate(timeout=300)
    assert driver.returncode == 1, out
    errors = {record['error'] for record in load_records('without')}
    assert errors == {'torch cannot use the GPU that Ray has given to the run'}


@pytest.mark.gpu
def test_runs_share_a_gpu_that_ray_hands_out(start):
    driver = start('save_folder=halves', *ONE_POINT, 'sweep.gpus_per_run=0.5', before=WITH_ONE_GPU)
    out, _ = driver.communicate(timeout=300)
    assert driver.returncode == 0, out
    records = load_records('halves')
    assert [record['status'] for record in records] == ['finished'] * 3
    for record in records:
        seconds = record['training_seconds'] + record['evaluation_seconds']
        assert record['device_hours'] == pytest.approx(0.5 * seconds / 3600)


@pytest.mark.slow
def test_two_sweeps_at_once_share_the_runs(undisturbed, start, recipe):
    import ray

    driver = start('save_folder=shared', cluster=ray.get_runtime_context().gcs_address)
    result = sweep(recipe('save_folder=shared'))
    out, _ = driver.communicate(timeout=300)
    assert driver.returncode == 0, out
    assert [(r.point, r.scores) for r in result.tasks] == [(r.point, r.scores) for r in undisturbed.tasks]
    assert outcomes('shared') == outcomes('undisturbed')
    # A run that both had made would have the times of the second in its file.
    seconds = {record['key']: record['training_seconds'] for record in load_records('shared')}
    assert {r.key: r.training_seconds for task in result.tasks for r in task.finished} == seconds


@pytest.mark.slow
def test_ctrl_c_ends_with_one_line_and_no_process_left(start, wait_for):
    driver = start('save_folder=stopped')
    wait_for(lambda: count_finished('stopped') >= 2, every=0.02)
    processes = psutil.Process(driver.pid).children(recursive=True)  # Ray's servers and its workers
    assert len(processes) > 4
    os.killpg(driver.pid, signal.SIGINT)  # as a terminal does
    out, _ = driver.communicate(timeout=300)
    assert driver.returncode == 130, out
    lines = [line for line in out.splitlines() if not line.startswith('[')]
    assert lines == ['stopped: the runs that ended are recorded, and the same command does the others']
    alive = psutil.wait_procs(processes, timeout=60)[1]
    assert {process.status() for process in alive} <= {psutil.STATUS_ZOMBIE}  # of a parent that does not reap
