"""The encoder, which is kept after pretraining (Sec. 3, "Excluding [MASK] from the Encoder")."""

from collections.abc import Iterator

from torch import Tensor, nn

from maelm_composer.config import ModelConfig
from maelm_composer.model.kernels.embedding import embed
from maelm_composer.model.stack import Stack


class Encoder(Stack):
    """Token and absolute position embeddings -> LN -> dropout -> L post-LN layers under one relative position bias."""

    def __init__(self, config: ModelConfig, has_tied_head: bool = False) -> None:
        """An encoder with torch's initial weights; :func:`model.maelm.build_model` draws the method's.

        Args:
            has_tied_head: whether every loss also reads the whole token table, as ``MaskedLanguageModel``'s does
                (:func:`kernels.embedding.embed`). Set it to False to train such an encoder without that head: on a CPU
                the table's gradient would be sparse, which AdamW refuses.
        """
        super().__init__()
        self.has_tied_head = has_tied_head
        self.token_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.make_modules(config, config)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        segment_ids: Tensor,
        predicted_index: Tensor | None = None,
        has_gaps: bool = False,
    ) -> Tensor:
        """(B, S) packed rows -> (B, S, D), or (B, M, D) with ``predicted_index``.

        Args:
            position_ids: (B, S) position in the block, in [0, N); they jump where [MASK]s were left out.
            segment_ids: (B, S) number of the block, from 1; 0 is padding. They are not BERT's token types: a token
                attends to the tokens of its own segment alone.
            predicted_index: (B, M) in [0, S), slots to predict at; the last layer has no other.
            has_gaps: whether positions may have gaps (:meth:`Stack.build_bias`). Where they have, as in MAE-LM's
                ``Batch``, False gives wrong states without an error.
        """
        hidden = self._embed(input_ids, position_ids)
        return self.run_layers(hidden, position_ids, segment_ids, predicted_index, has_gaps=has_gaps)

    def layer_states(
        self, input_ids: Tensor, position_ids: Tensor, segment_ids: Tensor, has_gaps: bool = False
    ) -> Iterator[Tensor]:
        """Inputs as in :meth:`forward` -> H^0, the embeddings' output, to H^L, each (B, S, D), one at a time."""
        hidden = self._embed(input_ids, position_ids)
        bias = self.build_bias(position_ids, segment_ids, has_gaps=has_gaps)
        yield hidden
        for layer in self.layers:
            hidden = layer(hidden, bias)
            yield hidden

    def _embed(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        tokens = embed(self.token_embeddings.weight, input_ids, is_tied=self.has_tied_head)
        return self.add_positions(tokens, position_ids)
