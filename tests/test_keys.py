"""The table of keys that `maelm keys`, `train.py --help` and docs/keys.md show."""

import subprocess
import sys
from pathlib import Path

import pytest

from maelm_composer.config import PretrainingConfig
from maelm_composer.errors import InputError
from maelm_composer.keys import KINDS, format_markdown, list_keys
from maelm_composer.recipe import to_plain
from tests.test_recipes import flatten

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize('kind', KINDS)
def test_every_key_has_a_meaning(kind):
    assert [key.name for key in list_keys(kind) if not key.meaning] == []


def test_the_keys_are_those_that_a_recipe_takes():
    config = PretrainingConfig(run_name='r', save_folder='s')
    config.data.remote = 'd'
    assert [key.name for key in list_keys('pretraining')] == list(flatten(to_plain(config)))


def test_a_key_shows_its_values_default_and_meaning():
    (key,) = list_keys('pretraining', 'masking.mlm_probability')
    assert (key.values, key.default) == ('number > 0, < 1', '0.15')
    assert key.meaning == 'share of masked positions; up to 1/6 fits every row'
    assert next(key.name for key in list_keys('corpus', 'tokenizer')) == 'tokenizer.vocab_size'
    by_name = {key.name: key for kind in KINDS for key in list_keys(kind)}
    assert by_name['training.precision'].values == 'fp32, bf16, auto'
    assert by_name['data.local'].values == 'text, or null'
    assert by_name['sweep.search.<name>.batch_size'].values == 'list of integer > 0'
    assert by_name['sources[].kind'].default == 'documentation'


def test_a_section_of_a_list_needs_no_brackets():
    assert list_keys('corpus', 'sources') == list_keys('corpus', 'sources[]') != []


def test_unknown_kinds_and_sections_are_refused():
    with pytest.raises(InputError, match='unknown kind of recipe tuning: one of corpus, pretraining'):
        list_keys('tuning')
    with pytest.raises(InputError, match='a suite recipe has no key model: `maelm keys suite` lists them all'):
        list_keys('suite', 'model')


def test_the_page_of_keys_is_that_of_the_source():
    """`maelm keys --markdown > docs/keys.md` makes it anew."""
    assert (ROOT / 'docs/keys.md').read_text(encoding='utf-8') == format_markdown()


@pytest.mark.parametrize(
    'recipe, key', [([], 'masking.mlm_probability'), (['yamls/finetune/glue.yaml'], 'sweep.selection')]
)
def test_the_help_of_the_training_script_lists_the_keys(recipe, key):
    command = [sys.executable, 'train.py', *recipe, '--help']
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, '')
    assert 'RECIPE.yaml' in done.stdout
    assert key in done.stdout
