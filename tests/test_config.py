"""Recipes: layering, one line for whatever is wrong with them, and a hash that is of the values alone."""

import json
import re

import pytest
import yaml
from omegaconf import OmegaConf

from maelm_composer.config import (
    CorpusConfig,
    DataConfig,
    DecoderAttention,
    DecoderConfig,
    FinetuningConfig,
    Logger,
    PretrainingConfig,
    SourceKind,
    SuiteConfig,
    TrainingConfig,
)
from maelm_composer.errors import InputError
from maelm_composer.recipe import hash_config, load_config, to_plain, to_yaml


@pytest.fixture
def write(tmp_path, monkeypatch):
    """``write('base', {...})`` -> 'base.yaml', a file in the working folder."""
    monkeypatch.chdir(tmp_path)

    def write(name, content):
        (tmp_path / f'{name}.yaml').write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        return f'{name}.yaml'

    return write


@pytest.fixture
def load(write):
    """A pretraining recipe of one file, changed by ``key=value``."""
    path = write('recipe', {'data': {'remote': 'shards'}})
    return lambda *overrides: load_config(PretrainingConfig, [path], overrides)


def nest(key, value):
    """``nest('a.b', 1)`` -> {'a': {'b': 1}}"""
    for part in reversed(key.split('.')):
        value = {part: value}
    return value


def test_defaults_are_the_papers_base_setting():
    config = load_config(PretrainingConfig, ['yamls/base.yaml'])
    own = {'data': DataConfig(remote='data/base'), 'training': TrainingConfig(device_train_microbatch_size=128)}
    assert config == PretrainingConfig(run_name='base', save_folder='runs/base', **own)
    model = config.model
    assert (model.num_hidden_layers, model.hidden_size, model.decoder.num_hidden_layers) == (12, 768, 4)


def test_later_files_win_and_the_command_line_wins_over_them(write):
    paths = [
        write('one', {'data': {'remote': 'shards'}, 'seed': 1, 'model': {'hidden_size': 24, 'max_seq_len': 64}}),
        write('two', {'seed': 2, 'model': {'hidden_size': 48}}),
        write('three', {'seed': 3}),
    ]
    config = load_config(PretrainingConfig, paths)
    assert (config.seed, config.model.hidden_size, config.model.max_seq_len) == (3, 48, 64)
    assert load_config(PretrainingConfig, [paths[0], paths[2], paths[1]]).seed == 2
    config = load_config(PretrainingConfig, paths, ['seed=4', 'model.hidden_size=12', 'seed=5'])
    assert (config.seed, config.model.hidden_size, config.model.max_seq_len) == (5, 12, 64)


def test_overrides_of_every_kind(load):
    config = load(
        'masking.masks_special_tokens=true',
        'optimizer.learning_rate=1e-4',
        'model.decoder.attention=causal_cross',
        'training.loggers=[wandb, tensorboard]',
        'training.device_train_microbatch_size=null',
        'data.local=a=b',
    )
    assert config.masking.masks_special_tokens is True
    assert config.optimizer.learning_rate == 1e-4
    assert config.model.decoder.attention is DecoderAttention.causal_cross
    assert config.training.loggers == [Logger.wandb, Logger.tensorboard]
    assert (config.training.device_train_microbatch_size, config.data.local) == (None, 'a=b')
    assert load('run_name=1e15').save_folder == 'runs/1e15'  # YAML reads a number


def test_a_decoder_can_be_taken_away_and_given_back(load):
    plain = load('model.decoder=null', 'masking.encoder_mask_fraction=1')
    assert plain.model.decoder is None
    again = load('model.decoder=null', 'model.decoder.num_hidden_layers=2')
    assert again.model.decoder == DecoderConfig(num_hidden_layers=2)


@pytest.mark.parametrize(
    'key, near',
    [
        ('model.hiden_size', 'model.hidden_size'),
        ('modle.hidden_size', 'model'),
        ('model.decoder.atention', 'model.decoder.attention'),
        ('masking.mlm_probabilty', 'masking.mlm_probability'),
        ('sed', 'seed'),
        ('trainning', 'training'),
        ('training.learning_rate', 'optimizer.learning_rate'),
        ('optimizer.lr', 'optimizer.learning_rate'),
        ('hidden_sizes', 'model.hidden_size'),
    ],
)
def test_an_unknown_key_names_the_nearest(key, near, write, load):
    wrong = 'modle' if key.startswith('modle') else key  # nothing under an unknown section is looked at
    with pytest.raises(InputError, match=rf'^command line: unknown key {re.escape(wrong)}; did you mean {near}\?$'):
        load(f'{key}=1')
    path = write('overlay', nest(key, 1))
    with pytest.raises(InputError, match=rf'^overlay\.yaml: unknown key {re.escape(wrong)}; did you mean {near}\?$'):
        load_config(PretrainingConfig, ['recipe.yaml', path])


def test_an_unknown_key_in_a_list_and_a_number_as_a_key_are_named(write):
    path = write('corpus', {'remote': 'r', 'sources': [{'kind': 'documentation'}, {'kind': 'files', 'path': 'a'}]})
    with pytest.raises(InputError, match=r'unknown key path; did you mean paths\?'):
        load_config(CorpusConfig, [path])
    with pytest.raises(InputError, match=r'^suite\.yaml: pretraining_of\.1\d+\.0: YAML reads this name as a number'):
        load_config(SuiteConfig, [write('suite', 'pretraining_of: {1e15: [seed=1]}')])


@pytest.mark.parametrize(
    'override, named',
    [
        ('seed=abc', "seed: Value 'abc'"),
        ('seed=1.5', "seed: Value '1.5'"),
        ('optimizer.learning_rate=fast', "optimizer.learning_rate: Value 'fast'"),
        ('masking.masks_special_tokens=maybe', "masking.masks_special_tokens: Value 'maybe'"),
        ('model.decoder.attention=full', "model.decoder.attention: Invalid value 'full', expected one of"),
        ('training.loggers=tensorboard', 'training.loggers: must be a list, as in training.loggers=[...]'),
        ('nonsense=1', 'unknown key nonsense; there are run_name, save_folder, init_from, seed, data'),
        ('training.loggers=[foo]', "Invalid value 'foo', expected one of [tensorboard, wandb, mlflow]"),
        ('model.hidden_size=null', "model.hidden_size: Incompatible value 'None'"),
        ('model.hidden_size={a: 1}', 'model.hidden_size: '),
        ('model.decoder=5', 'command line: model.decoder: must be key: value pairs'),
        ('model=[1]', 'command line: model: must be key: value pairs'),
        ('seed', 'no such recipe: seed'),
        ('x={a', "'x={a' cannot be read"),
        ('data.local=a #1', "' #' begins a comment"),
        ('data.local=${nothing}', "data.local: Interpolation key 'nothing' not found"),
        ('run_name=${oc.env:NOT_SET_ANYWHERE}', "Environment variable 'NOT_SET_ANYWHERE' not found"),
    ],
)
def test_a_wrong_type_is_named(override, named, load):
    with pytest.raises(InputError) as error:
        load(override)
    assert named in str(error.value)


@pytest.mark.parametrize(
    'content, message',
    [
        ('a: [', 'overlay.yaml is not readable YAML'),
        ('- a', 'overlay.yaml must hold key: value pairs'),
        ('just words', 'overlay.yaml'),
        (b'\xff\xfe\xff', 'overlay.yaml is not readable YAML'),
    ],
)
def test_a_file_that_is_no_recipe(content, message, load, tmp_path):
    (tmp_path / 'overlay.yaml').write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=message):
        load_config(PretrainingConfig, ['recipe.yaml', 'overlay.yaml'])


def test_a_missing_file_and_a_missing_value(load, write):
    with pytest.raises(InputError, match=r'no such recipe: nowhere\.yaml'):
        load_config(PretrainingConfig, ['nowhere.yaml'])
    with pytest.raises(InputError, match=r'^data\.remote is not set: give it in the recipe or as data\.remote=VALUE$'):
        load_config(PretrainingConfig, [write('empty', '')])
    assert load_config(PretrainingConfig, ['empty.yaml'], ['data.remote=here']).data.remote == 'here'


ABSENT_DECODER = 'model.decoder is null, so masking.encoder_mask_fraction must be 1, not'


def test_a_path_may_begin_with_the_home_folder(load, monkeypatch):
    monkeypatch.setenv('HOME', '/home/me')
    monkeypatch.setenv('STORE', '~/shards')
    config = load('save_folder=~/runs/x', 'data.remote=${oc.env:STORE}', 'init_from=runs/~/y')
    assert (config.save_folder, config.data.remote) == ('/home/me/runs/x', '/home/me/shards')
    assert config.init_from == 'runs/~/y'


@pytest.mark.parametrize(
    'overrides, message',
    [
        ('model.num_hidden_layers=0', 'model.num_hidden_layers 0: must be positive'),
        ('model.decoder.num_hidden_layers=0', 'model.decoder.num_hidden_layers 0: must be positive'),
        ('model.hidden_size=100', 'model.hidden_size 100 is not divisible by model.num_attention_heads 12'),
        ('model.decoder.hidden_size=512', 'model.decoder.hidden_size 512 is not divisible by model.decoder.num_att'),
        ('model.relative_position_buckets=6', 'model.relative_position_buckets 6: must be 0 or a multiple of 4'),
        ('model.relative_position_buckets=2', 'model.relative_position_buckets 2: must be 0 or a multiple of 4'),
        ('model.relative_position_buckets=-4', 'model.relative_position_buckets -4: must be at least 0'),
        ('model.relative_position_max_distance=8', 'below model.relative_position_max_distance 8'),
        ('model.decoder.relative_position_buckets=7', 'model.decoder.relative_position_buckets 7: must be'),
        ('model.hidden_dropout_prob=1', 'model.hidden_dropout_prob 1.0: must be below 1'),
        ('model.attention_probs_dropout_prob=-0.1', 'model.attention_probs_dropout_prob -0.1: must be at least 0'),
        ('masking.encoder_mask_fraction=1.1', 'masking.encoder_mask_fraction 1.1: must be at most 1'),
        ('masking.encoder_mask_fraction=-0.1', 'masking.encoder_mask_fraction -0.1: must be at least 0'),
        ('masking.encoder_mask_fraction=nan', 'masking.encoder_mask_fraction nan: must be a finite number'),
        ('masking.mlm_probability=0', 'masking.mlm_probability 0.0: must be positive'),
        ('masking.mlm_probability=1', 'masking.mlm_probability 1.0: must be below 1'),
        ('masking.mlm_probability=0.0001', '0.0001 masks nothing in a row of 512 tokens'),
        ('masking.mlm_probability=0.9999', '0.9999 masks all of a row of 512 tokens'),
        ('masking.mlm_probability=0.0015 masking.rounds_at_random=true', '0.0015 masks nothing in some rows of 512'),
        ('model.max_seq_len=3', 'masking.mlm_probability 0.15 masks nothing in a row of 3 tokens'),
        ('model.decoder=null', f'{ABSENT_DECODER} 0.0'),
        ('model.decoder=null masking.encoder_mask_fraction=0.5', f'{ABSENT_DECODER} 0.5'),
        ('masking.encoder_mask_content=random_token', 'encoder_mask_content without effect: masking.encoder_mask_frac'),
        ('masking.decoder_resets_masks=true', 'masking.decoder_resets_masks without effect: no decoder gets a masked'),
        ('masking.encoder_mask_fraction=1 masking.position_ids=consecutive', 'position_ids without effect: maski'),
        ("save_folder=''", "save_folder is '': name a folder of its own"),
        ('seed=2147483648', 'seed 2147483648: must be below 2147483648'),
        ('training.max_samples=0', 'training.max_samples 0: must be positive'),
        ('training.global_train_batch_size=-8', 'training.global_train_batch_size -8: must be positive'),
        ('training.device_train_microbatch_size=0', 'training.device_train_microbatch_size 0: must be positive'),
        ('optimizer.learning_rate=0', 'optimizer.learning_rate 0.0: must be positive'),
        ('optimizer.warmup_samples=-1', 'optimizer.warmup_samples -1: must be at least 0'),
        ('training.max_samples=64 optimizer.warmup_samples=65', 'warmup_samples 65 exceeds training.max_samples 64'),
        ('training.checkpoints_to_keep=0', 'training.checkpoints_to_keep 0: must be at least 1, or -1'),
        ('training.checkpoints_to_keep=-7', 'training.checkpoints_to_keep -7: must be at least 1, or -1'),
        ('optimizer.adam_eps=-1', 'optimizer.adam_eps -1.0: must be positive'),
        ("run_name='a b'", "run_name 'a b': use letters"),
        ('run_name=../up', "run_name '../up': use letters"),
    ],
)
def test_a_bad_value_is_named(overrides, message, load):
    with pytest.raises(InputError) as error:
        load(*overrides.split(' ') if "'" not in overrides else [overrides])
    assert message in str(error.value)


@pytest.mark.parametrize(
    'overrides',
    [
        'model.relative_position_buckets=0',
        'model.relative_position_buckets=4',
        'model.hidden_dropout_prob=0',
        'masking.encoder_mask_fraction=1',
        'model.decoder=null masking.encoder_mask_fraction=1',
        'optimizer.weight_decay=0',
        'optimizer.clip_norm=0',
        'optimizer.warmup_samples=0',
        'training.checkpoints_to_keep=-1',
    ],
)
def test_a_value_at_its_limit_is_taken(overrides, load):
    config = to_plain(load(*overrides.split(' ')))
    key, value = overrides.split(' ')[0].split('=')
    for part in key.split('.'):
        config = config[part]
    assert config == yaml.safe_load(value)


def test_plain_values_are_those_of_omegaconf(load, write):
    """Hashes of published records are of these values."""
    sources = [{'kind': 'files', 'paths': ['a']}, {'max_documents': 3}]
    mine = {'label_range': [0, 5], 'kind': 'regression', 'files': {'train': 'a', 'dev': 'b'}}
    search = {'glue_small': {'learning_rate': [1, 1e-3], 'batch_size': [8]}}
    tuning = {'tasks': {'mine': mine}, 'sweep': {'search': search}, 'data': {'max_train_examples_of': {'rte': 3}}}
    configs = [
        load('training.loggers=[wandb]', 'training.extends=[20480000]', 'optimizer.clip_norm=2'),
        load_config(CorpusConfig, [write('corpus', {'remote': 'r', 'sources': sources})]),
        load_config(FinetuningConfig, [write('tuning', {'checkpoint': 'c'} | tuning)]),
        load_config(FinetuningConfig, [write('whole', {'checkpoint': 'c', 'learning_rate': 1, 'weight_decay': 0})]),
        load_config(SuiteConfig, ['yamls/suite/ladder.yaml']),
    ]
    for config in configs:
        wanted = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
        assert json.dumps(to_plain(config)) == json.dumps(wanted)


@pytest.mark.parametrize(
    'change, message',
    [
        ({'max_seq_len': 7}, 'max_seq_len 7: must be at least 8'),
        ({'validation_fraction': 0}, 'validation_fraction 0.0: must be positive'),
        ({'validation_fraction': 1}, 'validation_fraction 1.0: must be below 1'),
        ({'documents_per_task': 0}, 'documents_per_task 0: must be positive'),
        ({'sources': []}, 'sources is empty: name at least one'),
        ({'tokenizer': {'vocab_size': 261}}, 'tokenizer.vocab_size 261: must be above 261'),
        ({'sources': [{'kind': 'documentation', 'max_documents': -1}]}, 'sources.max_documents -1: must be positive'),
        ({'sources': [{'paths': ['a']}]}, 'sources[0].paths is read by the kind files only'),
        ({'sources': [{'kind': 'web'}]}, "Invalid value 'web', expected one of [documentation, files, huggingface]"),
    ],
)
def test_a_bad_corpus_value_is_named(change, message, write):
    with pytest.raises(InputError) as error:
        load_config(CorpusConfig, [write('corpus', {'remote': 'r'} | change)])
    assert message in str(error.value)


def test_a_corpus_has_several_sources_and_no_run(write):
    sources = [{'kind': 'files', 'paths': ['a/*.txt']}, {'kind': 'huggingface', 'dataset': 'd', 'note': 'n'}]
    config = load_config(CorpusConfig, [write('corpus', {'remote': 'r', 'sources': sources})], ['max_seq_len=8'])
    assert [source.kind for source in config.sources] == [SourceKind.files, SourceKind.huggingface]
    assert config.sources[0].paths == ['a/*.txt']
    assert config.max_seq_len == 8


def test_a_run_is_named_after_its_files(write):
    first = write('base', {'data': {'remote': 'shards'}})
    write('misaligned', {'masking': {'position_ids': 'consecutive'}})
    config = load_config(PretrainingConfig, [f'./{first}', 'misaligned.yaml'])
    assert (config.run_name, config.save_folder) == ('base-misaligned', 'runs/base-misaligned')
    config = load_config(PretrainingConfig, [first], ['run_name=mine'])
    assert (config.run_name, config.save_folder) == ('mine', 'runs/mine')
    config = load_config(PretrainingConfig, [first], ['save_folder=s3://bucket/x'])
    assert (config.run_name, config.save_folder) == ('base', 's3://bucket/x')


@pytest.mark.parametrize(
    'overrides',
    [
        (),
        ('model.decoder=null', 'masking.encoder_mask_fraction=1', 'training.loggers=[mlflow]'),
        ('model.decoder.attention=cross', 'optimizer.learning_rate=1e-4', 'optimizer.adam_eps=1e-06', 'data.local=x'),
    ],
)
def test_the_resolved_recipe_loads_to_the_same_config_and_hash(overrides, write, load):
    config = load(*overrides)
    again = load_config(PretrainingConfig, [write('resolved', to_yaml(config))])
    assert again == config
    assert hash_config(again) == hash_config(config)


def test_the_hash_is_of_values_and_not_of_their_files(write, load):
    names = ['run_name=same', 'seed=5']
    whole = write('whole', 'model: {max_seq_len: 64, hidden_size: 96}\ndata: {remote: shards}')
    parts = [write('size', 'model: {hidden_size: 96}'), write('length', 'model: {max_seq_len: 64}')]
    expected = hash_config(load_config(PretrainingConfig, [whole], names))
    assert hash_config(load_config(PretrainingConfig, ['recipe.yaml', *parts], names)) == expected
    assert hash_config(load_config(PretrainingConfig, [*parts[::-1], 'recipe.yaml'], names[::-1])) == expected
    explicit = load('model.hidden_size=96', 'model.max_seq_len=64', 'optimizer.weight_decay=0.01', *names)
    assert hash_config(explicit) == expected
    assert re.fullmatch('[0-9a-f]{64}', expected)


def test_the_hash_changes_with_any_value(load):
    hashes = {hash_config(load())}
    changes = ['seed=1', 'model.decoder.attention=cross', 'training.compile=false', 'masking.position_ids=consecutive']
    for change in [*changes, 'optimizer.adam_eps=2e-6', 'data.remote=elsewhere', 'training.loggers=[wandb]']:
        hashes.add(hash_config(load(change)))
    assert len(hashes) == 8
