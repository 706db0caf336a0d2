"""What a suite refuses before it trains."""

import dataclasses
from pathlib import Path

import pytest

from maelm_composer.errors import InputError
from maelm_composer.reporting.artefacts import ABLATIONS, MAE_LM
from maelm_composer.suite.checks import assert_different_models, assert_own_shards
from maelm_composer.suite.steps import load_suite


def test_shards_that_no_model_reads_are_refused(demo, tmp_path):
    assert_own_shards(demo)
    made = f'{tmp_path}/mine'
    settings = dataclasses.replace(demo.settings, data=[*demo.settings.data, f'remote={made}'])
    with pytest.raises(InputError, match=rf'makes shards in {made}, pretraining reads .*: add data\.remote={made}'):
        assert_own_shards(dataclasses.replace(demo, settings=settings))


def test_two_rows_with_one_recipe_are_refused(demo):
    assert_different_models(demo, ABLATIONS)
    layers = demo.load_pretraining(MAE_LM).model.decoder.num_hidden_layers
    own = {'decoder_6_layers': [f'model.decoder.num_hidden_layers={layers}']}
    changed = dataclasses.replace(demo, settings=dataclasses.replace(demo.settings, pretraining_of=own))
    with pytest.raises(InputError, match=r"768 dimension' have the same recipe: set pretraining_of\.decoder_6_l"):
        assert_different_models(changed, ABLATIONS)


def test_a_seed_that_only_the_extended_scale_has_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv('MAELM_DATA', str(tmp_path))
    monkeypatch.chdir(tmp_path)
    mine = Path('yamls/suite/mine.yaml')
    mine.parent.mkdir(parents=True)
    mine.write_text('extends: small\npretraining_seeds: [17, 18, 19]\n')
    with pytest.raises(InputError, match=r'pretraining_seeds_of\.table2 is \[20\] in small, but .* set both'):
        load_suite('mine')
    mine.write_text('extends: small\npretraining_seeds: [17, 18, 19]\npretraining_seeds_of: {table2: [17]}\n')
    assert load_suite('mine').settings.pretraining_seeds_of['table2'] == [17]
