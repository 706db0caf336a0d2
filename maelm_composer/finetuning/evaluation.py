"""Predictions of a model, and their evaluation on a task's whole dev sets, which are tokenised once."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from maelm_composer.config import FinetuningConfig, SpanConfig
from maelm_composer.finetuning.fit import EVAL_BATCH_SIZE, predict
from maelm_composer.finetuning.model import FinetuningModel
from maelm_composer.records import Evaluation
from maelm_composer.tasks.catalogue import CLASSIFICATION, SPAN, Task
from maelm_composer.tasks.examples import Inputs, encode
from maelm_composer.tasks.metrics import compute_metrics, score_constant, score_questions
from maelm_composer.tasks.squad import predict_answers


@dataclass(frozen=True)
class Result:
    metrics: dict[str, float]
    predictions: list[dict[str, Any]]  # one per example, in the order of the splits and their rows
    influences: dict[str, np.ndarray]  # metric -> (examples,) influence function (tasks/metrics.py)


def read_scores(
    task: Task, examples: Sequence[Any], inputs: Inputs, scores: Sequence[np.ndarray], span: SpanConfig
) -> list[dict[str, Any]]:
    """One prediction per example: ``id``, ``prediction``, for classes ``scores``; span: see :func:`predict_answers`.

    Args:
        inputs: of ``examples``; only the windows of a span task are read.
        scores: the model's output for each row of ``inputs``, as :func:`predict` returns them.
    """
    if task.kind == SPAN:
        return predict_answers(examples, inputs.windows, scores, span)
    return [
        {'id': example.id, 'prediction': int(row.argmax()), 'scores': row.tolist()}
        if task.kind == CLASSIFICATION
        else {'id': example.id, 'prediction': task.denormalize(row.item())}
        for example, row in zip(examples, scores, strict=True)
    ]


class Evaluator:
    """Evaluates a model during its training, and keeps the best evaluation; the first of equals."""

    def __init__(
        self,
        task: Task,
        examples: dict[str, list[Any]],  # by split
        config: FinetuningConfig,
        tokenizer: Any,
    ) -> None:
        """Tokenise the dev sets; ``max_seq_len`` and ``span`` of ``config`` must not exceed the encoder's limits."""
        self.task, self.examples, self.span = task, examples, config.span
        self.precision, self.pad_id = config.precision, tokenizer.pad_token_id
        self.batch_size = min(EVAL_BATCH_SIZE, config.device_train_microbatch_size or EVAL_BATCH_SIZE)
        self.inputs = {
            split: encode(rows, task, tokenizer, config.max_seq_len, config.span) for split, rows in examples.items()
        }
        self.keeps_weights, self.weights = config.saves_model, dict[str, torch.Tensor]()  # of the best evaluation
        self.best: Result | None = None
        self.best_step, self.seconds = 0, 0.0
        self.history: list[Evaluation] = []

    def score_constant(self) -> float:
        """The task's metric for the best constant prediction."""
        examples = self.examples[self.task.eval_splits[0]]
        is_span = self.task.kind == SPAN
        labels = [bool(example.answers_text) if is_span else example.label for example in examples]
        return score_constant(self.task, np.array(labels))

    def evaluate(self, model: FinetuningModel, step: int) -> None:
        start = time.perf_counter()
        result = self._evaluate(model)
        score = result.metrics[self.task.metric]
        if all(score > earlier.score for earlier in self.history):
            self.best, self.best_step = result, step
            if self.keeps_weights:
                self.weights = {name: value.to('cpu', copy=True) for name, value in model.state_dict().items()}
        self.history.append(Evaluation(step=step, score=score))
        self.seconds += time.perf_counter() - start

    def _evaluate(self, model: FinetuningModel) -> Result:
        scores = {
            split: predict(model, inputs, self.precision, self.pad_id, self.batch_size)
            for split, inputs in self.inputs.items()
        }
        found = {
            split: read_scores(self.task, examples, self.inputs[split], scores[split], self.span)
            for split, examples in self.examples.items()
        }
        if self.task.kind == SPAN:
            (examples,), (answers,) = self.examples.values(), found.values()
            metrics, each = score_questions(
                {example.id: list(example.answers_text) for example in examples},
                {answer['id']: answer['prediction'] for answer in answers},
                {answer['id']: answer['null_score_difference'] for answer in answers},
            )
            return Result(metrics, answers, {name: values - values.mean() for name, values in each.items()})
        # A regression's predictions are on the scale of its labels; correlations do not depend on the scale.
        outputs = {split: np.array([p['prediction'] for p in predictions]) for split, predictions in found.items()}
        labels = {split: np.array([example.label for example in rows]) for split, rows in self.examples.items()}
        metrics, influences = compute_metrics(self.task, outputs, labels)
        predictions = [
            {'split': split, 'id': example.id, 'label': example.label} | prediction
            for split, examples in self.examples.items()
            for example, prediction in zip(examples, found[split], strict=True)
        ]
        return Result(metrics, predictions, influences)
