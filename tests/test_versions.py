"""The sets of versions that were tested, what a machine with its own torch lacks, and what another torch hears."""

import functools
import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from maelm_composer import train
from maelm_composer.errors import InputError
from maelm_composer.versions import ENGINES, TESTED_TORCH, describe_untested, find_missing, main, normalize_name

ROOT = Path(__file__).resolve().parents[1]
LOCK = (ROOT / 'constraints-latest.txt').read_text().splitlines()
MACHINE = {'torch': '2.11.0', 'torchvision': '0.26.0', 'transformers': '5.17.0', 'numpy': '2.5.2'}


def read_versions(name: str) -> dict[str, str]:
    """Version by normalised name, of a file of constraints."""
    lines = [line for line in (ROOT / name).read_text().splitlines() if not line.startswith('#')]
    return {normalize_name(package): version for package, version in (line.split('==') for line in lines)}


def read_names(requirements: list[str]) -> set[str]:
    return {normalize_name(line.partition('==')[0]) for line in requirements}


@pytest.mark.parametrize('name', ['constraints.txt', 'constraints-latest.txt'])
def test_both_sets_hold_what_the_package_asks_for_and_a_tested_torch(name):
    versions = read_versions(name)
    asked = map(Requirement, importlib.metadata.requires('maelm-composer') or [])
    wanted = {each.name for each in asked if each.marker is None or each.marker.evaluate({'extra': 'dev'})}
    assert len(wanted) > 20
    assert {normalize_name(package) for package in wanted} <= versions.keys()
    assert describe_untested(versions['torch']) is None
    for engine in ENGINES:
        assert versions[engine] == read_versions('constraints.txt')[engine]
    versions_page = (ROOT / 'docs/versions.md').read_text()
    assert {versions['torch'], versions['transformers']} <= set(re.findall(r'\d+\.\d+\.\d+', versions_page))
    assert all(f' {torch}.' in versions_page for torch in TESTED_TORCH)


@functools.cache
def walk_requirements() -> tuple[set[str], set[str]]:
    """Names of the installed packages that `pip install -e '.[dev,docs]'` asks for, and of those that are missing."""
    lacking, known = set(), set()
    queue = [('maelm-composer', 'dev'), ('maelm-composer', 'docs')]
    while queue:
        name, extra = queue.pop()
        if (name, extra) in known:
            continue
        known.add((name, extra))
        try:
            requirements = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            lacking.add(name)
            continue
        for requirement in map(Requirement, requirements):
            if requirement.marker is None or requirement.marker.evaluate({'extra': extra}):
                key = normalize_name(requirement.name)
                queue += [(key, each) for each in ('', *requirement.extras)]
    return {name for name, _ in known} - lacking, lacking


def test_the_default_set_is_whole():
    versions = read_versions('constraints.txt')
    if importlib.metadata.version('torch').partition('+')[0] != versions['torch']:
        pytest.skip('another set is installed')
    assert not walk_requirements()[0] - versions.keys() - {'maelm-composer', 'pip', 'setuptools', 'wheel'}


def test_nothing_that_the_package_imports_is_missing():
    """A lock that is installed without dependencies may have holes, which nobody sees before the import."""
    known, lacking = walk_requirements()
    assert not lacking
    assert len(known) > 100


def test_what_the_machine_has_stays():
    missing = find_missing(LOCK, MACHINE)
    names = read_names(missing)
    assert {'mosaicml', 'mosaicml-streaming', 'omegaconf', 'hypothesis', 'torchmetrics'} <= names
    assert not names & {'torch', 'torchvision', 'transformers', 'numpy', 'triton', 'tokenizers', 'huggingface-hub'}
    assert not [name for name in names if name.startswith(('nvidia', 'cuda'))]
    assert set(missing) <= set(LOCK)
    everything = read_versions('constraints-latest.txt')
    assert read_names(find_missing(LOCK, everything)) == set(ENGINES)  # pip sees that they are there
    assert read_names(find_missing(LOCK, {})) == everything.keys()


@pytest.mark.parametrize(
    'torch, torchvision',
    [('2.7.0+cu126', '0.22.*'), ('2.11.0', '0.26.*'), ('2.13.0', '0.28.*'), ('2.14.0', None), ('2.15.1', None)],
)
def test_a_torch_without_torchvision_gets_its_own(torch, torchvision):
    missing = find_missing(LOCK, {'torch': torch})
    latest = read_versions('constraints-latest.txt')['torchvision']
    assert [line for line in missing if line.startswith('torchvision')] == [f'torchvision=={torchvision or latest}']
    assert 'transformers' in read_names(missing)


def test_a_machine_without_transformers_gets_what_goes_with_ours():
    names = read_names(find_missing(LOCK, {'torch': '2.11.0', 'huggingface-hub': '0.36.2', 'tokenizers': '0.21.0'}))
    assert {'transformers', 'huggingface-hub', 'tokenizers'} <= names


def test_a_line_that_is_no_pin_is_named(tmp_path, capsys):
    with pytest.raises(InputError, match=r"'torch>=2' is not a line of the form name==version"):
        find_missing(['# a comment', '', 'torch>=2'], {})
    for arguments, reason in (([], 'usage: '), ([str(tmp_path / 'nowhere')], 'No such file')):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        error = capsys.readouterr().err
        assert stop.value.code == 2
        assert reason in error
        assert error.count('\n') == 1


def test_another_torch_is_told_in_one_line():
    assert describe_untested(f'{TESTED_TORCH[0]}.9+cu126') is None
    assert describe_untested('2.70.0') is not None
    assert 'torch 2.12.1+cu130 was not tested, 2.7, 2.11, 2.15 were' in str(describe_untested('2.12.1+cu130'))


@pytest.fixture
def another_torch(tmp_path, monkeypatch) -> Path:
    """Its version is what its metadata say, here those of a torch that comes first on the path of every new process."""
    (tmp_path / 'torch-2.99.0.dist-info').mkdir()
    (tmp_path / 'torch-2.99.0.dist-info/METADATA').write_text('Metadata-Version: 2.1\nName: torch\nVersion: 2.99.0\n')
    monkeypatch.setenv('PYTHONPATH', f'{tmp_path}:{ROOT}')
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    'recipe',
    [
        ('yamls/demo.yaml', 'data.remote=nowhere'),
        ('yamls/finetune/glue.yaml', 'task=rte', 'checkpoint=x', 'data.source=files', 'data.folder=nowhere'),
    ],
)
def test_a_run_on_another_torch_begins_with_one_line(another_torch, monkeypatch, capsys, recipe):
    """The run goes on, to its own end: here an input that is not there."""
    for module in ('finetuning', 'training'):  # before any package could keep that version
        importlib.import_module(f'maelm_composer.{module}.run')
    monkeypatch.syspath_prepend(another_torch)
    with pytest.raises(SystemExit) as stop:
        train.main([str(ROOT / recipe[0]), *recipe[1:]])
    warning, error = capsys.readouterr().err.splitlines()
    assert warning.startswith('warning: torch 2.99.0 was not tested')
    assert error.startswith('error: ')
    assert 'nowhere' in error
    assert stop.value.code == 2


def test_only_the_first_rank_says_so(another_torch, monkeypatch):
    program = 'from maelm_composer.versions import warn_of_untested_torch; warn_of_untested_torch()'

    def list_lines() -> list[str]:
        done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=True)
        return done.stderr.splitlines()

    assert len(list_lines()) == 1
    monkeypatch.setenv('RANK', '1')
    assert list_lines() == []


def run_make(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What make would do, whatever the make that runs these tests was told."""
    told = ('MAKEFLAGS', 'MFLAGS', 'MAKELEVEL', 'MAKEOVERRIDES', 'STACK', 'VENV')
    environment = {name: value for name, value in os.environ.items() if name not in told}
    command = ['make', '--dry-run', '--always-make', 'test', *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)


@pytest.mark.parametrize(
    'arguments, folder, installs',
    [
        ((), '.venv', "-c constraints.txt -e '.[dev,docs]'"),
        (('STACK=latest',), '.venv-latest', '--no-deps -r constraints-latest.txt'),
        (('STACK=own',), '.venv-own', '--no-deps -r .venv-own/missing.txt'),
    ],
)
def test_every_stack_has_an_environment_of_its_own(arguments, folder, installs):
    plan = run_make(*arguments).stdout.splitlines()
    assert f'rm -f {folder}/bin/python*' in plan[0]
    assert plan[1].endswith(f'-m venv {folder}')
    assert installs in plan[2]
    assert plan[3] == f'touch {folder}/.ready'


def test_an_unknown_stack_is_one_line():
    result = run_make('STACK=newest')
    assert result.returncode == 2
    assert not result.stdout
    assert 'STACK=newest is unknown: default, latest or own' in result.stderr
    assert result.stderr.count('\n') == 1
