"""The encoder: what is kept after pretraining (Sec. 3, "Excluding [MASK] from the Encoder")."""

from collections.abc import Iterator

from torch import Tensor, nn

from maelm_composer.config import AttentionBackend, ModelConfig
from maelm_composer.model.attention import Bias, build_attention_bias, build_flex_bias
from maelm_composer.model.embedding import look_up
from maelm_composer.model.layer import Layer, take_rows
from maelm_composer.model.relative_position import RelativePositionBias


class Encoder(nn.Module):
    """Token and absolute position embeddings -> LN -> dropout -> L post-LN layers under one relative position bias."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.token_embeddings = nn.Embedding(config.vocab_size, size)
        self.position_embeddings = nn.Embedding(config.max_seq_len, size)
        self.embedding_norm = nn.LayerNorm(size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.relative_position = RelativePositionBias(config, config) if config.relative_position_buckets else None
        self.layers = nn.ModuleList(Layer(config, config.layer_norm_eps) for _ in range(config.num_hidden_layers))
        self.is_plain_self_attention = True
        self.backend = AttentionBackend.dense

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        segment_ids: Tensor,
        query_index: Tensor | None = None,
        tokens: Tensor | None = None,
    ) -> Tensor:
        """(B, S) packed rows -> (B, S, D), or (B, M, D) with ``query_index``.

        Args:
            position_ids: (B, S) in [0, N); gaps where [MASK]s were left out
            segment_ids: (B, S) attention stays within equal ids
            query_index: (B, M) the only slots whose output is wanted; the last layer computes nothing else
            tokens: (B, S, D) their embeddings, where the caller has looked them up
        """
        hidden, bias = self._embed(input_ids, position_ids, segment_ids, tokens)
        for layer in self.layers[:-1]:
            hidden = layer(hidden, bias)
        if query_index is not None:
            bias = build_stack_bias(self.relative_position, position_ids, segment_ids, query_index, self.backend)
        return self.layers[-1](hidden, bias, query_index=query_index)

    def layer_states(self, input_ids: Tensor, position_ids: Tensor, segment_ids: Tensor) -> Iterator[Tensor]:
        """(B, S) as in :meth:`forward` -> H^0, the embeddings' output, to H^L, each (B, S, D), one at a time."""
        hidden, bias = self._embed(input_ids, position_ids, segment_ids)
        yield hidden
        for layer in self.layers:
            hidden = layer(hidden, bias)
            yield hidden

    def _embed(
        self, input_ids: Tensor, position_ids: Tensor, segment_ids: Tensor, tokens: Tensor | None = None
    ) -> tuple[Tensor, Bias]:
        if tokens is None:
            tokens, *_ = look_up(self.token_embeddings.weight, input_ids)
        positions, *_ = look_up(self.position_embeddings.weight, position_ids)
        hidden = self.dropout(self.embedding_norm(tokens + positions))  # PAPER-SILENT: LN here, as the authors' code
        bias = build_stack_bias(self.relative_position, position_ids, segment_ids, backend=self.backend)
        return hidden, bias


def build_stack_bias(
    relative_position: RelativePositionBias | None,
    position_ids: Tensor,
    segment_ids: Tensor,
    query_index: Tensor | None = None,
    backend: AttentionBackend = AttentionBackend.dense,
) -> Bias:
    """The (B, 1 or H, T or M, T) self-attention bias that all layers of a stack share."""
    positions, segments = position_ids, segment_ids
    if query_index is not None:
        positions, segments = take_rows(position_ids, query_index), take_rows(segment_ids, query_index)
    if backend is AttentionBackend.flex:
        entry = None if relative_position is None else relative_position.entry(positions, position_ids)
        return build_flex_bias(segments, segment_ids, entry)
    relative = None if relative_position is None else relative_position(positions, position_ids)
    return build_attention_bias(segments, segment_ids, relative)
