"""The batch of pretraining, with the same fields for every variant of the model."""

from typing import NamedTuple

import torch
from torch import Tensor

IGNORED_LABEL = -100


class Batch(NamedTuple):
    """B packed rows of N tokens, of which S are the encoder's input and M are predicted.

    All batches of a recipe have the same S and M, so a compiled step never recompiles. Attention does not cross the
    blocks of a packed row, and positions count from the start of a block, so each block is computed as if alone.
    """

    input_ids: Tensor  # (B, S) the encoder's input
    position_ids: Tensor  # (B, S) the encoder's positions, absolute and for relative distances
    visible_index: Tensor  # (B, S) the token's position in the row; N for an unused slot
    segment_ids: Tensor  # (B, N) number of the block in the row, from 1; 0 is padding
    original_position_ids: Tensor  # (B, N) position in the block, masked tokens included: the decoder's positions
    resets: Tensor  # (B, N) True where the decoder's input is e_[MASK] although the encoder's input has this position
    labels: Tensor  # (B, N) the original id at predicted positions, -100 elsewhere
    predicted_index: Tensor  # (B, M) predicted positions, ascending; N for an unused slot

    def to(self, device: str | torch.device) -> 'Batch':
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in self))
