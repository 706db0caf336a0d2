"""Speed of conversion, loading and collating, compared with training; and the overhead of Composer.

    pytest -s bench/test_data_path.py [--record]   with --record: results/throughput/{data_path,overhead}-<machine>.csv

The text is MAELM_DATA/corpus/*.parquet if the variable is set, else the documentation on this machine. No test asserts
a speed. Training uses fp32 or bf16, whichever is faster on the device.
"""

import functools
import itertools
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import boto3
import pytest
import torch
from moto.server import ThreadedMotoServer
from torch.nn.utils import clip_grad_norm_
from torch.optim.optimizer import register_optimizer_step_post_hook

from bench.contenders import DEVICE, TIMED_STEPS, Shape, make_ours, make_recipe, time_steps
from maelm_composer.cluster import connect_ray
from maelm_composer.config import CorpusConfig, Precision, PretrainingConfig, SourceConfig, SourceKind, TokenizerConfig
from maelm_composer.data import storage
from maelm_composer.data.corpora import iterate_documents
from maelm_composer.data.manifest import load_manifest
from maelm_composer.data.shards import build_shards, convert_documents
from maelm_composer.data.tokenizer import build_tokenizer, load_tokenizer
from maelm_composer.masking.collate import build_collator
from maelm_composer.model.maelm import build_model
from maelm_composer.precision import measure_speeds
from maelm_composer.training.loaders import build_train_loader
from maelm_composer.training.optimizer import build_optimizer, build_schedule
from maelm_composer.training.plan import Plan
from maelm_composer.training.run import pretrain

SMALL = Shape(6, 256, 4, 2, length=128, batch=64 if DEVICE == 'cpu' else 1024, vocab=8192)
HALF = replace(SMALL, batch=SMALL.batch // 2)  # at least 200 ms a step on two cores
DEMO = Shape(2, 128, 4, 1, length=64, batch=64, vocab=8192)
DATA = os.environ.get('MAELM_DATA')
DOCUMENTS = 1200 if DATA else 9000  # articles and novels, or docstrings: a few million tokens
DOCUMENTS_PER_TASK = DOCUMENTS // 12
STEPS, WARMUP_STEPS, ROUNDS = 10, 3, 3


def make_corpus(remote: Path, length: int) -> CorpusConfig:
    source = SourceConfig(max_documents=DOCUMENTS)
    if DATA is not None:
        source.kind, source.paths = SourceKind.files, [f'{DATA}/corpus/*.parquet']
    return CorpusConfig(
        remote=str(remote),
        max_seq_len=length,
        validation_fraction=0.02,
        documents_per_task=DOCUMENTS_PER_TASK,
        sources=[source],
        tokenizer=TokenizerConfig(vocab_size=8192, max_training_bytes=4_000_000),
    )


@pytest.fixture(scope='module')
def shards(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """``shards(length)`` returns the folder of shards with rows of that length."""

    @functools.cache
    def build(length: int) -> Path:
        corpus = make_corpus(tmp_path_factory.mktemp('shards'), length)
        build_tokenizer(corpus)
        build_shards(corpus)
        return Path(corpus.remote)

    return build


@pytest.fixture
def bucket(shards: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The shards in a bucket of a local HTTP S3 server, which runs in a thread of this process."""
    server = ThreadedMotoServer(ip_address='127.0.0.1', port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv('S3_ENDPOINT_URL', f'http://{host}:{port}')
    for name in ('AWS_ACCESS_KEY_ID', 'AWS_SECRET_ACCESS_KEY'):
        monkeypatch.setenv(name, 'someone')
    monkeypatch.setenv('AWS_DEFAULT_REGION', 'us-east-1')
    storage._s3_client.cache_clear()  # a cached client has another endpoint
    client, folder = boto3.client('s3', endpoint_url=f'http://{host}:{port}'), shards(SMALL.length)
    client.create_bucket(Bucket='bench')
    for path in folder.rglob('*'):
        if path.is_file():
            client.upload_file(str(path), 'bench', f'shards/{path.relative_to(folder)}')
    yield 's3://bench/shards'
    server.stop()
    storage._s3_client.cache_clear()


def make_config(shape: Shape, remote: str, folder: Path, workers: int, samples: int) -> PretrainingConfig:
    """A recipe of MAE-LM at ``shape`` for ``samples`` rows, evaluated and saved only at the end."""
    config = make_recipe(shape, decoder=True)
    config.save_folder = str(folder / 'run')
    config.data.remote, config.data.local, config.data.num_workers = remote, str(folder / 'cache'), workers
    training = config.training
    training.max_samples = training.eval_interval_samples = training.checkpoint_interval_samples = samples
    training.global_train_batch_size, training.eval_rows, training.compile = shape.batch, shape.batch, False
    training.precision = measure_speeds().faster
    config.optimizer.warmup_samples = shape.batch
    return config


def build_loader(config: PretrainingConfig) -> Iterator[dict[str, torch.Tensor]]:
    manifest = load_manifest(config.data.remote)
    plan = Plan(config, 1, manifest)
    return iter(build_train_loader(plan, build_collator(config)).dataloader)


def test_conversion(benchmark: Callable, record: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents to shards, in this process, then with one and two Ray workers."""
    monkeypatch.delenv('RAY_ADDRESS', raising=False)  # on a cluster, all its cores would work
    corpus = make_corpus(tmp_path / 'first', SMALL.length)
    build_tokenizer(corpus)
    documents = list(iterate_documents(corpus.sources))
    tokenizer_json = load_tokenizer(corpus)[0].to_str()
    speeds: dict[str, float] = {}

    def run() -> None:
        start = time.perf_counter()
        os.environ['TOKENIZERS_PARALLELISM'] = 'false'
        tokens = 0
        for task, first in enumerate(range(0, len(documents), DOCUMENTS_PER_TASK)):
            part = documents[first : first + DOCUMENTS_PER_TASK]
            done = convert_documents(part, tokenizer_json, corpus, task, tmp_path / 'alone')
            tokens += sum(done[split]['tokens'] for split in ('train', 'validation'))
        speeds['conversion, one core, no Ray'] = tokens / (time.perf_counter() - start)
        for workers in (1, 2):
            with connect_ray(workers):  # in a Ray with more cores, the task that is queued would run, too
                for turn in range(2):  # the first starts Ray's workers; its speed is replaced
                    folder = tmp_path / f'ray-{workers}-{turn}'
                    shutil.copytree(tmp_path / 'first/tokenizer', folder / 'tokenizer')
                    start = time.perf_counter()
                    manifest, _ = build_shards(make_corpus(folder, SMALL.length), workers)
                    converted = sum(split.tokens for split in manifest.splits.values())
                    speeds[f'conversion, Ray, workers {workers}'] = converted / (time.perf_counter() - start)
                    assert converted == tokens

    benchmark.pedantic(run, rounds=1)
    growth = speeds['conversion, Ray, workers 2'] / speeds['conversion, Ray, workers 1']
    print(f'\n{len(documents):,} documents; two workers: {growth:.2f} × one')
    for name, speed in speeds.items():
        print(f'{name:40}{speed:14,.0f} tokens/s')
        record('data_path', {'contender': name, 'length': SMALL.length, 'tokens_per_second': round(speed)})


def test_loader(
    benchmark: Callable, record: Callable, tmp_path: Path, shards: Callable[[int], Path], bucket: str
) -> None:
    """Batches of the small shape from a full cache, and from S3 with an empty cache, against training steps."""
    precision = measure_speeds().faster
    trainer = make_ours(SMALL, make_recipe(SMALL, decoder=False), precision, compiled=True)
    speeds: dict[str, float] = {}

    def read_epoch(remote: str, folder: Path, workers: int) -> float:
        """Tokens/s of one epoch, including the start of the workers and the first shard."""
        start, tokens = time.perf_counter(), 0
        for batch in build_loader(make_config(SMALL, remote, folder, workers, samples=SMALL.batch)):
            tokens += batch.labels.numel()
        assert tokens > 100 * SMALL.length
        return tokens / (time.perf_counter() - start)

    def run() -> None:
        for workers in (0, 1, 2):
            folder = tmp_path / str(workers)
            speeds[f'loader, from S3, workers {workers}'] = read_epoch(bucket, folder / 's3', workers)
            read_epoch(str(shards(SMALL.length)), folder / 'local', 0)
            speeds[f'loader, from the cache, workers {workers}'] = read_epoch(
                str(shards(SMALL.length)), folder / 'local', workers
            )
        for _ in range(1 + STEPS // TIMED_STEPS):
            time_steps(trainer)

    benchmark.pedantic(run, rounds=1)
    step = statistics.median(trainer.figures.seconds[TIMED_STEPS:])
    consumed = SMALL.tokens / step
    print(f'\n{f"RoBERTa, compiled, {precision.name}, consumes":40}{consumed:14,.0f} tokens/s')
    for name, speed in sorted(speeds.items()):
        times = speed / consumed
        print(f'{name:40}{speed:14,.0f} tokens/s{times:8.1f} × that')
        row = {'contender': name, 'length': SMALL.length, 'batch': SMALL.batch, 'tokens_per_second': round(speed)}
        record('data_path', row | {'times_trainer': round(times, 2), 'trainer_tokens_per_second': round(consumed)})
    assert trainer.figures.losses[-1] < trainer.figures.losses[0]


def test_collating(benchmark: Callable, record: Callable, tmp_path: Path, shards: Callable[[int], Path]) -> None:
    """Masking and collating one batch in the trainer's process, against a training step."""
    config = make_config(SMALL, str(shards(SMALL.length)), tmp_path, workers=0, samples=SMALL.batch)
    precision = measure_speeds().faster
    collator, trainer = build_collator(config), make_ours(SMALL, config, precision, compiled=False)
    rows = next(build_loader(config)).labels
    ids = torch.where(rows == -100, 4, rows).numpy()
    ids[:, 0] = 0
    samples = [{'input_ids': row.astype('uint16'), 'row': number, 'epoch': 0} for number, row in enumerate(ids)]
    benchmark.pedantic(collator, args=(samples,), rounds=30, warmup_rounds=3)
    for _ in range(1 + STEPS // TIMED_STEPS):
        time_steps(trainer)
    seconds, step = benchmark.stats.stats.median, statistics.median(trainer.figures.seconds[TIMED_STEPS:])
    print(
        f'\nmasking and collating: {seconds / SMALL.batch * 1e6:.1f} µs a row, {seconds / step:.2%} of a step of '
        f'{step * 1e3:.0f} ms ({SMALL}, MAE-LM, {precision.name}, eager)'
    )
    row = {'contender': 'masking and collating', 'length': SMALL.length, 'batch': SMALL.batch}
    row |= {'microseconds_per_row': round(seconds / SMALL.batch * 1e6, 1), 'share_of_step': round(seconds / step, 4)}
    record('data_path', row | {'tokens_per_second': round(SMALL.tokens / seconds)})


@pytest.mark.parametrize('shape', [HALF, DEMO], ids=str)
def test_composers_overhead(
    benchmark: Callable, record: Callable, tmp_path: Path, shards: Callable[[int], Path], shape: Shape
) -> None:
    """Seconds between optimizer steps in ``pretrain`` and in a bare loop of the same recipe.

    Both read, mask and collate in their own process, clip gradients and follow the schedule. The difference is the cost
    of Composer's Trainer with our callbacks.
    """
    steps = STEPS * (1 if shape is HALF else 10)
    stamps: list[float] = []
    intervals: dict[str, list[float]] = {'Composer': [], 'bare loop': []}

    def run_round() -> None:
        for name, train in (('Composer', pretrain), ('bare loop', train_bare)):
            folder = tmp_path / f'{name}{len(intervals[name])}'
            config = make_config(shape, str(shards(shape.length)), folder, workers=0, samples=steps * shape.batch)
            stamps.clear()
            train(config)
            assert len(stamps) == steps
            times = [after - before for before, after in itertools.pairwise(stamps)]
            intervals[name] += times[WARMUP_STEPS:]

    hook = register_optimizer_step_post_hook(lambda *_: stamps.append(time.perf_counter()))
    try:
        benchmark.pedantic(run_round, rounds=ROUNDS)
    finally:
        hook.remove()
    median = {name: statistics.median(times) for name, times in intervals.items()}
    overhead = median['Composer'] / median['bare loop'] - 1
    precision = measure_speeds().faster.name
    print(f'\n{shape}, MAE-LM, {precision}, eager: Composer {overhead:+.1%}')
    for name, seconds in median.items():
        print(f'{name:40}{seconds * 1e3:10.1f} ms/step{shape.tokens / seconds:12,.0f} tokens/s')
        row = {'contender': name, 'precision': precision, 'layers': shape.layers, 'hidden_size': shape.size}
        row |= {'length': shape.length, 'batch': shape.batch, 'milliseconds_per_step': round(seconds * 1e3, 2)}
        row |= {'tokens_per_second': round(shape.tokens / seconds), 'steps': len(intervals[name])}
        record('overhead', row | {'overhead': round(median[name] / median['bare loop'] - 1, 4)})


def train_bare(config: PretrainingConfig) -> None:
    """Train with the recipe's model, rows, masks, optimizer, clipping and schedule in a plain loop."""
    model = build_model(config.model, config.seed).to(DEVICE)
    model.select_attention(config.training.attention)
    optimizer = build_optimizer(model.parameters(), config.optimizer)
    schedule = build_schedule(optimizer, config.optimizer, config.training)
    batches = build_loader(config)
    for _ in range(config.training.max_samples // config.training.global_train_batch_size):
        batch = next(batches).to(DEVICE)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=config.training.precision == Precision.bf16):
            loss = model(batch).loss
        loss.backward()
        clip_grad_norm_(model.parameters(), config.optimizer.clip_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        assert loss.isfinite()  # waits for the device, as logging would
