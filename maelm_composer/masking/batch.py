"""The one batch that carries every variant of the model, from the collator to the loss."""

from typing import NamedTuple

import torch
from torch import Tensor

IGNORED_LABEL = -100


class Batch(NamedTuple):
    """B packed rows of N tokens: S of them are encoder input and M are predicted.

    S and M are the same for every batch of a recipe, so a compiled step never recompiles. Attention never crosses
    blocks and positions count from a block's start, so the model computes a packed block as if it were alone.
    """

    input_ids: Tensor  # (B, S) the encoder's input
    position_ids: Tensor  # (B, S) what the encoder's absolute and relative positions are computed from
    visible_index: Tensor  # (B, S) position of each encoder token in the row; N for an unused slot
    segment_ids: Tensor  # (B, N) block of the packed row, from 1; 0 is padding
    original_position_ids: Tensor  # (B, N) position in the block, whether masked or not: the decoder's positions
    resets: Tensor  # (B, N) True where the decoder's input is e_[MASK] although the encoder saw this position
    labels: Tensor  # (B, N) the original id where the model predicts it, -100 elsewhere
    predicted_index: Tensor  # (B, M) the positions to predict, ascending; N for an unused slot

    def to(self, device: str | torch.device) -> 'Batch':
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in self))
