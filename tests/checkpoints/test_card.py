"""The model card of an exported folder: what is known of the model, and no address of the user's."""

import json
from pathlib import Path

import yaml

from maelm_composer.checkpoints.export import export
from maelm_composer.data.manifest import Manifest, SplitStatistics, save_manifest
from tests.checkpoints.test_export import N, V, fine_tune, make_run, modules_cache, tokenizer
from tests.tiny import CHECKPOINT

__all__ = ['make_run', 'modules_cache', 'tokenizer']  # fixtures


def test_the_card_names_the_encoder_on_the_hub(make_run, tmp_path):
    path = Path(fine_tune(make_run('roberta'), 'mnli', tmp_path)[0], 'finetuned.json')
    described = json.loads(path.read_text())
    del described['checksum']
    for run_name, base_model in ((None, 'someone/roberta'), ('roberta', None)):  # a run's relative path looks alike
        described['checkpoint'] |= {'uri': 'someone/roberta', 'run_name': run_name}
        path.write_text(json.dumps(described))
        export(str(path.parent), str(tmp_path / f'of {run_name}'))
        card = (tmp_path / f'of {run_name}/README.md').read_text()
        assert yaml.safe_load(card.split('---')[1]).get('base_model') == base_model


def test_the_card_says_what_is_known_and_no_address(make_run, tmp_path):
    recipe = Path(run := make_run('base_pp'), 'recipe.yaml')
    recipe.write_text(recipe.read_text().replace('init_from: null', 'init_from: /secret/model'))
    export(run, str(tmp_path / 'exported'))
    card = (tmp_path / 'exported/README.md').read_text()
    assert card.startswith('---\nlicense: unknown')
    for part in (
        'AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True)',
        'd' * 64,
        '| validation loss (nats) | 2.3457 |',
        'mlm_probability: 0.15',
        'tags: [mae-lm, masked-language-modeling]',
        'random head',
    ):
        assert part in card
    assert 'secret' not in card


def write_manifest(folder: Path, content_hash: str) -> None:
    source = {'kind': 'files', 'max_documents': None, 'note': None, 'dataset': None}
    sources = [
        source | {'paths': ['/secret/*.txt'], 'files': [['a.txt', 5], ['b.txt', 7]], 'note': 'letters'},
        source | {'kind': 'huggingface', 'dataset': 'a/books', 'config_name': 'en', 'split': 'train'},
        source | {'kind': 'huggingface', 'dataset': '/secret/own', 'config_name': None, 'split': 'dev'},
        source | {'kind': 'documentation', 'max_documents': 1000},
    ]
    splits = {'train': SplitStatistics(documents=1200, tokens=34_000), 'validation': SplitStatistics()}
    save_manifest(str(folder), Manifest(V, N, {}, splits, 5.0, 't' * 64, content_hash, 'r' * 64, sources))


def test_the_card_names_the_text_s_sources_but_no_folder(make_run, tmp_path, monkeypatch):
    run = make_run('mpnet')
    write_manifest(Path(run), 'd' * 64)
    export(run, str(tmp_path / 'exported'))
    card = (tmp_path / 'exported/README.md').read_text()
    assert yaml.safe_load(card.split('---')[1])['datasets'] == ['a/books']
    text = card.split('## Text')[1].split('##')[0].split('\n')
    assert [line for line in text if line] == [
        '- `a.txt`, `b.txt`; letters',
        '- data set [a/books](https://huggingface.co/datasets/a/books); en; split train',
        '- data set own; split dev',
        '- English documentation installed on the machine that made the shards; the first 1,000 documents',
        'For training: 1,200 documents, 34,000 tokens.',
    ]
    assert 'secret' not in card
    (tmp_path / 'a/books').mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    export(run, str(tmp_path / 'local'))
    card = (tmp_path / 'local/README.md').read_text()
    assert 'a/books' not in card
    assert '- data set books; en' in card
    write_manifest(Path(run), 'e' * 64)  # of shards that were made again
    export(run, str(tmp_path / 'other'))
    assert '## Text' not in (tmp_path / 'other/README.md').read_text()


def test_results_of_the_last_checkpoint_are_not_those_of_an_earlier_one(make_run, tmp_path):
    run = make_run('mpnet')
    Path(run, CHECKPOINT, 'progress.json').write_text(json.dumps({'samples': 32}))
    export(run, str(tmp_path / 'exported'))
    assert '## Results' not in (tmp_path / 'exported/README.md').read_text()
