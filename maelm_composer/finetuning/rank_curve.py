"""The rank of an encoder's last hidden states while it is fine-tuned (Table 3, Figure 5)."""

import math
from collections.abc import Collection, Iterable

import numpy as np
import torch
from torch import nn

from maelm_composer.analysis.effective_rank import THRESHOLD, Gram, measure_effective_rank
from maelm_composer.finetuning.batching import Batch, collate, sort_for_evaluation
from maelm_composer.finetuning.fit import EVAL_BATCH_SIZE
from maelm_composer.tasks.examples import Inputs

MAX_TOKENS = 2**16  # 85 for each of base's dimensions; on two cores more took as long as the fine-tuning


def rank_of_inputs(encoder: nn.Module, inputs: Inputs, special_ids: Collection[int], pad_id: int) -> int:
    """As :func:`rank_of_encoder`, over every k-th row, at most ``MAX_TOKENS``; in fp32, as after pretraining."""
    lengths = np.asarray(inputs.lengths)
    chosen = np.arange(0, len(lengths), math.ceil(lengths.sum() / MAX_TOKENS))
    batches = (chosen[rows] for rows in sort_for_evaluation(lengths[chosen].tolist(), EVAL_BATCH_SIZE))
    return rank_of_encoder(encoder, (collate(inputs, rows, pad_id) for rows in batches), special_ids)


@torch.inference_mode()
def rank_of_encoder(
    encoder: nn.Module,
    batches: Iterable[Batch],
    special_ids: Collection[int],
    threshold: float = THRESHOLD,
) -> int:
    """Effective rank of the real tokens' last hidden states, without [MASK]; takes no random number.

    Args:
        encoder: on any device; its mode is left as it was.
        special_ids: the encoder's [CLS], [PAD] and [SEP].

    Raises:
        InputError: no real token in any batch.
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
    return measure_effective_rank(gram or Gram(1), threshold)
