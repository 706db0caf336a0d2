"""The model as Composer's Trainer sees it: a loss to minimise and three numbers to validate by."""

from typing import Any

import torch
from composer.models import ComposerModel
from torch import Tensor, nn
from torchmetrics import Metric

from maelm_composer.config import Precision
from maelm_composer.model.layer import Layer

Batch = dict[str, Tensor]


class MaskedLoss(Metric):
    """Cross-entropy in nats, averaged over every predicted position of every rank."""

    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state('total', torch.zeros((), dtype=torch.float64), dist_reduce_fx='sum')
        self.add_state('count', torch.zeros((), dtype=torch.float64), dist_reduce_fx='sum')

    def update(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """loss () mean over the labels other than -100; logits (B, M, V); labels (B, M)."""
        count = (labels != -100).sum()
        self.total += loss.double() * count
        self.count += count

    def compute(self) -> Tensor:
        return self.total / self.count


class MaskedPerplexity(MaskedLoss):
    """exp of the masked loss."""

    def compute(self) -> Tensor:
        return super().compute().exp()


class MaskedAccuracy(MaskedLoss):
    """Share of the predicted positions whose most likely token is the right one."""

    def update(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        is_predicted = labels != -100
        self.total += ((logits.argmax(-1) == labels) & is_predicted).sum()
        self.count += is_predicted.sum()


class PretrainingModel(ComposerModel):
    """``MaskedLanguageModel`` for the Trainer.

    Autocast is entered here and not by Composer, which refuses it on a CPU and, under FSDP2, would cast parameters
    and gradients instead; so the arithmetic is the same on every device and under every sharding.
    """

    def __init__(self, model: nn.Module, precision: Precision) -> None:
        super().__init__()
        # FSDP2 gathers layer by layer; the root keeps what is shared by several parts, the token table above all.
        model.fsdp_wrap_fn = lambda module: isinstance(module, Layer)  # type: ignore[assignment]
        self.model = model
        self.is_bf16 = precision is Precision.bf16

    def forward(self, batch: Batch) -> Any:
        """The model's output for a batch; see ``maelm_composer.masking.collate`` for the batch."""
        with torch.autocast(batch['input_ids'].device.type, torch.bfloat16, enabled=self.is_bf16):
            return self.model(batch)

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        return outputs.loss

    def eval_forward(self, batch: Batch, outputs: Any | None = None) -> Any:
        return self(batch) if outputs is None else outputs

    def get_metrics(self, is_train: bool) -> dict[str, Metric]:
        metrics = () if is_train else (MaskedLoss(), MaskedPerplexity(), MaskedAccuracy())
        return {type(metric).__name__: metric for metric in metrics}

    def update_metric(self, batch: Batch, outputs: Any, metric: Metric) -> None:
        metric.update(outputs.loss, outputs.logits, outputs.labels)


def count_predicted(batch: Batch) -> dict[str, int]:
    """Tokens of the rows, and those that the loss is a mean of."""
    labels = batch['labels']
    return {'total': labels.numel(), 'loss_generating': int((labels != -100).sum())}
