"""The parts that encoder and decoder share: absolute positions, the bias of the self-attention, post-LN layers."""

import torch
from torch import Tensor, nn

from maelm_composer.config import DecoderAttention, DecoderConfig, ModelConfig
from maelm_composer.model.kernels.attention import materialize
from maelm_composer.model.kernels.embedding import embed
from maelm_composer.model.layer import Layer
from maelm_composer.model.relative_position import RelativePositionBias


class Stack(nn.Module):
    """Absolute positions -> LN -> dropout -> post-LN layers under one relative position bias."""

    def make_modules(
        self,
        stack: ModelConfig | DecoderConfig,
        model: ModelConfig,
        attention: DecoderAttention = DecoderAttention.bidirectional,
    ) -> None:
        """Make the modules, whose sizes are those of ``stack``, everything else the ``model``'s.

        Initial weights are drawn in the order of the modules, so an encoder or decoder makes its own modules first.
        """
        self.has_self_attention = attention.has_self_attention
        self.has_cross_attention = attention.has_cross_attention
        self.is_causal = attention.is_causal
        size, eps = stack.hidden_size, model.layer_norm_eps
        self.position_embeddings = nn.Embedding(model.max_seq_len, size)
        self.embedding_norm = nn.LayerNorm(size, eps)
        self.dropout = nn.Dropout(stack.hidden_dropout_prob)
        has_relative_position = stack.relative_position_buckets and self.has_self_attention
        self.relative_position = RelativePositionBias(stack, model) if has_relative_position else None
        kinds = self.has_self_attention, self.has_cross_attention
        self.layers = nn.ModuleList(Layer(stack, eps, *kinds) for _ in range(stack.num_hidden_layers))

    def add_positions(self, inputs: Tensor, position_ids: Tensor) -> Tensor:
        """(B, T, D) embeddings and their (B, T) positions -> H^0, (B, T, D)."""
        # PAPER-SILENT: a LayerNorm here, as in the authors' code.
        return self.dropout(self.embedding_norm(inputs + embed(self.position_embeddings.weight, position_ids)))

    def run_layers(
        self,
        hidden: Tensor,
        position_ids: Tensor,
        segment_ids: Tensor,
        predicted_index: Tensor | None = None,
        memory: Tensor | None = None,
        memory_bias: Tensor | None = None,
        has_gaps: bool = False,
    ) -> Tensor:
        """(B, T, D) H^0 with (B, T) positions and segments -> (B, T, D), or (B, M, D) with ``predicted_index``.

        Args:
            predicted_index: (B, M) in [0, T), where to predict; the last layer computes no other.
            memory: (B, S, D) the encoder's output, for cross-attention.
            memory_bias: (B, 1, T, S), of the cross-attention.
            has_gaps: see :meth:`build_bias`.
        """
        *inner, last = self.layers
        bias = None
        if inner or predicted_index is None:
            bias = self.build_bias(position_ids, segment_ids, has_gaps=has_gaps)
        for layer in inner:
            hidden = layer(hidden, bias, memory=memory, memory_bias=memory_bias)
        if predicted_index is not None:
            bias = self.build_bias(position_ids, segment_ids, predicted_index)
            if memory_bias is not None:
                memory_bias = torch.take_along_dim(memory_bias, predicted_index[:, None, :, None], dim=2)
        return last(hidden, bias, predicted_index=predicted_index, memory=memory, memory_bias=memory_bias)

    def build_bias(
        self,
        position_ids: Tensor,
        segment_ids: Tensor,
        predicted_index: Tensor | None = None,
        has_gaps: bool = False,
    ) -> Tensor | None:
        """(B, T) -> (B, 1 or H, T, T), or (B, 1 or H, M, T) with ``predicted_index``; None without self-attention.

        Args:
            has_gaps: whether the positions of a segment may have gaps, as where [MASK]s were left out. Without gaps the
                distance of two positions is that of their slots, so the rows share one (H, T, T) bias if all positions
                are queries. False with gaps gives a wrong bias.
        """
        if not self.has_self_attention:
            return None
        positions, segments = position_ids, segment_ids  # of the queries
        if predicted_index is not None:
            positions, segments = position_ids.gather(1, predicted_index), segment_ids.gather(1, predicted_index)
        relative = None
        if self.relative_position is not None and (has_gaps or predicted_index is not None):
            # Not as rows of the shared bias: several threads would add up their gradients in an arbitrary order.
            relative = self.relative_position(positions, position_ids)
        elif self.relative_position is not None:
            shared = self.relative_position.between_slots(segment_ids.shape[1])
            relative = shared.expand(len(segments), -1, -1, -1)  # (B, H, T, T)
        bias = build_attention_bias(segments, segment_ids, relative)
        if self.is_causal:
            keys = torch.arange(segment_ids.shape[1], device=segment_ids.device)
            queries = keys[None] if predicted_index is None else predicted_index
            bias = bias.masked_fill(keys > queries[:, None, :, None], float('-inf'))
        return materialize(bias)


def build_attention_bias(query_segments: Tensor, key_segments: Tensor, relative: Tensor | None) -> Tensor:
    """(B, Q), (B, K) segment ids and an optional (B, H, Q, K) bias -> (B, 1 or H, Q, K), -inf across segments.

    Padding is a segment of its own (0), so that every query has a key. Under autocast the bias has autocast's type.
    """
    is_other = query_segments[:, None, :, None] != key_segments[:, None, None, :]
    bias = torch.zeros_like(is_other, dtype=torch.float32) if relative is None else relative
    device = bias.device.type
    if torch.is_autocast_enabled(device):
        bias = bias.to(torch.get_autocast_dtype(device))
    return bias.masked_fill(is_other, float('-inf'))
