"""Metrics of classification and regression as fractions, their influence functions, and scores of constant answers.

torchmetrics is not used: its ratios are in single precision, and its Matthews correlation is not 0 for every constant
prediction. scipy's correlations of a constant are NaN.
"""

import numpy as np
from scipy.stats import rankdata

from maelm_composer.tasks.catalogue import SPAN, Task


def compute_metrics(task: Task, predictions: dict[str, np.ndarray], labels: dict[str, np.ndarray]) -> dict[str, float]:
    """The task's metrics by name.

    Args:
        predictions: evaluation split -> (examples,) label ids or numbers.
        labels: as ``predictions``.
    """
    return {name: _compute(kind, predictions[split], labels[split]) for name, split, kind in task.list_metrics()}


def compute_influences(
    task: Task, predictions: dict[str, np.ndarray], labels: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Metric -> its influence function at every example, (examples,). Arguments as in :func:`compute_metrics`.

    To first order, the metric of a sample of n examples is the metric of the population plus the mean influence of the
    sample. The variance of the influences divided by n therefore estimates the metric's sampling variance. Influences
    are linear: those of a weighted sum of metrics are the weighted sum of the metrics' influences.
    """
    return {
        name: _measure_influence(kind, predictions[split], labels[split]) for name, split, kind in task.list_metrics()
    }


def score_constant(task: Task, labels: np.ndarray) -> float:
    """The task's metric for the best constant prediction.

    Args:
        labels: (examples,) labels; in a span task, True where the question has an answer.
    """
    if task.kind == SPAN:
        return float(1 - labels.mean())
    match task.list_metrics()[0].kind:
        case 'accuracy':
            return float(np.bincount(labels).max() / len(labels))
        case 'f1':
            return _compute('f1', np.ones(len(labels)), labels)
    return 0.0  # the correlation of a constant is 0 by our convention


def _compute(metric: str, predictions: np.ndarray, labels: np.ndarray) -> float:
    match metric:
        case 'accuracy':
            return float((predictions == labels).mean())
        case 'f1':
            true, either = ((predictions == 1) & (labels == 1)).sum(), (predictions == 1).sum() + (labels == 1).sum()
            return float(2 * true / either) if either else 0.0
        case 'matthews' | 'pearson':  # Matthews' correlation is Pearson's of binary labels
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
            # An example contributes its own two ranks and raises the ranks of all examples above it.
            shifts = _sum_from(first, second) + _sum_from(second, first)
            scale = first.std() * second.std()
            found: np.ndarray = (first * second + shifts) / scale
            return found - found.mean()
    raise ValueError(f'no metric {metric}')


def _sum_from(ranks: np.ndarray, values: np.ndarray) -> np.ndarray:
    """(n,) for each example, 1 / n times the sum of ``values`` at higher rank plus half the sum at equal rank."""
    _, inverse = np.unique(ranks, return_inverse=True)
    sums = np.bincount(inverse, weights=values)
    above: np.ndarray = np.cumsum(sums[::-1])[::-1] - sums / 2
    return above[inverse] / len(ranks)


def _correlate(first: np.ndarray, second: np.ndarray) -> float:
    """Pearson's correlation; 0 if either input is constant."""
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return 0.0
    return float(np.corrcoef(first, second)[0, 1])
