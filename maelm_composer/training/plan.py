"""The size, cost and learning rate of a pretraining run, computed from its recipe without torch."""

import math
from dataclasses import dataclass

from maelm_composer.config import OptimizerConfig, PretrainingConfig, Schedule, TrainingConfig
from maelm_composer.data.manifest import Manifest
from maelm_composer.errors import InputError
from maelm_composer.masking.draw import count_masked, count_visible
from maelm_composer.model.cost import count_forward_flops, count_parameters

FORWARD_AND_BACKWARD = 3  # FLOPs of a training step / FLOPs of its forward pass


@dataclass(frozen=True)
class Plan:
    """A recipe on ``world_size`` ranks with the shards of ``manifest``."""

    config: PretrainingConfig
    world_size: int
    manifest: Manifest

    @property
    def rows_per_epoch(self) -> int:
        return self.manifest.splits['train'].rows

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
        return count_samples(self.config.training) // self.global_batch_size

    @property
    def tokens_per_batch(self) -> int:
        return self.global_batch_size * self.config.model.max_seq_len

    @property
    def eval_rows(self) -> int:
        """Rows of a validation, whatever the number of ranks: Composer leaves out those that the sampler repeats."""
        return min(self.config.training.eval_rows, self.manifest.splits['validation'].rows)

    def check(self) -> None:
        """Raise InputError if the recipe does not fit the shards or the number of ranks."""
        remote = self.config.data.remote
        for key in ('vocab_size', 'max_seq_len'):
            ours, theirs = getattr(self.config.model, key), getattr(self.manifest, key)
            if ours != theirs:
                raise InputError(f'model.{key} {ours}: the shards in {remote} need model.{key}={theirs}')
        if self.global_batch_size % self.world_size:
            raise InputError(
                f'training.global_train_batch_size {self.global_batch_size} is not divisible by {self.world_size} ranks'
            )
        if self.rows_per_epoch < self.global_batch_size:
            raise InputError(
                f'{remote} holds {self.rows_per_epoch} training rows, fewer than one '
                f'training.global_train_batch_size of {self.global_batch_size}'
            )

    def describe(self, device: str, precision: str, attention: dict[str, str]) -> dict[str, str]:
        """The lines of the start screen by name."""
        training, optimizer, manifest = self.config.training, self.config.optimizer, self.manifest
        samples = count_samples(self.config.training)
        parameters = count_parameters(self.config.model)
        parts = ', '.join(f'{name} {count:,}' for name, count in parameters.items())
        accumulation = math.ceil(self.device_batch_size / self.microbatch_size)
        batches_per_epoch = self.rows_per_epoch // self.global_batch_size
        keep = training.checkpoints_to_keep
        kept = 'all are kept' if keep < 0 else f'the newest {keep} are kept'
        run = (
            f'{samples:,} samples = {self.batches:,} batches = {self.batches / batches_per_epoch:.2f} epochs = '
            f'{samples * self.config.model.max_seq_len:,} tokens = {count_training_flops(self.config):.2e} FLOPs'
        )
        data = (
            f'{self.config.data.remote}, {manifest.splits["train"].fill_rate:.2%} full, content hash '
            f'{manifest.content_hash[:12]}, tokenizer hash {manifest.tokenizer_hash[:12]}'
        )
        batch = f'{self.world_size} ranks × {self.microbatch_size} rows × {accumulation} accumulated'
        if self.device_batch_size % self.microbatch_size:
            batch = f'{self.world_size} ranks × {self.device_batch_size} rows, at most {self.microbatch_size} at a time'
        warmup = f'0 to {optimizer.learning_rate:g} over {optimizer.warmup_samples:,} samples'
        mode = 'compiled' if training.compile else 'eager'
        mode += ', activation checkpointing' * training.activation_checkpointing
        return {
            'parameters': f'{sum(parameters.values()):,} ({parts})',
            'data': data,
            'epoch': f'{self.rows_per_epoch:,} rows = {batches_per_epoch:,} batches',
            'run': run,
            'batch': f'{self.global_batch_size:,} rows = {batch}',
            'schedule': f'learning rate {warmup}, then {self._describe_schedule()}',
            'validation': f'{self.eval_rows:,} rows every {training.eval_interval_samples:,} samples',
            'checkpoints': f'every {training.checkpoint_interval_samples:,} samples, {kept}',
            'device': f'{device}, {precision}, {training.sharding.value}, {mode}',
            'attention': ', '.join(f'{stack} {backend}' for stack, backend in attention.items()),
            'saved in': self.config.save_folder,
        }

    def _describe_schedule(self) -> str:
        training, optimizer = self.config.training, self.config.optimizer
        if optimizer.schedule == Schedule.constant:
            return 'constant'
        shape = ' as a cosine' * (optimizer.schedule == Schedule.cosine)
        text = f'to 0{shape} at '
        for end in training.extends:
            rate = share_of_peak(optimizer, training, end) * optimizer.learning_rate
            text += f'{end:,}, then up to {rate:.3g} and to 0{shape} at '
        return f'{text}{training.max_samples:,}'


def share_of_peak(config: OptimizerConfig, training: TrainingConfig, samples: int) -> float:
    """The learning rate after ``samples`` as a share of its peak: 0 to 1 in the warm-up, then ``config.schedule``.

    A decay ends at ``max_samples`` (linear as in the authors' code; the paper's Table 4 names no shape). A run that was
    extended decayed to 0 at each of ``extends`` first; after each of them the learning rate is that of the longer run.
    """
    warmup, ends = config.warmup_samples, [*training.extends, training.max_samples]
    if samples < warmup:
        return samples / warmup
    end = next((end for end in ends if samples < end), ends[-1])
    share = max(0.0, (end - samples) / max(1, end - warmup))
    match config.schedule:
        case Schedule.linear:
            return share
        case Schedule.cosine:
            return 0.5 * (1 - math.cos(math.pi * share))
        case _:
            return 1.0


def count_positions(config: PretrainingConfig) -> tuple[int, int]:
    """S and M of a row as the collator makes them: tokens in the encoder, positions that the head predicts."""
    masking, length = config.masking, config.model.max_seq_len
    predicted = length if config.model.predicts_every_token else count_masked(masking, length)[1]
    return count_visible(masking, length), predicted


def fit_ranks(training: TrainingConfig, devices: int) -> int:
    """The most of ``devices`` among which a global batch can be divided."""
    return next(count for count in range(devices, 0, -1) if training.global_train_batch_size % count == 0)


def count_samples(training: TrainingConfig) -> int:
    """Rows of all optimizer steps of a run: ``max_samples``, rounded up to whole batches."""
    batch = training.global_train_batch_size
    return math.ceil(training.max_samples / batch) * batch


def count_training_flops(config: PretrainingConfig) -> int:
    """FLOPs of all optimizer steps of a run; validation is left out."""
    return count_row_flops(config) * count_samples(config.training)


def count_row_flops(config: PretrainingConfig) -> int:
    """FLOPs of the forward and the backward pass over one row."""
    return FORWARD_AND_BACKWARD * sum(count_forward_flops(config.model, *count_positions(config)).values())
