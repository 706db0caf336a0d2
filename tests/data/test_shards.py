"""Documents to shards: the same bytes however they are made, nothing done twice, nothing of another recipe used."""

import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from streaming import StreamingDataset

from maelm_composer.config import CorpusConfig, DataConfig, TokenizerConfig
from maelm_composer.data import shards as module
from maelm_composer.data import storage
from maelm_composer.data.dataset import PretrainingRows
from maelm_composer.data.manifest import load_id_counts, load_manifest
from maelm_composer.data.shards import build_shards, convert_documents, is_validation
from maelm_composer.data.tokenizer import build_tokenizer, load_tokenizer
from maelm_composer.errors import InputError
from maelm_composer.files import lock_folder
from maelm_composer.patches import _one_job_at_a_time
from maelm_composer.recipe import to_yaml
from tests.tiny import find_free_port

from .conftest import write_documents


@pytest.fixture
def shards(ray_here: None, shards: CorpusConfig) -> CorpusConfig:
    """Those of all tests, beside the Ray in which the tests of this file make others."""
    return shards


def read_files(remote: str, *folders: str) -> dict[str, bytes]:
    """Every file that training reads, by name."""
    names = folders or ('train', 'validation', 'manifest.json', 'id_counts.json')
    paths = [p for name in names for p in [Path(remote, name), *Path(remote, name).rglob('*')] if p.is_file()]
    return {str(p.relative_to(remote)): p.read_bytes() for p in paths}


def read_rows(remote: str, split: str, cache: Path) -> np.ndarray:
    """With the stock reader, from a copy: what we write is plain MDS."""
    local = str(cache / split)
    with _one_job_at_a_time():  # as the stock reader does not look for other jobs of this machine
        dataset = StreamingDataset(remote=f'{remote}/{split}', local=local, batch_size=1, validate_hash='sha1')
    return np.stack([dataset[i]['input_ids'] for i in range(dataset.num_samples)])


def test_the_manifest_is_true(shards, tmp_path):
    manifest = load_manifest(shards.remote)
    rows = {split: read_rows(shards.remote, split, tmp_path) for split in ('train', 'validation')}
    documents = (tmp_path / 'text.txt').read_text().split('\n\n')
    validation = [is_validation(document, 0.1) for document in documents]
    assert manifest.splits['validation'].documents == sum(validation)
    assert manifest.splits['train'].documents == 300 - sum(validation)
    for split, found in rows.items():
        stated = manifest.splits[split]
        assert found.dtype == np.uint16
        assert found.shape == (stated.rows, 32)
        assert (found != 1).sum() == stated.tokens
        assert stated.fill_rate == pytest.approx(stated.tokens / found.size, abs=1e-5)
    assert manifest.splits['train'].fill_rate > 0.97
    counts = Counter(rows['validation'].flatten().tolist())
    shares = np.array([n for token, n in counts.items() if token > 2], float)
    shares /= shares.sum()
    assert manifest.unigram_entropy == pytest.approx(-(shares * np.log(shares)).sum(), abs=1e-5)
    assert 0 < manifest.unigram_entropy < math.log(320)
    in_training = Counter(rows['train'].flatten().tolist())
    assert load_id_counts(shards.remote) == [in_training[i] if i > 2 else 0 for i in range(320)]
    assert (manifest.vocab_size, manifest.max_seq_len) == (320, 32)
    assert manifest.special_ids == {'[CLS]': 0, '[PAD]': 1, '[SEP]': 2, '[UNK]': 3, '[MASK]': 319}
    assert manifest.tokenizer_hash == load_tokenizer(shards)[1]
    assert manifest.sources[0]['note'] == 'in place of a library'
    assert manifest.sources[0]['files'] == [['text.txt', (tmp_path / 'text.txt').stat().st_size]]


def test_every_line_is_in_the_rows_once(shards, tmp_path):
    tokenizer, _ = load_tokenizer(shards)
    wanted: Counter = Counter()
    for line in (tmp_path / 'text.txt').read_text().split('\n'):
        ids = tokenizer.encode(line, add_special_tokens=False).ids
        wanted.update(tuple(ids[i : i + 30]) for i in range(0, len(ids), 30))
    found: Counter = Counter()
    for split in ('train', 'validation'):
        for row in read_rows(shards.remote, split, tmp_path):
            blocks = ' '.join(map(str, row[row != 1])).removeprefix('0 ').split(' 0 ')
            found.update(tuple(map(int, line.split())) for b in blocks for line in f'{b} '.split(' 2 ') if line)
    manifest = load_manifest(shards.remote)
    dropped = sum(split.dropped_tokens for split in manifest.splits.values())
    assert found <= wanted
    assert sum((len(line) + 1) * n for line, n in (wanted - found).items()) <= dropped


def test_the_number_of_workers_changes_no_byte(shards, tmp_path):
    first = read_files(shards.remote)
    shards.remote, before = str(tmp_path / 'again'), shards.remote
    build_tokenizer(shards)
    build_shards(shards, num_workers=1)
    assert len(first) > 10
    assert read_files(shards.remote) == first
    assert Path(before, 'parts').exists()


def test_files_that_change_while_they_are_read_are_noticed(shards, tmp_path, monkeypatch):
    Path(shards.remote, 'manifest.json').unlink()

    def convert(*arguments):
        made = convert_all(*arguments)
        (tmp_path / 'more.txt').write_text('more text')
        return made

    convert_all = module._convert
    monkeypatch.setattr(module, '_convert', convert)
    with pytest.raises(InputError, match='files have changed while they were read: run it again'):
        build_shards(shards)


def test_a_second_call_does_nothing(shards):
    stamps = {p: p.stat().st_mtime_ns for p in Path(shards.remote).rglob('*')}
    manifest, was_made = build_shards(shards)
    assert not was_made
    assert manifest == load_manifest(shards.remote)
    assert stamps == {p: p.stat().st_mtime_ns for p in Path(shards.remote).rglob('*')}


@pytest.mark.parametrize('change', ['validation_fraction', 'text', 'documents_per_task'])
def test_shards_of_another_recipe_or_text_are_refused(shards, change, tmp_path):
    if change == 'text':
        (tmp_path / 'text.txt').write_text('\n\n'.join(write_documents(290)))
    else:
        setattr(shards, change, {'validation_fraction': 0.2, 'documents_per_task': 61}[change])
    with pytest.raises(InputError, match='holds shards of another recipe'):
        build_shards(shards)


@pytest.mark.parametrize(
    'change', [{'max_seq_len': 64}, {'tokenizer': TokenizerConfig(vocab_size=320, lowercase=False)}]
)
def test_an_unfinished_conversion_uses_no_rows_of_another_length_or_vocabulary(shards, change, tmp_path):
    Path(shards.remote, 'manifest.json').unlink()
    shutil.rmtree(Path(shards.remote, 'tokenizer'))
    changed, fresh = (
        dataclasses.replace(shards, **change, remote=remote) for remote in (shards.remote, str(tmp_path / 'fresh'))
    )
    for recipe in (changed, fresh):
        build_tokenizer(recipe)
        build_shards(recipe)
    assert read_files(changed.remote) == read_files(fresh.remote)


def test_an_unfinished_conversion_goes_on_and_uses_nothing_of_other_text(shards, tmp_path):
    complete, content_hash = read_files(shards.remote), load_manifest(shards.remote).content_hash
    remote = Path(shards.remote)
    (remote / 'manifest.json').unlink()
    (remote / 'parts' / '00002.json').unlink()
    stamps = {p: p.stat().st_mtime_ns for p in (remote / 'parts').iterdir()}
    build_shards(shards)
    assert read_files(shards.remote) == complete
    assert all(p.stat().st_mtime_ns == stamp for p, stamp in stamps.items())
    # The same recipe, but one document of the second task is another: that task alone is done again.
    (remote / 'manifest.json').unlink()
    documents = (tmp_path / 'text.txt').read_text().split('\n\n')
    documents[70] = documents[70][::-1]
    (tmp_path / 'text.txt').write_text('\n\n'.join(documents))
    build_shards(shards)
    assert [p.name for p, stamp in stamps.items() if p.stat().st_mtime_ns != stamp] == ['00001.json']
    assert read_files(shards.remote) != complete
    assert load_manifest(shards.remote).content_hash != content_hash


def test_a_record_of_one_recipe_does_not_vouch_for_the_shards_of_another(shards):
    """The other conversion fails between the shards of a task and its record."""
    complete, remote = read_files(shards.remote), Path(shards.remote)
    (remote / 'manifest.json').unlink()
    folder = remote / 'train' / '00000'
    shutil.rmtree(folder)
    folder.write_text('no folder')
    with pytest.raises((InputError, OSError)):
        build_shards(dataclasses.replace(shards, validation_fraction=0.4))
    folder.unlink()
    build_shards(shards)
    assert read_files(shards.remote) == complete


def test_shards_that_are_gone_are_named_before_the_manifest_says_that_all_is_there(shards):
    remote = Path(shards.remote)
    (remote / 'manifest.json').unlink()
    gone = next((remote / 'train').rglob('*.zstd'))
    gone.unlink()
    with pytest.raises(InputError, match=rf'{gone.relative_to(remote)} is missing: remove parts/0000\d\.json and run'):
        build_shards(shards)
    assert not (remote / 'manifest.json').exists()


def test_shards_that_another_recipe_has_completed_meanwhile_stay(shards, monkeypatch):
    path = Path(shards.remote, 'manifest.json')
    theirs = path.read_bytes()
    path.unlink()

    def convert(*arguments):
        made = convert_all(*arguments)
        path.write_bytes(theirs)
        return made

    convert_all = module._convert
    monkeypatch.setattr(module, '_convert', convert)
    with pytest.raises(InputError, match='holds shards of another recipe'):
        build_shards(dataclasses.replace(shards, validation_fraction=0.4))
    assert path.read_bytes() == theirs


def test_one_conversion_at_a_time_works_in_a_folder(shards):
    Path(shards.remote, 'manifest.json').unlink()
    with lock_folder(Path(shards.remote), 'test'), pytest.raises(InputError, match='another conversion is at work in'):
        build_shards(shards)
    build_shards(shards)


def test_a_relative_folder_is_that_of_the_command_not_of_ray(shards, tmp_path, monkeypatch):
    complete = read_files(shards.remote)
    home = tmp_path / 'elsewhere'
    home.mkdir()
    monkeypatch.chdir(home)  # the fixture's Ray runs in another folder
    config = dataclasses.replace(shards, remote='mine')
    build_tokenizer(config)
    build_shards(config)
    assert read_files('mine') == complete


def test_killed_and_called_again_it_ends_with_the_same_bytes(recipe, ray_here, tmp_path):
    """SIGKILL of the whole command while some tasks are done and some are not."""
    recipe.documents_per_task = 6  # so many tasks that the poll does not come after the last one
    build_tokenizer(recipe)
    build_shards(recipe)
    complete = read_files(recipe.remote)
    tasks = len(list(Path(recipe.remote, 'parts').glob('*.json')))
    recipe.remote = str(tmp_path / 'again')
    (tmp_path / 'recipe.yaml').write_text(to_yaml(recipe))
    build_tokenizer(recipe)
    command = [sys.executable, '-m', 'maelm_composer.cli', 'shards', str(tmp_path / 'recipe.yaml'), '--workers', '1']
    process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
    parts = Path(recipe.remote, 'parts')
    while not (parts.is_dir() and list(parts.glob('*.json'))):
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    time.sleep(0.5)
    done = {p: p.stat().st_mtime_ns for p in parts.glob('*.json')}
    assert 0 < len(done) < tasks
    assert not Path(recipe.remote, 'manifest.json').exists()
    build_shards(recipe)
    assert read_files(recipe.remote) == complete
    assert all(p.stat().st_mtime_ns == stamp for p, stamp in done.items())


def test_wide_vocabularies_get_wide_ids(recipe, tmp_path):
    build_tokenizer(recipe)
    tokenizer, _ = load_tokenizer(recipe)
    recipe.tokenizer.vocab_size = 70_000
    record = convert_documents(write_documents(20), tokenizer.to_str(), recipe, 7, tmp_path / 'out')
    shard = record['train']['shards'][0]
    assert shard['column_encodings'] == ['ndarray:uint32:32']
    assert shard['zip_data']['basename'] == '00007/shard.00000.mds.zstd'


def test_a_split_is_that_of_published_shards():
    """Another choice means other shards of the same recipe: FORMAT_VERSION is then to be raised."""
    chosen = [i for i in range(40) if is_validation(f'document {i}', 0.2)]
    assert chosen == [1, 5, 7, 8, 10, 13, 20, 21, 22, 23, 28]


def test_text_that_spells_a_special_token_has_ordinary_ids(recipe, tmp_path):
    build_tokenizer(recipe)
    tokenizer, _ = load_tokenizer(recipe)
    record = convert_documents(['[CLS] [MASK] [SEP] [PAD] [UNK]'], tokenizer.to_str(), recipe, 0, tmp_path / 'out')
    (counts,) = (record[split]['id_counts'] for split in ('train', 'validation') if record[split]['rows'])
    assert [counts[i] for i in (0, 2, 3, 319)] == [1, 1, 0, 0]  # one block of one line


def test_shards_are_made_in_s3_as_in_a_folder(shards, s3):
    local = read_files(shards.remote)
    shards.remote = 's3://corpus/some/prefix'
    build_tokenizer(shards)
    build_shards(shards)
    storage.write_file(f'{shards.remote}/tokenizer/', b'')  # as other programs mark a folder
    assert all(storage.list_names(f'{shards.remote}/tokenizer'))
    assert {name: storage.read_file(f'{shards.remote}/{name}') for name in local} == local
    assert not build_shards(shards)[1]


@pytest.mark.parametrize(
    'remote,environment,message',
    [
        ('s3://nowhere/x', {}, 's3://nowhere/x.*no such bucket'),
        ('s3://corpus/x', {'S3_ENDPOINT_URL': 'http://127.0.0.1:CLOSED'}, 's3://corpus/x.*127.0.0.1:CLOSED'),
        ('s3://corpus/x', {'S3_ENDPOINT_URL': 'nonsense'}, 's3://corpus/x.*nonsense'),
        ('gs://corpus/x', {}, 'gs://corpus/x.*only a local folder or s3://'),
        ('s3:///x', {}, 'names no bucket'),
        ('s3://[corpus]/x', {}, r's3://\[corpus\]/x'),
        ('s3:/corpus/x', {}, 's3:/corpus/x.*begins with s3://, with two slashes'),
    ],
)
def test_an_unreachable_remote_is_one_line(s3, remote, environment, message, monkeypatch):
    port = str(find_free_port())  # nobody listens there
    for name, value in environment.items():
        monkeypatch.setenv(name, value.replace('CLOSED', port))
    with pytest.raises(InputError, match=message.replace('CLOSED', port)) as caught:
        load_manifest(remote)
    assert '\n' not in str(caught.value)


def test_wrong_credentials_are_named(s3):
    """moto checks keys only when told to; it then knows none."""
    import requests

    requests.post(f'{s3}/moto-api/reset-auth', data=b'0', timeout=60)
    try:
        with pytest.raises(InputError, match=r's3://corpus/x.*AWS_ACCESS_KEY_ID'):
            load_manifest('s3://corpus/x')
    finally:
        requests.post(f'{s3}/moto-api/reset-auth', data=b'Infinity', timeout=60)


@pytest.mark.parametrize(
    'change', [{'column_encodings': ['pkl']}, {'basename': '../rows.mds'}, {'basename': '/tmp/rows'}]
)
def test_shards_that_hold_pickles_or_lie_elsewhere_are_refused(shards, change):
    path = Path(shards.remote, 'train/index.json')
    index = json.loads(path.read_text())
    for shard in index['shards']:
        target = shard if 'column_encodings' in change else shard['raw_data']
        target |= change
    del index['checksum']
    path.write_text(json.dumps(index))
    with pytest.raises(InputError, match=r'train/index\.json: .* are no shards of `maelm shards`'):
        PretrainingRows(DataConfig(remote=shards.remote), load_manifest(shards.remote), 'train', batch_size=4, seed=0)
