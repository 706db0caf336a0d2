"""Loading our checkpoints, local and in an object store, and Hugging Face's encoders. Nothing is downloaded."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from maelm_composer.checkpoints.find import EncoderFolder, find_encoder, list_checkpoints, list_outdated, read_latest
from maelm_composer.checkpoints.pretrained import load_pretrained
from maelm_composer.config import Implementation
from maelm_composer.data.storage import upload, write_file
from maelm_composer.errors import InputError
from maelm_composer.files import hash_file
from maelm_composer.model.encoder import Encoder
from maelm_composer.model.maelm import build_model
from maelm_composer.recipe import to_plain
from tests.data.conftest import own_cache, s3, s3_server
from tests.tiny import CHECKPOINT, MODEL, N, V, write_tokenizer

__all__ = ['own_cache', 's3', 's3_server']  # fixtures

TOKENS = torch.arange(4, 12)[None], torch.arange(8)[None], torch.ones(1, 8, dtype=torch.long)


@pytest.fixture
def run(checkpoint, tmp_path) -> Path:
    """A copy of the run folder that a test may change."""
    folder = shutil.copytree(checkpoint, tmp_path / 'run', symlinks=True)
    recipe = folder / 'recipe.yaml'
    recipe.write_text(recipe.read_text().replace(str(checkpoint.parent), str(tmp_path)))
    return folder


def expected_states() -> torch.Tensor:
    return build_model(MODEL, seed=1).encoder.eval()(*TOKENS)


@pytest.mark.parametrize('path', ['', 'latest', 'latest/', CHECKPOINT])
def test_our_own_checkpoint(run, path):
    state = torch.get_rng_state()
    pretrained = load_pretrained(f'{run}/{path}')
    assert torch.get_rng_state().equal(state)
    assert_close(pretrained.encoder(*TOKENS), expected_states(), rtol=0, atol=0)
    assert (pretrained.hidden_size, pretrained.max_seq_len) == (32, N)
    assert pretrained.config == MODEL
    identity = dataclasses.asdict(pretrained.identity)
    assert len(identity.pop('hash')) == 64
    assert identity == {
        'uri': str(run / CHECKPOINT),
        'run_name': 'tiny',
        'samples': 64,
        'recipe_hash': 'r' * 64,
        'training_seconds': 1.5,
        'implementation': 'ours',
    }


def test_a_relative_address_stays_relative(run, monkeypatch):
    monkeypatch.chdir(run.parent)
    assert load_pretrained('run').identity.uri == f'run/{CHECKPOINT}'
    monkeypatch.chdir(run)
    assert load_pretrained('latest').identity.uri == f'./{CHECKPOINT}'
    monkeypatch.chdir(run / CHECKPOINT)
    assert load_pretrained('.').identity.uri == str(run / CHECKPOINT)


def test_a_link_to_a_run_elsewhere(run, tmp_path):
    (tmp_path / 'elsewhere').symlink_to(run)  # an absolute link
    for path in ('elsewhere', 'elsewhere/latest'):
        assert_close(load_pretrained(str(tmp_path / path)).encoder(*TOKENS), expected_states(), rtol=0, atol=0)


def test_a_run_copied_from_an_object_store_or_without_its_links(run, monkeypatch):
    (run / 'latest').unlink()
    (run / 'latest').write_text(CHECKPOINT)
    for path in (run, run / 'latest'):
        assert load_pretrained(str(path)).identity.uri == str(run / CHECKPOINT)
    monkeypatch.chdir(run)
    (run / 'samples-000000000999').mkdir()  # as a kill leaves it
    assert load_pretrained('latest').identity.uri == f'./{CHECKPOINT}'
    (run / 'latest').unlink()  # by a tool that skips links
    assert load_pretrained(str(run)).identity.uri == str(run / CHECKPOINT)
    shutil.copytree(run / CHECKPOINT, run / 'latest')  # by one that follows them
    with pytest.raises(InputError, match='run/latest is a folder: replace it by a file that holds the name'):
        load_pretrained(str(run))


def test_the_tokenizer_reads_special_tokens_as_text(run):
    tokenizer = load_pretrained(str(run)).tokenizer
    for ids in (tokenizer.backend_tokenizer.encode('[MASK]').ids, tokenizer('[MASK]')['input_ids']):
        assert V - 1 not in ids
        assert len(ids) > 3
    assert tokenizer.mask_token_id == V - 1


def test_reading_leaves_cuda_alone(run, monkeypatch):
    # A sweep's worker reads a checkpoint to plan; what CUDA saw then it would see in the run that comes after.
    asked = []
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: bool(asked.append('for a GPU')))
    encoder = load_pretrained(str(run)).encoder
    assert asked == []
    assert {weight.device.type for weight in encoder.parameters()} == {'cpu'}


def test_dropout_replaces_that_of_the_checkpoint(run):
    encoder = load_pretrained(str(run), dropout=0.3).encoder
    assert encoder.dropout.p == encoder.layers[1].dropout.p == encoder.layers[1].self_attention.dropout == 0.3
    assert load_pretrained(str(run)).encoder.dropout.p == MODEL.hidden_dropout_prob


def test_other_weights_have_another_hash(run):
    before = load_pretrained(str(run)).identity.hash
    save_file(build_model(MODEL, seed=2).state_dict(), run / CHECKPOINT / 'model.safetensors')
    assert load_pretrained(str(run)).identity.hash != before


def test_an_old_run_reads_with_the_tokenizer_of_its_data(run, tmp_path):
    shutil.rmtree(run / 'tokenizer')
    with pytest.raises(InputError, match=r'run/tokenizer is not there'):
        load_pretrained(str(run))
    write_tokenizer(tmp_path / 'shards' / 'tokenizer')
    assert len(load_pretrained(str(run)).tokenizer) == V


def test_an_object_store(run, s3):
    for path in sorted(p for p in run.rglob('*') if p.is_file() and run / 'latest' not in p.parents):
        upload(path, f's3://corpus/runs/tiny/{path.relative_to(run)}')
    write_file('s3://corpus/runs/tiny/latest', CHECKPOINT.encode())
    for path in ('', '/latest', f'/{CHECKPOINT}'):
        pretrained = load_pretrained(f's3://corpus/runs/tiny{path}')
        assert_close(pretrained.encoder(*TOKENS), expected_states(), rtol=0, atol=0)
        assert pretrained.identity.uri == f's3://corpus/runs/tiny/{CHECKPOINT}'
        assert pretrained.identity.samples == 64
        assert len(pretrained.tokenizer) == V
    with pytest.raises(InputError, match='neither a run nor a checkpoint'):
        load_pretrained('s3://corpus/runs/other')
    write_file('s3://corpus/runs/tiny/samples-000000000032/metrics.csv', b'')  # killed while it was sent
    assert [Path(found.uri).name for found in list_checkpoints('s3://corpus/runs/tiny')] == [CHECKPOINT]
    assert list_outdated('s3://corpus/runs/tiny', keep=1) == ['samples-000000000032']


def test_a_link_to_a_link_stands_for_the_checkpoint(run, tmp_path):
    (tmp_path / 'best').symlink_to(run / 'latest')
    found = find_encoder(str(tmp_path / 'best'))
    assert (Path(found.uri).name, Path(found.run)) == (CHECKPOINT, run)


def test_a_link_made_by_hand_may_end_with_a_slash_and_stays_in_its_run(run, tmp_path):
    (tmp_path / 'best').symlink_to(f'{run / CHECKPOINT}/')
    assert find_encoder(str(tmp_path / 'best')) == EncoderFolder(str(run / CHECKPOINT), str(run))
    for target in (f'{CHECKPOINT}/', f'./{CHECKPOINT}', f'{run / CHECKPOINT}/'):
        (run / 'latest').unlink()
        (run / 'latest').symlink_to(target)
        assert read_latest(str(run)) == CHECKPOINT
    shutil.copytree(run, tmp_path / 'other', symlinks=True)  # its link leads to the first run
    with pytest.raises(InputError, match=r'other/latest must hold the name of a checkpoint in .*other, not .*run'):
        find_encoder(str(tmp_path / 'other'))
    with pytest.raises(InputError, match=r'other/latest must hold the name of a checkpoint'):
        find_encoder(str(tmp_path / 'other/latest'))


def test_a_fine_tuned_model_gives_its_encoder(run, tmp_path):
    folder = tmp_path / 'finetuned' / 'rte-0'
    folder.mkdir(parents=True)
    encoder = Encoder(MODEL)
    weights = {f'encoder.{name}': value for name, value in encoder.state_dict().items()}
    save_file(weights | {'head.dense.weight': torch.zeros(2, 2)}, folder / 'model.safetensors')
    origin = load_pretrained(str(run)).identity
    description = {'config': to_plain(MODEL), 'task': 'rte', 'checkpoint': dataclasses.asdict(origin)}
    (folder / 'finetuned.json').write_text(json.dumps(description))
    write_tokenizer(folder / 'tokenizer')
    pretrained = load_pretrained(str(folder))
    assert_close(pretrained.encoder(*TOKENS), encoder.eval()(*TOKENS), rtol=0, atol=0)
    assert pretrained.identity.run_name == 'tiny'
    assert pretrained.identity.hash != origin.hash
    assert pretrained.config.relative_position_function is MODEL.relative_position_function
    for broken in ({}, {'config': None}, {'config': description['config'] | {'relative_position_function': 'new'}}):
        (folder / 'finetuned.json').write_text(json.dumps(broken))
        with pytest.raises(InputError, match=r'finetuned\.json describes no model of this version .*: fine-tune it'):
            load_pretrained(str(folder))


class TestBadCheckpoints:
    def test_nothing_there(self, tmp_path):
        with pytest.raises(InputError, match='there is no such checkpoint'):
            load_pretrained(str(tmp_path / 'nothing'))
        with pytest.raises(InputError, match='neither a run, a checkpoint nor a Hugging Face model: name one of its'):
            load_pretrained(str(tmp_path))
        with pytest.raises(InputError, match='the checkpoint is an empty name: name a run folder or a checkpoint'):
            load_pretrained('')

    def test_a_run_that_has_saved_nothing(self, run):
        (run / 'latest').unlink()
        shutil.rmtree(run / CHECKPOINT)
        with pytest.raises(InputError, match='holds no checkpoint yet'):
            load_pretrained(str(run))

    def test_other_shapes_than_the_recipe(self, run):
        recipe = run / 'recipe.yaml'
        recipe.write_text(recipe.read_text().replace('intermediate_size: 64', 'intermediate_size: 48'))
        with pytest.raises(InputError, match=r'intermediate.*is \(64.* in the checkpoint, \(48'):
            load_pretrained(str(run))

    def test_a_missing_weight(self, run):
        path = run / CHECKPOINT / 'model.safetensors'
        weights = load_file(path)
        del weights['encoder.relative_position.weight']
        save_file(weights, path)
        with pytest.raises(InputError, match=r'relative_position\.weight is missing in the checkpoint'):
            load_pretrained(str(run))

    def test_half_a_file(self, run):
        path = run / CHECKPOINT / 'model.safetensors'
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(InputError, match='not a whole safetensors file'):
            load_pretrained(str(run))

    def test_a_flipped_bit(self, run):
        path, progress = run / CHECKPOINT / 'model.safetensors', run / CHECKPOINT / 'progress.json'
        described = json.loads(progress.read_text()) | {'hashes': {path.name: hash_file(path)}}
        progress.write_text(json.dumps(described))
        assert_close(load_pretrained(str(run)).encoder(*TOKENS), expected_states(), rtol=0, atol=0)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1  # among the values of a tensor, where the format has no checksum
        path.write_bytes(content)
        with pytest.raises(InputError, match=r'is damaged: its SHA-256 is not the one written beside it'):
            load_pretrained(str(run))

    @pytest.mark.parametrize('name', ['progress.json', 'model.safetensors'])
    def test_a_checkpoint_without_one_of_its_files(self, run, name):
        (run / CHECKPOINT / name).unlink()
        with pytest.raises(InputError, match=f'{name} is missing: restore the file'):
            load_pretrained(str(run))
        assert [Path(found.uri).name for found in list_checkpoints(str(run))] == [CHECKPOINT]

    def test_a_run_without_its_record(self, run):
        (run / 'record.json').unlink()
        with pytest.raises(InputError, match=r'record\.json is missing: restore the file'):
            load_pretrained(str(run))

    @pytest.mark.parametrize('name', ['tokenizer.json', 'tokenizer_config.json'])
    def test_a_tokenizer_that_was_cut_off(self, run, name):
        path = run / 'tokenizer' / name
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(InputError, match=r'run/tokenizer: the files of the tokenizer are damaged'):
            load_pretrained(str(run))

    def test_a_tokenizer_without_a_special_token(self, run):
        path = run / 'tokenizer/tokenizer_config.json'
        settings = json.loads(path.read_text())
        del settings['cls_token']
        path.write_text(json.dumps(settings))
        with pytest.raises(InputError, match=r'run/tokenizer: the tokenizer lacks cls_token, sep_token or pad_token'):
            load_pretrained(str(run))

    def test_a_recipe_that_reads_the_environment(self, run):
        path = run / 'recipe.yaml'
        path.write_text(path.read_text().replace('remote: ', 'remote: ${oc.env:HOME}/'))
        with pytest.raises(InputError, match=r'recipe\.yaml contains \$\{\.\.\.\}'):
            load_pretrained(str(run))

    def test_a_recipe_of_another_version(self, run):
        path = run / 'recipe.yaml'
        path.write_text(path.read_text().replace('intermediate_size: 64', 'intermediate_size: 0'))
        with pytest.raises(InputError, match=r'run/recipe\.yaml: model\.intermediate_size'):
            load_pretrained(str(run))

    def test_a_tokenizer_of_another_size(self, run):
        write_tokenizer(run / 'tokenizer', vocab_size=V - 10)
        with pytest.raises(InputError, match=f'has {V - 10} tokens, the model {V}'):
            load_pretrained(str(run))

    def test_our_own_through_hugging_face(self, run):
        with pytest.raises(InputError, match='is a checkpoint of ours'):
            load_pretrained(str(run), Implementation.huggingface)

    def test_a_hub_name_without_network(self, monkeypatch, tmp_path):
        monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
        monkeypatch.setattr('transformers.utils.hub._is_offline_mode', True, raising=False)  # Transformers 4
        monkeypatch.chdir(tmp_path)
        with pytest.raises(InputError, match='no-such-owner/no-such-model: ') as error:
            load_pretrained('no-such-owner/no-such-model')
        assert '\n' not in str(error.value)
