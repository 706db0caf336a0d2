"""The effective rank of an encoder's last layer during fine-tuning (Table 3, Figure 5)."""

import math
from collections.abc import Collection, Iterable

import numpy as np
import torch
from torch import nn

from maelm_composer.analysis.effective_rank import Gram, measure_effective_rank
from maelm_composer.console import track
from maelm_composer.finetuning.batching import FinetuningBatch, collate, sort_for_evaluation
from maelm_composer.finetuning.fit import EVAL_BATCH_SIZE
from maelm_composer.tasks.examples import Inputs

MAX_TOKENS = 2**16  # 85 per dimension of base; with more, the ranks took as long as the fine-tuning on two cores


def rank_of_inputs(encoder: nn.Module, inputs: Inputs, special_ids: Collection[int], pad_id: int) -> int:
    """:func:`rank_of_encoder` in fp32 over every k-th row, with the least k that gives about ``MAX_TOKENS`` tokens."""
    lengths = np.asarray(inputs.lengths)
    chosen = np.arange(0, len(lengths), math.ceil(lengths.sum() / MAX_TOKENS))
    parts = sort_for_evaluation(lengths[chosen].tolist(), EVAL_BATCH_SIZE)
    batches = (collate(inputs, chosen[rows], pad_id) for rows in parts)
    return rank_of_encoder(encoder, track(batches, len(parts), 'effective rank', 'batches'), special_ids)


@torch.inference_mode()
def rank_of_encoder(encoder: nn.Module, batches: Iterable[FinetuningBatch], special_ids: Collection[int]) -> int:
    """Effective rank of the last layer at the real tokens. No random number is drawn.

    Args:
        encoder: on any device, in any mode, which it keeps.
        special_ids: the tokenizer's ids of [CLS], [PAD] and [SEP], which are not real tokens.

    Raises:
        InputError: no batch contains a real token.
    """
    device = next(encoder.parameters()).device
    specials = torch.tensor(sorted(special_ids), device=device)
    was_training = encoder.training
    encoder.eval()
    gram: Gram | None = None
    try:
        for batch in batches:
            ids, positions, segments = batch.to(device)[:3]
            states = encoder(ids, positions, segments)
            gram = gram or Gram(states.shape[-1], device)
            gram.add(states[(segments > 0) & torch.isin(ids, specials, invert=True)])
    finally:
        encoder.train(was_training)
    return measure_effective_rank(gram or Gram(1))
