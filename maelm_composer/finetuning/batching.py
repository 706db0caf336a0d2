"""Batches of rows of similar length, so that little is computed for padding."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from maelm_composer.tasks.examples import Inputs

CHUNK_BATCHES = 100  # rows are sorted by length within a chunk of this many batches


class FinetuningBatch(NamedTuple):
    """B rows padded to the length S of the longest."""

    input_ids: Tensor  # (B, S)
    position_ids: Tensor  # (B, S)
    segment_ids: Tensor  # (B, S) 1 for a token, 0 for padding
    targets: Tensor  # (B,); span task: (B, 2) first and last token of the answer
    is_candidate: Tensor | None = None  # (B, S), span task: an answer may start or end here; [CLS] is "no answer"

    def to(self, device: torch.device) -> 'FinetuningBatch':
        return self._replace(
            **{name: value.to(device, non_blocking=True) for name, value in self._asdict().items() if value is not None}
        )


def order_by_length(lengths: Sequence[int], batch_size: int, seed: int, epoch: int) -> list[np.ndarray]:
    """One epoch's batches of row numbers, each row once: a function of the lengths, ``seed`` and ``epoch``.

    Rows are shuffled, sorted by length within chunks of ``CHUNK_BATCHES`` batches and cut into batches, which are
    shuffled in turn. One batch may be smaller than ``batch_size``.
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


def collate(inputs: Inputs, rows: Sequence[int] | np.ndarray, pad_id: int) -> FinetuningBatch:
    """The batch of the rows with the numbers ``rows``."""
    ids = [inputs.input_ids[row] for row in rows]
    lengths = np.array([len(row) for row in ids])
    slots = np.arange(lengths.max())
    is_token = slots < lengths[:, None]
    padded = np.full(is_token.shape, pad_id, np.int64)
    padded[is_token] = np.concatenate(ids)
    is_candidate = None
    if inputs.passage_starts is not None:
        starts = inputs.passage_starts[rows][:, None]
        is_candidate = torch.from_numpy((slots == 0) | ((slots >= starts) & (slots < lengths[:, None] - 1)))
    return FinetuningBatch(
        input_ids=torch.from_numpy(padded),
        position_ids=torch.from_numpy(np.where(is_token, slots, 0)),
        segment_ids=torch.from_numpy(is_token.astype(np.int64)),
        targets=torch.from_numpy(inputs.targets[rows]),
        is_candidate=is_candidate,
    )


def measure_padding(lengths: Sequence[int], batches: Sequence[np.ndarray]) -> float:
    """The share of padding among all positions of the batches."""
    length = np.asarray(lengths)
    total = sum(len(rows) * int(length[rows].max()) for rows in batches)
    return 1 - sum(int(length[rows].sum()) for rows in batches) / total


def sort_for_evaluation(lengths: Sequence[int], batch_size: int) -> list[np.ndarray]:
    """Batches of row numbers in descending order of length."""
    order = np.argsort(-np.asarray(lengths), kind='stable')
    return [order[first : first + batch_size] for first in range(0, len(order), batch_size)]
