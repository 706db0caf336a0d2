"""The attention bias as functions that FlexAttention evaluates tile by tile, so that no (Q, K) tensor is stored."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128  # queries and keys along a side of the tiles that FlexAttention may skip
# Validation uses training's kernel, not FlexDecoding, with which three runs on a GPU ended (docs/architecture.md).
KERNEL_OPTIONS = {'FORCE_USE_FLEX_ATTENTION': True}
BiasEntry = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # of batch, head, query and key indices


class FlexBias(NamedTuple):
    score_mod: Callable[..., Tensor] | None
    block_mask: BlockMask

    def store(self, query: Tensor, key: Tensor) -> Tensor:
        """(B, H, Q, Dh), (B, H, K, Dh) -> every entry of the bias, (B, 1 or H, Q, K)."""
        sizes = (*query.shape[:3], key.shape[2])
        index = [torch.arange(size, device=query.device).view(-1, *[1] * (3 - i)) for i, size in enumerate(sizes)]
        is_visible, score = self.block_mask.mask_mod(*index), query.new_zeros((), dtype=torch.float32)
        bias = score.expand_as(is_visible) if self.score_mod is None else self.score_mod(score, *index)
        return bias.masked_fill(~is_visible, float('-inf'))


def build_flex_bias(query_segments: Tensor, key_segments: Tensor, relative: BiasEntry | None) -> FlexBias:
    """(B, Q) and (B, K) segment ids, and one entry of the relative bias as a function of (b, h, q, k).

    Its stored form is :func:`maelm_composer.model.stack.build_attention_bias` of the same segments.
    """

    def is_visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return query_segments[b, q] == key_segments[b, k]

    # Equal to torch's create_block_mask, which cannot be traced into a compiled graph (torch 2.7).
    lengths = query_segments.shape[1], key_segments.shape[1]
    is_same = query_segments[:, None, :, None] == key_segments[:, None, None, :]
    padded = functional.pad(is_same, (0, -lengths[1] % BLOCK, 0, -lengths[0] % BLOCK))
    visible_pairs = padded.unflatten(3, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).sum((3, 5))  # in each tile
    partial, partial_index = _list_tiles((visible_pairs > 0) & (visible_pairs < BLOCK**2))
    full, full_index = _list_tiles(visible_pairs == BLOCK**2)  # tiles that need no mask
    block_mask = BlockMask.from_kv_blocks(partial, partial_index, full, full_index, BLOCK, is_visible, lengths)
    if relative is None:
        return FlexBias(None, block_mask)
    return FlexBias(lambda score, b, h, q, k: score + relative(b, h, q, k), block_mask)


def attend_flex(query: Tensor, key: Tensor, value: Tensor, bias: FlexBias) -> Tensor:
    """FlexAttention on a GPU, compiled even in an eager model because its eager form is slow."""
    kernel: Any = flex_attention if torch.compiler.is_compiling() else _compile_flex()
    return kernel(query, key, value, bias.score_mod, bias.block_mask, kernel_options=KERNEL_OPTIONS)


def _list_tiles(is_chosen: Tensor) -> tuple[Tensor, Tensor]:
    """(B, 1, Q / 128, K / 128) -> how many tiles of each row are chosen; the columns, chosen ones first."""
    return is_chosen.sum(-1).int(), is_chosen.int().argsort(dim=-1, descending=True, stable=True).int()


@functools.cache
def _compile_flex() -> Any:
    return torch.compile(flex_attention, dynamic=False)
