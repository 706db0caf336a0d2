"""Multi-head attention with an additive bias.

(Meng et al., arXiv:2302.02060, preprint, Sec. 2.1), with linear layers that have biases, queries scaled by
head_dim^-0.5 and the relative bias added unscaled, as the authors' code does.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from maelm_composer.config import AttentionBackend
from maelm_composer.errors import InputError

MIN_FLEX_HEAD_SIZE = 16  # its GPU kernels refuse less (torch 2.7)
BLOCK = 128  # tokens along a side of the blocks that FlexAttention skips
BiasEntry = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # of batch, head, query and key indices


class FlexBias(NamedTuple):
    """The bias as FlexAttention's kernels compute it, tile by tile: nothing of size Q times K is ever stored."""

    score_mod: Callable[..., Tensor] | None
    block_mask: BlockMask

    def store(self, query: Tensor, key: Tensor) -> Tensor:
        """(B, H, Q, Dh), (B, H, K, Dh) -> the (B, 1 or H, Q, K) bias, every entry evaluated."""
        sizes = (*query.shape[:3], key.shape[2])
        index = [torch.arange(size, device=query.device).view(-1, *[1] * (3 - i)) for i, size in enumerate(sizes)]
        is_visible, score = self.block_mask.mask_mod(*index), query.new_zeros((), dtype=torch.float32)
        bias = score.expand_as(is_visible) if self.score_mod is None else self.score_mod(score, *index)
        return bias.masked_fill(~is_visible, float('-inf'))


Bias = Tensor | FlexBias  # (B, 1 or H, Q, K), -inf where a query must not look; or its functions


def build_attention_bias(query_segments: Tensor, key_segments: Tensor, relative: Tensor | None) -> Tensor:
    """(B, Q), (B, K) segment ids and an optional (B, H, Q, K) bias -> (B, 1 or H, Q, K), -inf across segments.

    Padding is a segment of its own (0), so that no row of scores is empty. Under autocast the result is of its type,
    once for all layers.
    """
    is_other = query_segments[:, None, :, None] != key_segments[:, None, None, :]
    bias = torch.zeros_like(is_other, dtype=torch.float32) if relative is None else relative
    device = bias.device.type
    if torch.is_autocast_enabled(device):
        bias = bias.to(torch.get_autocast_dtype(device))
    bias = bias.masked_fill(is_other, float('-inf'))
    return _Stored.apply(bias) if torch.compiler.is_compiling() else bias


def build_flex_bias(query_segments: Tensor, key_segments: Tensor, relative: BiasEntry | None) -> FlexBias:
    """As :func:`build_attention_bias`; ``relative`` (b, h, q, k) gives one entry of the relative bias."""

    def is_visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return query_segments[b, q] == key_segments[b, k]

    # As torch's create_block_mask, which looks at the function in a way that no compiled graph can hold (torch 2.7).
    lengths = query_segments.shape[1], key_segments.shape[1]
    is_same = query_segments[:, None, :, None] == key_segments[:, None, None, :]
    padded = functional.pad(is_same, (0, -lengths[1] % BLOCK, 0, -lengths[0] % BLOCK))
    visible = padded.unflatten(3, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).sum((3, 5))  # pairs, of each block
    some, some_index = _list_blocks((visible > 0) & (visible < BLOCK**2))
    full, full_index = _list_blocks(visible == BLOCK**2)  # these need no mask
    block_mask = BlockMask.from_kv_blocks(some, some_index, full, full_index, BLOCK, is_visible, lengths)
    if relative is None:
        return FlexBias(None, block_mask)
    return FlexBias(lambda score, b, h, q, k: score + relative(b, h, q, k), block_mask)


def _list_blocks(is_wanted: Tensor) -> tuple[Tensor, Tensor]:
    """(B, 1, Q / 128, K / 128) -> how many are wanted in each row of blocks; the columns, those first."""
    return is_wanted.sum(-1).int(), is_wanted.int().argsort(dim=-1, descending=True, stable=True).int()


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Bias, dropout: float, backend: AttentionBackend) -> Tensor:
    """Softmax(Q K^T / sqrt(d_h) + bias) V.

    Args:
        query: (B, H, Q, Dh); key and value: (B, H, K, Dh); the result is (B, H, Q, Dh).
        dropout: of the attention probabilities, 0 outside training.
        backend: ``dense`` or ``sdpa``; a :class:`FlexBias` is for ``flex`` alone.
    """
    if isinstance(bias, FlexBias):
        assert not dropout, 'FlexAttention has no dropout'
        if query.device.type != 'cpu':
            # Compiled even in an eager model, as it is slow otherwise.
            kernel: Any = flex_attention if torch.compiler.is_compiling() else _compile_flex()
            return kernel(query, key, value, bias.score_mod, bias.block_mask)
        bias = bias.store(query, key)  # on a CPU the kernels have no backward: torch 2.15 refuses even the eager one
    bias = bias.to(query.dtype)
    if backend is AttentionBackend.sdpa:
        return functional.scaled_dot_product_attention(query, key, value, bias, dropout)
    heads = query.shape[:2]
    query, key, value, bias = (part.flatten(0, 1) for part in (query, key, value, bias.expand(*heads, -1, -1)))
    if torch.compiler.is_compiling() and not dropout:
        return _CompiledAttention.apply(query, key, value, bias).unflatten(0, heads)
    # The bias goes into the product's own accumulator: no pass over the scores, and none rounded twice in bf16.
    probabilities = torch.baddbmm(bias, query, key.transpose(1, 2), alpha=query.shape[-1] ** -0.5).softmax(-1)
    if dropout:
        probabilities = functional.dropout(probabilities, dropout)
    return torch.bmm(probabilities, value).unflatten(0, heads)


class _CompiledAttention(torch.autograd.Function):
    """Attention whose work between two products is one pass over the scores, forward and backward, once compiled.

    exp is taken once; what is divided by its sum, and what the gradient of the softmax is a sum over, is the result,
    of head size, in place of the scores, of length. Left to autograd, the sum's gradient takes passes of its own.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        scores = torch.bmm(query, key.transpose(1, 2)).float() * query.shape[-1] ** -0.5 + bias.float()
        weights = (scores - scores.amax(-1, keepdim=True)).exp().to(value.dtype)  # of probabilities times their total
        total = weights.float().sum(-1, keepdim=True)
        attended = (torch.bmm(weights, value).float() / total).to(value.dtype)
        ctx.save_for_backward(query, key, value, weights, total, attended)
        return attended

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        query, key, value, weights, total, attended = ctx.saved_tensors
        scale = query.shape[-1] ** -0.5
        gradient = (gradients[0].float() / total).to(value.dtype)
        of_weights = torch.bmm(gradient, value.transpose(1, 2)).float()
        mean = (gradient.float() * attended.float()).sum(-1, keepdim=True)  # of of_weights, under the probabilities
        of_scores = (weights.float() * (of_weights - mean)).to(value.dtype)
        of_query = torch.bmm(of_scores, key) * scale
        of_key = torch.bmm(of_scores.transpose(1, 2), query) * scale
        return of_query, of_key, torch.bmm(weights.transpose(1, 2), gradient), of_scores


class _Stored(torch.autograd.Function):
    """The same tensor, which a compiled model then computes once, not anew in every layer that reads it."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.as_strided(values.shape, values.stride())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


@functools.cache
def _compile_flex() -> Any:
    return torch.compile(flex_attention, dynamic=False)


def choose_backend(
    requested: AttentionBackend, device_type: str, dropout: float, is_plain_self_attention: bool, head_size: int
) -> AttentionBackend:
    """What a stack attends with; ``auto`` is the fastest that can carry it.

    A CPU is fastest with two matrix products: the fused kernel is slow once its bias needs a gradient, and
    FlexAttention has no backward there, so that ``flex`` stores its bias. FlexAttention knows neither dropout nor two
    kinds of attention in a layer nor, on a GPU, very narrow heads, for which SDPA takes the dense bias.

    Args:
        is_plain_self_attention: bidirectional, without cross-attention.

    Raises:
        InputError: ``flex`` was asked for where it cannot be.
    """
    can_flex = is_plain_self_attention and not dropout and (device_type == 'cpu' or head_size >= MIN_FLEX_HEAD_SIZE)
    if requested is AttentionBackend.flex and not can_flex:
        raise InputError(
            'training.attention flex needs attention_probs_dropout_prob 0, in a decoder attention bidirectional and, '
            f'on a GPU, heads at least {MIN_FLEX_HEAD_SIZE} wide'
        )
    if requested is not AttentionBackend.auto:
        return requested
    if device_type == 'cpu':
        return AttentionBackend.dense
    return AttentionBackend.flex if can_flex else AttentionBackend.sdpa


class Attention(nn.Module):
    """Attention whose queries and keys may come from different sequences."""

    def __init__(self, hidden_size: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.backend = AttentionBackend.dense  # see select_attention
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)  # one product where one sequence gives all three
        self.output = nn.Linear(hidden_size, hidden_size)

    def forward(self, queries: Tensor, memory: Tensor | None, bias: Bias) -> Tensor:
        """(B, Q, D) queries, (B, K, D) memory or None for self-attention, (B, ·, Q, K) bias -> (B, Q, D)."""
        if memory is None:
            query, key, value = self._split_heads(self.query_key_value(queries), 3)
        else:
            size = queries.shape[-1]
            weight, offset = self.query_key_value.weight, self.query_key_value.bias
            (query,) = self._split_heads(functional.linear(queries, weight[:size], offset[:size]), 1)
            key, value = self._split_heads(functional.linear(memory, weight[size:], offset[size:]), 2)
        attended = attend(query, key, value, bias, self.dropout if self.training else 0.0, self.backend)
        return self.output(attended.transpose(1, 2).flatten(2))

    def _split_heads(self, projected: Tensor, parts: int) -> tuple[Tensor, ...]:
        """(B, T, parts·D) -> ``parts`` tensors (B, H, T, Dh)."""
        batch, length, _ = projected.shape
        # Unbound where the parts lie, so that their gradients are stacked there too, without another copy.
        split = projected.view(batch, length, parts, self.num_heads, -1).unbind(2)
        return tuple(part.transpose(1, 2) for part in split)


def select_attention(stack: Any, requested: AttentionBackend, device_type: str) -> AttentionBackend:
    """Have an encoder or decoder attend as :func:`choose_backend` says from now on; returns what it chose."""
    attentions = [module for module in stack.modules() if isinstance(module, Attention)]
    first = attentions[0]
    head_size = first.output.in_features // first.num_heads
    backend = choose_backend(requested, device_type, first.dropout, stack.is_plain_self_attention, head_size)
    for module in (stack, *attentions):
        module.backend = backend
    return backend
