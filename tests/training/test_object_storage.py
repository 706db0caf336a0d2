"""Shards, checkpoints and resumption over HTTP, against a real S3 endpoint on loopback."""

import gc
import hashlib
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from streaming import StreamingDataLoader

from maelm_composer.checkpoints.names import name_checkpoint
from maelm_composer.config import DataConfig
from maelm_composer.data import dataset, storage
from maelm_composer.data.dataset import PretrainingRows
from maelm_composer.data.manifest import load_manifest
from maelm_composer.data.storage import OutageError
from maelm_composer.errors import InputError
from maelm_composer.training.run import pretrain
from maelm_composer.training.run_folder import RunFolder
from tests.tiny import find_free_port
from tests.training.conftest import APART, ISOLATED, count_rows, run_ranks, two_machines


@pytest.fixture
def remote_shards(bucket, shards) -> str:
    for path in filter(Path.is_file, shards.rglob('*')):
        bucket.upload_file(str(path), 'runs', f'shards/{path.relative_to(shards)}')
    return 's3://runs/shards'


def test_a_checkpoint_that_leads_out_of_the_run_folder_is_refused(bucket, recipe):
    remote = ('save_folder=s3://runs/checkpoints', 'training.max_samples=64', 'training.eval_interval_samples=64')
    pretrain(recipe(*remote))
    newest = bucket.get_object(Bucket='runs', Key='checkpoints/latest')['Body'].read().decode()
    bucket.put_object(Bucket='runs', Key=f'checkpoints/{newest}/../../outside.json', Body=b'{}')
    with pytest.raises(InputError, match=r'\.\./outside\.json leads out of the run folder: delete the object'):
        pretrain(recipe(*remote, 'training.max_samples=128', 'training.extends=[64]'))
    for name in ('samples-1/../../outside', '../outside', '', '\xff'):  # whether or not there is such an object
        bucket.put_object(Bucket='runs', Key='checkpoints/latest', Body=name.encode('latin-1'))
        with pytest.raises(InputError, match='checkpoints/latest must hold the name of a checkpoint in s3://runs/chec'):
            pretrain(recipe(*remote))


def test_a_run_from_and_to_a_bucket_survives_the_loss_of_its_machine(
    bucket, remote_shards, recipe, train_once, signal_after, assert_same_run
):
    remote = (f'data.remote={remote_shards}', 'save_folder=s3://runs/checkpoints', 'training.checkpoints_to_keep=2')
    whole = train_once()
    signal_after(11)
    with pytest.raises(SystemExit):
        pretrain(recipe(*remote))
    shutil.rmtree('runs')
    shutil.rmtree('cache')
    Path('runs/recipe/.fetched/samples-000000000001').mkdir(parents=True)  # of a start that was killed
    pretrain(recipe(*remote))

    names = list_names(bucket)
    assert {name for name in names if name.startswith('samples-')} == {'samples-000000000256', 'samples-000000000384'}
    assert names >= {'recipe.yaml', 'record.json', 'metrics.csv', 'latest'}
    assert not list(Path('runs/recipe').rglob('*samples-*'))  # the working copy keeps no checkpoint
    assert_same_run(whole, fetch(bucket))


def list_names(bucket) -> set[str]:
    keys = [item['Key'] for item in bucket.list_objects_v2(Bucket='runs', Prefix='checkpoints/')['Contents']]
    return {key.split('/')[1] for key in keys}


def fetch(bucket) -> str:
    Path('fetched/latest').mkdir(parents=True)
    bucket.download_file('runs', 'checkpoints/metrics.csv', 'fetched/metrics.csv')
    latest = bucket.get_object(Bucket='runs', Key='checkpoints/latest')['Body'].read().decode()
    bucket.download_file('runs', f'checkpoints/{latest}/model.safetensors', 'fetched/latest/model.safetensors')
    return 'fetched'


def begin_outage(server, fault: str) -> None:
    if fault == 'refused':
        server.stop()
    server.fault = fault


def end_outage(server) -> None:
    if server.fault == 'refused':
        server.start()
    server.fault = None


@pytest.fixture
def outage_between(server, at_row):
    """``outage_between(fault, first, last)``: the server fails from row ``first`` of metrics.csv to row ``last``."""

    def plan(fault: str, first: int, last: int | None = None) -> None:
        at_row(first, lambda: begin_outage(server, fault))
        if last is not None:
            at_row(last, lambda: end_outage(server))

    return plan


@pytest.mark.parametrize('fault', ['refused', '503', 'lost'])
def test_training_goes_on_through_an_outage(
    bucket, server, recipe, train_once, outage_between, assert_same_run, capsys, fault
):
    """Both checkpoints of the outage wait and are uploaded after it, the older one first."""
    whole = train_once()
    capsys.readouterr()
    outage_between(fault, 3, 24)
    pretrain(recipe('save_folder=s3://runs/checkpoints'))
    lines = said(capsys)
    assert lines.count('training goes on, the upload is tried again for 30 minutes') == 1
    assert len(re.findall(r's3://runs/checkpoints answers after \d+ s: every checkpoint is uploaded', lines)) == 1
    assert server.fault is None
    assert {name for name in list_names(bucket) if name.startswith('samples-')} == {
        f'samples-{rows:012d}' for rows in (128, 256, 384)
    }
    assert not list(Path('runs/recipe').rglob('*samples-*'))
    assert_same_run(whole, fetch(bucket))


@pytest.mark.slow
def test_two_ranks_go_on_through_an_outage_together(bucket, server, recipe, start, wait_for, assert_same_run):
    def answer_again() -> None:
        wait_for(lambda: count_rows('runs/recipe') >= 24)
        end_outage(server)

    recipe()
    arguments = ('recipe.yaml', 'training.sharding=full_shard')
    out, _ = start(*arguments, 'save_folder=whole', ranks=2).communicate(timeout=300)
    server.fails_from = '/samples-'
    threading.Thread(target=answer_again, daemon=True).start()
    process = start(*arguments, 'run_name=recipe', 'save_folder=s3://runs/checkpoints', ranks=2)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    assert out.count('training goes on') == out.count('every checkpoint is uploaded') == 1
    assert_same_run('whole', fetch(bucket))


@pytest.mark.slow
@two_machines
@pytest.mark.parametrize('disks', ['one', 'two'])
@pytest.mark.parametrize('sharding', ['ddp', 'full_shard'])
def test_two_nodes_save_to_one_bucket(bucket, server, recipe, start_nodes, assert_same_run, sharding, disks):
    recipe()
    before = (*ISOLATED, *(APART if disks == 'two' else ()))
    for said in ('384 samples', 'recipe is complete: 384 samples'):
        nodes = start_nodes(f'training.sharding={sharding}', 'save_folder=s3://runs/checkpoints', before=before)
        outs = [process.communicate(timeout=400)[0] for process in nodes]
        assert [process.returncode for process in nodes] == [0, 0], outs
        assert said in outs[0]
    names = {'state.pt'} if sharding == 'ddp' else {'state/.metadata', 'state/__0_0.distcp', 'state/__1_0.distcp'}
    saved = bucket.list_objects_v2(Bucket='runs', Prefix='checkpoints/samples-000000000384/')['Contents']
    names |= {'model.safetensors', 'metrics.csv', 'progress.json'}
    assert {item['Key'].split('/', 2)[2] for item in saved} == names
    assert max(server.uploads.count(path) for path in server.uploads if '/samples-' in path) == 1


@pytest.mark.parametrize('how', ['limit', 'signal'])
def test_what_an_outage_kept_here_is_uploaded_by_the_next_start(
    bucket, server, recipe, train_once, outage_between, signal_after, assert_same_run, capsys, how
):
    whole = train_once()
    remote = 'save_folder=s3://runs/checkpoints'
    outage_between('503', 3)
    if how == 'limit':
        wanted = r'SlowDown.*no answer for 0.001 minutes .*: saved at (\d+) samples in \S+/runs/recipe; the same'
        with pytest.raises(InputError) as ending:
            pretrain(recipe(remote, 'training.max_outage_minutes=0.001'))
        told = str(ending.value)
    else:
        wanted = r'saved at (\d+) samples in \S+/runs/recipe, not yet in s3://runs/checkpoints; the same command'
        signal_after(11)
        with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
            pretrain(recipe(remote))
        told = said(capsys)
    kept = sorted(path.name for path in Path('runs/recipe/.unsent').glob('samples-*'))
    assert kept[-1] == name_checkpoint(int(re.search(wanted, told)[1]))
    if how == 'limit':
        assert_refused_and_kept(server, recipe, remote, kept)
    end_outage(server)
    pretrain(recipe(remote))
    assert f'resuming from {int(kept[-1][8:])} samples' in said(capsys)
    assert list_names(bucket) >= {*kept, 'samples-000000000384'}
    assert_same_run(whole, fetch(bucket))


def assert_refused_and_kept(server, recipe, remote: str, kept: list[str]) -> None:
    """The next start is refused in the outage, and then elsewhere or with a damaged checkpoint; what waits is kept."""
    with pytest.raises(InputError, match='SlowDown'):
        pretrain(recipe(remote))  # which loses nothing
    assert sorted(path.name for path in Path('runs/recipe/.unsent').glob('samples-*')) == kept
    end_outage(server)
    with pytest.raises(InputError, match=r'\.unsent holds checkpoints .* s3://runs/checkpoints: resume that run there'):
        pretrain(recipe('save_folder=s3://runs/elsewhere'))
    weights = Path('runs/recipe/.unsent', kept[-1], 'model.safetensors')
    content = weights.read_bytes()
    weights.unlink()  # as a part of another machine that was not started
    with pytest.raises(InputError, match=rf'{kept[-1]} lacks {weights.name}, which another machine holds: start the'):
        pretrain(recipe(remote))
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(InputError, match=rf'{weights.name} in a .unsent/{kept[-1]} is not of this checkpoint, or dam'):
        pretrain(recipe(remote))
    weights.write_bytes(content)


def test_checkpoints_that_wait_on_some_nodes_are_uploaded_or_refused_and_never_deleted(bucket, tmp_path, monkeypatch):
    def recover(rank: int) -> None:
        for number in range(len(steps)):
            os.chdir(tmp_path / f'{number}/node{rank}')
            try:
                RunFolder('s3://runs/checkpoints', 'recipe').recover()
            except ValueError as error:
                print(error, file=sys.stderr)

    contents = {'a': 'of rank 0', 'b': 'of rank 1'}
    contents['progress.json'] = json.dumps(
        {'hashes': {k: hashlib.sha256(v.encode()).hexdigest() for k, v in contents.items()}}
    )
    bucket.put_object(Bucket='runs', Key='checkpoints/record.json', Body=b'{}')
    for file in ('progress.json', 'a'):  # which a machine that is no longer there had uploaded before the outage
        bucket.put_object(Bucket='runs', Key=f'checkpoints/{name_checkpoint(4)}/{file}', Body=contents[file])
    first, second, none = ['progress.json', 'a'], ['b'], []  # what a node holds; nothing if it is a new machine
    steps = [(2, first, none), (2, none, first), (4, none, none), (2, first, second), (3, none, first + second)]
    steps.append((1, none, first + second))  # older than `latest`, from which the run has gone on elsewhere
    for number, (samples, *held) in enumerate(steps):
        for node, files in enumerate(held):
            place = tmp_path / str(number) / f'node{node}'
            waiting = place / 'runs/recipe/.unsent' / name_checkpoint(samples)
            (waiting if node or files else place).mkdir(parents=True)  # node 1 holds a part, which may be empty
            for file in files:
                (waiting / file).write_text(contents[file])
            if waiting.exists():
                (waiting.parent / 'address').write_text('s3://runs/checkpoints')
    (errors := tmp_path / 'errors').mkdir()
    assert run_ranks(errors, monkeypatch, recover, nodes=2, per_node=1) == [0, 0]
    for rank in range(2):
        out = (errors / f'{rank}').read_text()
        assert re.findall(r'(samples-\d+) lacks b, which', out) == [name_checkpoint(at) for at in (2, 2, 4)], out
    assert {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob('samples-*/*')} == {'0', '1'}
    sent = {f'checkpoints/{name_checkpoint(at)}/{file}' for at in (2, 3) for file in ('progress.json', 'a', 'b')}
    assert {item['Key'] for item in bucket.list_objects_v2(Bucket='runs')['Contents']} >= sent
    assert bucket.get_object(Bucket='runs', Key='checkpoints/latest')['Body'].read().decode() == name_checkpoint(3)


def said(capsys) -> str:
    return ' '.join(capsys.readouterr().out.split())


def test_access_denied_in_the_middle_ends_the_run_and_loses_nothing(
    bucket, server, recipe, train_once, outage_between, assert_same_run
):
    whole = train_once()
    outage_between('403', 3)
    with pytest.raises(InputError, match=r's3://runs/checkpoints/\S+: access denied; check AWS_ACCESS_KEY_ID'):
        pretrain(recipe('save_folder=s3://runs/checkpoints'))
    end_outage(server)
    pretrain(recipe('save_folder=s3://runs/checkpoints'))
    assert_same_run(whole, fetch(bucket))


def test_a_bucket_that_is_not_there_is_told_before_training(bucket, recipe):
    with pytest.raises(InputError, match=r's3://nowhere/x.*no such bucket'):
        pretrain(recipe('save_folder=s3://nowhere/x'))


def test_a_small_file_that_is_accepted_and_lost_is_noticed(bucket, server, workspace):
    folder = RunFolder('s3://runs/checkpoints', 'run')
    server.fault = 'lost'
    with pytest.raises(OutageError, match='s3://runs/checkpoints accepts a file but does not return it'):
        folder.write('manifest.json', '{}')
    server.fault = None
    folder.write('manifest.json', '{}')
    assert folder.read('manifest.json') == '{}'


@pytest.mark.parametrize('has_link', [True, False])
def test_a_working_copy_never_lies_over_a_local_run(bucket, recipe, train_once, has_link):
    shutil.copytree(train_once(), 'runs/recipe', symlinks=True)
    if not has_link:  # as in a copy made by a tool that skips links
        Path('runs/recipe/latest').unlink()
    before = {path: path.read_bytes() for path in Path('runs').rglob('*') if path.is_file()}
    with pytest.raises(InputError, match=r'runs/recipe holds a local run, where the working copy of s3://runs/x'):
        pretrain(recipe('save_folder=s3://runs/x'))
    assert {path: path.read_bytes() for path in Path('runs').rglob('*') if path.is_file()} == before


def test_an_endpoint_that_does_not_answer_is_told_before_training(bucket, recipe, monkeypatch):
    monkeypatch.setenv('S3_ENDPOINT_URL', f'http://127.0.0.1:{find_free_port()}')
    storage._s3_client.cache_clear()
    with pytest.raises(InputError, match='Could not connect'):
        pretrain(recipe('save_folder=s3://runs/x'))


def read_rows(remote: str, workers: int, patience: float = 0.0) -> list[list[int]]:
    config, manifest = DataConfig(remote=remote), load_manifest(remote)
    rows = PretrainingRows(config, manifest, 'train', batch_size=4, seed=5, max_outage_minutes=patience)
    loader = StreamingDataLoader(rows, batch_size=4, num_workers=workers, drop_last=True)
    return [ids for batch in loader for ids in batch['input_ids'].tolist()]


@pytest.mark.parametrize('workers', [0, 2])
@pytest.mark.usefixtures('workspace')
def test_shards_are_waited_for(server, shards, remote_shards, monkeypatch, capfd, workers):
    """The clock of the waits runs ten times as fast, in the loader's workers, forks of this process, too."""
    whole = read_rows(str(shards), workers)
    clock = SimpleNamespace(monotonic=lambda: 10 * time.monotonic(), sleep=lambda seconds: time.sleep(seconds / 10))
    monkeypatch.setattr(storage, 'time', clock)
    begin = dataset.VerifiedStream.set_up_local

    def begin_and_fail(stream, *arguments) -> None:  # the index has been read
        begin(stream, *arguments)
        # So many that no worker meets its first one when the wait of the other is over: both would speak.
        server.fault, server.times = '503', server.failed + 3 * max(workers, 1)

    monkeypatch.setattr(dataset.VerifiedStream, 'set_up_local', begin_and_fail)
    assert read_rows(remote_shards, workers, patience=10) == whole
    lines = said(capfd)
    shard = r's3://runs/shards/train/shard.0000\d.mds.zstd'
    assert re.search(shard + ': .*SlowDown.*: trying again for 10 min', lines)
    assert lines.count('trying again') == 1
    assert len(re.findall(shard + r' answers after \d+ s', lines)) == 1
    shutil.rmtree('cache')
    with pytest.raises(InputError, match='SlowDown'):
        read_rows(remote_shards, workers)
    # The loader waits so long for each worker that has failed, as soon as it is collected.
    monkeypatch.setattr(torch.utils.data._utils, 'MP_STATUS_CHECK_INTERVAL', 0.1, raising=False)
    gc.collect()


@pytest.mark.parametrize('fault', ['damaged', 'cut'])
def test_an_answer_that_does_not_come_whole_is_asked_for_again(bucket, server, fault):
    bucket.put_object(Bucket='runs', Key='x', Body=b'whole')
    server.fault, server.times = fault, 2
    assert storage.read_file('s3://runs/x') == b'whole'
    assert server.failed == 2
    server.fault, server.times = fault, None
    with pytest.raises(storage.OutageError, match=r's3://runs/x: '):
        storage.read_file('s3://runs/x')
    assert server.failed == 5
