"""Batches of the same rows with and without [MASK], the input of every rank measurement."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from maelm_composer.analysis.rows import RowSource
from maelm_composer.config import MaskingConfig
from maelm_composer.data.special_tokens import CLS_ID, PAD_ID, SEP_ID
from maelm_composer.masking.collate import Batch, MaskingCollator

TOKENS_PER_BATCH = 16_384
# PAPER-SILENT: which tokens are "real". Not [CLS] and [SEP], whose number depends on how text is cut into blocks.
NOT_REAL = (CLS_ID, PAD_ID, SEP_ID)


@dataclass(frozen=True)
class View:
    """One batch of rows with and without [MASK]. All fields are (B, S)."""

    plain_ids: Tensor  # the original tokens
    masked_ids: Tensor  # the same with [MASK] at the masked positions
    position_ids: Tensor
    segment_ids: Tensor  # 0 is padding
    is_real: Tensor  # neither [CLS], [SEP] nor padding
    is_masked: Tensor  # True for the real tokens that are [MASK] in ``masked_ids``

    def to(self, device: torch.device) -> 'View':
        return View(**{name: tensor.to(device) for name, tensor in vars(self).items()})

    def number_sequences(self) -> Tensor:
        """(B, S) a number for each position that identifies its row and block."""
        rows = torch.arange(len(self.segment_ids), device=self.segment_ids.device)
        return self.segment_ids + rows[:, None] * (self.segment_ids.max() + 1)


def iterate_views(
    source: RowSource, *, max_tokens: int, mlm_probability: float, seed: int, is_packed: bool
) -> Iterator[View]:
    """Batches of the first rows of ``source`` until they contain ``max_tokens`` real tokens, or of all rows.

    The masks are drawn as in pretraining, and the encoder's input contains every [MASK], as in plain MLM (Sec. 2.2).

    Args:
        is_packed: False for an encoder without block-wise attention: each block becomes a padded row of its own.
    """
    masking = MaskingConfig(mlm_probability=mlm_probability, encoder_mask_fraction=1.0)
    collator = MaskingCollator(masking, source.vocab_size, seed)
    model_ids = torch.from_numpy(source.model_ids)
    rows, tokens = enumerate(source.open()), 0
    while tokens < max_tokens:
        samples: list[dict[str, Any]] = []
        for number, ids in rows:
            samples.append({'input_ids': ids, 'row': number, 'epoch': 0})
            tokens += int(np.isin(ids, NOT_REAL, invert=True).sum())
            if tokens >= max_tokens or len(samples) * len(ids) >= TOKENS_PER_BATCH:
                break
        if not samples:
            return
        view = _build_view(collator(samples), model_ids)
        yield from [view] if is_packed else split_blocks(view, int(model_ids[PAD_ID]))


def _build_view(batch: Batch, model_ids: Tensor) -> View:
    is_masked, fed = batch.labels >= 0, batch.input_ids
    plain = torch.where(is_masked, batch.labels, fed)
    is_real = torch.isin(plain, torch.tensor(NOT_REAL), invert=True)
    return View(model_ids[plain], model_ids[fed], batch.position_ids, batch.segment_ids, is_real, is_masked)


def split_blocks(view: View, pad_id: int) -> Iterator[View]:
    """Unpack ``view``: each block becomes a row, longest first, padded to the longest of its batch."""
    rows, length = view.segment_ids.shape
    pieces = [
        (row * length + (segments == segment).nonzero().flatten())
        for row, segments in enumerate(view.segment_ids)
        for segment in range(1, int(segments.max()) + 1)
    ]
    pieces.sort(key=len, reverse=True)
    fills = {'plain_ids': pad_id, 'masked_ids': pad_id, 'position_ids': 0, 'is_real': 0, 'is_masked': 0}
    flat = {name: functional.pad(getattr(view, name).flatten(), (0, 1), value=fill) for name, fill in fills.items()}
    while pieces:
        count = max(rows * length // len(pieces[0]), 1)
        # (B, S) index into the flattened packed rows; padding has the index after the last position.
        index = nn.utils.rnn.pad_sequence(pieces[:count], batch_first=True, padding_value=rows * length)
        taken = {name: values[index] for name, values in flat.items()}
        yield View(**taken, segment_ids=(index < rows * length).long())
        pieces = pieces[count:]
