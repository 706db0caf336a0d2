"""A pretrained encoder with a task's head, and the batch that it reads."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from maelm_composer.tasks.catalogue import CLASSIFICATION, REGRESSION, SPAN, Task

SPAN_INIT_STD = 0.02  # PAPER-SILENT


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


def _compute_scores(output: nn.Linear, hidden: Tensor) -> Tensor:
    """In fp32 under autocast, too: bf16 has 8 significant bits, with which many scores would be equal."""
    with torch.autocast(hidden.device.type, enabled=False):
        return output(hidden.float())


class FirstTokenHead(nn.Module):
    """First token -> dropout -> dense -> tanh -> dropout -> output (authors' code, with COCO-LM's dropout)."""

    def __init__(self, hidden_size: int, num_outputs: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.output = nn.Linear(hidden_size, num_outputs)

    def forward(self, hidden: Tensor) -> Tensor:
        """(B, D) hidden states of the first tokens -> (B, outputs)"""
        hidden = torch.tanh(self.dense(self.dropout(hidden)))
        return _compute_scores(self.output, self.dropout(hidden))


class SpanHead(nn.Module):
    """A linear layer that gives every token a start and an end score."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.output = nn.Linear(hidden_size, 2)
        nn.init.normal_(self.output.weight, std=SPAN_INIT_STD)
        nn.init.zeros_(self.output.bias)

    def forward(self, hidden: Tensor, is_candidate: Tensor) -> Tensor:
        """(B, S, D) hidden states, (B, S) candidates -> (B, S, 2) scores, -inf where a token is no candidate."""
        return _compute_scores(self.output, hidden).masked_fill(~is_candidate[..., None], float('-inf'))


class FinetuningModel(nn.Module):
    """An encoder, called as :class:`model.encoder.Encoder`, and a head on its first token or, for spans, on each."""

    def __init__(self, encoder: nn.Module, hidden_size: int, task: Task, dropout: float, seed: int) -> None:
        """Keeps ``encoder``; ``dropout`` is the head's alone. ``seed`` draws the head's initial weights, and torch's
        generators are left as they were.
        """
        super().__init__()
        self.encoder = encoder
        self.kind = task.kind
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self.head = (
                SpanHead(hidden_size) if task.kind == SPAN else FirstTokenHead(hidden_size, task.num_outputs, dropout)
            )

    def forward(self, batch: FinetuningBatch) -> Tensor:
        """Outputs for a batch: (B, classes), (B,) for regression, or (B, S, 2) start and end scores."""
        tokens = batch.input_ids, batch.position_ids, batch.segment_ids
        if self.kind == SPAN:
            return self.head(self.encoder(*tokens), batch.is_candidate)
        # Our encoder's last layer computes the first token only; a Hugging Face encoder computes all.
        first = torch.zeros_like(batch.input_ids[:, :1])
        outputs = self.head(self.encoder(*tokens, predicted_index=first).squeeze(1))
        return outputs.squeeze(-1) if self.kind == REGRESSION else outputs

    def compute_loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Mean loss of fp32 ``scores``, an output of :meth:`forward`, for (B,) or, for spans, (B, 2) ``targets``.

        Cross-entropy, squared error or, for spans, the mean of the cross-entropies of start and end.
        """
        if self.kind == CLASSIFICATION:
            return functional.cross_entropy(scores, targets)
        if self.kind == REGRESSION:
            return functional.mse_loss(scores, targets)
        # (B, S, 2) -> (2B, S): start and end scores of each row in turn, like the (2B,) targets.
        return functional.cross_entropy(scores.transpose(1, 2).flatten(0, 1), targets.flatten())
