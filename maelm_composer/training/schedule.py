"""The learning rate over a run (Meng et al., arXiv:2302.02060, preprint, Table 4: linear). Imports no torch."""

import math
from collections.abc import Callable

from maelm_composer.config import OptimizerConfig, Schedule, TrainingConfig


def share_of_peak(config: OptimizerConfig, training: TrainingConfig) -> Callable[[int], float]:
    """A function from samples to the share of the peak learning rate: 0 to 1 in the warm-up, then the schedule.

    A decay ends at ``max_samples``. A run that was extended decayed to 0 at each of ``extends`` first; after each of
    them the learning rate is that of the longer run.
    """
    ends = [*training.extends, training.max_samples]
    shares = {end: linear_warmup_and_decay(config.warmup_samples, end) for end in ends}

    def factor(samples: int) -> float:
        share = shares[next((end for end in ends if samples < end), ends[-1])](samples)
        if samples < config.warmup_samples or config.schedule is Schedule.linear:
            return share
        return 1.0 if config.schedule is Schedule.constant else 0.5 * (1 - math.cos(math.pi * share))

    return factor


def linear_warmup_and_decay(warmup_samples: int, max_samples: int) -> Callable[[int], float]:
    """A function from samples to the share of the peak learning rate: 0 to 1 at ``warmup_samples``, to 0 at the end."""

    def factor(samples: int) -> float:
        if samples < warmup_samples:
            return samples / warmup_samples
        return max(0.0, (max_samples - samples) / max(1, max_samples - warmup_samples))

    return factor
