"""What a run will do, as text: pure arithmetic, no torch."""

import math
from dataclasses import dataclass

from maelm_composer.config import PretrainingConfig
from maelm_composer.errors import InputError

FORWARD_AND_BACKWARD = 3  # times the forward pass's operations


@dataclass(frozen=True)
class Plan:
    """The numbers that the start screen shows and the Trainer is built from."""

    config: PretrainingConfig
    world_size: int
    rows_per_epoch: int
    parameters: dict[str, int]
    forward_flops: int  # of one row

    @property
    def global_batch_size(self) -> int:
        return self.config.training.global_train_batch_size

    @property
    def device_batch_size(self) -> int:
        """Rows of one rank in one optimizer step."""
        return self.global_batch_size // self.world_size

    @property
    def microbatch_size(self) -> int:
        """Rows of one rank in one forward pass."""
        return min(self.config.training.device_train_microbatch_size or self.device_batch_size, self.device_batch_size)

    @property
    def batches(self) -> int:
        """Optimizer steps of the whole run."""
        return math.ceil(self.config.training.max_samples / self.global_batch_size)

    @property
    def tokens_per_batch(self) -> int:
        return self.global_batch_size * self.config.model.max_seq_len

    @property
    def flops(self) -> int:
        return FORWARD_AND_BACKWARD * self.forward_flops * self.global_batch_size * self.batches

    def check(self) -> None:
        """Raise InputError where the batch does not come out even."""
        if self.global_batch_size % self.world_size:
            raise InputError(
                f'training.global_train_batch_size {self.global_batch_size} is not divisible by {self.world_size} ranks'
            )
        if self.rows_per_epoch < self.global_batch_size:
            raise InputError(
                f'{self.config.data.remote} holds {self.rows_per_epoch} training rows, fewer than one '
                f'training.global_train_batch_size of {self.global_batch_size}'
            )

    def describe(self, data: str, device: str, precision: str, attention: dict[str, str]) -> list[tuple[str, str]]:
        """Lines of the start screen."""
        training, optimizer = self.config.training, self.config.optimizer
        samples = self.batches * self.global_batch_size
        total = sum(self.parameters.values())
        parts = ', '.join(f'{name} {count:,}' for name, count in self.parameters.items())
        accumulation = math.ceil(self.device_batch_size / self.microbatch_size)
        batches_per_epoch = self.rows_per_epoch // self.global_batch_size
        keep = 'all kept' if training.checkpoints_to_keep < 0 else f'newest {training.checkpoints_to_keep} kept'
        return [
            ('parameters', f'{total:,} ({parts})'),
            ('data', data),
            ('epoch', f'{self.rows_per_epoch:,} rows = {batches_per_epoch:,} batches'),
            (
                'run',
                f'{samples:,} samples = {self.batches:,} batches = {self.batches / batches_per_epoch:.2f} epochs = '
                f'{samples * self.config.model.max_seq_len:,} tokens = {self.flops:.2e} FLOPs',
            ),
            (
                'batch',
                f'{self.global_batch_size:,} rows = {self.world_size} ranks × {self.microbatch_size} rows × '
                f'{accumulation} accumulated',
            ),
            (
                'schedule',
                f'learning rate 0 to {optimizer.learning_rate:g} over {optimizer.warmup_samples:,} samples, '
                f'then to 0 at {training.max_samples:,}',
            ),
            ('validation', f'{training.eval_rows:,} rows every {training.eval_interval_samples:,} samples'),
            ('checkpoints', f'every {training.checkpoint_interval_samples:,} samples, {keep}'),
            (
                'device',
                f'{device}, {precision}, {training.sharding.value}, {"compiled" if training.compile else "eager"}',
            ),
            ('attention', ', '.join(f'{stack} {backend}' for stack, backend in attention.items())),
            ('saved in', self.config.save_folder),
        ]
