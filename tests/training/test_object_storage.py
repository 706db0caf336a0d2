"""Shards, checkpoints and resumption over HTTP, against a real S3 endpoint on loopback."""

import shutil
import socket
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from maelm_composer.data import storage
from maelm_composer.errors import InputError
from maelm_composer.training.run import pretrain


@pytest.fixture
def bucket(monkeypatch, shards):
    server = ThreadedMotoServer(ip_address='127.0.0.1', port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv('S3_ENDPOINT_URL', f'http://{host}:{port}')
    for name in ('AWS_ACCESS_KEY_ID', 'AWS_SECRET_ACCESS_KEY'):
        monkeypatch.setenv(name, 'testing')
    monkeypatch.setenv('AWS_DEFAULT_REGION', 'us-east-1')
    client = boto3.client('s3', endpoint_url=f'http://{host}:{port}')
    client.create_bucket(Bucket='runs')
    for path in shards.rglob('*'):
        if path.is_file():
            client.upload_file(str(path), 'runs', f'shards/{path.relative_to(shards)}')
    storage._s3_client.cache_clear()  # it keeps the endpoint that it was made for
    yield client
    server.stop()
    storage._s3_client.cache_clear()


def test_a_run_from_and_to_a_bucket_survives_the_loss_of_its_machine(bucket, recipe, signal_after, assert_same_run):
    remote = ('data.remote=s3://runs/shards', 'save_folder=s3://runs/checkpoints', 'training.checkpoints_to_keep=2')
    pretrain(recipe('save_folder=whole'))
    signal_after('runs/recipe', 11)
    with pytest.raises(SystemExit):
        pretrain(recipe(*remote))
    shutil.rmtree('runs')
    shutil.rmtree('cache')
    pretrain(recipe(*remote))

    keys = [item['Key'] for item in bucket.list_objects_v2(Bucket='runs', Prefix='checkpoints/')['Contents']]
    names = {key.split('/')[1] for key in keys}
    assert {name for name in names if name.startswith('samples-')} == {'samples-000000000256', 'samples-000000000384'}
    assert names >= {'recipe.yaml', 'record.json', 'metrics.csv', 'latest'}
    assert not list(Path('runs/recipe').glob('*samples-*'))  # the working copy keeps no checkpoint
    Path('fetched').mkdir()
    for name in ('metrics.csv', 'latest'):
        bucket.download_file('runs', f'checkpoints/{name}', f'fetched/{name}')
    latest = Path('fetched/latest').read_text()
    Path('fetched/latest').unlink()
    Path('fetched/latest').mkdir()
    bucket.download_file('runs', f'checkpoints/{latest}/model.safetensors', 'fetched/latest/model.safetensors')
    assert_same_run('whole', 'fetched')


def test_a_bucket_that_is_not_there_is_told_before_training(bucket, recipe):
    with pytest.raises(InputError, match=r's3://nowhere/x.*no such bucket'):
        pretrain(recipe('save_folder=s3://nowhere/x'))


def test_a_working_copy_never_lies_over_a_local_run(bucket, recipe):
    pretrain(recipe('training.max_samples=32', 'optimizer.warmup_samples=16'))
    before = {path: path.read_bytes() for path in Path('runs').rglob('*') if path.is_file()}
    with pytest.raises(InputError, match=r'runs/recipe holds a local run, where the working copy of s3://runs/x'):
        pretrain(recipe('save_folder=s3://runs/x'))
    assert {path: path.read_bytes() for path in Path('runs').rglob('*') if path.is_file()} == before


def test_an_endpoint_that_does_not_answer_is_told_before_training(bucket, recipe, monkeypatch):
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        port = probe.getsockname()[1]
    monkeypatch.setenv('S3_ENDPOINT_URL', f'http://127.0.0.1:{port}')
    storage._s3_client.cache_clear()
    with pytest.raises(InputError, match='Could not connect'):
        pretrain(recipe('save_folder=s3://runs/x'))
