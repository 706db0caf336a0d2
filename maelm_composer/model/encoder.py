"""The encoder, which is kept after pretraining (Sec. 3, "Excluding [MASK] from the Encoder")."""

from collections.abc import Iterator

from torch import Tensor, nn

from maelm_composer.config import AttentionBackend, ModelConfig
from maelm_composer.model.attention import Bias
from maelm_composer.model.attention_bias import build_self_attention_bias
from maelm_composer.model.kernels.embedding import embed
from maelm_composer.model.layer import Layer
from maelm_composer.model.relative_position import RelativePositionBias


class Encoder(nn.Module):
    """Token and absolute position embeddings -> LN -> dropout -> L post-LN layers under one relative position bias."""

    def __init__(self, config: ModelConfig, has_tied_head: bool = False) -> None:
        """``has_tied_head``: every loss also reads the whole token table; see :func:`kernels.embedding.embed`."""
        super().__init__()
        size = config.hidden_size
        self.has_tied_head = has_tied_head
        self.token_embeddings = nn.Embedding(config.vocab_size, size)
        self.position_embeddings = nn.Embedding(config.max_seq_len, size)
        self.embedding_norm = nn.LayerNorm(size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.relative_position = RelativePositionBias(config, config) if config.relative_position_buckets else None
        self.layers = nn.ModuleList(Layer(config, config.layer_norm_eps) for _ in range(config.num_hidden_layers))
        self.is_plain_self_attention = True
        self.backend = AttentionBackend.dense

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, segment_ids: Tensor, predicted_index: Tensor | None = None
    ) -> Tensor:
        """(B, S) packed rows -> (B, S, D), or (B, M, D) with ``predicted_index``.

        Args:
            position_ids: (B, S) in [0, N), with gaps where [MASK]s were left out.
            segment_ids: (B, S); a token attends to the tokens of its own segment.
            predicted_index: (B, M) the slots to predict from; the last layer computes no other.
        """
        hidden, bias = self._embed(input_ids, position_ids, segment_ids)
        for layer in self.layers[:-1]:
            hidden = layer(hidden, bias)
        if predicted_index is not None:
            bias = build_self_attention_bias(
                self.relative_position, position_ids, segment_ids, predicted_index, self.backend
            )
        return self.layers[-1](hidden, bias, predicted_index=predicted_index)

    def layer_states(self, input_ids: Tensor, position_ids: Tensor, segment_ids: Tensor) -> Iterator[Tensor]:
        """(B, S) as in :meth:`forward` -> H^0, the embeddings' output, to H^L, each (B, S, D), one at a time."""
        hidden, bias = self._embed(input_ids, position_ids, segment_ids)
        yield hidden
        for layer in self.layers:
            hidden = layer(hidden, bias)
            yield hidden

    def _embed(self, input_ids: Tensor, position_ids: Tensor, segment_ids: Tensor) -> tuple[Tensor, Bias]:
        tokens = embed(self.token_embeddings.weight, input_ids, is_tied=self.has_tied_head)
        positions = embed(self.position_embeddings.weight, position_ids)
        # PAPER-SILENT: a LayerNorm here, as in the authors' code.
        hidden = self.dropout(self.embedding_norm(tokens + positions))
        bias = build_self_attention_bias(self.relative_position, position_ids, segment_ids, backend=self.backend)
        return hidden, bias
