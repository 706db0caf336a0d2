"""Metrics of classification and regression, as fractions, and what guessing one constant answer would score."""

import numpy as np

from maelm_composer.finetuning.tasks import CLASSIFICATION, SPAN, Task


def compute_metrics(task: Task, predictions: dict[str, np.ndarray], labels: dict[str, np.ndarray]) -> dict[str, float]:
    """The task's metrics by name.

    Args:
        predictions: by evaluation split, (examples,) label ids or numbers.
        labels: the same.
    """
    computed = {}
    for name in task.metrics:
        split, _, metric = name.rpartition('_') if len(task.eval_splits) > 1 else (task.eval_splits[0], '', name)
        computed[name] = _compute(metric, predictions[split], labels[split])
    return computed


def score_constant(task: Task, labels: np.ndarray) -> float:
    """What the best constant answer scores on these (examples,) labels; of a span task: whether each has an answer."""
    if task.kind == SPAN:
        return float(1 - labels.mean())
    if task.kind == CLASSIFICATION and task.metric.endswith('accuracy'):
        return float(np.bincount(labels).max() / len(labels))
    return 0.0  # a constant correlates with nothing


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
            return _correlate(_rank(predictions), _rank(labels))
    raise ValueError(f'no metric {metric}')


def _correlate(first: np.ndarray, second: np.ndarray) -> float:
    """Pearson's correlation; 0 where one of the two is constant."""
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return 0.0
    return float(np.corrcoef(first, second)[0, 1])


def _rank(values: np.ndarray) -> np.ndarray:
    """Ranks from 1; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]
