"""The built wheel, installed beside no checkout: recipes and the paper's numbers travel with it."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from maelm_composer.reporting.load import read_csv
from tests.records import make_pretraining
from tests.training.conftest import N, V, write_rows

ROOT = Path(__file__).resolve().parents[1]
TINY = (
    *(f'model.vocab_size={V}', f'model.max_seq_len={N}', 'model.num_hidden_layers=1', 'model.hidden_size=32'),
    *('model.num_attention_heads=2', 'model.intermediate_size=64', 'model.head_bias_init=zeros', 'model.decoder=null'),
    *('masking.encoder_mask_fraction=1', 'data.num_workers=0', 'optimizer.warmup_samples=16', 'training.eval_rows=32'),
    *('training.global_train_batch_size=16', 'training.max_samples=64', 'training.precision=fp32'),
    'training.compile=false',
)


@pytest.fixture(scope='module')
def installed(tmp_path_factory) -> Path:
    """The folder into which the wheel of this checkout is installed."""
    folder = tmp_path_factory.mktemp('wheel')
    source, target = folder / 'source', folder / 'site'
    for name in ('maelm_composer', 'yamls', 'results/paper'):  # the build leaves files beside what it reads
        ignored = shutil.ignore_patterns('__pycache__')
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    for name in ('pyproject.toml', 'README.md', 'LICENSE'):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, '-m', 'pip', '--quiet', '--disable-pip-version-check']
    subprocess.run([*pip, 'wheel', '--no-deps', '--no-build-isolation', '-w', str(folder), str(source)], check=True)
    (wheel,) = folder.glob('*.whl')
    shutil.rmtree(source)
    subprocess.run([*pip, 'install', '--no-deps', '--target', str(target), str(wheel)], check=True)
    return target


@pytest.fixture
def maelm(installed: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """``maelm('keys')``: the installed command, in an empty folder."""
    environment = os.environ | {'PYTHONPATH': str(installed), 'MAELM_CACHE': str(tmp_path / 'cache')}

    def run(*arguments: str, command: tuple[str, ...] = (str(installed / 'bin/maelm'),)) -> subprocess.CompletedProcess:
        return subprocess.run(
            [*command, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    return run


def test_the_wheel_holds_every_recipe_and_every_published_number(installed):
    for folder, pattern in (('yamls', '**/*.yaml'), ('results/paper', '*.csv')):
        shipped = installed / 'maelm_composer/shipped'
        found = {path.relative_to(shipped) for path in (shipped / folder).glob(pattern)}
        assert found == {path.relative_to(ROOT) for path in (ROOT / folder).glob(pattern)} != set()


def test_recipes_are_found_from_anywhere_and_those_of_the_folder_come_first(maelm, tmp_path):
    done = maelm('keys', 'pretraining', 'masking.mlm_probability')
    assert (done.returncode, done.stderr) == (0, '')
    assert 'share of masked positions' in done.stdout
    done = maelm('train', 'yamls/demo.yaml', 'yamls/roberta.yaml', 'model.decoder.hidden=3')
    assert (done.returncode, done.stderr.count('\n')) == (2, 1)
    assert 'unknown key model.decoder.hidden; did you mean model.decoder.hidden_size?' in done.stderr
    (tmp_path / 'yamls').mkdir()
    (tmp_path / 'yamls/demo.yaml').write_text('mine: 1\n')
    assert 'yamls/demo.yaml: unknown key mine' in maelm('train', 'yamls/demo.yaml').stderr


def test_a_suite_is_planned_for_another_machine(maelm, tmp_path):
    done = maelm('suite', '--scale', 'demo', '--plan', '--gpus', '8', '--gpu', 'h100', '--artefacts', 'table1')
    assert (done.returncode, done.stderr) == (0, '')
    assert 'pretraining demo-roberta' in done.stdout
    assert 'scale demo on 8 × H100' in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_report_has_the_papers_numbers(maelm, tmp_path):
    records = tmp_path / 'results/demo/records/pretraining'
    records.mkdir(parents=True)
    (records / 'demo.json').write_text(json.dumps(make_pretraining('demo')))
    done = maelm('report', '--scale', 'demo')
    assert (done.returncode, done.stderr) == (0, '')
    assert done.stdout.splitlines()[-1] == 'report: results/demo/report.html'
    rows = read_csv(tmp_path / 'results/demo/table3.csv')
    assert {row['paper'] for row in rows if (row['row'], row['column']) == ('MAE-LM', 'pretrained')} == {'491'}


@pytest.mark.slow
def test_a_run_is_trained_from_a_recipe_of_the_wheel_on_one_rank_and_on_two(maelm, tmp_path):
    missing = maelm('train', 'yamls/demo.yaml')
    assert (missing.returncode, missing.stderr.count('\n')) == (2, 1)
    assert missing.stderr.startswith('error: no shards at data/demo: run `maelm shards')
    write_rows(tmp_path / 'data/demo')
    done = maelm('train', 'yamls/demo.yaml', *TINY)
    assert (done.returncode, done.stderr) == (0, '')
    composer = (str(Path(sys.executable).with_name('composer')), '-n', '2', '-m', 'maelm_composer.train')
    done = maelm('yamls/demo.yaml', *TINY, 'run_name=two', command=composer)
    assert done.returncode == 0, done.stderr
    for name, ranks in (('demo', 1), ('two', 2)):
        record = json.loads((tmp_path / 'runs' / name / 'record.json').read_text())
        assert (record['status'], record['samples'], record['world_size']) == ('finished', 64, ranks)
        assert record['provenance']['git_revision'] is None


@pytest.mark.slow
def test_a_suite_is_made_in_an_empty_folder(maelm, tmp_path):
    settings = {'pretraining': ['training.max_samples=320', 'training.checkpoint_interval_samples=320']}
    (tmp_path / 'short.yaml').write_text(json.dumps(settings | {'finetuning': ['own.yaml']}))
    (tmp_path / 'rows.csv').write_text('text,label\n' + 'a red rose,red\nthe blue sky,blue\nblue,blue\n' * 8)
    colours = {'kind': 'classification', 'text_columns': ['text'], 'label_names': ['red', 'blue']}
    colours['files'] = {'train': 'rows.csv', 'dev': 'rows.csv'}
    (tmp_path / 'own.yaml').write_text(json.dumps({'tasks': {'colours': colours}}))
    first, again = (
        maelm('suite', '--scale', 'demo', '--artefacts', 'table3,own', '--settings', 'short.yaml') for _ in '12'
    )
    for done in (first, again):
        assert done.returncode == 0, done.stderr
        assert 'report: results/demo/report.html' in done.stdout
    assert re.search(r'^pretraining demo-roberta: \d+ s; about \d+ min \d+ s left$', first.stdout, re.MULTILINE)
    assert 'times the estimate' in first.stdout
    rows = {(row['row'], row['column']): row['value'] for row in read_csv(tmp_path / 'results/demo/own.csv')}
    assert rows.keys() == {
        (label, 'colours accuracy') for label in ('MAE-LM', 'RoBERTa', 'a constant answer', 'MAE-LM − RoBERTa')
    }
    assert rows['a constant answer', 'colours accuracy'] == '66.6667'
    assert ' left' not in again.stdout  # every result is found
