"""The decoder: predicts the masked tokens and is thrown away after pretraining (Sec. 3, "Decoder Configuration")."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from maelm_composer.config import AttentionBackend, DecoderAttention, ModelConfig
from maelm_composer.model.attention import Bias, build_attention_bias
from maelm_composer.model.embedding import look_up
from maelm_composer.model.encoder import build_stack_bias
from maelm_composer.model.layer import Layer, take_rows
from maelm_composer.model.relative_position import RelativePositionBias


class Decoder(nn.Module):
    """A shallow stack over the whole row: encoder outputs where there are some, e_[MASK] elsewhere, plus positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        decoder = config.decoder
        assert decoder is not None
        self.attention = decoder.attention
        size = decoder.hidden_size
        # Sec. 4.3, "Decoder Size"
        self.input_projection = nn.Linear(config.hidden_size, size) if size != config.hidden_size else None
        self.position_embeddings = nn.Embedding(config.max_seq_len, size)
        self.embedding_norm = nn.LayerNorm(size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(decoder.hidden_dropout_prob)
        has_self_attention = self.attention is not DecoderAttention.cross
        has_relative_position = decoder.relative_position_buckets and has_self_attention
        self.relative_position = RelativePositionBias(decoder, config) if has_relative_position else None
        self.layers = nn.ModuleList(
            Layer(
                decoder,
                config.layer_norm_eps,
                has_self_attention=has_self_attention,
                has_cross_attention=self.attention is not DecoderAttention.bidirectional,
            )
            for _ in range(decoder.num_hidden_layers)
        )
        self.is_plain_self_attention = self.attention is DecoderAttention.bidirectional
        self.backend = AttentionBackend.dense

    def forward(
        self,
        encoded: Tensor,
        token_embeddings: nn.Embedding,
        batch: dict[str, Tensor],
        mask_embedding: Tensor | None = None,
    ) -> Tensor:
        """(B, S, D) encoder output and the batch (see masking/collate.py) -> (B, M, D_dec) at ``masked_index``.

        Args:
            mask_embedding: (D,) e_[MASK], where the caller has looked it up
        """
        positions, segments = batch['original_position_ids'], batch['segment_ids']
        wanted = batch['masked_index'].clamp(max=segments.shape[1] - 1)  # an unused slot reads anything; no label
        if self.attention is DecoderAttention.causal_cross:
            filled = token_embeddings(_shift_right(batch['labels'], positions))
        else:
            mask = token_embeddings.weight[-1] if mask_embedding is None else mask_embedding
            filled = fill_masks(encoded, mask, batch['visible_index'], batch['resets'])
        if self.input_projection is not None:
            filled = self.input_projection(filled)
            if self.attention is not DecoderAttention.bidirectional:
                encoded = self.input_projection(encoded)
        if self.attention is DecoderAttention.cross:
            # Without self-attention no position reads another one: only the wanted ones exist.
            filled, positions, segments = (take_rows(x, wanted) for x in (filled, positions, segments))
        places, *_ = look_up(self.position_embeddings.weight, positions)
        hidden = self.dropout(self.embedding_norm(filled + places))

        memory_bias: Tensor | None = None
        if self.attention is not DecoderAttention.bidirectional:
            memory_segments = take_padded(batch['segment_ids'], batch['visible_index'])
            memory_bias = build_attention_bias(segments, memory_segments, None)
            # Where [CLS] may be masked too, a short block can be hidden whole: it looks at the row, as nothing is NaN.
            is_alone = memory_bias.isneginf().all(-1, keepdim=True)
            memory_bias = memory_bias.masked_fill(is_alone, 0.0)
        memory = None if memory_bias is None else encoded
        if self.attention is DecoderAttention.cross:
            for layer in self.layers:
                hidden = layer(hidden, None, memory=memory, memory_bias=memory_bias)
            return hidden

        bias = self._forbid_future(build_stack_bias(self.relative_position, positions, segments, None, self.backend))
        for layer in self.layers[:-1]:
            hidden = layer(hidden, bias, memory=memory, memory_bias=memory_bias)
        last_bias = build_stack_bias(self.relative_position, positions, segments, wanted, self.backend)
        if memory_bias is not None:
            memory_bias = memory_bias.gather(2, wanted[:, None, :, None].expand(-1, -1, -1, memory_bias.shape[-1]))
        last_bias = self._forbid_future(last_bias, wanted)
        return self.layers[-1](hidden, last_bias, query_index=wanted, memory=memory, memory_bias=memory_bias)

    def _forbid_future(self, bias: Bias, query_index: Tensor | None = None) -> Bias:
        """-inf above the diagonal of the (B, ·, T or M, T) bias of the autoregressive decoder."""
        if self.attention is not DecoderAttention.causal_cross:
            return bias
        assert isinstance(bias, Tensor)
        keys = torch.arange(bias.shape[-1], device=bias.device)
        queries = keys[None] if query_index is None else query_index
        return bias.masked_fill(keys > queries[:, None, :, None], float('-inf'))


def fill_masks(encoded: Tensor, mask_embedding: Tensor, visible_index: Tensor, resets: Tensor) -> Tensor:
    """(B, N, D) Ĥ^0 before positions: h_i^L where the encoder saw token i, e_[MASK] elsewhere (Sec. 3).

    Args:
        encoded: (B, S, D); ``mask_embedding``: (D,)
        visible_index: (B, S) positions of the encoder's tokens; N for an unused slot
        resets: (B, N) positions that get e_[MASK] although the encoder saw them
    """
    # Unused and reset slots are written to a row of their own after the last, never to a real position.
    target = visible_index.masked_fill(take_padded(resets, visible_index), resets.shape[1])
    filled: Tensor = _FilledRow.apply(encoded, mask_embedding.to(encoded.dtype), target, resets.shape[1])
    return filled


class _FilledRow(torch.autograd.Function):
    """(B, S, D) rows at ``target`` (B, S) of (B, length, D), another row elsewhere; a target of ``length`` is nowhere.

    No position has two sources, so every gradient is read from its place: autograd would copy them all twice before.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, other: Tensor, target: Tensor, length: int) -> Tensor:
        filled = other.expand(len(target), length + 1, -1).clone()
        filled[_each_row(target), target] = rows
        ctx.save_for_backward(target)
        return filled[:, :-1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (gradient,), (target,) = gradients, ctx.saved_tensors
        length = gradient.shape[1]
        is_nowhere = (target == length)[..., None]
        of_rows = gradient[_each_row(target), target.clamp(max=length - 1)].masked_fill(is_nowhere, 0.0)
        is_other = gradient.new_ones(len(target), length + 1).scatter_(1, target, 0.0)[:, :-1]
        return of_rows, is_other.flatten() @ gradient.flatten(0, 1), None, None


def _each_row(target: Tensor) -> Tensor:
    return torch.arange(len(target), device=target.device)[:, None]


def take_padded(values: Tensor, index: Tensor) -> Tensor:
    """(B, N) values at (B, K) index; 0 where the index is N."""
    return functional.pad(values, (0, 1)).gather(1, index)


def _shift_right(labels: Tensor, positions: Tensor) -> Tensor:
    """(B, N) labels -> (B, N) the token before each position; [CLS], which is id 0, at a block's start and in padding.

    PAPER-SILENT: labels leave out only block starts, whose token is always [CLS], and padding.
    """
    before = functional.pad(labels, (1, -1), value=0)
    return before.masked_fill(positions == 0, 0).clamp(min=0)
