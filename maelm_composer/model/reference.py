"""MAE-LM and plain MLM in ordinary torch, to be read with the paper (Meng et al., arXiv:2302.02060).

Every position is computed, without dropout and without any short cut of ``maelm.py``. The modules have the names of the
fast model, so that either loads the other's ``state_dict``; the loss and every gradient are equal
(tests/model/test_reference.py). Weights start with torch's defaults; ``build_model`` has the method's. Shapes: B rows
of N tokens, S of them in the encoder; D hidden size; V vocabulary.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from maelm_composer.config import DecoderAttention, DecoderConfig, ModelConfig
from maelm_composer.masking.collate import IGNORED_LABEL, Batch
from maelm_composer.model.relative_position import bucket_distances


class ReferenceModel(nn.Module):
    """The batch that ``masking/collate.py`` draws -> the scalar loss of Eq. 1."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        decoder, self.mask_id, self.decoder = config.decoder, config.vocab_size - 1, None
        self.encoder = Stack(config, config, DecoderAttention.bidirectional)
        self.encoder.token_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        if decoder is not None:
            self.decoder = Stack(decoder, config, decoder.attention)
            if decoder.hidden_size != config.hidden_size:  # Sec. 4.3, "Decoder Size"
                self.decoder.input_projection = nn.Linear(config.hidden_size, decoder.hidden_size)
        self.head = Head(config)

    def forward(self, batch: Batch) -> Tensor:
        # Sec. 3, "Excluding [MASK] from the Encoder": its S tokens are the visible ones. Each keeps its position in its
        # block (a stretch of text), so positions jump where a token was masked. ``segments`` numbers the blocks of a
        # row; a row with fewer than S visible tokens has slots that are unused: segment 0, as padding.
        tokens = self.encoder.token_embeddings
        segments = functional.pad(batch.segment_ids, (0, 1)).gather(1, batch.visible_index)
        hidden = self.encoder(tokens(batch.input_ids), batch.position_ids, segments)

        if self.decoder is not None:
            hidden = self.decode(hidden, segments, batch)
        # Plain MLM, Sec. 2.1: the encoder's S slots are the row's N positions.
        logits = self.head(hidden, tokens.weight)
        # Eq. 1, as a mean over the predicted tokens.
        return functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED_LABEL)

    def decode(self, hidden: Tensor, segments: Tensor, batch: Batch) -> Tensor:
        """(B, S, D) encoder outputs and their (B, S) segments -> (B, N, D_dec)."""
        decoder, tokens = self.decoder, self.encoder.token_embeddings
        assert decoder is not None
        if decoder.is_causal:  # Table 2, "uni. self-attention": the previous token; a block starts from [CLS], id 0
            previous = functional.pad(batch.labels, (1, -1)).clamp(min=0)
            inputs = tokens(previous.where(batch.original_position_ids > 0, 0))
        else:
            # Sec. 3, "Decoder Configuration": h_i^L where the encoder saw token i, else e_[MASK].
            inputs = tokens(torch.full_like(batch.labels, self.mask_id))
            row, slot = (batch.visible_index < batch.labels.shape[1]).nonzero(as_tuple=True)
            inputs = inputs.index_put((row, batch.visible_index[row, slot]), hidden[row, slot])
            # Table 2: e_[MASK] at the masked positions although the encoder saw a [MASK] there.
            inputs = torch.where(batch.resets[..., None], tokens.weight[self.mask_id], inputs)
        if decoder.input_projection is not None:
            inputs, hidden = decoder.input_projection(inputs), decoder.input_projection(hidden)
        return decoder(inputs, batch.original_position_ids, batch.segment_ids, hidden, segments)


class Head(nn.Module):
    """Dense, GELU, LayerNorm, then the token table as output layer (Eq. 1) and a bias. PAPER-SILENT: all but Eq. 1."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size = config.hidden_size if config.decoder is None else config.decoder.hidden_size
        self.dense, self.norm = nn.Linear(size, size), nn.LayerNorm(size, config.layer_norm_eps)
        self.output_projection = nn.Linear(size, config.hidden_size, bias=False) if size != config.hidden_size else None
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, hidden: Tensor, token_table: Tensor) -> Tensor:
        """(B, N, D_dec) and (V, D) -> (B, N, V) logits."""
        hidden = self.norm(functional.gelu(self.dense(hidden)))
        if self.output_projection is not None:
            hidden = self.output_projection(hidden)
        return hidden @ token_table.T + self.bias


class Stack(nn.Module):
    """Absolute positions, LayerNorm and post-LN Transformer layers that share one relative position bias."""

    token_embeddings: nn.Embedding  # of the encoder

    def __init__(self, stack: ModelConfig | DecoderConfig, model: ModelConfig, attention: DecoderAttention) -> None:
        super().__init__()
        self.input_projection: nn.Linear | None = None  # of a decoder of another width
        size, eps = stack.hidden_size, model.layer_norm_eps
        self.is_causal = attention == DecoderAttention.causal_cross
        self.buckets = stack.relative_position_buckets
        self.bucketing = model.relative_position_max_distance, model.relative_position_function
        if attention == DecoderAttention.cross:  # no self-attention
            self.buckets = 0
        self.position_embeddings, self.embedding_norm = nn.Embedding(model.max_seq_len, size), nn.LayerNorm(size, eps)
        if self.buckets:
            self.relative_position = nn.Embedding(self.buckets, stack.num_attention_heads)
        self.layers = nn.ModuleList(Layer(stack, eps, attention) for _ in range(stack.num_hidden_layers))

    def forward(
        self,
        inputs: Tensor,  # (B, T, D)
        positions: Tensor,  # (B, T)
        segments: Tensor,  # (B, T)
        memory: Tensor | None = None,  # (B, S, D), for cross-attention
        memory_segments: Tensor | None = None,  # (B, S)
    ) -> Tensor:
        hidden = self.embedding_norm(inputs + self.position_embeddings(positions))
        bias = separate(segments, segments)
        if self.buckets:  # Sec. 4.1 and App. C: one learned number for each bucket of distances and head
            distances = positions[:, None, :] - positions[:, :, None]  # key - query
            bias = bias + self.relative_position(bucket_distances(distances, self.buckets, *self.bucketing)).movedim(
                3, 1
            )
        if self.is_causal:
            bias = bias + torch.full(bias.shape[-2:], float('-inf'), device=bias.device).triu(1)
        memory_bias = None
        if memory_segments is not None:
            memory_bias = separate(segments, memory_segments)
            # A block whose tokens are all hidden attends to the whole row: a softmax over no key is undefined.
            memory_bias = memory_bias.masked_fill(memory_bias.isneginf().all(-1, keepdim=True), 0.0)
        for layer in self.layers:
            hidden = layer(hidden, bias, memory, memory_bias)
        return hidden


class Layer(nn.Module):
    """x <- LN(x + f(x)) for each attention f, then for the feed-forward network (PAPER-SILENT, as in RoBERTa)."""

    def __init__(self, stack: ModelConfig | DecoderConfig, eps: float, attention: DecoderAttention) -> None:
        super().__init__()
        size, heads, inner = stack.hidden_size, stack.num_attention_heads, stack.intermediate_size
        if attention.has_self_attention:
            self.self_attention, self.self_attention_norm = Attention(size, heads), nn.LayerNorm(size, eps)
        if attention.has_cross_attention:
            self.cross_attention, self.cross_attention_norm = Attention(size, heads), nn.LayerNorm(size, eps)
        self.intermediate, self.output = nn.Linear(size, inner), nn.Linear(inner, size)
        self.output_norm = nn.LayerNorm(size, eps)

    def forward(self, hidden: Tensor, bias: Tensor, memory: Tensor | None, memory_bias: Tensor | None) -> Tensor:
        if hasattr(self, 'self_attention'):
            hidden = self.self_attention_norm(hidden + self.self_attention(hidden, hidden, bias))
        if hasattr(self, 'cross_attention'):
            hidden = self.cross_attention_norm(hidden + self.cross_attention(hidden, memory, memory_bias))
        return self.output_norm(hidden + self.output(functional.gelu(self.intermediate(hidden))))


class Attention(nn.Module):
    """Sec. 2.1 with a bias: Softmax(Q K^T / sqrt(d_h) + bias) V."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value, self.output = nn.Linear(size, 3 * size), nn.Linear(size, size)

    def forward(self, queries: Tensor, memory: Tensor, bias: Tensor) -> Tensor:
        """(B, Q, D), (B, K, D) and (B, 1 or H, Q, K) -> (B, Q, D)."""
        query_weight, key_weight, value_weight = self.query_key_value.weight.chunk(3)
        query_offset, key_offset, value_offset = self.query_key_value.bias.chunk(3)
        query = self.split_heads(functional.linear(queries, query_weight, query_offset))
        key = self.split_heads(functional.linear(memory, key_weight, key_offset))
        value = self.split_heads(functional.linear(memory, value_weight, value_offset))
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=bias.to(query.dtype))
        return self.output(attended.transpose(1, 2).flatten(2))

    def split_heads(self, projected: Tensor) -> Tensor:
        """(B, T, D) -> (B, H, T, d_h)."""
        return projected.unflatten(-1, (self.heads, -1)).transpose(1, 2)


def separate(query_segments: Tensor, key_segments: Tensor) -> Tensor:
    """(B, Q), (B, K) -> (B, 1, Q, K): 0 within a block of the packed row, -inf between blocks."""
    is_same = query_segments[:, None, :, None] == key_segments[:, None, None, :]
    return torch.where(is_same, 0.0, float('-inf'))
