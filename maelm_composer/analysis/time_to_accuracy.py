"""When a model reaches its baseline's final accuracy: the rules of Figure 3, as code. Imports no torch.

- The clock is training alone: ``training_seconds`` of the checkpoints; validation, saving and fine-tuning are off it.
- The first checkpoint whose median reaches the target counts, whatever later ones do. Its own cost is the first
  crossing; the interpolated one assumes a straight line from the checkpoint before it.
- A curve that starts at or above the target is charged its first checkpoint whole: nothing is known before it.
- A curve that never reaches the target costs infinity.
"""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from maelm_composer.errors import InputError

Axis = Enum('Axis', 'hours samples flops')


@dataclass(frozen=True)
class ScoredCheckpoint:
    """The cost of one checkpoint from the beginning of its run, and its scores."""

    samples: int  # rows trained on
    hours: float  # of training
    flops: float | None  # None: not recorded, so the checkpoint has no place on this axis
    scores: Mapping[int, float]  # fine-tuning seed -> score

    @property
    def median(self) -> float:
        return statistics.median(self.scores.values())

    def get_cost(self, axis: Axis) -> float:
        return float(getattr(self, axis.name))


@dataclass(frozen=True)
class Arrival:
    """The cost of reaching a target, in units of the axis; infinity if the curve never reaches it."""

    first_crossing: float
    interpolated: float  # equal to or less than the first crossing
    starts_above: bool  # the first checkpoint had reached it: both figures are upper bounds


def find_arrival(curve: Sequence[ScoredCheckpoint], target: float, axis: Axis) -> Arrival:
    """The first point of ``curve`` whose median is at least ``target``.

    Raises:
        InputError: the costs do not rise.
    """
    costs = [point.get_cost(axis) for point in curve]
    if not all(before < after for before, after in itertools.pairwise([0.0, *costs])):
        raise InputError(f'{axis.name} of the checkpoints must rise from above 0: {costs}')
    first = next((i for i, point in enumerate(curve) if point.median >= target), None)
    if first is None:
        return Arrival(math.inf, math.inf, starts_above=False)
    cost = costs[first]
    if first == 0:
        return Arrival(cost, cost, starts_above=True)
    before, start = curve[first - 1].median, costs[first - 1]
    way = (target - before) / (curve[first].median - before)
    # Rounding must not make the interpolated cost exceed the checkpoint's.
    return Arrival(cost, min(start + way * (cost - start), cost), starts_above=False)
