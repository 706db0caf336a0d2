"""Training and prediction on one device.

The loop is plain PyTorch. A sweep makes thousands of short runs, for which Composer's Trainer has an overhead without
a benefit (docs/finetuning.md).
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from transformers import get_linear_schedule_with_warmup

from maelm_composer.config import EvaluationProtocol, FinetuningConfig, OptimizerConfig, Precision
from maelm_composer.console import track
from maelm_composer.errors import InputError
from maelm_composer.finetuning.batching import collate, measure_padding, order_by_length, sort_for_evaluation
from maelm_composer.finetuning.model import FinetuningModel
from maelm_composer.tasks.examples import Inputs
from maelm_composer.training.optimizer import build_optimizer

EVAL_BATCH_SIZE = 64
STEPS_BETWEEN_CHECKS = 50  # losses are read this seldom, because reading one waits for the device
OPTIMIZER_SETTINGS = ('learning_rate', 'adam_beta1', 'adam_beta2', 'adam_eps', 'weight_decay')


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
    """Train for ``config.max_epochs``. The order of the rows and dropout depend on ``config.seed`` alone.

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
    settings = {name: getattr(config, name) for name in OPTIMIZER_SETTINGS}
    optimizer = build_optimizer(model.parameters(), OptimizerConfig(**settings))
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
            with torch.autocast(device.type, torch.bfloat16, enabled=config.precision is Precision.bf16):
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
    return FitReport(steps, mean(losses[-steps_per_epoch:]), seconds, measure_padding(lengths, batches))


def plan_evaluations(protocol: EvaluationProtocol, steps_per_epoch: int, epochs: int) -> set[int]:
    """The steps, counted from 1, after which the dev set is evaluated. The last step is always one."""
    match protocol:
        case EvaluationProtocol.final:
            return {steps_per_epoch * epochs}
        case EvaluationProtocol.half_epochs:
            return {math.ceil(half * steps_per_epoch / 2) for half in range(1, 2 * epochs + 1)}


@torch.inference_mode()
def predict(
    model: FinetuningModel, inputs: Inputs, precision: Precision, pad_id: int, batch_size: int = EVAL_BATCH_SIZE
) -> list[np.ndarray]:
    """The model's output for each row, in the order of the rows, fp32.

    (classes,) for classification, () for regression, (S, 2) for a span task, with S at least the row's length.
    """
    device = next(model.parameters()).device
    model.eval()
    scores: list[np.ndarray] = [np.empty(0)] * len(inputs)
    batches = sort_for_evaluation(inputs.lengths, batch_size)
    for rows in track(batches, len(batches), 'evaluation', 'batches'):
        batch = collate(inputs, rows, pad_id).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=precision is Precision.bf16):
            outputs = model(batch)
        for row, output in zip(rows, outputs.float().cpu().numpy(), strict=True):
            scores[row] = output
    return scores


def _read_losses(unread: list[Tensor], step: int) -> list[float]:
    losses: list[float] = torch.stack(unread).tolist()
    for number, loss in enumerate(losses, start=step - len(losses) + 1):
        if not math.isfinite(loss):
            raise InputError(f'the loss is not finite at step {number}: try a smaller learning_rate or precision=fp32')
    return losses
