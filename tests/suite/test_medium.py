"""The scale that one GPU trains in ten minutes a model, and bench/gpu.sh, which runs it there; here on a CPU."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import torch

from maelm_composer.config import SourceConfig, SourceKind, SuiteConfig
from maelm_composer.data.corpora import iterate_documents
from maelm_composer.data.manifest import load_manifest
from maelm_composer.data.shards import build_shards
from maelm_composer.data.tokenizer import build_tokenizer
from maelm_composer.errors import InputError
from maelm_composer.recipe import load_config
from maelm_composer.reporting.artefacts import MAE_LM, ROBERTA, find_artefact
from maelm_composer.reporting.load import read_csv
from maelm_composer.suite.cost import PEAKS, describe_device
from maelm_composer.suite.plan import plan_suite
from maelm_composer.suite.steps import Kind, list_saved_samples, load_suite
from maelm_composer.tasks.catalogue import TASKS
from maelm_composer.training.plan import count_training_flops
from maelm_composer.training.run import pretrain
from tests.suite.conftest import write_record
from tests.suite.test_run import read_records
from tests.tiny import make_rows, write_rows

SCRIPT = Path('bench/gpu.sh')
THOUSANDTH = Path(__file__).with_name('thousandth.yaml')
# What makes a run short whose end matters and not its numbers.
NARROW = [
    *('model.vocab_size=600', 'model.num_hidden_layers=2', 'model.hidden_size=32', 'model.num_attention_heads=2'),
    *('model.intermediate_size=64', 'model.decoder.num_hidden_layers=1', 'model.decoder.hidden_size=32'),
    *('model.decoder.num_attention_heads=2', 'model.decoder.intermediate_size=64', 'training.precision=fp32'),
    *('training.max_samples=1280', 'optimizer.warmup_samples=128', 'training.eval_interval_samples=64'),
    *('training.checkpoint_interval_samples=320', 'training.eval_rows=32'),
]


@pytest.mark.parametrize('model', [MAE_LM, ROBERTA], ids=lambda model: model.label)
@pytest.mark.parametrize('gpu', ['h100', 'h200'])
def test_a_model_takes_ten_minutes_of_a_gpu_at_35_percent_of_its_peak(gpu, model, tmp_path):
    config = load_suite('medium', tmp_path).load_pretraining(model)
    assert count_training_flops(config) / (0.35 * PEAKS[gpu][1]) == pytest.approx(600, rel=0.1)
    steps = config.training.max_samples / config.training.global_train_batch_size
    assert config.optimizer.warmup_samples / config.training.max_samples == 0.1
    assert 5000 < steps < 10_000
    assert len(list_saved_samples(config)) == 4


def test_the_plan_of_the_scale_is_that_of_its_flops(tmp_path, monkeypatch):
    monkeypatch.setenv('MAELM_DATA', str(tmp_path))
    suite = load_suite('medium', tmp_path / 'work', tmp_path / 'results')
    items = plan_suite(suite, [find_artefact('table1')], describe_device('h100', 1))
    (baseline, mine) = (item.seconds for item in items if item.step.kind is Kind.pretraining)
    assert baseline < mine
    assert mine == pytest.approx(4 + 30 + count_training_flops(suite.load_pretraining(MAE_LM)) / (0.40 * 989e12))
    tuning = sum(item.seconds for item in items if item.step.kind is Kind.finetuning)
    starts = 2 * 9 * 4 * (1 + 10) / 4  # models, tasks, runs of each; four at a time on one GPU
    assert tuning - starts == pytest.approx(535, rel=0.05)


def test_settings_come_after_the_scales_own(tmp_path):
    whole, short = load_suite('medium', tmp_path), load_suite('medium', tmp_path, added=THOUSANDTH)
    assert short.load_pretraining(MAE_LM).training.max_samples == 6400
    assert short.load_pretraining(MAE_LM).model == whole.load_pretraining(MAE_LM).model
    mine = short.load_finetuning(MAE_LM, 6400, ['mnli'])
    assert (mine.data.limit('mnli'), mine.sweep.seeds) == (64, [1, 2])
    assert (short.settings.rank_tokens, whole.settings.rank_tokens) == (2000, 1_000_000)
    assert short.records == whole.records
    seeds = {'pretraining_seeds': [5, 6], 'pretraining_seeds_of': {'table2': [5]}}
    own = load_suite('small', tmp_path, added=write_record(tmp_path / 'seeds.yaml', seeds))
    assert (own.list_seeds('table1', MAE_LM), own.list_seeds('table2', MAE_LM)) == ([5, 6], [5])
    assert own.settings.pretraining_of == load_suite('small').settings.pretraining_of
    with pytest.raises(InputError, match=r'again\.yaml: pretraining seeds \[5, 5\]: a seed is listed twice'):
        load_suite('small', tmp_path, added=write_record(tmp_path / 'again.yaml', {'pretraining_seeds': [5, 5]}))


def call(folder: Path, *parts: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [SCRIPT, *parts], env=describe(folder, **environment), capture_output=True, text=True, check=False
    )


def describe(folder: Path, **environment: str) -> dict[str, str]:
    own = {'PYTHON': sys.executable, 'WORK': f'{folder}/work', 'RESULTS': f'{folder}/results', 'DEVICE': 'cpu'}
    return os.environ | own | environment


@pytest.mark.parametrize(
    'parts, environment, message',
    [
        (['tests'], {'DEVICE': 'cuda', 'CUDA_VISIBLE_DEVICES': ''}, 'no GPU: torch '),
        (['tests'], {'DEVICE': 'cuda', 'PYTHON': 'no-python'}, 'no-python has no torch'),
        (['tests'], {'DEVICE': 'tpu'}, "DEVICE is cuda or cpu, not 'tpu'"),
        (['speeds'], {}, 'no part speeds: tests, speed, suite or growth'),
        (['suite'], {'SCALE': 'huge'}, 'no yamls/suite/huge.yaml'),
        (['suite'], {'PART_SECONDS': '8m'}, "PART_SECONDS and GRACE are whole seconds, not '8m'"),
        (['suite'], {}, 'MAELM_DATA is not set'),
        (['suite'], {'MAELM_DATA': 'nowhere'}, '/nowhere/glue'),
        (['suite'], {'MAELM_DATA': 'data', 'SCALE': 'small'}, 'no text: neither '),
    ],
)
def test_what_the_script_cannot_use_is_one_line(tmp_path, parts, environment, message):
    if 'MAELM_DATA' in environment:
        environment = environment | {'MAELM_DATA': str(tmp_path / environment['MAELM_DATA']), 'DATA_ROOT': 'empty'}
        for name in ('glue', 'squad_v2'):
            (tmp_path / 'data' / name).mkdir(parents=True)
    if environment.get('SCALE') == 'small' and Path('data/small/manifest.json').exists():
        pytest.skip('shards of this scale are there')
    done = call(tmp_path, *parts, **environment)
    assert (done.returncode, done.stdout) == (2, '')
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith('bench/gpu.sh: ')
    assert message in done.stderr


def test_parts_pass_fail_and_go_on(tmp_path):
    """With a test file as the part `tests`, which says by its end and its length what the script must do."""
    tests = tmp_path / 'test_it.py'
    environment = {'TESTS': f'-p no:cacheprovider -c /dev/null {tests}', 'PART_SECONDS': '60', 'OUT': f'{tmp_path}/out'}
    tests.write_text('def test_it():\n    assert not "broken"\n')
    failed = call(tmp_path, 'tests', **environment)
    assert failed.returncode == 1
    assert 'tests: FAILED with exit code 1' in failed.stdout
    assert 'assert not "broken"' in failed.stdout  # the end of the log
    tests.write_text('import time\n\n\ndef test_it():\n    time.sleep(60)\n')
    late = call(tmp_path, 'tests', **environment | {'PART_SECONDS': '2', 'GRACE': '1'})
    assert late.returncode == 1
    assert 'of PART_SECONDS=2, and cannot be divided' in late.stdout
    command = {'args': [SCRIPT, 'tests'], 'env': describe(tmp_path, **environment)}
    process = subprocess.Popen(**command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert 'tests: begun' in process.stdout.readline() + process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    rest = process.communicate(timeout=60)[0]
    assert process.returncode == 75
    assert rest.splitlines()[-1] == 'left: tests; call again'
    tests.write_text('def test_it():\n    pass\n')
    passed = call(tmp_path, 'tests', **environment)
    assert (passed.returncode, passed.stderr) == (0, '')
    assert 'tests: passed' in passed.stdout
    tests.unlink()
    again = call(tmp_path, 'tests', **environment)
    assert again.returncode == 0
    assert 'begun' not in again.stdout
    with tarfile.open(tmp_path / 'out/results.tar.gz') as packed:
        assert 'gpu/tests.log' in packed.getnames()


@pytest.mark.slow
@pytest.mark.parametrize('model', [MAE_LM, ROBERTA], ids=lambda model: model.label)
def test_the_recipe_learns_at_a_thousandth_of_its_rows(model, tmp_path, monkeypatch):
    """The recipe's own model and vocabulary; text of this machine in place of one's own."""
    torch.set_num_threads(os.cpu_count() or 1)  # a run takes a quarter of an hour on two cores
    monkeypatch.setenv('DATA_ROOT', str(tmp_path))
    suite = load_suite('medium', tmp_path / 'work', tmp_path / 'results', added=THOUSANDTH)
    write_corpus(tmp_path, 17_000)
    corpus = dataclasses.replace(suite.load_corpus(), remote=str(tmp_path / 'shards'))
    build_tokenizer(corpus)
    build_shards(corpus)
    config = suite.load_pretraining(model)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, remote=corpus.remote))
    record = pretrain(config)
    rows = (suite.run_folder(model) / 'metrics.csv').read_text().splitlines()
    column = rows[0].split(',').index('eval_loss')
    losses = [float(value) for row in rows[1:] if (value := row.split(',')[column])]
    assert len(losses) == 4
    assert losses == sorted(losses, reverse=True)
    # 200 steps learn the frequencies of the tokens and little more.
    assert record.eval_loss == losses[-1] < load_manifest(corpus.remote).unigram_entropy + 0.5


@pytest.mark.slow
def test_a_speed_is_measured_once_and_its_rows_are_with_the_results(tmp_path):
    environment = {'GROWTH': 'growth_with_batch[8]', 'PART_SECONDS': '1200'}
    done = call(tmp_path, 'growth', **environment)
    assert done.returncode == 0, done.stdout
    assert 'growth-growth_with_batch-8: passed' in done.stdout
    (table,) = (tmp_path / 'results/throughput').glob('growth-*.csv')
    rows = read_csv(table)
    assert [row['batch'] for row in rows] == ['8'] * 4
    assert all(float(row['tokens_per_second']) > 0 for row in rows)
    assert 'begun' not in call(tmp_path, 'growth', **environment).stdout
    none = call(tmp_path, 'growth', **environment | {'GROWTH': 'of_nothing'})
    assert none.returncode == 1
    assert 'growth: FAILED: no shape to measure' in none.stdout


@pytest.mark.slow
def test_a_suite_in_parts_that_are_killed_ends_with_the_same_records(tmp_path):
    environment = prepare(tmp_path)
    whole, cut = tmp_path / 'whole', tmp_path / 'cut'
    done = call(whole, 'suite', **environment, PART_SECONDS='3000')
    assert done.returncode == 0, done.stdout
    wanted = read_records(whole, 'medium')
    # Both models: nine tasks and MNLI of three earlier checkpoints, two seeds each; a pretraining and a rank record.
    assert len([name for name in wanted if name.startswith('finetuning')]) == 2 * (9 + 3) * 2
    assert len(wanted) == 2 * (9 + 3) * 2 + 2 * 2 + 2

    first = call(cut, 'suite', **environment, PART_SECONDS='15')
    assert first.returncode == 75
    assert 'suite: not done after ' in first.stdout
    assert 'fine-tuning medium at 1,280, 9 tasks' in first.stdout  # what is left, by the planner

    def count(pattern: str) -> int:
        return len(list((cut / 'work').glob(pattern)))

    def has_begun(run: str) -> bool:
        log = cut / 'work/runs' / run / 'metrics.csv'
        return log.exists() and len(log.read_text().splitlines()) > 5

    stops = [
        (signal.SIGKILL, lambda: count('runs/medium/samples-*') > 0),
        (signal.SIGKILL, lambda: count('finetuning/*.json') >= 5),
        (signal.SIGTERM, lambda: count('finetuning/*.json') >= 10),
        (signal.SIGTERM, lambda: has_begun('medium-roberta')),  # its MAE-LM is fine-tuned before
    ]
    command, own = [SCRIPT, 'suite'], describe(cut, **environment, PART_SECONDS='3000')
    for number, is_time in stops:
        process = subprocess.Popen(command, env=own, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert process.stdout is not None
        next(line for line in process.stdout if 'suite: begun' in line)
        while not is_time():
            assert process.poll() is None, 'the suite ended before it was to be stopped'
            time.sleep(0.05)
        if number == signal.SIGKILL:
            os.killpg(process.pid, number)
            process.wait()
        else:
            process.send_signal(number)
            assert process.wait(300) == 75
    log = (cut / 'results/gpu/suite.log').read_text()
    assert 'SIGTERM: saved at ' in log
    assert log.count('stopped; the same command resumes') >= 2  # the first call may have got as far, too
    assert call(cut, 'suite', **environment, PART_SECONDS='3000').returncode == 0
    assert read_records(cut, 'medium') == wanted


def prepare(folder: Path) -> dict[str, str]:
    """Text, tasks and settings below ``folder``, and the variables that name them."""
    write_corpus(folder / 'data', 2000)
    for name, task in TASKS.items():
        if task.is_demo:
            continue
        place = folder / 'data' / ('squad_v2' if task.kind == 'span' else f'glue/{name}')
        write_rows(place / 'train.parquet', make_rows(name, 96, seed=0))
        for split in task.eval_splits:
            write_rows(place / (f'dev_{split}.parquet' if name == 'mnli' else 'dev.parquet'), make_rows(name, 48, 1))
    short = load_config(SuiteConfig, [str(THOUSANDTH)])
    own = {
        'data': [f'remote={folder}/shards', 'tokenizer.vocab_size=600'],
        'pretraining': [*short.pretraining, *NARROW, f'data.remote={folder}/shards'],
        'finetuning': [*short.finetuning, 'precision=fp32'],
        'rank_tokens': short.rank_tokens,
    }
    settings = folder / 'settings.yaml'
    settings.write_text(json.dumps(own))
    return {'MAELM_DATA': str(folder / 'data'), 'SETTINGS': str(settings)}


def write_corpus(folder: Path, documents: int) -> None:
    """``folder``/corpus/text.parquet, of documentation on this machine."""
    sources = [SourceConfig(SourceKind.documentation, max_documents=documents)]
    write_rows(folder / 'corpus/text.parquet', [{'text': text} for text in iterate_documents(sources)])
