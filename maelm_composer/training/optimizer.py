"""AdamW and its schedule (Meng et al., arXiv:2302.02060, preprint, Table 4)."""

from collections.abc import Callable, Iterable

from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from maelm_composer.config import OptimizerConfig, TrainingConfig


def build_optimizer(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> AdamW:
    """torch's AdamW, whose weight decay is decoupled from the gradient and multiplied by the learning rate.

    # PAPER-SILENT: which parameters decay. All do, with biases and LayerNorms, as in the authors' code.
    """
    return AdamW(
        parameters,
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def build_schedule(optimizer: AdamW, config: OptimizerConfig, training: TrainingConfig) -> LambdaLR:
    """The learning rate as a function of the optimizer step; step the schedule once per batch."""
    factor = linear_warmup_and_decay(config.warmup_samples, training.max_samples)
    return LambdaLR(optimizer, lambda step: factor(step * training.global_train_batch_size))


def linear_warmup_and_decay(warmup_samples: int, max_samples: int) -> Callable[[int], float]:
    """A function from samples to the share of the peak learning rate: 0 to 1 at ``warmup_samples``, to 0 at the end."""

    def factor(samples: int) -> float:
        if samples < warmup_samples:
            return samples / warmup_samples
        return max(0.0, (max_samples - samples) / max(1, max_samples - warmup_samples))

    return factor
