"""Rows of like length into batches, so that hardly anything is computed for padding."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from maelm_composer.tasks.examples import Inputs

Batch = dict[str, Tensor]
CHUNK_BATCHES = 100  # rows are sorted by length within so many batches; more mixes them less


def order_by_length(lengths: Sequence[int], batch_size: int, seed: int, epoch: int) -> list[np.ndarray]:
    """One epoch's batches of row numbers, each of like length; a function of (seed, epoch) and the lengths.

    Rows are shuffled, sorted within chunks of ``CHUNK_BATCHES`` batches, cut, and the batches shuffled. Every row comes
    once; one batch may be smaller.
    """
    generator = np.random.default_rng((seed, epoch))
    order, length = generator.permutation(len(lengths)), np.asarray(lengths)
    batches: list[np.ndarray] = []
    chunk_size = batch_size * CHUNK_BATCHES
    for first in range(0, len(order), chunk_size):
        chunk = order[first : first + chunk_size]
        chunk = chunk[np.argsort(length[chunk], kind='stable')]
        batches += [chunk[i : i + batch_size] for i in range(0, len(chunk), batch_size)]
    return [batches[i] for i in generator.permutation(len(batches))]


def collate(inputs: Inputs, rows: Sequence[int] | np.ndarray, pad_id: int) -> Batch:
    """The batch of the numbered rows, padded to its longest.

    Returns:
        ``input_ids``, ``position_ids`` and ``segment_ids`` (B, S), the last 1 for a token and 0 for padding;
        ``targets`` (B,) or (B, 2); of a span task also ``is_candidate`` (B, S): where an answer may start or end,
        [CLS] for "no answer" included.
    """
    ids = [inputs.input_ids[row] for row in rows]
    lengths = np.array([len(row) for row in ids])
    slots = np.arange(lengths.max())
    is_token = slots < lengths[:, None]
    padded = np.full(is_token.shape, pad_id, np.int64)
    padded[is_token] = np.concatenate(ids)
    batch = {
        'input_ids': torch.from_numpy(padded),
        'position_ids': torch.from_numpy(np.where(is_token, slots, 0)),
        'segment_ids': torch.from_numpy(is_token.astype(np.int64)),
        'targets': torch.from_numpy(inputs.targets[rows]),
    }
    if inputs.passage_starts is not None:
        starts = inputs.passage_starts[rows][:, None]
        batch['is_candidate'] = torch.from_numpy((slots == 0) | ((slots >= starts) & (slots < lengths[:, None] - 1)))
    return batch


def measure_padding(lengths: Sequence[int], batches: Sequence[np.ndarray]) -> float:
    """Share of the positions of these batches that are padding."""
    length = np.asarray(lengths)
    total = sum(len(rows) * int(length[rows].max()) for rows in batches)
    return 1 - sum(int(length[rows].sum()) for rows in batches) / total


def sort_for_evaluation(lengths: Sequence[int], batch_size: int) -> Iterator[np.ndarray]:
    """Batches of row numbers, the longest first."""
    order = np.argsort(-np.asarray(lengths), kind='stable')
    for first in range(0, len(order), batch_size):
        yield order[first : first + batch_size]
