"""The batch of pretraining: masked rows of token ids, split into the inputs of encoder and decoder (Sec. 3, 4.3)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maelm_composer.config import EncoderMaskContent, MaskingConfig, PositionIds, PretrainingConfig
from maelm_composer.data.special_tokens import CLS_ID, NUM_LEADING_SPECIALS, PAD_ID, SEP_ID
from maelm_composer.masking.draw import TOKEN_STREAM, count_masked, count_visible, draw_bits, draw_masked_positions

Ids = NDArray[np.int64]
Flags = NDArray[np.bool_]
IGNORED_LABEL = -100


class Batch(NamedTuple):
    """B packed rows of N tokens, of which S are the encoder's input and M are predicted.

    All batches of a recipe have the same S and M, so batches of equal size share a compiled step. Attention does not
    cross the blocks of a packed row, and positions count from the start of a block, so each block is computed as if
    alone. One exception: where [CLS] may be masked too, a decoder with cross-attention lets a block without a visible
    token attend to the whole row.
    """

    input_ids: Tensor  # (B, S) the encoder's input
    position_ids: Tensor  # (B, S) the encoder's positions, absolute and for relative distances
    visible_index: Tensor  # (B, S) the token's position in the row; N for an unused slot
    segment_ids: Tensor  # (B, N) number of the block in the row, from 1; 0 is padding
    original_position_ids: Tensor  # (B, N) position in the block, masked tokens included: the decoder's positions
    resets: Tensor  # (B, N) True where the encoder reads a masked position, but the decoder gets e_[MASK]
    labels: Tensor  # (B, N) the original id at predicted positions, -100 elsewhere
    predicted_index: Tensor  # (B, M) positions for the head, ascending (all if autoregressive); N for an unused slot

    def to(self, device: str | torch.device) -> 'Batch':
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in self))


@dataclass(frozen=True)
class MaskingCollator:
    """Turns B samples ``{'input_ids': (N,) integers, 'row': int, 'epoch': int}`` into a batch on the CPU.

    A sample is a packed row: ``[CLS] … [SEP] [CLS] … [SEP]``, with [PAD] at the end alone. Its special tokens have the
    ids of ``data/special_tokens.py``, and [MASK] is ``vocab_size - 1``; other ids are not detected. Of a row's N slots,
    padding counted, round(p·N) are masked, or floor(p·N + U[0, 1)) with ``rounds_at_random``. The masks are a function
    of (seed, epoch, row).
    """

    masking: MaskingConfig
    vocab_size: int
    seed: int  # of the masks
    predicts_every_token: bool = False  # for the autoregressive decoder, which predicts the whole row

    def __call__(self, samples: Sequence[dict[str, Any]]) -> Batch:
        """B samples -> a batch. Raises InputError if a row has too few tokens to mask."""
        ids = np.stack([sample['input_ids'] for sample in samples]).astype(np.int64)
        rows = np.array([sample['row'] for sample in samples], np.int64)
        epochs = np.array([sample['epoch'] for sample in samples], np.int64)
        is_masked, is_fed_masked = self._draw(ids, epochs, rows)
        fed_ids = np.where(is_fed_masked, self._draw_replacements(ids, epochs, rows), ids)
        return self._split(ids, fed_ids, is_masked, is_fed_masked)

    def read_masks(self, ids: Ids) -> Batch:
        """The batch whose masks are the [MASK]s in (B, N) ``ids``; S and M are the largest of a row.

        A [MASK]'s original is unknown, so its label is [MASK]. Of a row's m [MASK]s the encoder reads the first
        round(δ·m). Random tokens in their place depend on the position alone, so that a text reads alike in any batch.
        """
        is_masked = ids == self.vocab_size - 1
        is_fed_masked = is_masked & (is_masked.cumsum(axis=1) <= self._count_fed(is_masked.sum(axis=1))[:, None])
        zeros = np.zeros(len(ids), np.int64)
        replacements = self._draw_replacements(ids, epochs=zeros, rows=zeros)
        fed_ids = np.where(is_fed_masked, replacements, ids)
        num_visible, num_masked = (~is_masked | is_fed_masked).sum(axis=1).max(), is_masked.sum(axis=1).max()
        return self._split(ids, fed_ids, is_masked, is_fed_masked, (int(num_visible), int(num_masked)))

    def _count_fed(self, masked: Any) -> Any:
        """How many of ``masked`` positions stay in the encoder's input (δ, Sec. 4.3)."""
        return np.rint(self.masking.encoder_mask_fraction * masked).astype(np.int64)

    def _draw(self, ids: Ids, epochs: Ids, rows: Ids) -> tuple[Flags, Flags]:
        """(B, N) ids -> (B, N) whether masked; (B, N) whether masked and in the encoder's input."""
        is_maskable = ids != PAD_ID
        if not self.masking.masks_special_tokens:
            is_maskable &= (ids != CLS_ID) & (ids != SEP_ID)
        drawn, counts = draw_masked_positions(is_maskable, self.masking, self.seed, epochs, rows)
        order = np.arange(drawn.shape[1])[None]
        is_masked, is_fed_masked = np.zeros_like(is_maskable), np.zeros_like(is_maskable)
        np.put_along_axis(is_masked, drawn, order < counts[:, None], axis=1)
        np.put_along_axis(is_fed_masked, drawn, order < self._count_fed(counts)[:, None], axis=1)
        return is_masked, is_fed_masked

    def _draw_replacements(self, ids: Ids, epochs: Ids, rows: Ids) -> Ids:
        """(B, N) ids that replace the original ones at masked positions in the encoder's input."""
        match self.masking.encoder_mask_content:
            case EncoderMaskContent.mask_token:
                return np.full_like(ids, self.vocab_size - 1)
            case EncoderMaskContent.random_token:
                bits = draw_bits(self.seed, epochs, rows, ids.shape[1], TOKEN_STREAM)
                num_real_tokens = self.vocab_size - NUM_LEADING_SPECIALS - 1
                return (NUM_LEADING_SPECIALS + bits % np.uint64(num_real_tokens)).astype(np.int64)

    def _split(
        self, ids: Ids, fed_ids: Ids, is_masked: Flags, is_fed_masked: Flags, sizes: tuple[int, int] | None = None
    ) -> Batch:
        """Split (B, N) masked rows into the inputs of encoder and decoder, with ``sizes`` S and M or the recipe's."""
        length = ids.shape[1]
        num_visible, num_masked = sizes or (count_visible(self.masking, length), count_masked(self.masking, length)[1])
        is_padding = ids == PAD_ID
        is_start = ids == CLS_ID
        segment_ids = np.where(is_padding, 0, is_start.cumsum(axis=1))
        starts = np.maximum.accumulate(np.where(is_start, np.arange(length), 0), axis=1)
        original_positions = np.arange(length) - starts

        is_visible = ~is_masked | is_fed_masked
        visible_index = _index_of(is_visible, num_visible)
        match self.masking.position_ids:
            case PositionIds.aligned:
                positions = original_positions
            case PositionIds.consecutive:
                before: Ids = is_visible.cumsum(axis=1) - is_visible
                positions = before - np.take_along_axis(before, starts, axis=1)
        if self.predicts_every_token:
            is_predicted = ~is_padding & ~is_start
            predicted_index = np.broadcast_to(np.arange(length), ids.shape).copy()
        else:
            is_predicted = is_masked
            predicted_index = _index_of(is_masked, num_masked)
        arrays = {
            'input_ids': _take(fed_ids, visible_index, fill=PAD_ID),
            'position_ids': _take(positions, visible_index, fill=0),
            'visible_index': visible_index,
            'segment_ids': segment_ids,
            'original_position_ids': original_positions,
            'resets': is_fed_masked & self.masking.decoder_resets_masks,
            'labels': np.where(is_predicted, ids, IGNORED_LABEL),
            'predicted_index': predicted_index,
        }
        return Batch(**{name: torch.from_numpy(array) for name, array in arrays.items()})


def build_collator(config: PretrainingConfig) -> MaskingCollator:
    """The collator of a recipe, with the recipe's seed."""
    return MaskingCollator(
        masking=config.masking,
        vocab_size=config.model.vocab_size,
        seed=config.seed,
        predicts_every_token=config.model.predicts_every_token,
    )


def _index_of(flags: Flags, width: int) -> Ids:
    """(B, N) flags -> (B, ``width``) positions of set flags, ascending, then N in unused slots."""
    counts = flags.sum(axis=1, keepdims=True)
    if counts.max() > width:
        raise ValueError(f'a row has {counts.max()} positions for {width} slots: masking/draw.py counts too few')
    index = np.argsort(~flags, axis=1, kind='stable')[:, :width]
    unused = np.arange(width) >= counts
    return np.where(unused, flags.shape[1], index)


def _take(values: Ids, index: Ids, fill: int) -> Ids:
    """(B, N) values, (B, I) index -> (B, I) values; ``fill`` where the index is N."""
    padded = np.pad(values, ((0, 0), (0, 1)), constant_values=fill)
    return np.take_along_axis(padded, index, axis=1)
