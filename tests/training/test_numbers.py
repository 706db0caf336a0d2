"""The numbers of a run against computations of their own: validation, clipping, precision, clock, identity."""

import dataclasses
import itertools
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.utils import get_total_norm
from torch.optim.optimizer import register_optimizer_step_post_hook

from maelm_composer.data.dataset import PretrainingRows
from maelm_composer.data.manifest import load_manifest
from maelm_composer.device import find_device
from maelm_composer.files import write_json
from maelm_composer.keys import list_keys
from maelm_composer.masking.collate import IGNORED_LABEL, build_collator
from maelm_composer.model.maelm import build_model
from maelm_composer.training import callbacks
from maelm_composer.training.callbacks import BatchSeed, TrainingClock
from maelm_composer.training.run import pretrain
from maelm_composer.training.run_record import UNDECIDING, identify, read_metrics
from tests.training.conftest import RECIPE, V
from tests.training.test_initial import STILL

ROWS = RECIPE['training']['eval_rows']
BATCH = RECIPE['training']['global_train_batch_size']


def at_batch(number: int) -> SimpleNamespace:
    """As much of Composer's State as BatchSeed reads."""
    return SimpleNamespace(timestamp=SimpleNamespace(batch=SimpleNamespace(value=number)))


@pytest.mark.parametrize('attention', ['bidirectional', 'causal_cross'])  # the latter has labels of -100
def test_a_validation_is_of_the_first_validation_rows_and_the_last_weights(recipe, attention):
    config = recipe('training.max_samples=96', f'model.decoder.attention={attention}')
    record = pretrain(config)
    model = build_model(config.model, seed=0, id_counts=[1] * config.model.vocab_size).eval()
    model.load_state_dict(load_file(Path(config.save_folder, 'latest/model.safetensors')))
    rows = PretrainingRows(config.data, load_manifest(config.data.remote), 'validation', batch_size=8, seed=config.seed)
    with torch.inference_mode():
        output = model(build_collator(config)([rows[i] for i in range(ROWS)]))
    is_predicted = output.labels != IGNORED_LABEL
    logits, labels = output.logits[is_predicted], output.labels[is_predicted]
    loss = torch.nn.functional.cross_entropy(logits, labels).item()
    assert record.eval_loss == pytest.approx(loss, rel=1e-5)
    assert record.eval_perplexity == pytest.approx(torch.tensor(loss).exp().item(), rel=1e-4)
    assert record.eval_accuracy == pytest.approx((logits.argmax(-1) == labels).double().mean().item())
    tokens = 96 * config.model.max_seq_len
    assert (record.tokens, record.tokens_per_second) == (tokens, pytest.approx(tokens / record.training_seconds))


def test_the_seed_decides_weights_rows_masks_and_dropout_of_the_first_step(recipe):
    config = recipe('seed=5', 'model.initializer_range=0.5', *STILL)  # so wide that all four move the loss
    pretrain(config)
    saved = load_file(Path(config.save_folder, 'latest/model.safetensors'))
    torch.testing.assert_close(saved, dict(build_model(config.model, 5).state_dict()), rtol=0, atol=0)

    def compute_loss(weights: int = 5, order: int = 5, masks: int = 5, dropout: int = 5) -> float:
        manifest = load_manifest(config.data.remote)
        rows = list(PretrainingRows(config.data, manifest, 'train', batch_size=BATCH, seed=order))[:BATCH]
        batch, device = dataclasses.replace(build_collator(config), seed=masks)(rows), find_device()
        model = build_model(config.model, weights).to(device)
        model.select_attention(config.training.attention)
        BatchSeed(dropout).batch_start(at_batch(0), None)
        return model(batch.to(device)).loss.item()

    (row,) = read_metrics(Path(config.save_folder, 'metrics.csv'))
    loss = float(row['train_loss'])
    assert compute_loss() == pytest.approx(loss, rel=1e-6)
    for part in ('weights', 'order', 'masks', 'dropout'):
        assert compute_loss(**{part: 6}) != pytest.approx(loss, rel=1e-3), part


def test_a_unigram_head_bias_is_that_of_the_counts_beside_the_shards(recipe, shards):
    shutil.copytree(shards, 'shards')
    write_json(Path('shards/id_counts.json'), {'train': [*range(V)]})
    config = recipe('data.remote=shards', 'model.head_bias_init=unigram', *STILL)
    pretrain(config)
    counts = torch.arange(1, V + 1, dtype=torch.float64)
    bias = load_file(Path(config.save_folder, 'latest/model.safetensors'))['head.bias']
    torch.testing.assert_close(bias, (counts / counts.sum()).log().float())


def test_the_dropout_of_published_runs_is_drawn_again():
    BatchSeed(17).batch_start(at_batch(5), None)
    assert torch.initial_seed() == 5895423714208867557


def test_dropout_is_another_one_for_every_seed_batch_and_rank(monkeypatch):
    draws = set()
    for seed, batch, rank in itertools.product((5, 6), (0, 1), (0, 1)):
        monkeypatch.setattr(callbacks.dist, 'get_global_rank', lambda rank=rank: rank)
        BatchSeed(seed).batch_start(at_batch(batch), None)
        draws.add(torch.rand(()).item())
    assert len(draws) == 8


@pytest.mark.parametrize('max_norm', [0.01, 0])
def test_the_gradient_is_clipped_and_its_norm_logged_before(recipe, max_norm):
    norms = []  # after the step, whose closure computes the gradient

    def measure(optimizer, *_):
        parameters = [p for group in optimizer.param_groups for p in group['params'] if p.grad is not None]
        norms.append(get_total_norm([p.grad for p in parameters]).item())

    hook = register_optimizer_step_post_hook(measure)
    try:
        config = recipe(f'optimizer.clip_norm={max_norm}', 'training.max_samples=64')
        pretrain(config)
    finally:
        hook.remove()
    logged = [float(row['gradient_norm']) for row in read_metrics(Path(config.save_folder, 'metrics.csv'))]
    assert min(logged) > 0.02
    assert norms == pytest.approx([max_norm] * 4 if max_norm else logged, rel=1e-3)


def test_bf16_is_another_arithmetic(recipe):
    losses = []
    for precision in ('fp32', 'bf16'):
        pretrain(recipe(f'run_name={precision}', 'training.max_samples=64', f'training.precision={precision}'))
        losses.append([float(row['train_loss']) for row in read_metrics(Path(f'runs/{precision}/metrics.csv'))])
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.01)


def test_a_run_that_is_traced_for_compilation_learns_the_same(recipe, monkeypatch):
    """With torch's tracer alone, since its compiler takes a minute; slow tests of test_run.py have both."""
    compile_module, compiled = torch.nn.Module.compile, []

    def trace(self, **arguments) -> None:
        compiled.append(self)
        compile_module(self, **arguments | {'backend': 'eager'})

    monkeypatch.setattr(torch.nn.Module, 'compile', trace)
    losses = []
    for name in ('eager', 'traced'):
        assert not compiled
        pretrain(recipe(f'run_name={name}', 'training.max_samples=64', f'training.compile={name == "traced"}'))
        losses.append([float(row['train_loss']) for row in read_metrics(Path(f'runs/{name}/metrics.csv'))])
    assert compiled
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_the_clock_counts_batches_alone_and_the_first_ones_as_the_one_after_them(monkeypatch):
    seconds = iter([90.0, 9.0, 9.0, 2.0, 3.0])  # compilation, two slow batches, then the usual ones
    now = [0.0]
    monkeypatch.setattr(callbacks.time, 'perf_counter', lambda: now[0])
    monkeypatch.setattr(callbacks.dist, 'get_world_size', lambda: 2)
    clock = TrainingClock(tokens_per_batch=100, seconds=10.0, device_seconds=30.0)
    for length in seconds:
        now[0] += 50.0  # validation, a checkpoint
        clock.before_dataloader(None, None)
        now[0] += length
        clock.batch_end(None, SimpleNamespace(log_metrics=lambda values: None))
    assert clock.seconds == pytest.approx(10 + 4 * 2 + 3)
    assert clock.device_seconds == pytest.approx(30 + 2 * 11)
    assert clock.tokens_per_second == pytest.approx(100 / 3)
    assert (clock.timed_batches, clock.timed_seconds) == (2, pytest.approx(5))


def test_the_identity_holds_what_decides_the_weights_and_nothing_else(recipe):
    config = recipe()
    identity = identify(config, 'content')
    assert identify(config, 'other content') != identity
    assert {key.name for key in list_keys('pretraining')} >= UNDECIDING  # no name in it is misspelt
    for override in (
        'seed=5',
        'init_from=elsewhere',
        'masking.mlm_probability=0.3',
        'masking.encoder_mask_fraction=0.5',
        'model.hidden_dropout_prob=0.2',
        'model.decoder.num_hidden_layers=2',
        'optimizer.clip_norm=1',
        'optimizer.schedule=cosine',
        'training.global_train_batch_size=32',
        'training.precision=bf16',
        'data.shuffle_block_size=64',
    ):
        assert identify(recipe(override), 'content') != identity, override
    for override in ('run_name=other', 'save_folder=there', 'data.num_workers=1', 'training.compile=true'):
        assert identify(recipe(override), 'content') == identity, override
    for override in ('training.eval_interval_samples=192', 'training.device_train_microbatch_size=4'):
        assert identify(recipe(override), 'content') == identity, override
