"""Relative position bias: one learned number per bucket of distance and head, added to the attention scores.

Source: Sec. 4.1 and App. C of the paper (encoder only), from Raffel et al. (2019; there in Sec. 2.1).
"""

import math

import torch
from torch import Tensor, nn

from maelm_composer.config import DecoderConfig, ModelConfig, RelativePositionFunction, RelativePositionInit


def bucket_distances(distance: Tensor, buckets: int, max_distance: int, function: RelativePositionFunction) -> Tensor:
    """Signed distances (key position - query position), any shape -> bucket ids in [0, ``buckets``), same shape.

    Both functions give each short distance a bucket of its own and longer ones logarithmically wider buckets, on each
    side separately. ``t5`` is bidirectional T5 (and MPNet); ``authors``, from the paper's released code, rounds up, not
    down, and reaches its last bucket earlier. Each function leaves one bucket unused.
    """
    half = buckets // 2
    exact = half // 2
    size = distance.abs()
    ratio = torch.log(size.clamp(min=exact).double() / exact)
    # 1e-9 exceeds rounding errors, so that floor and ceil keep exact whole numbers.
    match function:
        case RelativePositionFunction.t5:
            far = exact + (ratio / math.log(max_distance / exact) * (half - exact) + 1e-9).floor().long()
            return torch.where(size < exact, size, far.clamp(max=half - 1)) + half * (distance > 0)
        case RelativePositionFunction.authors:
            far = exact + (ratio / math.log((max_distance - 1) / exact) * (half - 1 - exact) - 1e-9).ceil().long()
            return half - 1 + torch.where(size < exact, size, far.clamp(max=half - 1)) * distance.sign()


class RelativePositionBias(nn.Module):
    """Table of (buckets, H) biases, shared by all layers of a stack."""

    bucket_of_distance: Tensor  # (2N - 1,), from distance 1 - N

    def __init__(self, stack: ModelConfig | DecoderConfig, model: ModelConfig) -> None:
        """Heads and buckets are those of the ``stack``, everything else the ``model``'s."""
        super().__init__()
        self.max_seq_len, buckets = model.max_seq_len, stack.relative_position_buckets
        self.weight = nn.Parameter(torch.zeros(buckets, stack.num_attention_heads))
        distances = torch.arange(1 - self.max_seq_len, self.max_seq_len)
        bucket_of_distance = bucket_distances(
            distances, buckets, model.relative_position_max_distance, model.relative_position_function
        )
        self.register_buffer('bucket_of_distance', bucket_of_distance, persistent=False)

    def forward(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """(B, Q) and (B, K) positions, gaps allowed -> (B, H, Q, K) bias."""
        batch, num_queries = query_positions.shape
        by_distance = self._by_distance()
        distance = key_positions[:, None, :] - query_positions[:, :, None] + (self.max_seq_len - 1)
        # A gather along the last, contiguous axis, whose backward pass is 15 times faster on a CPU than that of
        # indexing the table: 2N - 1 numbers for each head receive the gradients, not B·Q·K rows of the table.
        heads = by_distance.shape[0]
        index = distance.reshape(batch, 1, -1).expand(-1, heads, -1)
        bias = by_distance.expand(batch, -1, -1).gather(2, index)
        return bias.view(batch, heads, num_queries, -1)

    def between_slots(self, length: int) -> Tensor:
        """The bias between T = ``length`` neighbouring slots, (H, T, T).

        Not as windows of the biases by distance (``unfold``): several threads of a compiled backward pass would add up
        their gradients in an arbitrary order.
        """
        slots = torch.arange(length, device=self.weight.device)[None]
        return self(slots, slots)[0]

    def _by_distance(self) -> Tensor:
        """The bias of every distance from 1 - N to N - 1, (H, 2N - 1)."""
        return self.weight[self.bucket_of_distance].t()

    @torch.no_grad()
    def reset_parameters(self, init: RelativePositionInit, std: float) -> None:
        match init:
            case RelativePositionInit.normal:
                nn.init.normal_(self.weight, std=std)
            case RelativePositionInit.local:
                self.weight.copy_(self._local_prior())

    def _local_prior(self) -> Tensor:
        """(buckets, H): even heads look left, odd ones right, at near tokens most (docs/deviations.md).

        In pair h = 0, 1, ... of heads, a token at distance d on the head's side has the bias -2^-h d; a token on the
        other side counts as two positions farther, the token itself as two away.
        No entry starts below -log N, so that every entry gets a gradient: N tokens at this floor have the total weight
        of one token of score 0.
        """
        buckets, heads = self.weight.shape
        distance, head = torch.arange(1 - self.max_seq_len, self.max_seq_len)[:, None], torch.arange(heads)
        side, slope = 2 * (head % 2) - 1, 2.0 ** -(head // 2)
        of_distance = -slope * (distance.abs() + 2 * (distance * side <= 0))  # (2N - 1, H)
        bucket = self.bucket_of_distance[:, None].expand_as(of_distance)
        # A bucket of several distances has the value of its nearest one, the greatest.
        prior = torch.zeros(buckets, heads).scatter_reduce(0, bucket, of_distance, 'amax', include_self=False)
        return prior.clamp(min=-math.log(self.max_seq_len))
