"""FSDP2 through Composer, the same on GPUs over NCCL and on CPU ranks over gloo."""

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist
from composer.utils.parallelism import FSDP2Config, ParallelismConfig

from maelm_composer.config import Sharding


def build_parallelism(sharding: Sharding) -> ParallelismConfig | None:
    """What the Trainer shards by; None replicates (DDP where there are several ranks)."""
    if sharding is Sharding.ddp:
        return None
    # Parameters and gradients stay fp32; the adapter's autocast decides what is computed in bf16.
    fsdp = FSDP2Config(reshard_after_forward=sharding is Sharding.full_shard, mixed_precision='FULL')
    return ParallelismConfig(fsdp2=fsdp)


class GradientAverage(Callback):
    """Make a sharded gradient the mean over ranks, where the backend gives the sum instead.

    FSDP2 asks for an average; gloo (torch 2.7) takes the request and returns the sum, without a word. AdamW hides it,
    being blind to the gradient's scale, but clipping is not. What the backend does is measured, not assumed.
    """

    def __init__(self) -> None:
        self.excess = 1.0

    def fit_start(self, state: State, logger: Logger) -> None:
        ones = state.device.tensor_to_device(torch.ones(dist.get_world_size()))
        averaged = torch.empty_like(ones[:1])
        torch.distributed.reduce_scatter_tensor(averaged, ones, op=torch.distributed.ReduceOp.AVG)
        self.excess = averaged.item()

    def after_train_batch(self, state: State, logger: Logger) -> None:
        if self.excess != 1:
            torch._foreach_div_([p.grad for p in state.model.parameters() if p.grad is not None], self.excess)
