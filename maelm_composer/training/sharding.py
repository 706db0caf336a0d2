"""FSDP2 through Composer, on GPUs (NCCL) and on CPU ranks (gloo)."""

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist
from composer.utils.parallelism import FSDP2Config, ParallelismConfig

from maelm_composer.config import Sharding


def build_parallelism(sharding: Sharding) -> ParallelismConfig | None:
    """The Trainer's configuration of FSDP2, or None for replication (DDP on several ranks)."""
    if sharding is Sharding.ddp:
        return None
    # Parameters and gradients stay fp32; the adapter enters autocast for bf16.
    fsdp = FSDP2Config(reshard_after_forward=sharding is Sharding.full_shard, mixed_precision='FULL')
    return ParallelismConfig(fsdp2=fsdp)


class GradientAverage(Callback):
    """Divides sharded gradients by the number of ranks where the backend sums instead of averaging.

    FSDP2 asks for the average, but gloo (torch 2.7) silently returns the sum. AdamW does not depend on the gradient's
    scale, but clipping does. A test reduction before training shows what the backend does.
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
            for parameter in state.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(self.excess)
