"""The whole dev set of a task: encoded once, scored after training."""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from maelm_composer.config import FinetuningConfig, Precision, SpanConfig
from maelm_composer.finetuning.examples import Inputs, encode_texts, stack_windows
from maelm_composer.finetuning.fit import predict
from maelm_composer.finetuning.metrics import compute_metrics, score_constant
from maelm_composer.finetuning.model import FinetuningModel
from maelm_composer.finetuning.squad import Window, build_all_windows, predict_answers
from maelm_composer.finetuning.squad_metric import evaluate
from maelm_composer.finetuning.tasks import CLASSIFICATION, SPAN, Task


@dataclass(frozen=True)
class Result:
    metrics: dict[str, float]
    predictions: list[dict[str, Any]]  # one an example, in the order of the splits and their rows


@dataclass(frozen=True)
class Evaluator:
    """Build with :func:`build_evaluator`."""

    task: Task
    examples: dict[str, list[Any]]  # by split
    inputs: dict[str, Inputs]
    windows: list[list[Window]]  # of a span task, by example
    span: SpanConfig
    precision: Precision
    pad_id: int

    def score_constant(self) -> float:
        """What the best constant prediction reaches in the task's own metric."""
        examples = self.examples[self.task.eval_splits[0]]
        if self.task.kind == SPAN:
            return score_constant(self.task, np.array([bool(example.answers_text) for example in examples]))
        return score_constant(self.task, np.array([example.label for example in examples]))

    def evaluate(self, model: FinetuningModel) -> Result:
        scores = {split: predict(model, inputs, self.precision, self.pad_id) for split, inputs in self.inputs.items()}
        if self.task.kind == SPAN:
            return self._evaluate_span(scores[self.task.eval_splits[0]])
        is_classification = self.task.kind == CLASSIFICATION
        guesses = {
            split: np.array([row.argmax() if is_classification else row for row in rows])
            for split, rows in scores.items()
        }
        labels = {split: np.array([example.label for example in rows]) for split, rows in self.examples.items()}
        predictions = [
            {'split': split, 'id': example.id, 'label': example.label, 'prediction': guess.item()}
            | ({'scores': row.tolist()} if is_classification else {})
            for split in self.examples
            for example, guess, row in zip(self.examples[split], guesses[split], scores[split], strict=True)
        ]
        return Result(compute_metrics(self.task, guesses, labels), predictions)

    def _evaluate_span(self, scores: list[np.ndarray]) -> Result:
        examples = self.examples[self.task.eval_splits[0]]
        starts, ends = [row[:, 0] for row in scores], [row[:, 1] for row in scores]
        answers = predict_answers(examples, self.windows, starts, ends, self.span)
        metrics = evaluate(
            {example.id: list(example.answers_text) for example in examples},
            {answer['id']: answer['text'] for answer in answers},
            {answer['id']: answer['null_score_difference'] for answer in answers},
        )
        predictions = [
            {'id': answer['id'], 'prediction': answer['text'], 'null_score_difference': answer['null_score_difference']}
            for answer in answers
        ]
        return Result(metrics, predictions)


def build_evaluator(
    task: Task,
    examples: dict[str, list[Any]],
    config: FinetuningConfig,
    tokenizer: Any,
    max_seq_len: int,
    span: SpanConfig,
) -> Evaluator:
    """Tokenise the dev sets."""
    windows: list[list[Window]] = []
    if task.kind == SPAN:
        (split,) = task.eval_splits
        windows = list(build_all_windows(examples[split], tokenizer, max_seq_len, span, is_training=False))
        inputs = {split: stack_windows(itertools.chain.from_iterable(windows))}
    else:
        inputs = {split: encode_texts(rows, task, tokenizer, max_seq_len) for split, rows in examples.items()}
    return Evaluator(task, examples, inputs, windows, span, config.precision, tokenizer.pad_token_id)
