"""Metrics of classification and regression as fractions, their influence functions, and scores of constant answers.

Accuracy, F1 and correlations are not torchmetrics', which computes ratios in single precision and does not give 0 for
every constant prediction (Matthews' correlation); scipy gives NaN there.
"""

import numpy as np
from scipy.stats import rankdata

from maelm_composer.tasks.catalogue import CLASSIFICATION, SPAN, Task


def compute_metrics(task: Task, predictions: dict[str, np.ndarray], labels: dict[str, np.ndarray]) -> dict[str, float]:
    """The task's metrics by name.

    Args:
        predictions: by evaluation split, (examples,) label ids or numbers.
        labels: the same.
    """
    return {name: _compute(metric, predictions[split], labels[split]) for name, split, metric in _list_metrics(task)}


def compute_influences(
    task: Task, predictions: dict[str, np.ndarray], labels: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The influence function of each of the task's metrics at every example, (examples,); arguments as above.

    A metric over n examples differs from its value on all examples there are by about the mean of these numbers over
    the n, so their variance over n is the metric's variance over samples of examples; and those of a weighted sum of
    metrics are the weighted sum of theirs.
    """
    return {
        name: _measure_influence(metric, predictions[split], labels[split])
        for name, split, metric in _list_metrics(task)
    }


def score_constant(task: Task, labels: np.ndarray) -> float:
    """The score of the best constant answer.

    Args:
        labels: (examples,); of a span task, whether each question has an answer.
    """
    if task.kind == SPAN:
        return float(1 - labels.mean())
    if task.kind == CLASSIFICATION and task.metric.endswith('accuracy'):
        return float(np.bincount(labels).max() / len(labels))
    return 0.0  # a constant correlates with nothing


def _list_metrics(task: Task) -> list[tuple[str, str, str]]:
    """(name in a record, evaluation split, metric) of all metrics."""
    if len(task.eval_splits) == 1:
        return [(name, task.eval_splits[0], name) for name in task.metrics]
    parts = ((name, name.rpartition('_')) for name in task.metrics)
    return [(name, split, metric) for name, (split, _, metric) in parts]


def _compute(metric: str, predictions: np.ndarray, labels: np.ndarray) -> float:
    match metric:
        case 'accuracy':
            return float((predictions == labels).mean())
        case 'f1':
            true, either = ((predictions == 1) & (labels == 1)).sum(), (predictions == 1).sum() + (labels == 1).sum()
            return float(2 * true / either) if either else 0.0
        case 'matthews' | 'pearson':  # Matthews' is Pearson's of two labels 0 and 1
            return _correlate(predictions, labels)
        case 'spearman':
            return _correlate(rankdata(predictions), rankdata(labels))
    raise ValueError(f'no metric {metric}')


def _measure_influence(metric: str, predictions: np.ndarray, labels: np.ndarray) -> np.ndarray:
    match metric:
        case 'accuracy':
            correct = (predictions == labels).astype(float)
            return correct - correct.mean()
        case 'f1':
            true, either = (predictions == 1) & (labels == 1), (predictions == 1) * 1.0 + (labels == 1)
            f1 = _compute(metric, predictions, labels)
            return (2 * true - f1 * either) / max(either.mean(), 1 / len(labels))
        case 'matthews' | 'pearson':
            if np.ptp(predictions) == 0 or np.ptp(labels) == 0:
                return np.zeros(len(labels))
            first, second = ((values - values.mean()) / values.std() for values in (predictions, labels))
            return first * second - _correlate(predictions, labels) * (first**2 + second**2) / 2
        case 'spearman':
            if np.ptp(predictions) == 0 or np.ptp(labels) == 0:
                return np.zeros(len(labels))
            first, second = ((rankdata(values) - 0.5) / len(values) for values in (predictions, labels))
            # Besides its own two ranks, an example shifts the ranks of all above it.
            shifts = _sum_from(first, second) + _sum_from(second, first)
            scale = first.std() * second.std()
            found: np.ndarray = (first * second + shifts) / scale
            return found - found.mean()
    raise ValueError(f'no metric {metric}')


def _sum_from(ranks: np.ndarray, values: np.ndarray) -> np.ndarray:
    """(n,) for each example the mean over all n of ``values`` where the rank is higher, and half where it is equal."""
    _, inverse = np.unique(ranks, return_inverse=True)
    sums = np.bincount(inverse, weights=values)
    above: np.ndarray = np.cumsum(sums[::-1])[::-1] - sums / 2
    return above[inverse] / len(ranks)


def _correlate(first: np.ndarray, second: np.ndarray) -> float:
    """Pearson's correlation; 0 where one of the two is constant."""
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return 0.0
    return float(np.corrcoef(first, second)[0, 1])
