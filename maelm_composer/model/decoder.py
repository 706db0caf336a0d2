"""The decoder, which predicts the masked tokens and is discarded afterwards (Sec. 3, "Decoder Configuration")."""

from torch import Tensor, nn
from torch.nn import functional

from maelm_composer.config import ModelConfig
from maelm_composer.data.special_tokens import CLS_ID
from maelm_composer.masking.collate import IGNORED_LABEL, Batch
from maelm_composer.model.kernels.attention import materialize
from maelm_composer.model.kernels.embedding import embed
from maelm_composer.model.kernels.filled_row import fill_row
from maelm_composer.model.layer import take_positions
from maelm_composer.model.stack import Stack, build_attention_bias


class Decoder(Stack):
    """A shallow stack over the N positions of a row (Sec. 3), discarded after pretraining.

    The input is h_i^L where the encoder saw token i, else e_[MASK]. A causal decoder (Table 2, "uni. self-attention")
    reads the token before each position instead.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        decoder = config.decoder
        assert decoder is not None
        self.mask_id = config.vocab_size - 1
        size = decoder.hidden_size
        # Sec. 4.3, "Decoder Size". PAPER-SILENT: e_[MASK], a vector of the encoder's width, is projected, too.
        self.input_projection = nn.Linear(config.hidden_size, size) if size != config.hidden_size else None
        self.make_modules(decoder, config, decoder.attention)

    def forward(self, encoded: Tensor, token_table: Tensor, batch: Batch) -> Tensor:
        """(B, S, D) encoder outputs and the (V, D) token table -> (B, M, D_dec) at ``batch.predicted_index``."""
        predicted = batch.predicted_index.clamp(max=batch.segment_ids.shape[1] - 1)  # unused slots have no label
        row = self._read_row(encoded, token_table, batch), batch.original_position_ids, batch.segment_ids
        if self.has_self_attention:
            inputs, positions, segments = row
        else:  # no position reads another one, so only the predicted ones are computed
            inputs, positions, segments = (take_positions(values, predicted) for values in row)
        # None: every position, which a causal decoder predicts (masking/collate.py).
        chosen = predicted if self.has_self_attention and not self.is_causal else None
        memory, memory_bias = self._build_memory(encoded, segments, batch)
        return self.run_layers(self.add_positions(inputs, positions), positions, segments, chosen, memory, memory_bias)

    def _read_row(self, encoded: Tensor, token_table: Tensor, batch: Batch) -> Tensor:
        """(B, N, D_dec) Ĥ^0 without the p_i."""
        if self.is_causal:
            inputs = embed(token_table, shift_right(batch.labels, batch.original_position_ids), is_tied=True)
        else:
            mask_embedding = embed(token_table, batch.labels.new_full((), self.mask_id), is_tied=True)
            inputs = fill_masks(encoded, mask_embedding, batch.visible_index, batch.resets)
        return self._project(inputs)

    def _build_memory(self, encoded: Tensor, segments: Tensor, batch: Batch) -> tuple[Tensor | None, Tensor | None]:
        """Cross-attention's memory, (B, S, D_dec), and its (B, 1, T, S) bias for queries in (B, T) ``segments``."""
        if not self.has_cross_attention:
            return None, None
        bias = build_attention_bias(segments, take_padded(batch.segment_ids, batch.visible_index), None)
        # Where [CLS] may be masked too, a short block can have no visible token. Its queries then attend to the whole
        # row, because a softmax over no key is NaN.
        has_no_key = bias.isneginf().all(-1, keepdim=True)
        return self._project(encoded), materialize(bias.masked_fill(has_no_key, 0.0))

    def _project(self, values: Tensor) -> Tensor:
        """(B, ·, D) -> (B, ·, D_dec)."""
        return values if self.input_projection is None else self.input_projection(values)


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
    """(B, N) labels -> (B, N) the token before each position; [CLS] at a block's start.

    Sec. 4.3, "Decoder Attention" (2): "autoregressive decoding of the entire sequence". PAPER-SILENT: the [CLS] of each
    block is read but not predicted, so it has no label; nor has padding, whose place [CLS] takes here.
    """
    before = functional.pad(labels, (1, -1), value=CLS_ID)
    return before.masked_fill((positions == 0) | (before == IGNORED_LABEL), CLS_ID)
