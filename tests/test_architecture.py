"""The rules of docs/architecture.md that a machine can check."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import maelm_composer

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / 'maelm_composer'
MODULES = sorted(PACKAGE.rglob('*.py'))
# A module imports its own stage or an earlier one.
STAGES = [
    {
        '__init__',
        'errors',
        'config',
        'recipe',
        'recipe_checks',
        'records',
        'files',
        'patches',
        'statistics',
        'cluster',
        'device',
        'console',
        'keys',
        'precision',
        'processor',
        'versions',
        'shipped',
    },
    {'data'},
    {'masking'},
    {'model'},
    {'tasks'},
    {'checkpoints'},
    {'analysis'},
    {'training'},
    {'finetuning'},
    {'sweep'},
    {'reporting'},
    {'suite'},
    {'cli', 'train'},
]
TORCHLESS = [
    *('config', 'errors', 'recipe', 'files', 'records', 'versions', 'statistics', 'cluster', 'checkpoints.names'),
    *('model.cost', 'training.plan', 'tasks.metrics', 'suite.steps', 'suite.cost', 'suite.plan'),
    *('reporting.report', 'finetuning.identity', 'sweep.search', 'sweep.lease', 'sweep.report'),
]
# Importing Composer takes 3 to 9 seconds, in every process that reads shards, fine-tunes or ranks.
COMPOSERLESS = ['data.dataset', 'finetuning.run', 'sweep.run', 'analysis.ranks']  # and all of the above


def stage_of(name: str) -> int:
    return next(i for i, stage in enumerate(STAGES) if name in stage)


def find_imports(source: str) -> set[str]:
    """Every module that ``source`` imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, 'imports are absolute'
            # `from maelm_composer import data` imports maelm_composer.data
            found |= {f'{node.module}.{alias.name}' for alias in node.names} | {str(node.module)}
    return found


def imports_of(path: Path) -> set[str]:
    return find_imports(path.read_text())


def name_of(path: Path) -> str:
    """``maelm_composer/model/layer.py`` -> ``model.layer``"""
    return '.'.join(path.relative_to(PACKAGE).with_suffix('').parts)


def find_later_stages(name: str, imports: set[str]) -> set[str]:
    """The stages after ``name``'s own that its ``imports`` reach."""
    known = set().union(*STAGES)
    reached = {i.split('.')[1] for i in imports if i.startswith('maelm_composer.')} & known
    return {other for other in reached if stage_of(other) > stage_of(name.split('.')[0])}


def test_every_module_belongs_to_a_stage():
    assert len(MODULES) > 20
    assert {name_of(path).split('.')[0] for path in MODULES} <= set().union(*STAGES)


@pytest.mark.parametrize('path', MODULES, ids=name_of)
def test_a_module_imports_its_own_stage_or_an_earlier_one(path):
    assert find_later_stages(name_of(path), imports_of(path)) == set()


def test_the_import_rule_sees_what_it_must():
    source = 'import maelm_composer.training.run\ndef f():\n    from maelm_composer import cli\nimport torch'
    assert find_later_stages('model.layer', find_imports(source)) == {'training', 'cli'}
    assert find_later_stages('cli', find_imports(source)) == set()


@pytest.mark.parametrize('path', MODULES, ids=name_of)
def test_engines_stay_where_they_belong(path):
    roots = {name.split('.')[0] for name in imports_of(path)}
    if PACKAGE / 'model' in path.parents:
        assert not roots & {'composer', 'streaming', 'omegaconf'}
    if path != PACKAGE / 'recipe.py':
        assert 'omegaconf' not in roots
    if path.parent.name == 'reporting' or name_of(path) in TORCHLESS:
        assert 'torch' not in roots


def test_every_imported_package_is_declared():
    lines = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']['dependencies']
    declared = {re.split(r'[^\w-]', line)[0].lower().replace('_', '-') for line in lines}
    roots = {name.split('.')[0] for path in MODULES for name in imports_of(path)}
    imported = roots - {*sys.stdlib_module_names, 'maelm_composer'}
    packages = packages_distributions()
    assert {r for r in imported if not declared & {p.lower().replace('_', '-') for p in packages[r]}} == set()


def test_the_citation_names_this_version():
    assert f'version: {maelm_composer.__version__}\n' in (ROOT / 'CITATION.cff').read_text()


def test_start_up_imports_no_more_than_it_needs():
    """Not even through what these modules import."""
    torchless, composerless = (
        ', '.join(f'maelm_composer.{name}' for name in names) for names in (TORCHLESS, COMPOSERLESS)
    )
    program = (
        f'import sys, {torchless}\nprint("torch" in sys.modules)\n'
        f'import {composerless}\nprint("composer" in sys.modules)'
    )
    result = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout.split(), result.stderr) == (0, ['False', 'False'], '')


@pytest.mark.parametrize('folder', ['maelm_composer', 'tests', 'bench'])
def test_files_stay_readable(folder):
    for path in (ROOT / folder).rglob('*.py'):
        assert len(path.read_text().splitlines()) <= 350, f'{path} has more than 350 lines'
        assert path.stem not in {'utils', 'helpers', 'common', 'misc'}, f'{path} is named after nothing'
