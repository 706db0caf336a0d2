"""Exact match and F1 by the rules of the official SQuAD 2.0 evaluation (Rajpurkar et al., 2018)."""

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

_ARTICLE = re.compile(r'\b(?:a|an|the)\b')
_WITHOUT_PUNCTUATION = str.maketrans('', '', string.punctuation)  # ASCII's only, as the official rules


def score_questions(
    gold: Mapping[str, Sequence[str]], predictions: Mapping[str, str], null_score_difference: Mapping[str, float]
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Scores of all questions, as fractions, and of each.

    Args:
        gold: question id -> its answers, none where it has no answer.
        predictions: question id -> the best text that is an answer.
        null_score_difference: question id -> score of "no answer" minus that of the text.

    Returns:
        ``exact`` and ``f1`` where a difference above 0 means "no answer", also of the questions with an answer
        (``has_answer_``) and without (``no_answer_``) where there are any; ``best_exact`` and ``best_f1`` at the
        thresholds that are best on these very questions, and those, ``best_exact_threshold``, ``best_f1_threshold``.
        And, (Q,), the scores that ``exact``, ``f1``, ``best_exact`` and ``best_f1`` are the means of.

    Raises:
        ValueError: a question without a prediction or without a score, or no question at all.
    """
    if not gold:
        raise ValueError('there is no question to evaluate')
    if missing := [key for key in gold if key not in predictions or key not in null_score_difference]:
        raise ValueError(f'{len(missing)} questions have no prediction, {missing[0]} the first')
    has_answer = np.array([bool(answers) for answers in gold.values()])
    difference = np.array([null_score_difference[key] for key in gold], float)
    says_something = np.array([bool(predictions[key]) for key in gold])
    metrics: dict[str, float] = {}
    each: dict[str, np.ndarray] = {}
    for name, score in (('exact', score_exact), ('f1', score_f1)):
        raw = np.array([_score_best(score, answers, predictions[key]) for key, answers in gold.items()], float)
        decided = np.where(difference > 0, ~has_answer, raw)
        metrics[name] = float(decided.mean())
        for split, chosen in (('has_answer', has_answer), ('no_answer', ~has_answer)):
            if chosen.any():
                metrics[f'{split}_{name}'] = float(decided[chosen].mean())
        threshold, answers = find_best_threshold(raw, difference, has_answer, says_something)
        at_best = np.where(answers, np.where(has_answer, raw, ~says_something), ~has_answer)
        metrics |= {f'best_{name}': float(at_best.mean()), f'best_{name}_threshold': threshold}
        each |= {name: decided, f'best_{name}': at_best}
    return metrics, each


def normalize_answer(text: str) -> str:
    """Lower case, without ASCII punctuation and the articles a, an, the; single spaces."""
    return ' '.join(_ARTICLE.sub(' ', text.lower().translate(_WITHOUT_PUNCTUATION)).split())


def score_exact(answer: str, prediction: str) -> float:
    """1 where both are the same once normalised, else 0."""
    return float(normalize_answer(answer) == normalize_answer(prediction))


def score_f1(answer: str, prediction: str) -> float:
    """Harmonic mean of precision and recall over the normalised words, repeated ones counted as often as they occur."""
    wanted, given = normalize_answer(answer).split(), normalize_answer(prediction).split()
    if not wanted or not given:
        return float(wanted == given)
    shared = (Counter(wanted) & Counter(given)).total()
    if not shared:
        return 0.0
    precision, recall = shared / len(given), shared / len(wanted)
    return 2 * precision * recall / (precision + recall)


def find_best_threshold(
    raw: np.ndarray, difference: np.ndarray, has_answer: np.ndarray, says_something: np.ndarray
) -> tuple[float, np.ndarray]:
    """The first threshold of the null score difference whose mean score is the best, and which questions it answers.

    All (Q,): the score of the text, the difference, whether there is an answer, whether the text is not empty. As in
    the official rules, questions of equal difference are added one by one, in their order.
    """
    order = np.argsort(difference, kind='stable')
    # From "no answer" to every question, answering one after another: each gains its score or loses its point.
    gains = np.where(has_answer, raw, -says_something.astype(float))[order]
    scores = np.cumsum(np.concatenate([[float((~has_answer).sum())], gains]))
    best = int(scores.argmax())
    answers = np.zeros(len(raw), bool)
    answers[order[:best]] = True
    return 0.0 if best == 0 else float(difference[order[best - 1]]), answers


def _score_best(score: Callable[[str, str], float], answers: Sequence[str], prediction: str) -> float:
    """Against the nearest answer; one that normalises to nothing counts as none."""
    return max(score(answer, prediction) for answer in [a for a in answers if normalize_answer(a)] or [''])
