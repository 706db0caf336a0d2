"""Real shards and recipes, small enough that a whole run takes about a second."""

import contextlib
import functools
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import boto3
import numpy as np
import pytest
import torch
import yaml
from composer.utils import dist
from safetensors.torch import load_file
from streaming import MDSWriter

from maelm_composer.config import PretrainingConfig
from maelm_composer.data import storage
from maelm_composer.data.manifest import Manifest, SplitStatistics, save_manifest
from maelm_composer.recipe import load_config
from maelm_composer.training.callbacks import TIMED_COLUMNS, MetricsLog
from maelm_composer.training.run import pretrain
from maelm_composer.training.run_record import read_metrics
from tests.faulty_s3 import FaultyS3
from tests.tiny import find_free_port

ROOT = Path(__file__).resolve().parents[2]
N, V, ROWS, VALIDATION_ROWS = 32, 512, 200, 40

RECIPE = {
    'data': {'num_workers': 0, 'shuffle_block_size': 1000},
    'model': {
        'vocab_size': V,
        'max_seq_len': N,
        'num_hidden_layers': 1,
        'hidden_size': 32,
        'num_attention_heads': 2,
        'intermediate_size': 64,
        'decoder': {'num_hidden_layers': 1, 'hidden_size': 32, 'num_attention_heads': 2, 'intermediate_size': 64},
    },
    'optimizer': {'learning_rate': 2e-3, 'warmup_samples': 64},
    'training': {
        'max_samples': 384,
        'global_train_batch_size': 16,
        'precision': 'fp32',
        'compile': False,
        'eval_interval_samples': 96,
        'eval_rows': 32,
        'checkpoint_interval_samples': 128,
    },
}


def write_rows(root: Path, rows: int = ROWS, validation_rows: int = VALIDATION_ROWS, shortest: int = N) -> Path:
    """Shards as ``maelm shards`` makes them, of random words with a frequent few: rows of N to ``shortest`` tokens."""
    generator, splits = np.random.default_rng(0), {}
    for split, count in (('train', rows), ('validation', validation_rows)):
        lengths = [N - row % (N - shortest + 1) for row in range(count)]
        columns = {'input_ids': f'ndarray:uint16:{N}'}
        out = str(root / split)
        with MDSWriter(out=out, columns=columns, size_limit=4096, compression='zstd', hashes=['sha1']) as writer:
            for length in lengths:
                ids = generator.zipf(1.3, N) % (V - 5) + 4
                ids[[0, length - 1]] = 0, 2
                ids[length:] = 1
                writer.write({'input_ids': ids.astype(np.uint16)})
        tokens = sum(lengths)
        splits[split] = SplitStatistics(documents=count, rows=count, tokens=tokens, fill_rate=tokens / (count * N))
    save_manifest(str(root), Manifest(V, N, {}, splits, 5.0, 't' * 64, 'c' * 64, 'r' * 64, []))
    return root


@pytest.fixture(scope='session')
def shards(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp('shards'))


def enter_workspace(folder: Path, shards: Path, patch: pytest.MonkeyPatch) -> Callable[..., PretrainingConfig]:
    """Go to ``folder``, with ``recipe.yaml`` and a cache of its own, until ``patch`` is undone; returns ``recipe``."""
    patch.chdir(folder)
    patch.setenv('MAELM_CACHE', str(folder / 'cache'))
    recipe = RECIPE | {'data': RECIPE['data'] | {'remote': str(shards)}}
    (folder / 'recipe.yaml').write_text(yaml.safe_dump(recipe))
    return lambda *overrides: load_config(PretrainingConfig, [str(folder / 'recipe.yaml')], overrides)


@pytest.fixture
def recipe(tmp_path, monkeypatch, shards):
    """``recipe('training.max_samples=64', ...)`` -> a checked config."""
    return enter_workspace(tmp_path, shards, monkeypatch)


@pytest.fixture
def workspace(recipe, tmp_path) -> Path:
    """A folder to run in, with ``recipe.yaml`` and a cache of its own."""
    return tmp_path


@pytest.fixture(scope='session')
def train_once(tmp_path_factory, shards):
    """``train_once('training.max_samples=64', ...)``: the folder of that run, which tests read or copy.

    The first call trains it, so a test calls this before it changes anything or plans a signal.
    """

    @functools.cache
    def train(*overrides: str) -> Path:
        with pytest.MonkeyPatch.context() as patch:
            config = enter_workspace(folder := tmp_path_factory.mktemp('once'), shards, patch)(*overrides)
            pretrain(config)
        return folder / config.save_folder

    return train


@pytest.fixture
def assert_same_run():
    """Bitwise the same weights, and the same log but for timings."""

    def compare(ours: str, theirs: str) -> None:
        weights = [load_file(f'{folder}/latest/model.safetensors') for folder in (ours, theirs)]
        torch.testing.assert_close(*weights, rtol=0, atol=0)
        logs = [read_metrics(Path(folder, 'metrics.csv')) for folder in (ours, theirs)]
        untimed = [[{k: v for k, v in row.items() if k not in TIMED_COLUMNS} for row in rows] for rows in logs]
        assert untimed[0] == untimed[1]

    return compare


@pytest.fixture
def at_row(monkeypatch):
    """``at_row(row, act)``: call ``act`` once, when the log of a run of this process gets the row of that number."""
    pending: list[tuple[int, Callable[[], None]]] = []
    write = MetricsLog.batch_checkpoint

    def write_and_act(log: MetricsLog, *arguments) -> None:
        write(log, *arguments)
        rows = sum(1 for _ in read_metrics(log.path))
        for entry in [entry for entry in pending if entry[0] == rows]:
            pending.remove(entry)
            entry[1]()

    monkeypatch.setattr(MetricsLog, 'batch_checkpoint', write_and_act)
    return lambda row, act: pending.append((row, act))


@pytest.fixture
def signal_after(at_row):
    """``signal_after(row)``: send this process a signal when the log gets that row."""
    return lambda row, number=signal.SIGTERM: at_row(row, lambda: os.kill(os.getpid(), number))


def forget_hashes(checkpoint: Path) -> None:
    """Let ``checkpoint`` be as one of version 0.1, or as someone leaves it who changed a file and hides that."""
    progress = json.loads((checkpoint / 'progress.json').read_text())
    del progress['hashes'], progress['checksum']
    (checkpoint / 'progress.json').write_text(json.dumps(progress))


def count_rows(folder: str) -> int:
    log = Path(folder, 'metrics.csv')
    return log.read_text().count('\n') - 1 if log.exists() else 0


@pytest.fixture
def start():
    """``start(*arguments)``: ``python train.py ...``; with ``ranks=2``: ``composer -n 2 train.py ...``.

    ``before``: the command that runs it. ``threads``: of each process; None: as torch chooses.
    """
    started = []

    def launch(
        *arguments: str, ranks: int = 0, before: tuple[str, ...] = (), threads: int | None = 1
    ) -> subprocess.Popen:
        train = str(ROOT / 'train.py')
        environment = {name: value for name, value in os.environ.items() if name != 'OMP_NUM_THREADS'}
        launcher = [str(Path(sys.executable).with_name('composer')), '-n', str(ranks)]
        started.append(
            subprocess.Popen(
                [*before, *(launcher if ranks else [sys.executable]), train, *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
                env=environment | ({} if threads is None else {'OMP_NUM_THREADS': str(threads)}),
            )
        )
        return started[-1]

    yield launch
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def run_ranks(folder: Path, monkeypatch, run: Callable[[int], None], nodes: int = 1, per_node: int = 2) -> list[int]:
    """Fork connected ranks; returns their exit codes. Their standard errors are files named 0, 1, ..."""
    count = nodes * per_node
    ranks = {'WORLD_SIZE': count, 'LOCAL_WORLD_SIZE': per_node}
    ranks |= {'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': find_free_port()}

    def begin(rank: int) -> None:
        with (folder / f'{rank}').open('w') as sys.stderr:
            own = {'RANK': rank, 'LOCAL_RANK': rank % per_node, 'NODE_RANK': rank // per_node}
            for name, value in (ranks | own).items():
                monkeypatch.setenv(name, str(value))
            dist.initialize_dist('cpu', timeout=60)
            run(rank)

    processes = [multiprocessing.get_context('fork').Process(target=begin, args=(rank,)) for rank in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    for process in processes:
        process.kill()  # one that is still alive, for which pytest would wait
    return [process.exitcode for process in processes]


@pytest.fixture
def server(monkeypatch):
    """An object store on loopback."""
    server = FaultyS3()
    monkeypatch.setenv('S3_ENDPOINT_URL', server.url)
    for name in ('AWS_ACCESS_KEY_ID', 'AWS_SECRET_ACCESS_KEY'):
        monkeypatch.setenv(name, 'testing')
    monkeypatch.setenv('AWS_DEFAULT_REGION', 'us-east-1')
    monkeypatch.setenv('AWS_MAX_ATTEMPTS', '1')  # what botocore waits between its own tries only takes time here
    storage._s3_client.cache_clear()  # it keeps the endpoint that it was made for
    yield server
    server.stop()
    storage._s3_client.cache_clear()


@pytest.fixture
def bucket(server):
    """The client of that store, which has the bucket ``runs``."""
    client = boto3.client('s3', endpoint_url=server.url)
    client.create_bucket(Bucket='runs')
    return client


ISOLATED = ('unshare', '--mount', 'sh', '-c', 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', 'sh')
# Each node in a folder of its own: they share no disk.
APART = ('sh', '-c', 'mkdir -p node$RANK && cp recipe.yaml node$RANK && cd node$RANK && exec "$@"', 'sh')
two_machines = pytest.mark.skipif(
    shutil.which('unshare') is None or subprocess.run([*ISOLATED, 'true'], capture_output=True).returncode != 0,
    reason='two machines are two sets of shared memory, and mounting one takes the rights to',
)


@pytest.fixture
def start_nodes(start, monkeypatch, tmp_path_factory):
    """``start_nodes(*arguments)``: the same run on two nodes of one rank each."""

    def launch(*arguments: str, before: tuple[str, ...] = ()) -> list[subprocess.Popen]:
        common = {'WORLD_SIZE': 2, 'LOCAL_RANK': 0, 'LOCAL_WORLD_SIZE': 1}
        common |= {'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': find_free_port()}
        nodes = []
        for node in range(2):
            own = {'RANK': node, 'NODE_RANK': node, 'TMPDIR': tmp_path_factory.mktemp('node')}
            for name, value in (common | own).items():
                monkeypatch.setenv(name, str(value))
            nodes.append(start('recipe.yaml', *arguments, before=before))
        return nodes

    return launch
