"""Evaluating a model on a task's whole dev sets, which are tokenised once."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from maelm_composer.config import FinetuningConfig, SpanConfig
from maelm_composer.finetuning.fit import EVAL_BATCH_SIZE, predict
from maelm_composer.finetuning.model import FinetuningModel
from maelm_composer.tasks.catalogue import CLASSIFICATION, REGRESSION, SPAN, Task
from maelm_composer.tasks.examples import encode_texts, stack_windows
from maelm_composer.tasks.metrics import compute_metrics, score_constant
from maelm_composer.tasks.squad import Window, build_windows, predict_answers
from maelm_composer.tasks.squad_metric import score_questions


@dataclass(frozen=True)
class Result:
    metrics: dict[str, float]
    predictions: list[dict[str, Any]]  # one per example, in the order of the splits and their rows
    influences: dict[str, np.ndarray]  # metric -> influence of every example of its split, (examples,)


class Evaluator:
    def __init__(
        self,
        task: Task,
        examples: dict[str, list[Any]],  # by split
        config: FinetuningConfig,
        tokenizer: Any,
        max_seq_len: int,
        span: SpanConfig,
    ) -> None:
        """Tokenise the dev sets; ``max_seq_len`` and ``span`` must not exceed the encoder's limits."""
        self.task, self.examples, self.span = task, examples, span
        self.precision, self.pad_id = config.precision, tokenizer.pad_token_id
        self.batch_size = min(EVAL_BATCH_SIZE, config.device_train_microbatch_size or EVAL_BATCH_SIZE)
        self.windows: list[list[Window]] = []  # span task: the windows of each example
        if task.kind == SPAN:
            (split,) = task.eval_splits
            self.windows = list(build_windows(examples[split], tokenizer, max_seq_len, span, is_training=False))
            self.inputs = {split: stack_windows(self.windows)[0]}
        else:
            self.inputs = {split: encode_texts(rows, task, tokenizer, max_seq_len) for split, rows in examples.items()}

    def score_constant(self) -> float:
        """The task's metric for the best constant prediction."""
        examples = self.examples[self.task.eval_splits[0]]
        is_span = self.task.kind == SPAN
        labels = [bool(example.answers_text) if is_span else example.label for example in examples]
        return score_constant(self.task, np.array(labels))

    def evaluate(self, model: FinetuningModel) -> Result:
        scores = {
            split: predict(model, inputs, self.precision, self.pad_id, self.batch_size)
            for split, inputs in self.inputs.items()
        }
        if self.task.kind == SPAN:
            return self._evaluate_span(scores[self.task.eval_splits[0]])
        is_classification = self.task.kind == CLASSIFICATION
        outputs = {
            split: np.array([row.argmax() if is_classification else row for row in rows])
            for split, rows in scores.items()
        }
        labels = {split: np.array([example.label for example in rows]) for split, rows in self.examples.items()}
        rescale: Callable[[float], float] = self.task.denormalize if self.task.kind == REGRESSION else int
        predictions = [
            {'split': split, 'id': example.id, 'label': example.label, 'prediction': rescale(output.item())}
            | ({'scores': row.tolist()} if is_classification else {})
            for split in self.examples
            for example, output, row in zip(self.examples[split], outputs[split], scores[split], strict=True)
        ]
        metrics, influences = compute_metrics(self.task, outputs, labels)
        return Result(metrics, predictions, influences)

    def _evaluate_span(self, scores: list[np.ndarray]) -> Result:
        examples = self.examples[self.task.eval_splits[0]]
        answers = predict_answers(examples, self.windows, scores, self.span)
        metrics, each = score_questions(
            {example.id: list(example.answers_text) for example in examples},
            {answer['id']: answer['prediction'] for answer in answers},
            {answer['id']: answer['null_score_difference'] for answer in answers},
        )
        return Result(metrics, answers, {name: values - values.mean() for name, values in each.items()})
