"""Each kind of source, and what is said when it cannot be read."""

import gzip
import json
import os
import random
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from maelm_composer.config import SourceConfig, SourceKind
from maelm_composer.data.corpora import assert_readable, describe_source, find_files, group_documents, iterate_documents
from maelm_composer.errors import InputError


def read(tmp_path: Path, *patterns: str, **fields) -> list[str]:
    paths = [str(tmp_path / pattern) for pattern in patterns]
    return list(iterate_documents([SourceConfig(kind=SourceKind.files, paths=paths, **fields)]))


def flip(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 255]) + content[at + 1 :]


def test_documentation_is_plenty_english_and_free_of_duplicates():
    documents = list(iterate_documents([SourceConfig(max_documents=800)]))
    assert len(documents) == len(set(documents)) == 800
    assert sum(map(len, documents)) > 300_000
    assert sum(' the ' in document for document in documents) > 600
    assert documents == list(iterate_documents([SourceConfig(max_documents=800)]))
    assert not any('\n\n' in document or document != document.strip() for document in documents)


def test_txt_documents_are_separated_by_blank_lines(tmp_path):
    (tmp_path / 'a.txt.gz').write_bytes(gzip.compress('é\n\nlast'.encode(), mtime=0))
    # As tools that pack in parallel write them: several frames, one after the other.
    (tmp_path / 'c.txt.zst').write_bytes(zstandard.compress(b'packed\n') + zstandard.compress(b'\nagain'))
    (tmp_path / 'b.txt').write_text('one\n  two\n\n \n\nthree\u2028four\n')
    assert read(tmp_path, '*.txt*') == ['é', 'last', 'one\ntwo', 'three\u2028four', 'packed', 'again']


def test_jsonl_and_parquet_have_a_text_column(tmp_path):
    lines = [{'body': 'one\n\ntwo'}, {'body': None}, {'body': ' '}, {'body': 'three'}]
    (tmp_path / 'a.jsonl').write_text('\n'.join(map(json.dumps, lines)) + '\n{"body": "\\ud800x"}\n')
    (tmp_path / 'b.jsonl.zst').write_bytes(zstandard.compress(b'{"body": "packed"}'))
    pyarrow.parquet.write_table(pyarrow.table({'body': ['four', None, 'five'], 'n': [1, 2, 3]}), tmp_path / 'c.parquet')
    wanted = ['one\ntwo', 'three', '\ufffdx', 'packed', 'four', 'five']
    assert read(tmp_path, '*', text_column='body') == wanted
    assert read(tmp_path, '*', text_column='body', max_documents=2) == wanted[:2]


def test_a_huggingface_dataset_is_streamed_from_a_local_folder(tmp_path, monkeypatch):
    monkeypatch.setenv('HF_DATASETS_CACHE', str(tmp_path / 'cache'))
    (tmp_path / 'set').mkdir()
    pyarrow.parquet.write_table(pyarrow.table({'text': ['four', 'five']}), tmp_path / 'set' / 'train.parquet')
    source = SourceConfig(kind=SourceKind.huggingface, dataset=str(tmp_path / 'set'))
    assert list(iterate_documents([source])) == ['four', 'five']
    source.text_column = 'body'
    with pytest.raises(InputError, match=r"no column 'body' \(it has: text\)"):
        list(iterate_documents([source]))
    source.text_column = 'text'
    (tmp_path / 'set' / 'train-2.parquet').write_bytes(b'PAR1, cut short')
    with pytest.raises(InputError, match=r'dataset \S+/set: cannot be read'):
        list(iterate_documents([source]))
    source.dataset = str(tmp_path / 'nowhere')
    with pytest.raises(InputError, match='nowhere'):
        list(iterate_documents([source]))


def test_the_split_and_the_configuration_of_a_huggingface_dataset_are_those_that_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv('HF_DATASETS_CACHE', str(tmp_path / 'cache'))
    texts = {f'{name}/{split}': f'{split} of {name}' for name in ('en', 'de') for split in ('train', 'validation')}
    for place, text in texts.items():
        path = tmp_path / 'set' / f'{place}.parquet'
        path.parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.table({'text': [text]}), path)
    configs = [{'config_name': name, 'data_dir': name} for name in ('en', 'de')]
    (tmp_path / 'set/README.md').write_text(f'---\n{json.dumps({"configs": configs})}\n---\n')
    for place, text in texts.items():
        name, split = place.split('/')
        named = {'dataset': str(tmp_path / 'set'), 'config_name': name, 'split': split}
        assert list(iterate_documents([SourceConfig(kind=SourceKind.huggingface, **named)])) == [text]


def test_a_revision_describes_a_source_and_none_leaves_the_hashes_of_older_shards():
    source = SourceConfig(kind=SourceKind.huggingface, dataset='someone/texts')
    assert 'revision' not in describe_source(source)
    source.revision = 'a1b2c3'
    assert describe_source(source)['revision'] == 'a1b2c3'


def test_wrapped_lines_are_joined_up_to_a_blank_one(tmp_path):
    text = 'It was the\r\nbest of times,\r\n\r\n  it was\nthe worst\n'
    (tmp_path / 'book.jsonl').write_text(json.dumps({'text': text}))
    assert read(tmp_path, '*', joins_lines=True) == ['It was the best of times,\nit was the worst']
    assert read(tmp_path, '*') == ['It was the\nbest of times,\nit was\nthe worst']
    source = SourceConfig(kind=SourceKind.files, paths=[str(tmp_path / '*')])
    assert 'joins_lines' not in describe_source(source)
    source.joins_lines = True
    assert describe_source(source)['joins_lines'] is True


def test_a_later_source_that_cannot_be_read_is_named_first(tmp_path):
    (tmp_path / 'good.txt').write_text('text')
    good = SourceConfig(kind=SourceKind.files, paths=[str(tmp_path / '*')])
    assert_readable([good])
    (tmp_path / 'read.me').write_text('text')
    with pytest.raises(InputError, match=r'read\.me: not a \.txt, \.jsonl'):
        assert_readable([good])
    (tmp_path / 'read.me').unlink()
    with pytest.raises(InputError, match=r'^dataset .*none: cannot be read'):
        assert_readable([good, SourceConfig(kind=SourceKind.huggingface, dataset=str(tmp_path / 'none'))])


def test_the_revision_reaches_the_hub(monkeypatch):
    asked = {}
    monkeypatch.setattr('datasets.load_dataset', lambda *_, **options: asked.update(options) or [{'text': 'one'}])
    source = SourceConfig(kind=SourceKind.huggingface, dataset='someone/texts', revision='a1b2c3')
    assert list(iterate_documents([source])) == ['one']
    assert asked == {'split': 'train', 'revision': 'a1b2c3', 'streaming': True}


def test_a_file_that_several_globs_match_is_read_once(tmp_path):
    for name in ('b', 'a'):
        (tmp_path / f'{name}.txt').write_text(name)
    assert read(tmp_path, 'b*', '*.txt', 'a*') == ['b', 'a']


@pytest.mark.parametrize(
    'name,content,message',
    [
        ('x.txt', b'fine\ncaf\xe9\n', r'x\.txt, line 2: not UTF-8'),
        ('x.txt.gz', b'not gzip', r'x\.txt\.gz: cannot be unpacked'),
        ('x.txt.gz', gzip.compress(b'cut short' * 99, mtime=0)[:-9], r'x\.txt\.gz: cannot be unpacked'),
        ('x.txt.gz', flip(gzip.compress(random.Random(0).randbytes(9999), mtime=0), 5000), r'x\.txt\.gz: '),
        ('x.txt.zst', b'not zstd', r'x\.txt\.zst: cannot be unpacked'),
        ('x.txt.zst', zstandard.compress(b'cut short\n' * 99)[:-9], r'x\.txt\.zst: cannot be unpacked'),
        ('x.jsonl', b'{"text": "a"}\n{"text": ', r'x\.jsonl, line 2: not JSON'),
        ('x.jsonl', b'{"text": ' + b'1' * 5000 + b'}', r'x\.jsonl, line 1: not JSON'),
        ('x.jsonl', b'[' * 200_000, r'x\.jsonl, line 1: not JSON'),
        ('x.jsonl', b'{"body": "a"}', r"x\.jsonl, line 1: no column 'text' \(it has: body\); set text_column"),
        ('x.jsonl', b'{"text": 3}', r"x\.jsonl, line 1: column 'text' holds int"),
        ('x.parquet', b'not parquet', r'x\.parquet: not a readable Parquet file'),
        ('x.pdf', b'%PDF', r'x\.pdf: not a \.txt'),
    ],
)
def test_an_unreadable_file_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        read(tmp_path, 'x*')


def test_a_missing_column_and_a_glob_without_match_are_named(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({'body': ['a']}), tmp_path / 'x.parquet')
    with pytest.raises(InputError, match=r"x\.parquet: no column 'text' \(it has: body\); set text_column"):
        read(tmp_path, '*.parquet')
    with pytest.raises(InputError, match=rf'{tmp_path} is a folder: write {tmp_path}/\*\.parquet, or another'):
        read(tmp_path, '')
    with pytest.raises(InputError, match=r'\*\.jsonl: matches no file'):
        read(tmp_path, '*.parquet', '*.jsonl')
    (tmp_path / 'y.parquet').symlink_to('gone')
    with pytest.raises(InputError, match=r'y\.parquet is a link to gone, which is not there'):
        read(tmp_path, '*.parquet')
    (tmp_path / os.fsdecode(b'caf\xe9.txt')).write_text('a')
    with pytest.raises(InputError, match=r'the name of the file is not UTF-8'):
        read(tmp_path, '*.txt')
    with pytest.raises(InputError, match=r's3://bucket/\*\.txt: must be a local or shared file'):
        find_files(SourceConfig(paths=['s3://bucket/*.txt']))


def test_a_group_ends_at_its_number_of_documents_or_when_it_holds_enough_text():
    assert list(map(len, group_documents('abcdefg', 100, 3))) == [3, 3, 1]
    assert list(map(len, group_documents(['a' * 4] * 7, 10, 5))) == [3, 3, 1]
