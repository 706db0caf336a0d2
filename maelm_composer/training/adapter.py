"""The model as Composer's Trainer expects it: a loss for training and three metrics for validation."""

from typing import Any

import torch
from composer.models import ComposerModel
from torch import Tensor, nn
from torchmetrics import Metric

from maelm_composer.config import Precision
from maelm_composer.masking.collate import IGNORED_LABEL, Batch
from maelm_composer.model.layer import Layer
from maelm_composer.patches import keep_buffers_from_ddp


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
        count = (labels != IGNORED_LABEL).sum()
        self.total += loss.double() * count
        self.count += count

    def compute(self) -> Tensor:
        return self.total / self.count


class MaskedPerplexity(MaskedLoss):
    """exp of the masked loss."""

    def compute(self) -> Tensor:
        return super().compute().exp()


class MaskedAccuracy(MaskedLoss):
    """Share of the predicted positions whose most likely token is the label."""

    def update(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        is_predicted = labels != IGNORED_LABEL
        self.total += ((logits.argmax(-1) == labels) & is_predicted).sum()
        self.count += is_predicted.sum()


class PretrainingModel(ComposerModel):
    """``MaskedLanguageModel`` for the Trainer.

    Autocast is entered here because Composer refuses autocast on a CPU and, under FSDP2, casts parameters and gradients
    instead. The arithmetic is therefore the same on every device, sharded or not.
    """

    def __init__(self, model: nn.Module, precision: Precision) -> None:
        super().__init__()
        # FSDP2 gathers the weights layer by layer. The token table, which three parts use, stays with the root.
        model.fsdp_wrap_fn = lambda module: isinstance(module, Layer)  # type: ignore[assignment]
        self.model = model
        keep_buffers_from_ddp(self)
        self.is_bf16 = precision == Precision.bf16

    def forward(self, batch: Batch) -> Any:
        """The model's output for a batch, whose tensors Composer hands on in a plain list or tuple."""
        batch = Batch(*batch)
        with torch.autocast(batch.input_ids.device.type, torch.bfloat16, enabled=self.is_bf16):
            output = self.model(batch)
        # Composer keeps the output until the next one is there, with logits that training does not read.
        return output._replace(logits=None) if self.training else output

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        return outputs.loss

    def eval_forward(self, batch: Batch, outputs: Any | None = None) -> Any:
        return self(batch)  # outputs are given for metrics of training alone, of which there are none

    def get_metrics(self, is_train: bool) -> dict[str, Metric]:
        metrics = () if is_train else (MaskedLoss(), MaskedPerplexity(), MaskedAccuracy())
        return {type(metric).__name__: metric for metric in metrics}

    def update_metric(self, batch: Batch, outputs: Any, metric: Metric) -> None:
        metric.update(outputs.loss, outputs.logits, outputs.labels)


def count_tokens(batch: Batch) -> dict[str, int]:
    """For Composer: how many tokens there are, and how many the loss averages."""
    labels = Batch(*batch).labels
    return {'total': labels.numel(), 'loss_generating': int((labels != IGNORED_LABEL).sum())}
