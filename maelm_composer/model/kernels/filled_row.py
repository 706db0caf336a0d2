"""Vectors written to their positions in a row, and one default vector at every other position."""

from typing import Any

import torch
from torch import Tensor


def fill_row(vectors: Tensor, default: Tensor, positions: Tensor, length: int) -> Tensor:
    """(B, S, D) vectors at (B, S) positions of a (B, ``length``, D) row, the (D,) default elsewhere.

    A vector whose position is ``length`` is dropped; the other positions of a row differ from each other.
    """
    filled: Tensor = _FilledRow.apply(vectors, default, positions, length)
    return filled


def plain_fill_row(vectors: Tensor, default: Tensor, positions: Tensor, length: int) -> Tensor:
    """As :func:`fill_row`."""
    filled = default.expand(len(positions), length + 1, -1)
    index = positions[..., None].expand_as(vectors)
    return filled.scatter(1, index, vectors)[:, :-1]


class _FilledRow(torch.autograd.Function):
    """Each output position has one source, so the backward pass is a gather; autograd's own copies the row twice."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, default: Tensor, positions: Tensor, length: int) -> Tensor:
        filled = default.expand(len(positions), length + 1, -1).clone()
        filled[_number_rows(positions), positions] = vectors
        ctx.save_for_backward(positions)
        return filled[:, :-1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (gradient,), (positions,) = gradients, ctx.saved_tensors
        length = gradient.shape[1]
        is_dropped = (positions == length)[..., None]
        of_vectors = gradient[_number_rows(positions), positions.clamp(max=length - 1)].masked_fill(is_dropped, 0.0)
        # Not as a matrix product with the default's positions, which autocast would round to bf16 when compiled.
        return of_vectors, gradient.sum((0, 1)) - of_vectors.sum((0, 1)), None, None


def _number_rows(positions: Tensor) -> Tensor:
    return torch.arange(len(positions), device=positions.device)[:, None]
