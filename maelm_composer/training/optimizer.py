"""AdamW and the schedule of its learning rate."""

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from maelm_composer.config import FinetuningConfig, OptimizerConfig, TrainingConfig
from maelm_composer.training.plan import share_of_peak


def build_optimizer(parameters: Iterable[nn.Parameter], config: OptimizerConfig | FinetuningConfig) -> AdamW:
    """torch's AdamW (Tables 4 to 6), whose weight decay is decoupled and multiplied by the learning rate."""
    # PAPER-SILENT: which parameters decay. All do, with biases and LayerNorms, as in the authors' code.
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
    return LambdaLR(optimizer, lambda step: share_of_peak(config, training, step * training.global_train_batch_size))


def restore_learning_rate(optimizer: Optimizer, schedule: Any) -> None:
    """Set the learning rate to the value of ``schedule``; the checkpoint of a run that is extended holds another."""
    for group, base, factor in zip(optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
        group['lr'] = base * factor(schedule.last_epoch)
