"""Batches, training and prediction on one device, and the effective rank of the last layer during training.

The loop is plain PyTorch. A sweep makes thousands of short runs, for which Composer's Trainer has an overhead without
a benefit (docs/finetuning.md).
"""

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from statistics import mean

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from transformers import get_linear_schedule_with_warmup

from maelm_composer.analysis.measures import Gram
from maelm_composer.config import EvaluationProtocol, FinetuningConfig, Precision
from maelm_composer.console import track
from maelm_composer.errors import InputError
from maelm_composer.finetuning.model import FinetuningBatch, FinetuningModel
from maelm_composer.tasks.catalogue import SPAN
from maelm_composer.tasks.examples import Inputs
from maelm_composer.training.optimizer import build_optimizer

EVAL_BATCH_SIZE = 64
CHUNK_BATCHES = 100  # rows are sorted by length within a chunk of this many batches
STEPS_BETWEEN_CHECKS = 50  # losses are read this seldom, because reading one waits for the device
# Tokens per measurement of the effective rank: 85 for each of base's 768 dimensions. On two cores, measuring more took
# as long as the fine-tuning.
MAX_RANK_TOKENS = 2**16


def order_by_length(lengths: Sequence[int], batch_size: int, seed: int, epoch: int) -> list[np.ndarray]:
    """One epoch's batches of row numbers, each row once: a function of the lengths, ``seed`` and ``epoch``.

    Rows are shuffled, sorted by length within chunks of ``CHUNK_BATCHES`` batches and cut into batches, which are
    shuffled in turn. One batch may be smaller than ``batch_size``.
    """
    generator = np.random.default_rng((seed, epoch))
    order, length = generator.permutation(len(lengths)), np.asarray(lengths)
    batches: list[np.ndarray] = []
    chunk_size = batch_size * CHUNK_BATCHES
    for first in range(0, len(order), chunk_size):
        chunk = order[first : first + chunk_size]
        chunk = chunk[np.argsort(length[chunk], kind='stable')]
        batches += [chunk[i : i + batch_size] for i in range(0, len(chunk), batch_size)]
    return [batches[i] for i in generator.permutation(len(batches))]


def collate(inputs: Inputs, rows: Sequence[int] | np.ndarray, pad_id: int) -> FinetuningBatch:
    """The batch of the rows with the numbers ``rows``."""
    ids = [inputs.input_ids[row] for row in rows]
    lengths = np.array([len(row) for row in ids])
    slots = np.arange(lengths.max())
    is_token = slots < lengths[:, None]
    padded = np.full(is_token.shape, pad_id, np.int64)
    padded[is_token] = np.concatenate(ids)
    is_candidate = None
    if inputs.passage_starts is not None:
        starts = inputs.passage_starts[rows][:, None]
        is_candidate = torch.from_numpy((slots == 0) | ((slots >= starts) & (slots < lengths[:, None] - 1)))
    return FinetuningBatch(
        input_ids=torch.from_numpy(padded),
        position_ids=torch.from_numpy(np.where(is_token, slots, 0)),
        segment_ids=torch.from_numpy(is_token.astype(np.int64)),
        targets=torch.from_numpy(inputs.targets[rows]),
        is_candidate=is_candidate,
    )


def measure_padding(lengths: Sequence[int], batches: Sequence[np.ndarray]) -> float:
    """The share of padding among all positions of the batches."""
    length = np.asarray(lengths)
    total = sum(len(rows) * int(length[rows].max()) for rows in batches)
    return 1 - sum(int(length[rows].sum()) for rows in batches) / total


def sort_for_evaluation(lengths: Sequence[int], batch_size: int) -> list[np.ndarray]:
    """Batches of row numbers in descending order of length."""
    order = np.argsort(-np.asarray(lengths), kind='stable')
    return [order[first : first + batch_size] for first in range(0, len(order), batch_size)]


@dataclass(frozen=True)
class FitReport:
    steps: int
    train_loss: float  # mean over the last epoch's batches
    training_seconds: float  # collating and training steps, without ``evaluate`` and ``observe``
    padded_share: float  # padding's share of all positions that training computed


def fit(
    model: FinetuningModel,
    inputs: Inputs,
    config: FinetuningConfig,
    pad_id: int,
    evaluate: Callable[[int], None],
    observe: Callable[[int], None] = lambda epoch: None,
) -> FitReport:
    """Train ``model``, and so its encoder, in place on the device of its parameters, for ``config.max_epochs``.

    The order of the rows and dropout depend on ``config.seed`` alone, which becomes that of torch's global generators.

    Args:
        evaluate: called with the number of steps done, at the steps of the evaluation protocol.
        observe: called with the number of epochs done, before the first epoch and after each, if
            ``config.measures_rank``.

    Raises:
        InputError: a loss is not finite; the message names the step.
    """
    device = next(model.parameters()).device
    steps_per_epoch = math.ceil(len(inputs) / config.batch_size)
    steps = steps_per_epoch * config.max_epochs
    evaluation_steps = plan_evaluations(config.evaluation, steps_per_epoch, config.max_epochs)
    optimizer = build_optimizer(model.parameters(), config)
    schedule = get_linear_schedule_with_warmup(optimizer, round(config.warmup_proportion * steps), steps)
    lengths, epochs = inputs.lengths, range(config.max_epochs)
    batches = [rows for epoch in epochs for rows in order_by_length(lengths, config.batch_size, config.seed, epoch)]
    torch.manual_seed(config.seed)
    losses: list[float] = []
    unread: list[Tensor] = []
    if config.measures_rank:
        observe(0)
    seconds, start = 0.0, time.perf_counter()
    model.train()
    microbatch_size = config.device_train_microbatch_size or config.batch_size
    for step, rows in enumerate(track(batches, steps, 'training', 'steps'), start=1):
        loss = torch.zeros((), device=device)
        for first in range(0, len(rows), microbatch_size):
            part = rows[first : first + microbatch_size]
            batch = collate(inputs, part, pad_id).to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=config.precision == Precision.bf16):
                scores = model(batch)
            share = model.compute_loss(scores, batch.targets) * (len(part) / len(rows))
            share.backward()
            loss += share.detach()
        if config.clip_norm:
            clip_grad_norm_(model.parameters(), config.clip_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        unread.append(loss)
        is_observed = config.measures_rank and step % steps_per_epoch == 0
        is_pause = step in evaluation_steps or is_observed
        # Reading the losses waits for the device, so that the clock, too, stops at the right time.
        if len(unread) == STEPS_BETWEEN_CHECKS or is_pause:
            losses += _read_losses(unread, step)
            unread.clear()
        if is_pause:
            seconds += time.perf_counter() - start
            if step in evaluation_steps:
                evaluate(step)
            if is_observed:
                observe(step // steps_per_epoch)
            model.train()
            start = time.perf_counter()
    parts = [rows[i : i + microbatch_size] for rows in batches for i in range(0, len(rows), microbatch_size)]
    return FitReport(steps, mean(losses[-steps_per_epoch:]), seconds, measure_padding(lengths, parts))


def plan_evaluations(protocol: EvaluationProtocol, steps_per_epoch: int, epochs: int) -> set[int]:
    """The steps, counted from 1, after which the dev set is evaluated. The last step is always one."""
    match protocol:
        case EvaluationProtocol.final:
            return {steps_per_epoch * epochs}
        case EvaluationProtocol.half_epochs:
            return {math.ceil(half * steps_per_epoch / 2) for half in range(1, 2 * epochs + 1)}


@torch.inference_mode()
def predict(
    model: FinetuningModel, inputs: Inputs, precision: Precision, pad_id: int, batch_size: int
) -> list[np.ndarray]:
    """The model's output for each row, in the order of the rows, fp32.

    (classes,) for classification, () for regression, (S, 2) for a span task, with S at least the row's length.

    Raises:
        InputError: an output is not finite, as after an update that overflowed.
    """
    device = next(model.parameters()).device
    model.eval()
    scores: list[np.ndarray] = [np.empty(0)] * len(inputs)
    batches = sort_for_evaluation(inputs.lengths, batch_size)
    # Around the loop: autocast keeps the bf16 weights until its end.
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == Precision.bf16):
        for rows in track(batches, len(batches), 'evaluation', 'batches'):
            outputs = model(collate(inputs, rows, pad_id).to(device)).cpu().numpy()
            is_fine = np.isfinite(outputs)
            if model.kind == SPAN:
                is_fine |= outputs == -math.inf  # outside the passage
            if not is_fine.all():
                raise InputError('an output of the model is not finite: try a smaller learning_rate or precision=fp32')
            for row, output in zip(rows, outputs, strict=True):
                scores[row] = output
    return scores


@torch.inference_mode()
def measure_last_layer(
    encoder: nn.Module, inputs: Inputs, special_ids: Collection[int], pad_id: int, batch_size: int
) -> int:
    """Effective rank of the last layer in fp32 at the real tokens (Table 3); ``encoder`` is left in evaluation mode.

    Every k-th row is read, with the least k that gives at most about ``MAX_RANK_TOKENS`` tokens. No random number is
    drawn.

    Args:
        special_ids: the tokenizer's ids of [CLS], [PAD] and [SEP], which are not real tokens.

    Raises:
        InputError: no row contains a real token.
    """
    device = next(encoder.parameters()).device
    specials = torch.tensor(sorted(special_ids), device=device)
    lengths = np.asarray(inputs.lengths)
    chosen = np.arange(0, len(lengths), math.ceil(lengths.sum() / MAX_RANK_TOKENS))
    parts = sort_for_evaluation(lengths[chosen].tolist(), batch_size)
    encoder.eval()
    gram: Gram | None = None
    for rows in track(parts, len(parts), 'effective rank', 'batches'):
        ids, positions, segments = collate(inputs, chosen[rows], pad_id).to(device)[:3]
        states = encoder(ids, positions, segments)
        gram = gram or Gram(states.shape[-1], device)
        gram.add(states[(segments > 0) & torch.isin(ids, specials, invert=True)])
    assert gram is not None
    return gram.measure_effective_rank()


def _read_losses(unread: list[Tensor], step: int) -> list[float]:
    losses: list[float] = torch.stack(unread).tolist()
    for number, loss in enumerate(losses, start=step - len(losses) + 1):
        if not math.isfinite(loss):
            raise InputError(f'the loss is not finite at step {number}: try a smaller learning_rate or precision=fp32')
    return losses
