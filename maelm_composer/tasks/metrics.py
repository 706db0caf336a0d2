"""Metrics of classification and regression as fractions, their influence functions, and scores of constant answers.

torchmetrics is not used: its ratios are in single precision, and its Matthews correlation is not 0 for every constant
prediction. scipy's correlations of a constant are NaN.
"""

import numpy as np
from scipy.stats import rankdata

from maelm_composer.tasks.catalogue import SPAN, Task


def compute_metrics(
    task: Task, predictions: dict[str, np.ndarray], labels: dict[str, np.ndarray]
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """The task's metrics, and each metric's influence function at every example, (examples,).

    To first order, the metric of a sample of n examples is the metric of the population plus the mean influence of the
    sample. The variance of the influences divided by n therefore estimates the metric's sampling variance. Influences
    are linear: those of a weighted sum of metrics are the weighted sum of the metrics' influences.

    Args:
        predictions: evaluation split -> (examples,) label ids or numbers.
        labels: as ``predictions``.
    """
    found = {name: _measure(kind, predictions[split], labels[split]) for name, split, kind in task.list_metrics()}
    return {name: value for name, (value, _) in found.items()}, {name: each for name, (_, each) in found.items()}


def score_constant(task: Task, labels: np.ndarray) -> float:
    """The metric of the best constant prediction; (examples,) ``labels`` of a span task: whether there is an answer."""
    if task.kind == SPAN:
        return float(1 - labels.mean())
    match task.list_metrics()[0].kind:
        case 'accuracy':
            return float(np.bincount(labels).max() / len(labels))
        case 'f1':
            return _measure('f1', np.ones(len(labels)), labels)[0]
    return 0.0  # the correlation of a constant is 0 by our convention


def _measure(metric: str, predictions: np.ndarray, labels: np.ndarray) -> tuple[float, np.ndarray]:
    """A metric and its influence function at every example."""
    match metric:
        case 'accuracy':
            correct = (predictions == labels).astype(float)
            return float(correct.mean()), correct - correct.mean()
        case 'f1':
            true, either = (predictions == 1) & (labels == 1), (predictions == 1) * 1.0 + (labels == 1)
            f1 = float(2 * true.sum() / either.sum()) if either.any() else 0.0
            return f1, (2 * true - f1 * either) / max(either.mean(), 1 / len(labels))
        case 'matthews' | 'pearson' | 'spearman' if np.ptp(predictions) == 0 or np.ptp(labels) == 0:
            return 0.0, np.zeros(len(labels))
        case 'matthews' | 'pearson':  # Matthews' correlation is Pearson's of binary labels
            correlation = _correlate(predictions, labels)
            first, second = ((values - values.mean()) / values.std() for values in (predictions, labels))
            return correlation, first * second - correlation * (first**2 + second**2) / 2
        case _:  # spearman
            ranks = rankdata(predictions), rankdata(labels)
            first, second = ((values - 0.5) / len(values) for values in ranks)
            # An example contributes its own two ranks and raises the ranks of all examples above it.
            shifts = _sum_from(first, second) + _sum_from(second, first)
            found = (first * second + shifts) / (first.std() * second.std())
            return _correlate(*ranks), found - found.mean()


def _sum_from(ranks: np.ndarray, values: np.ndarray) -> np.ndarray:
    """(n,) for each example, 1 / n times the sum of ``values`` at higher rank plus half the sum at equal rank."""
    _, inverse = np.unique(ranks, return_inverse=True)
    sums = np.bincount(inverse, weights=values)
    above: np.ndarray = np.cumsum(sums[::-1])[::-1] - sums / 2
    return above[inverse] / len(ranks)


def _correlate(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.corrcoef(first, second)[0, 1])
