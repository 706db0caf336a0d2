"""Waiting while an object store does not answer."""

import dataclasses
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import boto3
import pytest

from maelm_composer.config import DataConfig
from maelm_composer.data import storage
from maelm_composer.data.dataset import PretrainingRows
from maelm_composer.data.manifest import load_manifest
from maelm_composer.data.shards import build_shards
from maelm_composer.data.storage import OutageError, list_names, read_file, wait_out
from maelm_composer.data.tokenizer import build_tokenizer
from maelm_composer.errors import InputError
from tests.faulty_s3 import FaultyS3
from tests.training.conftest import write_rows

from .conftest import s3_at, serve_s3


@pytest.fixture
def fast_clock(monkeypatch):
    """Time goes by 20 times as fast for ``storage``: how long it waits between two tries is not tested with this."""
    clock = SimpleNamespace(monotonic=lambda: 20 * time.monotonic(), sleep=lambda seconds: time.sleep(seconds / 20))
    monkeypatch.setattr(storage, 'time', clock)


@pytest.mark.usefixtures('fast_clock')
@pytest.mark.parametrize('has_locks', [True, False])
def test_a_call_is_tried_again_until_the_store_answers_with_or_without_locks(tmp_path, capsys, has_locks):
    """Only the lock's holder speaks; a file system without locks must not end the wait."""
    lock = tmp_path / '.outage'
    if not has_locks:
        lock.write_text('no folder')
        lock = lock / 'below'
    answers = [OutageError('away'), 'content']

    def call() -> str:
        answer = answers.pop(0)
        if isinstance(answer, OutageError):
            raise answer
        return answer

    assert wait_out(call, 's3://bucket/x', 1.0, lock) == 'content'
    assert ('trying again for 1 minutes' in capsys.readouterr().out) == has_locks


@pytest.mark.parametrize('code, is_outage', [('RequestTimeout', True), ('SlowDown', True), ('InvalidRequest', False)])
def test_a_bad_request_that_says_that_the_store_is_busy_is_an_outage(code, is_outage, monkeypatch):
    """S3 closes an upload that stands still with status 400."""
    with serve_s3(lambda path: (400, f'<Error><Code>{code}</Code></Error>'.encode())) as url:
        for name, value in (s3_at(url) | {'AWS_MAX_ATTEMPTS': '1'}).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(InputError) as caught:
            read_file('s3://corpus/x')
    assert isinstance(caught.value, OutageError) == is_outage


def test_a_listing_has_all_its_pages(monkeypatch):
    """A page holds 1,000 objects."""

    def answer(path: str) -> tuple[int, bytes]:
        key, more = ('b', 'false') if 'continuation-token' in path else ('a', 'true')
        page = f'<IsTruncated>{more}</IsTruncated><NextContinuationToken>t</NextContinuationToken>'
        return 200, f'<ListBucketResult>{page}<Contents><Key>x/{key}</Key></Contents></ListBucketResult>'.encode()

    with serve_s3(answer) as url:
        for name, value in s3_at(url).items():
            monkeypatch.setenv(name, value)
        assert list_names('s3://corpus/x') == ['a', 'b']


def test_the_wait_has_an_end(tmp_path):
    def call() -> None:
        raise OutageError('away')

    with pytest.raises(OutageError, match=r'^away$'):
        wait_out(call, 's3://bucket/x', 0.0, tmp_path / '.outage')


class Interrupted(FaultyS3):
    """Away for a number of requests from the first upload to ``place`` on."""

    def __init__(self, place: str, requests: int) -> None:
        self.place, self.requests = place, requests
        super().__init__()

    def _answer(self, environ, respond):
        if self.place in environ['PATH_INFO'] and environ['REQUEST_METHOD'] == 'PUT' and not self.failed:
            self.fault, self.times = '500', self.requests
        return super()._answer(environ, respond)


def test_a_vocabulary_waits_until_the_store_answers(recipe, s3_server, monkeypatch, fast_clock):
    server = Interrupted('/tokenizer/tokenizer.json', 3)
    monkeypatch.setenv('S3_ENDPOINT_URL', server.url)
    monkeypatch.setenv('AWS_MAX_ATTEMPTS', '1')
    storage._s3_client.cache_clear()
    boto3.client('s3', endpoint_url=server.url).create_bucket(Bucket='corpus')
    there = dataclasses.replace(recipe, remote='s3://corpus/shards')
    try:
        build_tokenizer(there)
        assert not build_tokenizer(there)  # complete
    finally:
        server.stop()
    assert server.failed == 3


def test_a_conversion_waits_until_the_store_answers(shards, ray_here, monkeypatch):
    server = Interrupted('/train/00001/', 12)  # two workers of five attempts each have no try left
    monkeypatch.setenv('S3_ENDPOINT_URL', server.url)
    storage._s3_client.cache_clear()
    boto3.client('s3', endpoint_url=server.url).create_bucket(Bucket='corpus')
    there = dataclasses.replace(shards, remote='s3://corpus/shards')
    try:
        storage.write_folder(f'{there.remote}/tokenizer', Path(shards.remote, 'tokenizer'))
        assert build_shards(there)[0].content_hash == load_manifest(shards.remote).content_hash
    finally:
        server.stop()
    assert server.failed >= 12


def test_a_shard_that_was_damaged_on_its_way_is_asked_for_again(tmp_path, monkeypatch):
    remote, asked = str(write_rows(tmp_path / 'shards')), Counter()

    def read_rows(cache: str) -> list[list[int]]:
        config, manifest = DataConfig(remote=remote, local=str(tmp_path / cache)), load_manifest(remote)
        rows = PretrainingRows(config, manifest, 'train', batch_size=4, seed=0)
        return [rows[at]['input_ids'].tolist() for at in range(rows.num_samples)]

    def read_damaged(url: str) -> bytes | None:
        content = read_file(url)
        if not url.endswith('.zstd') or content is None:
            return content
        asked[url] += 1
        return content if asked[url] > 1 else content[:-1] + bytes([content[-1] ^ 1])

    whole = read_rows('whole')
    monkeypatch.setattr(storage, 'read_file', read_damaged)
    assert read_rows('again') == whole
    assert {*asked.values()} == {2}
