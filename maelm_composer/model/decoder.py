"""The decoder, which predicts the masked tokens and is discarded afterwards (Sec. 3, "Decoder Configuration")."""

from torch import Tensor, nn
from torch.nn import functional

from maelm_composer.config import ModelConfig
from maelm_composer.data.special_tokens import CLS_ID
from maelm_composer.masking.collate import Batch
from maelm_composer.model.kernels.embedding import embed
from maelm_composer.model.kernels.filled_row import fill_row
from maelm_composer.model.layer import take_positions
from maelm_composer.model.stack import Stack, build_attention_bias


class Decoder(Stack):
    """A shallow stack over the row: h_i^L where the encoder saw token i, else e_[MASK]; not if causal."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        decoder = config.decoder
        assert decoder is not None
        self.mask_id = config.vocab_size - 1
        size = decoder.hidden_size
        # Sec. 4.3, "Decoder Size"
        self.input_projection = nn.Linear(config.hidden_size, size) if size != config.hidden_size else None
        self.make_modules(decoder, config, decoder.attention)

    def forward(self, encoded: Tensor, token_table: Tensor, batch: Batch) -> Tensor:
        """(B, S, D) encoder outputs and the (V, D) token table -> (B, M, D_dec) at ``batch.predicted_index``."""
        positions, segments = batch.original_position_ids, batch.segment_ids
        predicted = batch.predicted_index.clamp(max=segments.shape[1] - 1)  # an unused slot has no label
        if self.is_causal:
            inputs = embed(token_table, shift_right(batch.labels, positions), is_tied=True)
        else:
            mask_embedding = embed(token_table, positions.new_full((), self.mask_id), is_tied=True)
            inputs = fill_masks(encoded, mask_embedding, batch.visible_index, batch.resets)
        if self.input_projection is not None:
            inputs = self.input_projection(inputs)
            if self.has_cross_attention:
                encoded = self.input_projection(encoded)
        if not self.has_self_attention:
            # No position reads another one, so only the predicted ones are computed.
            inputs, positions, segments = (take_positions(x, predicted) for x in (inputs, positions, segments))
        chosen = predicted if self.has_self_attention else None  # None: ``inputs`` are these
        hidden = self.add_positions(inputs, positions)
        if not self.has_cross_attention:
            return self.run_layers(hidden, positions, segments, chosen, has_gaps=False)
        memory_bias = build_attention_bias(segments, take_padded(batch.segment_ids, batch.visible_index), None)
        # Where [CLS] may be masked too, a short block can have no visible token. Its queries then attend to the whole
        # row, because a softmax over no key is NaN.
        has_no_key = memory_bias.isneginf().all(-1, keepdim=True)
        memory_bias = memory_bias.masked_fill(has_no_key, 0.0)
        return self.run_layers(hidden, positions, segments, chosen, encoded, memory_bias, has_gaps=False)


def fill_masks(encoded: Tensor, mask_embedding: Tensor, visible_index: Tensor, resets: Tensor) -> Tensor:
    """(B, N, D) Ĥ^0 without the p_i: h_i^L where the encoder saw token i, else e_[MASK] (Sec. 3).

    Args:
        encoded: (B, S, D); ``mask_embedding``: (D,).
        visible_index: (B, S) positions of the encoder's tokens; N for an unused slot.
        resets: (B, N) True: e_[MASK] although the encoder saw the position.
    """
    length = resets.shape[1]
    positions = visible_index.masked_fill(take_padded(resets, visible_index), length)
    return fill_row(encoded, mask_embedding.to(encoded.dtype), positions, length)


def take_padded(values: Tensor, index: Tensor, fill: int = 0) -> Tensor:
    """(B, N) values at (B, I) index; ``fill`` where the index is N."""
    return functional.pad(values, (0, 1), value=fill).gather(1, index)


def shift_right(labels: Tensor, positions: Tensor) -> Tensor:
    """(B, N) labels -> (B, N) the token before each position; [CLS] at a block's start and in padding.

    Sec. 4.3: "the entire sequence". PAPER-SILENT: no label (-100) for each block's [CLS], nor for padding.
    """
    before = functional.pad(labels, (1, -1), value=CLS_ID)
    return before.masked_fill(positions == 0, CLS_ID).clamp(min=CLS_ID)
