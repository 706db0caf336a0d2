"""Predicting the [MASK]s of texts with a pretraining checkpoint: its encoder, its decoder (or none) and its head."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from maelm_composer.checkpoints.find import find_encoder, read_recipe, read_weights
from maelm_composer.checkpoints.pretrained import build, read_tokenizer, set_to_masked_text
from maelm_composer.data.special_tokens import CLS_ID, PAD_ID
from maelm_composer.device import find_device
from maelm_composer.errors import InputError
from maelm_composer.masking.collate import Batch, MaskingCollator, build_collator
from maelm_composer.model.decoder import take_padded
from maelm_composer.model.maelm import MaskedLanguageModel


class MaskPredictions(NamedTuple):
    """The most probable tokens of the [MASK]s of some texts, ordered by text, then by position."""

    texts: Tensor  # (masks,) number of the text, from 0
    positions: Tensor  # (masks,) position of the [MASK] in the text's ids, which begin with [CLS]
    ids: Tensor  # (masks, top_k), the most probable first
    probabilities: Tensor  # (masks, top_k)


@dataclass(frozen=True)
class MaskPredictor:
    """A pretrained model in evaluation mode and fp32: MAE-LM, RoBERTa or any variant."""

    model: MaskedLanguageModel
    tokenizer: PreTrainedTokenizerFast  # takes "[MASK]" in a text for the mask token
    collator: MaskingCollator  # of the run's recipe: what the encoder and the decoder read
    max_seq_len: int

    @classmethod
    def from_checkpoint(cls, checkpoint: str) -> 'MaskPredictor':
        """Load a run folder, which stands for its newest checkpoint, or a checkpoint in it, local or s3://.

        Raises:
            InputError: the checkpoint is not one of pretraining, is missing or damaged, or does not match its recipe.
        """
        found = find_encoder(checkpoint)
        if found is None or found.run is None:
            kind = 'no checkpoint of ours' if found is None else 'a fine-tuned model without a head for tokens'
            raise InputError(f'{checkpoint} is {kind}: name a pretraining run or one of its checkpoints')
        recipe = read_recipe(found)
        tokenizer = read_tokenizer(found, recipe.model)
        set_to_masked_text(tokenizer)
        model = build(MaskedLanguageModel, recipe.model, read_weights(found)[0], checkpoint)
        model.to(find_device())
        return cls(model, tokenizer, build_collator(recipe), recipe.model.max_seq_len)

    def encode(self, texts: Sequence[str]) -> Batch:
        """B texts -> a batch of rows ``[CLS] text [SEP]``, padded to the longest.

        Raises:
            InputError: there is no text, or one has no [MASK], too many tokens, or a [CLS] or [PAD] of its own.
        """
        if not texts:
            raise InputError('no texts: give at least one, with a [MASK]')
        if broken := [text for text in texts if re.search('[\ud800-\udfff]', text)]:  # as a shell passes other bytes
            raise InputError(f'{broken[0]!r} is not UTF-8: convert it first')
        rows = [encoding.ids for encoding in self.tokenizer.backend_tokenizer.encode_batch(list(texts))]
        for text, row in zip(texts, rows, strict=True):
            shown = repr(text if len(text) <= 60 else f'{text[:57]}...')
            if self.tokenizer.mask_token_id not in row:
                raise InputError(f'{shown} has no [MASK]: write one for each token to predict')
            if CLS_ID in row[1:] or PAD_ID in row:
                raise InputError(f'{shown} has [CLS] or [PAD], which only separate rows: remove it')
            if len(row) > self.max_seq_len:
                raise InputError(f'{shown} has {len(row)} tokens, the model takes {self.max_seq_len}: shorten it')
        ids = np.full((len(rows), max(map(len, rows))), PAD_ID, np.int64)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = row
        return self.collator.read_masks(ids)

    @torch.inference_mode()
    def compute_logits(self, batch: Batch) -> Tensor:
        """A batch of :meth:`encode` -> (masks, V) logits of its [MASK]s, ordered by row, then by position.

        The autoregressive decoder (Table 2) reads the token before each position: it predicts the [MASK]s from left to
        right, and reads its own most probable token where an earlier [MASK] was.
        """
        batch = batch.to(self.model.head.bias.device)
        is_mask = batch.labels == self.tokenizer.mask_token_id  # (B, N)
        is_wanted = take_padded(is_mask, batch.predicted_index)  # (B, M)
        logits = self.model(batch).logits[is_wanted]
        if self.collator.predicts_every_token:
            for _ in range(int(is_mask.sum(1).max()) - 1):
                labels = batch.labels.masked_scatter(is_mask, logits.argmax(-1))
                batch = batch._replace(labels=labels)
                logits = self.model(batch).logits[is_wanted]
        return logits

    def predict(self, texts: Sequence[str], top_k: int = 5) -> MaskPredictions:
        """B texts, as one batch -> the ``top_k`` = K most probable tokens of their P [MASK]s.

        Raises:
            InputError: ``top_k`` is not between 1 and the size of the vocabulary, or as :meth:`encode`.
        """
        if not 1 <= top_k <= self.collator.vocab_size:
            raise InputError(f'top_k {top_k}: must be between 1 and {self.collator.vocab_size}, the number of tokens')
        batch = self.encode(texts)
        probabilities, ids = self.compute_logits(batch).softmax(-1).topk(top_k)
        numbers, positions = (batch.labels == self.tokenizer.mask_token_id).nonzero(as_tuple=True)
        return MaskPredictions(numbers, positions, ids.cpu(), probabilities.cpu())
