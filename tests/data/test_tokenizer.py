"""Ids, template and file of the vocabulary."""

import hashlib
import json
import resource
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from maelm_composer.data.manifest import SPLITS, Manifest, SplitStatistics, save_manifest
from maelm_composer.data.special_tokens import SPECIAL_TOKENS
from maelm_composer.data.tokenizer import build_tokenizer, load_tokenizer, sample_documents
from maelm_composer.errors import InputError

from .conftest import serve_s3, write_documents


def test_auto_tokenizer_loads_it_with_the_promised_ids_and_template(recipe):
    assert build_tokenizer(recipe)
    loaded = AutoTokenizer.from_pretrained(f'{recipe.remote}/tokenizer')
    assert loaded.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, 2, 3, 319]
    assert len(loaded) == loaded.vocab_size == 320
    assert loaded.model_max_length == 32
    words = loaded('whale', add_special_tokens=False)['input_ids']
    pair = loaded('whale', 'Whale', return_token_type_ids=True)
    assert loaded('whale')['input_ids'] == [0, *words, 2]
    assert pair['input_ids'] == [0, *words, 2, 2, *words, 2]
    assert set(pair['token_type_ids']) == {0}
    assert 'token_type_ids' not in loaded('whale')
    assert loaded('the [MASK]')['input_ids'][-2] == 319
    text = 'the naïve 鯨 ﬁn 🐋\t!'
    assert loaded.decode(loaded(text, add_special_tokens=False)['input_ids']) == f' {text}'
    assert 3 not in loaded(text)['input_ids']
    offsets = loaded('the whale', return_offsets_mapping=True, add_special_tokens=False)['offset_mapping']
    assert all(not 'the whale'[a:b].startswith(' ') for a, b in offsets)
    ours, digest = load_tokenizer(recipe)
    assert ours.encode('old men, sing').ids == loaded('old men, sing')['input_ids']
    assert digest == hashlib.sha256(Path(recipe.remote, 'tokenizer/tokenizer.json').read_bytes()).hexdigest()


def test_text_that_spells_a_special_token_is_ordinary_text(recipe):
    build_tokenizer(recipe)
    tokenizer, _ = load_tokenizer(recipe)
    ids = tokenizer.encode('[CLS] [MASK] [SEP]', add_special_tokens=False).ids
    assert not set(ids) & {0, 1, 2, 3, 319}


def test_the_same_text_gives_the_same_file(recipe, tmp_path):
    build_tokenizer(recipe)
    first = {p.name: p.read_bytes() for p in Path(recipe.remote, 'tokenizer').iterdir()}
    recipe.remote = str(tmp_path / 'again')
    build_tokenizer(recipe)
    assert first == {p.name: p.read_bytes() for p in Path(recipe.remote, 'tokenizer').iterdir()}


def test_a_cased_vocabulary_keeps_case(recipe):
    recipe.tokenizer.lowercase = False
    build_tokenizer(recipe)
    tokenizer, _ = load_tokenizer(recipe)
    assert tokenizer.encode('The').ids != tokenizer.encode('the').ids
    assert tokenizer.decode(tokenizer.encode('The').ids) == ' The'


def test_a_tokenizer_of_other_text_is_refused(recipe, tmp_path):
    build_tokenizer(recipe)
    with (tmp_path / 'text.txt').open('a') as file:
        file.write('another line')
    with pytest.raises(InputError, match='another recipe'):
        build_tokenizer(recipe)


def test_the_same_recipe_does_nothing_and_another_is_refused(recipe):
    build_tokenizer(recipe)
    assert not build_tokenizer(recipe)
    recipe.sources[0].note = 'a note is no part of the recipe'
    assert not build_tokenizer(recipe)
    recipe.tokenizer.lowercase = False
    with pytest.raises(InputError, match='another recipe'):
        build_tokenizer(recipe)
    with pytest.raises(InputError, match=r'tokenizer\.lowercase is True, the recipe needs False'):
        load_tokenizer(recipe)


def test_too_little_text_says_how_many_pieces_it_yields(recipe):
    recipe.tokenizer.vocab_size = 20_000
    with pytest.raises(InputError, match=r'too small for tokenizer\.vocab_size 20000: it yields \d+ pieces'):
        build_tokenizer(recipe)
    assert not Path(recipe.remote).exists()


def test_a_full_disk_is_an_error_of_the_system(recipe):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))  # tokenizer.json has more
    try:
        with pytest.raises(OSError, match=r'File too large: .*/tokenizer\.json'):
            build_tokenizer(recipe)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_an_empty_corpus_is_refused(recipe, tmp_path):
    (tmp_path / 'text.txt').write_text(' \n\n')
    with pytest.raises(InputError, match='no text'):
        build_tokenizer(recipe)


def test_the_training_sample_is_even_bounded_and_deterministic():
    documents = [f'{i} {text}' for i, text in enumerate(write_documents(2000))]
    size = sum(len(text.encode()) for text in documents)
    sample = sample_documents(documents, size // 3)
    assert size // 12 < sum(len(text.encode()) for text in sample) <= size // 3
    positions = [documents.index(text) for text in sample]
    assert positions == sorted(positions)
    assert 0.35 < sum(position < 1000 for position in positions) / len(positions) < 0.65
    assert sample == sample_documents(documents, size // 3)
    assert sample_documents(documents, size) == documents
    chosen = sample_documents([f'document {i}' for i in range(40)], 150)  # as for published tokenizers
    assert [int(text.split()[1]) for text in chosen] == [11, 15, 26, 27, 28, 36, 37]


@pytest.mark.parametrize('read', [build_tokenizer, load_tokenizer])
@pytest.mark.parametrize('name', ['tokenizer.json', 'tokenizer_config.json', 'special_tokens_map.json', 'recipe.json'])
def test_a_file_that_was_damaged_or_removed_is_named(recipe, name, read):
    build_tokenizer(recipe)
    path = Path(recipe.remote, 'tokenizer', name)
    if not path.exists():
        pytest.skip(f'this version of Transformers writes no {name}')
    content = path.read_bytes()
    path.write_bytes(content[:-20])
    with pytest.raises(InputError, match=rf'tokenizer/{name} is (missing or )?damaged'):
        read(recipe)
    if name != 'recipe.json':
        path.write_bytes(content.replace(b'[CLS]', b'[CLT]', 1))
        with pytest.raises(InputError, match=rf'tokenizer/{name} is missing or damaged'):
            read(recipe)
        path.unlink()
        with pytest.raises(InputError, match=rf'tokenizer/{name} is missing or damaged'):
            read(recipe)


def test_an_interrupted_tokenizer_is_none_and_that_of_complete_shards_is_not_trained_again(recipe):
    build_tokenizer(recipe)
    folder = Path(recipe.remote, 'tokenizer')
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / 'recipe.json').unlink()
    with pytest.raises(InputError, match=r'has no recipe\.json: run `maelm tokenizer` with the same recipe'):
        load_tokenizer(recipe)
    own_hash = hashlib.sha256(whole['tokenizer.json']).hexdigest()
    splits = dict.fromkeys(SPLITS, SplitStatistics())
    save_manifest(recipe.remote, Manifest(320, 32, {}, splits, 5.0, own_hash, 'c' * 64, 'r' * 64, []))
    load_tokenizer(recipe)  # as version 0.1 left it
    assert not build_tokenizer(recipe)
    (folder / 'tokenizer.json').write_bytes(whole['tokenizer.json'] + b'\n')
    with pytest.raises(InputError, match='is not the tokenizer of the shards beside it: restore it'):
        build_tokenizer(recipe)
    shutil.rmtree(folder)
    with pytest.raises(InputError, match=r'has no tokenizer\.json, but there are shards beside it'):
        build_tokenizer(recipe)
    Path(recipe.remote, 'manifest.json').unlink()
    assert build_tokenizer(recipe)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole


def test_a_bucket_that_cannot_be_written_is_named_before_the_text_is_read(recipe, tmp_path, s3, monkeypatch):
    def answer(path: str) -> tuple[int, bytes]:
        if 'list-type' in path:
            return 200, b'<ListBucketResult></ListBucketResult>'
        return 404, b'<Error><Code>NoSuchKey</Code></Error>'

    (tmp_path / 'text.txt').write_bytes(b'\xff')
    recipe.remote = 's3://corpus/readonly'
    with serve_s3(answer) as url, monkeypatch.context() as patch:
        patch.setenv('S3_ENDPOINT_URL', url)
        with pytest.raises(InputError, match=r'^s3://corpus/readonly/tokenizer/\.probe: '):
            build_tokenizer(recipe)


def test_a_tokenizer_cannot_write_elsewhere(recipe, tmp_path):
    build_tokenizer(recipe)
    path = Path(recipe.remote, 'tokenizer/recipe.json')
    content = {'recipe_hash': '', 'hashes': {'tokenizer.json': ''}}
    for name in ('../outside', str(tmp_path / 'outside'), '..'):
        path.write_text(json.dumps(content | {'hashes': content['hashes'] | {name: ''}}))
        with pytest.raises(InputError, match=f'names {name!r}, which is no file of that folder'):
            load_tokenizer(recipe)


def test_a_recipe_of_another_vocabulary_is_refused(recipe):
    build_tokenizer(recipe)
    settings = json.loads(Path(recipe.remote, 'tokenizer/tokenizer_config.json').read_text())
    assert settings['tokenizer_class'] == 'PreTrainedTokenizerFast'
    recipe.tokenizer.vocab_size = 321
    with pytest.raises(InputError, match=r'vocab_size is 320, the recipe needs 321'):
        load_tokenizer(recipe)
