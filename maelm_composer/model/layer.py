"""One Transformer block, post-LN: x <- LN(x + drop(f(x))) for f each attention, then the feed-forward network."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from maelm_composer.config import DecoderConfig, ModelConfig
from maelm_composer.model.attention import Attention


class Layer(nn.Module):
    """Self-attention, cross-attention to an encoder's output, or both, and a feed-forward network (exact GELU)."""

    def __init__(
        self,
        stack: ModelConfig | DecoderConfig,
        layer_norm_eps: float,
        has_self_attention: bool = True,
        has_cross_attention: bool = False,
    ) -> None:
        super().__init__()
        size = stack.hidden_size
        build_attention = partial(Attention, size, stack.num_attention_heads, stack.attention_probs_dropout_prob)
        build_norm = partial(nn.LayerNorm, size, layer_norm_eps)
        if has_self_attention:
            self.self_attention, self.self_attention_norm = build_attention(), build_norm()
        if has_cross_attention:
            self.cross_attention, self.cross_attention_norm = build_attention(), build_norm()
        self.has_self_attention, self.has_cross_attention = has_self_attention, has_cross_attention
        self.intermediate = nn.Linear(size, stack.intermediate_size)
        self.output = nn.Linear(stack.intermediate_size, size)
        self.output_norm = build_norm()
        self.activation = nn.GELU()
        self.dropout = nn.Dropout(stack.hidden_dropout_prob)
        self.recomputes = False

    def forward(
        self,
        hidden: Tensor,
        bias: Tensor | None,
        *,
        predicted_index: Tensor | None = None,
        memory: Tensor | None = None,
        memory_bias: Tensor | None = None,
    ) -> Tensor:
        """(B, T, D) -> (B, T, D), or (B, M, D) with ``predicted_index`` (B, M), which leaves out all other positions.

        Args:
            bias: (B, ·, T or M, T), of the self-attention.
            memory: (B, S, D) the encoder's output, for cross-attention.
            memory_bias: (B, ·, T or M, S), of the cross-attention.
        """
        inputs = hidden, bias, predicted_index, memory, memory_bias
        return checkpoint(self.compute, *inputs, use_reentrant=False) if self.recomputes else self.compute(*inputs)

    def compute(
        self,
        hidden: Tensor,
        bias: Tensor | None,
        predicted_index: Tensor | None,
        memory: Tensor | None,
        memory_bias: Tensor | None,
    ) -> Tensor:
        """As :meth:`forward`, which may keep no activations of it."""
        if self.has_self_attention:
            assert bias is not None
            if predicted_index is None:
                attended = self.self_attention(hidden, None, bias)
            else:
                row, hidden = hidden, take_positions(hidden, predicted_index)
                attended = self.self_attention(hidden, row, bias)
            hidden = self.self_attention_norm(hidden + self.dropout(attended))
        if self.has_cross_attention:
            assert memory is not None
            assert memory_bias is not None
            attended = self.cross_attention(hidden, memory, memory_bias)
            hidden = self.cross_attention_norm(hidden + self.dropout(attended))
        fed_forward = self.output(self.activation(self.intermediate(hidden)))
        return self.output_norm(hidden + self.dropout(fed_forward))


def recompute_layers(model: nn.Module) -> None:
    """Activation checkpointing: keep the inputs of each layer alone, and compute the layer again in the backward pass.

    Dropout draws the same masks again, so loss and gradients are those of a layer that keeps its activations.
    """
    for layer in model.modules():
        if isinstance(layer, Layer):
            layer.recomputes = True


def take_positions(values: Tensor, index: Tensor) -> Tensor:
    """(B, T, D) or (B, T) values at (B, I) index -> (B, I, D) or (B, I)."""
    return torch.take_along_dim(values, index if values.dim() == 2 else index[..., None], dim=1)
