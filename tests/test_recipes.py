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
OVERLAYS = [
    YAMLS / 'roberta.yaml',
    YAMLS / 'authors.yaml',
    *sorted((YAMLS / 'ablations').glob('*.yaml')),
    *sorted((YAMLS / 'delta').glob('*.yaml')),
]
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


@pytest.mark.parametrize('overlay', OVERLAYS, ids=lambda path: path.stem)
@pytest.mark.parametrize('recipe', ['base', 'small'])
def test_overlay_changes_exactly_what_it_declares(recipe: str, overlay: Path) -> None:
    declared = flatten(OmegaConf.to_container(OmegaConf.load(overlay)))
    assert 1 <= len(declared) <= 3
    plain = flatten(to_plain(load(recipe)))
    overlaid_config = load_config(PretrainingConfig, [str(YAMLS / f'{recipe}.yaml'), str(overlay)])
    overlaid = flatten(to_plain(overlaid_config))
    changed = {key for key in plain.keys() | overlaid.keys() if plain.get(key) != overlaid.get(key)}
    changed -= {'run_name', 'save_folder'}
    if declared.get('model.decoder', '') is None:  # the section goes as a whole
        changed = {'model.decoder' if key.startswith('model.decoder') else key for key in changed}
    assert changed <= declared.keys()
    if recipe == 'base' and not overlay.stem.startswith('delta_0.00'):
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
