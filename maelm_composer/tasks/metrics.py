"""Metrics (fractions, correlations) of classification and regression with their influence functions, and SQuAD 2.0's.

SQuAD's exact match and F1 are those of the official evaluation (Rajpurkar et al., 2018). For the other metrics,
torchmetrics is not used: its ratios are in single precision, and its Matthews correlation is not 0 for every constant
prediction. scipy's correlations of a constant are NaN.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from scipy.stats import rankdata

from maelm_composer.tasks.catalogue import SPAN, Task

_ARTICLE = re.compile(r'\b(?:a|an|the)\b')
_WITHOUT_PUNCTUATION = str.maketrans('', '', string.punctuation)  # ASCII only, as in the official script


def compute_metrics(
    task: Task, predictions: dict[str, np.ndarray], labels: dict[str, np.ndarray]
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """The task's metrics, and each metric's influence function at every example, (examples,).

    To first order, the metric of a sample of n examples is the metric of the population plus the mean influence of the
    sample. The variance of the influences divided by n therefore estimates the metric's sampling variance. Influences
    are linear: those of a weighted sum of metrics are the weighted sum of the metrics' influences.

    Args:
        predictions: evaluation split (``dev``, of MNLI ``matched`` and ``mismatched``) -> (examples,) label ids or, for
            a regression, numbers on any scale.
        labels: as ``predictions``.

    Returns:
        Fractions; correlations from -1 to 1. F1 is that of class 1.

    Raises:
        ValueError: predictions and labels of a split are not arrays of one shape (examples,).
    """
    for split, given in labels.items():
        if not np.ndim(given) == np.ndim(predictions[split]) == 1 or len(given) != len(predictions[split]):
            shapes = np.shape(predictions[split]), np.shape(given)
            raise ValueError(f'split {split}: predictions and labels have shapes {shapes[0]} and {shapes[1]}')
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
        case 'matthews' | 'pearson' | 'spearman':
            return 0.0  # the correlation of a constant is 0 by our convention
        case other:
            raise ValueError(f'score_constant has no branch for {other}')


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
        case 'spearman':
            ranks = rankdata(predictions), rankdata(labels)
            first, second = ((values - 0.5) / len(values) for values in ranks)
            # An example contributes its own two ranks and raises the ranks of all examples above it.
            shifts = _sum_from(first, second) + _sum_from(second, first)
            # An example that is tied with others lowers the variance of the ranks.
            ties = sum(_share_equal(values) ** 2 / (4 * values.var()) for values in (first, second))
            correlation = _correlate(*ranks)
            found = (first * second + shifts) / (first.std() * second.std()) + correlation / 2 * ties
            return correlation, found - found.mean()
        case _:
            raise ValueError(f'_measure has no branch for {metric}')


def _sum_from(ranks: np.ndarray, values: np.ndarray) -> np.ndarray:
    """(n,) for each example, 1 / n times the sum of ``values`` at higher rank plus half the sum at equal rank."""
    _, inverse = np.unique(ranks, return_inverse=True)
    sums = np.bincount(inverse, weights=values)
    above: np.ndarray = np.cumsum(sums[::-1])[::-1] - sums / 2
    return above[inverse] / len(ranks)


def _share_equal(values: np.ndarray) -> np.ndarray:
    """(n,) for each example, the share of the examples that have its value."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    shares: np.ndarray = counts[inverse] / len(values)
    return shares


def _correlate(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.corrcoef(first, second)[0, 1])


def score_questions(
    gold: Mapping[str, Sequence[str]], predictions: Mapping[str, str], null_score_difference: Mapping[str, float]
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Mean scores over Q questions, as fractions, and the score of each question.

    Args:
        gold: question id -> its answers; empty if the question has no answer.
        predictions: question id -> the text of the best non-null answer, for every id of ``gold``.
        null_score_difference: question id -> score of "no answer" minus score of the text. The prediction is "no
            answer" if the difference exceeds a threshold. Without such scores give 0 for each, and '' as the prediction
            "no answer"; ``best_exact`` and ``best_f1`` then mean nothing.

    Returns:
        A dictionary of means: ``exact`` and ``f1`` at threshold 0, the same over the questions with an answer
        (``has_answer_exact``, ``has_answer_f1``) and without (``no_answer_exact``, ``no_answer_f1``) if there are any;
        ``best_exact`` and ``best_f1`` at the threshold that is best for these questions, and that threshold
        (``best_exact_threshold``, ``best_f1_threshold``).
        A dictionary of the questions' scores, (questions,), for ``exact``, ``f1``, ``best_exact`` and ``best_f1``.
    """
    has_answer = np.array([bool(answers) for answers in gold.values()])
    difference = np.array([null_score_difference[key] for key in gold], float)
    has_text = np.array([bool(predictions[key]) for key in gold])
    metrics: dict[str, float] = {}
    each: dict[str, np.ndarray] = {}
    for name, score in (('exact', score_exact), ('f1', score_f1)):
        raw = np.array([_score_best(score, answers, predictions[key]) for key, answers in gold.items()], float)
        decided = np.where(difference > 0, ~has_answer, raw)
        metrics[name] = float(decided.mean())
        for split, chosen in (('has_answer', has_answer), ('no_answer', ~has_answer)):
            if chosen.any():
                metrics[f'{split}_{name}'] = float(decided[chosen].mean())
        threshold, is_answered = find_best_threshold(raw, difference, has_answer, has_text)
        at_best = np.where(is_answered, np.where(has_answer, raw, ~has_text), ~has_answer)
        metrics |= {f'best_{name}': float(at_best.mean()), f'best_{name}_threshold': threshold}
        each |= {name: decided, f'best_{name}': at_best}
    return metrics, each


def normalize_answer(text: str) -> str:
    """``text`` in lower case without ASCII punctuation and articles (a, an, the), words separated by one space."""
    return ' '.join(_ARTICLE.sub(' ', text.lower().translate(_WITHOUT_PUNCTUATION)).split())


def score_exact(answer: str, prediction: str) -> float:
    """1 if both texts are equal after normalisation, else 0."""
    return float(normalize_answer(answer) == normalize_answer(prediction))


def score_f1(answer: str, prediction: str) -> float:
    """F1 between the multisets of the two texts' normalised words."""
    gold, predicted = normalize_answer(answer).split(), normalize_answer(prediction).split()
    if not gold or not predicted:
        return float(gold == predicted)
    shared = (Counter(gold) & Counter(predicted)).total()
    if not shared:
        return 0.0
    precision, recall = shared / len(predicted), shared / len(gold)
    return 2 * precision * recall / (precision + recall)


def find_best_threshold(
    raw: np.ndarray, difference: np.ndarray, has_answer: np.ndarray, has_text: np.ndarray
) -> tuple[float, np.ndarray]:
    """The lowest threshold on the null score difference with the best mean score.

    As in the official script, questions of equal difference are answered one after another, in their order.

    Args:
        raw: (questions,) score of each predicted text.
        difference: (questions,) null score difference of each.
        has_answer: (questions,) whether each has an answer.
        has_text: (questions,) whether each predicted text is not empty.

    Returns:
        The threshold, and (questions,) whether the text is the prediction at that threshold ("no answer" otherwise).
    """
    order = np.argsort(difference, kind='stable')
    # At first every prediction is "no answer". Each text that replaces one gains its score, or loses the point of a
    # question without an answer.
    gains = np.where(has_answer, raw, -has_text.astype(float))[order]
    scores = np.cumsum(np.concatenate([[float((~has_answer).sum())], gains]))
    best = int(scores.argmax())
    is_answered = np.zeros(len(raw), bool)
    is_answered[order[:best]] = True
    return 0.0 if best == 0 else float(difference[order[best - 1]]), is_answered


def _score_best(score: Callable[[str, str], float], answers: Sequence[str], prediction: str) -> float:
    """The best score against any of the answers; answers that normalise to nothing are ignored."""
    return max(score(answer, prediction) for answer in [a for a in answers if normalize_answer(a)] or [''])
