"""The effective rank of an encoder's last layer during fine-tuning (Table 3, Figure 5)."""

import math
from collections.abc import Collection

import numpy as np
import torch
from torch import nn

from maelm_composer.analysis.measures import Gram
from maelm_composer.console import track
from maelm_composer.finetuning.batching import collate, sort_for_evaluation
from maelm_composer.finetuning.fit import EVAL_BATCH_SIZE
from maelm_composer.tasks.examples import Inputs

MAX_TOKENS = 2**16  # 85 per dimension of base; with more, the ranks took as long as the fine-tuning on two cores


@torch.inference_mode()
def measure_last_layer(encoder: nn.Module, inputs: Inputs, special_ids: Collection[int], pad_id: int) -> int:
    """Effective rank of the last layer in fp32 at the real tokens; ``encoder`` is left in evaluation mode.

    Every k-th row is read, with the least k that gives about ``MAX_TOKENS`` tokens. No random number is drawn.

    Args:
        special_ids: the tokenizer's ids of [CLS], [PAD] and [SEP], which are not real tokens.

    Raises:
        InputError: no row contains a real token.
    """
    device = next(encoder.parameters()).device
    specials = torch.tensor(sorted(special_ids), device=device)
    lengths = np.asarray(inputs.lengths)
    chosen = np.arange(0, len(lengths), math.ceil(lengths.sum() / MAX_TOKENS))
    parts = sort_for_evaluation(lengths[chosen].tolist(), EVAL_BATCH_SIZE)
    encoder.eval()
    gram: Gram | None = None
    for rows in track(parts, len(parts), 'effective rank', 'batches'):
        ids, positions, segments = collate(inputs, chosen[rows], pad_id).to(device)[:3]
        states = encoder(ids, positions, segments)
        gram = gram or Gram(states.shape[-1], device)
        gram.add(states[(segments > 0) & torch.isin(ids, specials, invert=True)])
    assert gram is not None
    return gram.measure_effective_rank()
