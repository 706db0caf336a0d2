"""Composer callbacks: seeding, averaging and clipping of gradients, timing, logging."""

import contextlib
import csv
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from maelm_composer.console import format_duration
from maelm_composer.errors import InputError
from maelm_composer.files import replacing
from maelm_composer.records import DIVERGED
from maelm_composer.training.run_record import read_metrics

TIMED_COLUMNS = ('tokens_per_second', 'training_seconds')  # on a CPU in fp32, a resumed run repeats all others exactly
EVAL_COLUMNS = ('eval_loss', 'eval_perplexity', 'eval_accuracy')
COLUMNS = ('samples', 'batch', 'train_loss', 'learning_rate', 'gradient_norm', *TIMED_COLUMNS, *EVAL_COLUMNS)
SECONDS_BETWEEN_LINES = 60
UNTIMED_BATCHES = 3  # a process's first batches include compilation, allocation and the start of the loaders


class BatchSeed(Callback):
    """Seed torch with (seed, batch, rank) before every batch, so that a resumed run draws the same dropout masks.

    Checkpoints hold no generator's state, since Composer 0.32.1 would not restore it for a StreamingDataset.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def batch_start(self, state: State, logger: Logger) -> None:
        key = (self.seed, state.timestamp.batch.value, dist.get_global_rank())
        torch.manual_seed(int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0]))


class GradientAverage(Callback):
    """Divides sharded gradients by the number of ranks where the backend sums instead of averaging.

    FSDP2 asks for the average, but gloo (torch 2.7) silently returns the sum. AdamW does not depend on the gradient's
    scale, but clipping does. A test reduction before training shows what the backend does.
    """

    def fit_start(self, state: State, logger: Logger) -> None:
        ones = state.device.tensor_to_device(torch.ones(dist.get_world_size()))
        averaged = torch.empty_like(ones[:1])
        torch.distributed.reduce_scatter_tensor(averaged, ones, op=torch.distributed.ReduceOp.AVG)
        self.excess = averaged.item()

    def after_train_batch(self, state: State, logger: Logger) -> None:
        if self.excess != 1:
            for parameter in state.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(self.excess)


class GradientClipping(Callback):
    """Scales the gradient to a global L2 norm of at most ``max_norm``; with 0 the norm is only measured.

    Composer's own clipping does not report the norm. An infinite or NaN loss or norm raises InputError before a
    checkpoint is saved.
    """

    def __init__(self, max_norm: float) -> None:
        self.max_norm = max_norm
        self.norm = torch.zeros(())

    def after_train_batch(self, state: State, logger: Logger) -> None:
        parameters = [p for p in state.model.parameters() if p.grad is not None]
        norm = get_total_norm([p.grad for p in parameters])  # type: ignore[misc]
        self.norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        # A product with 1 changes nothing. A GPU computes it all the same: a look at the norm would wait for the GPU.
        is_within = self.norm.is_cpu and bool(self.max_norm / (self.norm + 1e-6) >= 1)
        if self.max_norm > 0 and not is_within:
            clip_grads_with_norm_(parameters, self.max_norm, self.norm)

    def batch_end(self, state: State, logger: Logger) -> None:
        # Composer has just copied the loss to the host, so reading the norm does not delay the device.
        at = state.timestamp
        values = {'loss': state.total_loss_dict['loss/train/total'], 'gradient norm': self.norm.item()}
        for name, value in values.items():
            if not math.isfinite(value):
                raise InputError(
                    f'{DIVERGED}: {name} is {value} at batch {at.batch.value}, {at.sample.value} samples; '
                    'earlier checkpoints, if any, are complete; try a lower optimizer.learning_rate or '
                    'optimizer.clip_norm, or training.precision=fp32, in a run of another run_name'
                )


class TrainingClock(Callback):
    """Counts the seconds of data loading, forward pass, backward pass and optimizer step.

    Validation, checkpoints and compilation are not counted. The first three batches of a process, with compilation and
    allocation, are not timed: the time of the fourth counts four times. A process that ends before adds nothing. A
    resumed run goes on from the counts in its checkpoint, on any number of ranks: ``seconds``, and ``device_seconds``,
    their sum over the ranks.
    """

    def __init__(self, tokens_per_batch: int, seconds: float, device_seconds: float) -> None:
        self.tokens_per_batch = tokens_per_batch
        self.seconds, self.device_seconds = seconds, device_seconds
        self.tokens_per_second = 0.0  # of the last timed batch
        self.timed_batches = 0  # of this process
        self.timed_seconds = 0.0
        self._untimed = 0
        self._since = 0.0

    def before_dataloader(self, state: State, logger: Logger) -> None:
        self._since = time.perf_counter()

    def batch_end(self, state: State, logger: Logger) -> None:
        elapsed = time.perf_counter() - self._since
        if self.timed_batches == 0 and self._untimed < UNTIMED_BATCHES:
            self._untimed += 1
            return
        counted = elapsed * (1 + self._untimed)
        self.seconds += counted
        self.device_seconds += counted * dist.get_world_size()
        self._untimed = 0
        self.timed_batches += 1
        self.timed_seconds += elapsed
        self.tokens_per_second = self.tokens_per_batch / elapsed
        logger.log_metrics(
            {'time/training_seconds': self.seconds, 'throughput/tokens_per_second': self.tokens_per_second}
        )


class MetricsLog(Callback):
    """Writes a row of metrics.csv per batch, before the checkpoint of that batch.

    The first rank calls :meth:`begin` before training. ``error`` is why it could not write a row; CheckpointSaver tells
    the other ranks, which would wait for this one.
    """

    def __init__(self, path: Path, clock: TrainingClock, clipping: GradientClipping) -> None:
        self.path, self.clock, self.clipping = path, clock, clipping
        self.last_eval: dict[str, float] = {}
        self.error: OSError | None = None
        self._row: dict[str, Any] = {}
        self._file: TextIO | None = None  # kept open: on a disk of the network each closing takes milliseconds

    def begin(self, earlier: Path | None, samples: int) -> None:
        """Start with the rows of the log ``earlier`` up to ``samples``, so that no batch has two rows.

        They are copied one by one: all rows of a long log take as much memory as a model.
        """
        with replacing(self.path) as temporary, temporary.open('w', encoding='utf-8') as file:
            file.write(','.join(COLUMNS) + '\n')
            for row in read_metrics(earlier) if earlier else ():
                if int(row['samples']) <= samples:
                    file.write(','.join(row[column] for column in COLUMNS) + '\n')
                    if row['eval_loss']:
                        self.last_eval = {name: float(row[name]) for name in EVAL_COLUMNS}

    def batch_start(self, state: State, logger: Logger) -> None:
        self._row = {'learning_rate': state.optimizers[0].param_groups[0]['lr']}

    def batch_end(self, state: State, logger: Logger) -> None:
        timed = self.clock.timed_batches > 0
        self._row |= {
            'samples': state.timestamp.sample.value,
            'batch': state.timestamp.batch.value,
            'train_loss': state.total_loss_dict['loss/train/total'],
            'gradient_norm': self.clipping.norm.item(),
            'tokens_per_second': f'{self.clock.tokens_per_second:.0f}' if timed else '',
            'training_seconds': f'{self.clock.seconds:.3f}',
        }
        logger.log_metrics({'gradient_norm': self._row['gradient_norm'], 'learning_rate': self._row['learning_rate']})

    def eval_end(self, state: State, logger: Logger) -> None:
        values = state.eval_metric_values.items()  # MaskedLoss, MaskedPerplexity, MaskedAccuracy
        self.last_eval = {f'eval_{name.removeprefix("Masked").lower()}': float(value) for name, value in values}
        self._row |= self.last_eval
        state.outputs = []  # logits, which Composer would keep in memory through the next step

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        if dist.get_global_rank() == 0:
            try:
                if self._file is None:
                    self._file = self.path.open('a', newline='', encoding='utf-8')
                csv.DictWriter(self._file, COLUMNS, lineterminator='\n').writerow(self._row)
                self._file.flush()
            except OSError as error:
                self.error = error

    def close(self, state: State, logger: Logger) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # which writing the row has told
                self._file.close()


class ProgressLines(Callback):
    """Prints the time of compilation, the expected duration after ten timed batches, and every validation.

    Without ``has_bar``, a progress bar on the terminal, also a line a minute, so that a log shows that the run goes on.
    """

    def __init__(
        self, say: Callable[[str], None], clock: TrainingClock, log: MetricsLog, compiles: bool, has_bar: bool
    ) -> None:
        self.say, self.clock, self.log, self.compiles, self.has_bar = say, clock, log, compiles, has_bar

    def fit_start(self, state: State, logger: Logger) -> None:
        self.start = self.last_line = time.monotonic()
        if self.compiles:
            self.say('compiling the model in the first step: minutes, unless a cache holds the compiled code')

    def batch_end(self, state: State, logger: Logger) -> None:
        if self.compiles:
            self.say(f'compiled: the first step took {time.monotonic() - self.start:.0f} s')
            self.compiles = False

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        clock, samples, now = self.clock, state.timestamp.sample.value, time.monotonic()
        is_tenth = clock.timed_batches == 10
        is_due = clock.timed_batches > 10 and not self.has_bar and now - self.last_line >= SECONDS_BETWEEN_LINES
        if not (is_tenth or is_due):
            return
        self.last_line = now
        seconds, total = clock.timed_seconds / clock.timed_batches, state.max_duration.value  # type: ignore[union-attr]
        speed = f'{clock.tokens_per_batch / seconds:,.0f} tokens/s'
        left = max(0, total - samples)
        hours = left / (samples / state.timestamp.batch.value) * seconds / 3600
        if is_tenth:
            self.say(
                f'measured {speed}: {left:,} samples left take {hours:.2f} hours, '
                f'{hours * dist.get_world_size():.2f} device-hours'
            )
        else:
            loss, time_left = state.total_loss_dict['loss/train/total'], format_duration(3600 * hours)
            self.say(f'{samples:,} of {total:,} samples: training loss {loss:.4f}, {speed}, {time_left} left')

    def eval_end(self, state: State, logger: Logger) -> None:
        evaluation = self.log.last_eval
        self.say(
            f'{state.timestamp.sample.value:,} samples: validation loss {evaluation["eval_loss"]:.4f}, '
            f'perplexity {evaluation["eval_perplexity"]:.2f}, accuracy {evaluation["eval_accuracy"]:.4f}'
        )
