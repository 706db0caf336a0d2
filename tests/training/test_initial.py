"""Runs that start from the weights of another model (``init_from``)."""

import dataclasses
import functools
import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from maelm_composer.checkpoints.export import export
from maelm_composer.checkpoints.pretrained import load_pretrained
from maelm_composer.data.manifest import load_manifest, save_manifest
from maelm_composer.errors import InputError
from maelm_composer.files import parse_json, write_json
from maelm_composer.records import UnfinishedPretraining
from maelm_composer.training.run import pretrain
from tests.tiny import write_tokenizer
from tests.training.conftest import N, V, enter_workspace, forget_hashes

STILL = ('training.max_samples=16', 'optimizer.warmup_samples=16')  # one step, whose learning rate is 0
FREE = ('model.initializer_range=0.5', 'model.relative_position_init=local', 'model.decoder.hidden_dropout_prob=0.2')
FREE += ('model.hidden_dropout_prob=0.2', 'model.attention_probs_dropout_prob=0.2')  # the weights fit all the same
PLAIN = ('model.decoder=null', 'masking.encoder_mask_fraction=1')


def write_words(folder: Path, first: int) -> None:
    words = [f'{number:04x}' for number in range(first, first + 2000)]
    write_tokenizer(folder, [' '.join(words * 2)], V, N)


@pytest.fixture(scope='session')
def prepare(tmp_path_factory, shards) -> Callable[[], Path]:
    """A function, called in a test with its number of threads: the folder of two folders of shards, each with a
    tokenizer of its own, and ``first``, a finished run on the first of them.
    """

    @functools.cache
    def build() -> Path:
        folder = tmp_path_factory.mktemp('prepared')
        with pytest.MonkeyPatch.context() as patch:
            recipe = enter_workspace(folder, shards, patch)
            for name, number in (('shards', 0), ('others', 30_000)):
                shutil.copytree(shards, name)
                write_words(Path(name, 'tokenizer'), number)
                digest = hashlib.sha256(Path(name, 'tokenizer/tokenizer.json').read_bytes()).hexdigest()
                save_manifest(name, dataclasses.replace(load_manifest(name), tokenizer_hash=digest))
            pretrain(recipe('save_folder=first', 'data.remote=shards', 'training.max_samples=64'))
        return folder

    return build


@pytest.fixture
def begin(recipe, prepare):
    """``begin('second', 'init_from=first', ...)``: the recipe of a run beside a copy of what ``prepare`` makes."""
    for name in ('shards', 'others', 'first'):
        shutil.copytree(prepare() / name, name, symlinks=True)
    return lambda folder, *changes: recipe(f'save_folder={folder}', 'data.remote=shards', *changes)


def read_weights(folder: str) -> dict[str, torch.Tensor]:
    return load_file(f'{folder}/latest/model.safetensors')


@pytest.mark.parametrize(
    'source, changes, line',
    [
        ('first', (), 'encoder, decoder, head'),
        ('first', FREE, 'encoder, decoder, head'),
        ('first', ('model.decoder.num_attention_heads=4',), 'encoder, head; fresh: decoder'),
        ('first', PLAIN, 'encoder, head'),
        ('exported', (), 'encoder; fresh: decoder, head'),
    ],
)
def test_the_parts_that_fit_are_taken(begin, capsys, source, changes, line):
    if source == 'exported':
        export('first', 'exported')
    capsys.readouterr()
    record = pretrain(begin('second', f'init_from={source}', *STILL, *changes))
    assert line in ' '.join(capsys.readouterr().out.split()).replace(record.init_from.uri, '')
    first, second = read_weights('first'), read_weights('second')
    taken = line.split(';')[0].split(', ')
    changed = {name.split('.')[0] for name in second if not torch.equal(second[name], first.get(name, torch.empty(0)))}
    assert changed == {'encoder', 'decoder', 'head'} & {name.split('.')[0] for name in second} - {*taken}
    assert record.identity['init_from'] == source
    if source == 'first':
        digest = hashlib.sha256(Path('first/latest/model.safetensors').read_bytes()).hexdigest()
        assert (record.init_from.samples, record.init_from.hash) == (64, digest)


def test_an_exported_plain_model_has_the_tokenizer_of_its_shards(begin, capsys):
    pretrain(begin('plain', *STILL, *PLAIN))
    export('plain', 'exported')
    pretrain(begin('second', 'init_from=exported', *STILL, *PLAIN))
    assert 'encoder; fresh: head' in ' '.join(capsys.readouterr().out.split())


@pytest.mark.usefixtures('begin')
def test_a_run_can_be_loaded_without_its_shards():
    vocabulary = Tokenizer.from_file('shards/tokenizer/tokenizer.json').get_vocab()
    shutil.rmtree('shards')
    assert load_pretrained('first').tokenizer.get_vocab() == vocabulary


def test_the_tokenizer_of_other_shards_is_refused_before_a_run_copies_it(begin):
    shutil.copytree('others/tokenizer', 'shards/tokenizer', dirs_exist_ok=True)
    with pytest.raises(InputError, match='shards/tokenizer is not the tokenizer of the shards beside it'):
        pretrain(begin('second', *STILL))
    assert not Path('second').exists()


def test_such_a_run_resumes_as_if_never_stopped_even_without_its_start(begin, assert_same_run, signal_after):
    pretrain(begin('whole', 'init_from=first'))
    signal_after(7)
    with pytest.raises(SystemExit):
        pretrain(begin('stopped', 'init_from=first'))
    shutil.rmtree('first')
    record = pretrain(begin('stopped', 'init_from=first'))
    assert record.init_from.samples == 64
    assert_same_run('whole', 'stopped')


def test_a_start_that_changed_before_the_first_checkpoint_is_refused(begin):
    config = begin('second', 'init_from=first', *STILL)
    pretrain(config)
    Path('second/latest').unlink()
    shutil.rmtree(Path('second', 'samples-000000000016'))
    with pytest.raises(InputError, match='second holds the record of a finished run, but no checkpoint'):
        pretrain(config)
    record = parse_json(Path('second/record.json').read_bytes(), 'record.json')
    begun = {name: record[name] for name in record.keys() & UnfinishedPretraining.model_fields.keys()}
    write_json(Path('second/record.json'), begun | {'status': 'running'})  # as a run that was killed before one
    weights = read_weights('first')
    save_file(weights | {'head.bias': weights['head.bias'] + 1}, 'first/latest/model.safetensors')
    forget_hashes(Path('first/latest'))
    with pytest.raises(InputError, match=r'began from first/samples-\d+, 64 samples, hash \w+; init_from is now'):
        pretrain(config)


@pytest.mark.parametrize(
    'changes, message',
    [
        (('model.hidden_size=64',), r'model.hidden_size is 64, but init_from first/\S+ has 32'),
        (('model.num_attention_heads=4',), r'model.num_attention_heads is 4, but init_from first/\S+ has 2'),
        (('model.relative_position_function=authors',), r'function is authors, but init_from first/\S+ has t5'),
        (
            ('data.remote=others',),
            r'first/\S+ was trained with another .* in others \(its model differs\): copy that model',
        ),
        (('init_from=no/such/folder',), 'no/such/folder: there is no such checkpoint'),
    ],
)
def test_a_start_that_does_not_fit_is_one_line(begin, changes, message):
    with pytest.raises(InputError, match=message):
        pretrain(begin('second', 'init_from=first', *STILL, *changes))
    assert not Path('second/record.json').exists()
