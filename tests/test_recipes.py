"""Every YAML in yamls/: it loads, says what the paper says, and changes only what it declares."""

import re
import shlex
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from maelm_composer.config import CorpusConfig, DecoderAttention, FinetuningConfig, PretrainingConfig
from maelm_composer.errors import InputError
from maelm_composer.masking.collate import build_collator
from maelm_composer.recipe import is_finetuning, load_config, to_plain

ROOT = Path(__file__).parent.parent
YAMLS = ROOT / 'yamls'
PAGES = [ROOT / 'README.md', *(ROOT / 'docs').glob('*.md'), *(ROOT / 'results').rglob('*.md')]
RECIPES = ('base', 'base_pp', 'large_pp', 'medium', 'small', 'demo')
# What each overlay sets: the variants of the paper's Table 2, the points of its Figure 4, and the authors' code.
OVERLAYS: dict[str, dict[str, object]] = {
    'roberta': {'masking.encoder_mask_fraction': 1.0, 'model.decoder': None},
    'authors': {
        'masking.masks_special_tokens': True,
        'masking.rounds_at_random': True,
        'model.relative_position_function': 'authors',
    },
    'ablations/encoder_with_mask': {'masking.encoder_mask_fraction': 1.0},
    'ablations/decoder_resets_masks': {'masking.encoder_mask_fraction': 1.0, 'masking.decoder_resets_masks': True},
    'ablations/random_replace': {
        'masking.encoder_mask_fraction': 1.0,
        'masking.encoder_mask_content': 'random_token',
    },
    'ablations/misaligned': {'masking.position_ids': 'consecutive'},
    'ablations/no_relative_position': {
        'model.relative_position_buckets': 0,
        'model.decoder.relative_position_buckets': 0,
    },
    'ablations/bidirectional_cross': {'model.decoder.attention': 'bidirectional_cross'},
    'ablations/causal_cross': {'model.decoder.attention': 'causal_cross'},
    'ablations/cross': {'model.decoder.attention': 'cross'},
    'ablations/decoder_2_layers': {'model.decoder.num_hidden_layers': 2},
    'ablations/decoder_6_layers': {'model.decoder.num_hidden_layers': 6},
    **{
        f'ablations/decoder_{width}_wide': {
            'model.decoder.hidden_size': width,
            'model.decoder.num_attention_heads': width // 64,
            'model.decoder.intermediate_size': 4 * width,
        }
        for width in (512, 1024)
    },
    **{f'delta/delta_{delta:.2f}': {'masking.encoder_mask_fraction': delta} for delta in (0, 0.25, 0.5, 0.75, 1)},
}
# Table 4 of the paper, as printed; steps and batch size give samples.
TABLE_4 = {
    'base': {'steps': 125_000, 'lr': 5e-4, 'buckets': 32, 'max_distance': 128, 'clip': 2.0},
    'base_pp': {'steps': 2_000_000, 'lr': 2e-4, 'buckets': 64, 'max_distance': 128, 'clip': 2.0},
    'large_pp': {'steps': 1_000_000, 'lr': 1e-4, 'buckets': 128, 'max_distance': 256, 'clip': 1.0},
}


def load(*names: str, overrides: tuple[str, ...] = ()) -> PretrainingConfig:
    return load_config(PretrainingConfig, [str(YAMLS / f'{name}.yaml') for name in names], overrides)


def flatten(node: object, prefix: str = '') -> dict[str, object]:
    if not isinstance(node, dict):
        return {prefix: node}
    return {k: v for key, value in node.items() for k, v in flatten(value, f'{prefix}.{key}'.strip('.')).items()}


def test_a_recipe_of_others_runs_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    touch, path = '!!python/object/apply:pathlib.Path.touch', '!!python/object/apply:pathlib.Path [ran]'
    Path('theirs.yaml').write_text(f'seed: {touch} [{path}]')
    with pytest.raises(InputError, match=r'theirs\.yaml is not readable YAML: could not determine a constructor'):
        load_config(PretrainingConfig, ['theirs.yaml'])
    assert not Path('ran').exists()


@pytest.mark.parametrize('names', [['roberta.yaml', 'theirs.yaml'], ['theirs.yaml', 'small.yaml']])
def test_a_decoder_that_the_environment_lacks_is_one_line(tmp_path, names):
    (tmp_path / 'theirs.yaml').write_text('model: {decoder: "${oc.env:NOT_SET_ANYWHERE}"}')
    paths = [str(tmp_path / name if name == 'theirs.yaml' else YAMLS / name) for name in names]
    with pytest.raises(InputError, match="Environment variable 'NOT_SET_ANYWHERE' not found"):
        load_config(PretrainingConfig, paths)


def test_an_autoregressive_decoder_has_no_masked_positions_to_reset():
    pairs = ('masking.encoder_mask_fraction=1', 'masking.decoder_resets_masks=true', 'model.decoder.attention={}')
    assert load('demo', overrides=(*pairs[:2], pairs[2].format('bidirectional_cross'), 'run_name=r'))
    with pytest.raises(InputError, match='decoder_resets_masks without effect: no decoder gets a masked position'):
        load('demo', overrides=(*pairs[:2], pairs[2].format('causal_cross'), 'run_name=r'))


@pytest.mark.parametrize('name', RECIPES)
def test_recipe_loads_and_its_batches_are_whole(name: str) -> None:
    config = load(name)
    training = config.training
    assert training.max_samples % training.global_train_batch_size == 0
    assert training.checkpoint_interval_samples % training.global_train_batch_size == 0
    assert training.eval_interval_samples % training.global_train_batch_size == 0
    assert config.save_folder == f'runs/{name}'


@pytest.mark.parametrize('name', TABLE_4)
def test_table_4_value_by_value(name: str) -> None:
    config, printed = load(name), TABLE_4[name]
    training, optimizer, model = config.training, config.optimizer, config.model
    assert training.global_train_batch_size == 2048
    assert training.max_samples == printed['steps'] * 2048
    assert optimizer.learning_rate == printed['lr']
    assert optimizer.warmup_samples == 10_000 * 2048
    assert model.max_seq_len == 512
    assert model.relative_position_buckets == printed['buckets']
    assert model.relative_position_max_distance == printed['max_distance']
    assert (optimizer.adam_eps, optimizer.adam_beta1, optimizer.adam_beta2) == (1e-6, 0.9, 0.98)
    assert optimizer.clip_norm == printed['clip']
    assert model.hidden_dropout_prob == model.attention_probs_dropout_prob == 0.1
    assert optimizer.weight_decay == 0.01


def test_model_sizes_are_the_papers() -> None:
    """Sec. 4.1: 12 × 768 or 24 × 1024, decoder of 4 layers as wide; 32,768 uncased or 64,000 cased; App. C."""
    for name, layers, size, vocab in (
        ('base', 12, 768, 32_768),
        ('base_pp', 12, 768, 64_000),
        ('large_pp', 24, 1024, 64_000),
    ):
        config = load(name)
        model, decoder = config.model, config.model.decoder
        assert decoder is not None
        assert (model.num_hidden_layers, model.hidden_size, model.vocab_size) == (layers, size, vocab)
        assert (decoder.num_hidden_layers, decoder.hidden_size) == (4, size)
        assert decoder.relative_position_buckets == decoder.hidden_dropout_prob == 0
        assert decoder.attention_probs_dropout_prob == 0
        assert decoder.attention is DecoderAttention.bidirectional
        assert config.masking.mlm_probability == 0.15
        corpus = load_config(CorpusConfig, [str(YAMLS / 'data' / f'{config.data.remote.split("/")[-1]}.yaml')])
        assert corpus.tokenizer.vocab_size == vocab
        assert corpus.tokenizer.lowercase == (name == 'base')


@pytest.mark.parametrize('name', RECIPES)
def test_recipe_and_its_data_recipe_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('DATA_ROOT', 'anywhere')
    config = load(name)
    corpus = load_config(CorpusConfig, [str(YAMLS / f'{config.data.remote}.yaml')])
    assert corpus.remote == config.data.remote
    assert corpus.max_seq_len == config.model.max_seq_len
    assert corpus.tokenizer.vocab_size == config.model.vocab_size


def test_every_overlay_is_known():
    files = [*(YAMLS / 'ablations').glob('*.yaml'), *(YAMLS / 'delta').glob('*.yaml')]
    assert {f'{path.parent.name}/{path.stem}' for path in files} == OVERLAYS.keys() - {'roberta', 'authors'}


@pytest.mark.parametrize('overlay', OVERLAYS)
@pytest.mark.parametrize('recipe', ['base', 'small'])
def test_an_overlay_changes_what_it_declares_and_nothing_else(recipe: str, overlay: str) -> None:
    declared = flatten(OmegaConf.to_container(OmegaConf.load(YAMLS / f'{overlay}.yaml')))
    assert declared == OVERLAYS[overlay]
    plain = flatten(to_plain(load(recipe)))
    overlaid_config = load(recipe, overlay)
    overlaid = flatten(to_plain(overlaid_config))
    changed = {key for key in plain.keys() | overlaid.keys() if plain.get(key) != overlaid.get(key)}
    changed -= {'run_name', 'save_folder'}
    if declared.get('model.decoder', '') is None:  # the section goes as a whole
        changed = {'model.decoder' if key.startswith('model.decoder') else key for key in changed}
    assert changed <= declared.keys()
    if recipe == 'base' and overlay != 'delta/delta_0.00':
        # The decoder has no relative positions at base; at demo and small scale it has, and the overlay drops them.
        assert changed == declared.keys() - {'model.decoder.relative_position_buckets'}
    build_collator(overlaid_config)


def find_commands(text: str) -> list[list[str]]:
    """The `composer train.py` and `maelm` command lines of a document, as argument lists."""
    found = re.findall(r'\b(?:composer (?:-\S+ \S+ )*train\.py|maelm (?:tokenizer|shards|train|sweep)) [^`#\n&]*', text)
    return [shlex.split(command.removesuffix("'")) for command in found if 'yamls/' in command]  # of bash -c '...'


@pytest.mark.parametrize(
    'path',
    [*YAMLS.rglob('*.yaml'), *PAGES],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_commands_in_documents_name_recipes_that_load(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv('DATA_ROOT', 'anywhere')
    commands = find_commands(path.read_text(encoding='utf-8'))
    if path.parent.name == 'suite':
        assert re.search('pytest bench/|maelm suite', path.read_text(encoding='utf-8'))
    elif path.suffix == '.yaml' or path == ROOT / 'README.md':
        assert commands, 'a recipe says how it is run'
    for command in commands:
        files = [argument for argument in command if argument.startswith('yamls/')]
        overrides = [argument for argument in command if '=' in argument]
        if is_finetuning(files, overrides):
            load_config(FinetuningConfig, files, overrides)
        else:
            load_config(CorpusConfig if command[1] in ('tokenizer', 'shards') else PretrainingConfig, files, overrides)


@pytest.mark.parametrize('path', PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_scales_and_benchmarks_that_a_page_names_exist(path: Path) -> None:
    text = path.read_text(encoding='utf-8')
    for scale in re.findall(r'--scale (\w+)', text):
        assert scale == 'SCALE' or (YAMLS / f'suite/{scale}.yaml').is_file(), scale
    for bench in re.findall(r'bench/\w+\.py', text):
        assert (ROOT / bench).is_file(), bench
