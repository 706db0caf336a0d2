"""SQuAD 2.0: passages cut into windows of tokens, and the tokens' scores turned into answer texts.

Where the paper is silent, layout, stride and the limits of questions and answers follow the authors' code;
docs/deviations.md lists the differences: the length of a window, short rows, the n-best list and the threshold.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Encoding

from maelm_composer.config import SpanConfig
from maelm_composer.console import track
from maelm_composer.tasks.sources import SpanExample

MAX_START_ERROR = 20  # characters between the recorded start of an answer and its occurrence in the context
TEXTS_AT_ONCE = 2048  # questions; batches of distinct texts are tokenised four times as fast as single examples


@dataclass(frozen=True, eq=False)  # numpy's arrays have no single truth value
class Window:
    """One input of the model, T tokens, of which [passage_start, T - 1) are P tokens of the passage."""

    input_ids: np.ndarray  # (T,) int32
    passage_start: int
    target: tuple[int, int]  # the answer's first and last token; (0, 0) if the window does not contain the whole answer
    offsets: np.ndarray  # (passage, 2) int32, first character of each token in the context, and the one after its last
    is_best_context: np.ndarray  # (passage,) bool, no other window has more context around the token; empty in training


def build_windows(
    examples: Sequence[SpanExample], tokenizer: Any, max_seq_len: int, span: SpanConfig, is_training: bool
) -> Iterator[list[Window]]:
    """Yield the windows of each example: ``[CLS] question [SEP] [SEP] part of the passage [SEP]``.

    In training, the target is the first answer, and an example whose context does not contain that answer gets an empty
    list.

    Args:
        tokenizer: a fast Hugging Face tokenizer.
        max_seq_len: the greatest length of a window in tokens, special tokens included.
        span: its ``max_query_length`` leaves room for the passage, see :func:`examples.fit_span`.
    """
    cls, sep = tokenizer.cls_token_id, tokenizer.sep_token_id
    texts: dict[str, Encoding] = {}
    for number, example in enumerate(track(examples, len(examples), 'tokenising', 'questions')):
        if number % TEXTS_AT_ONCE == 0:
            some = examples[number : number + TEXTS_AT_ONCE]
            texts = tokenize_texts([text for one in some for text in (one.question.lstrip(), one.context)], tokenizer)
        # One question of SQuAD 2.0 begins with 25,457 blanks, of which a byte-level tokenizer makes as many tokens.
        question, passage, answer = texts[example.question.lstrip()], texts[example.context], None
        if is_training and example.answers_text:
            answer = _find_answer(example, passage.offsets)
            if answer is None:
                yield []
                continue
        head = [cls, *question.ids[: span.max_query_length], sep, sep]
        yield _cut(head, passage, answer, max_seq_len, span.doc_stride, is_training)


def tokenize_texts(texts: Sequence[str], tokenizer: Any) -> dict[str, Encoding]:
    """Text -> its tokens without special ones; repeated texts are tokenised once."""
    unique = list(dict.fromkeys(texts))
    return dict(zip(unique, tokenizer.backend_tokenizer.encode_batch(unique, add_special_tokens=False), strict=True))


def _find_answer(example: SpanExample, offsets: list[tuple[int, int]]) -> tuple[int, int] | None:
    """First and last token of the first answer in the context, or None if the context does not contain it.

    White space may differ between answer and context. ``offsets`` are those of the context's tokens.
    """
    start, words = example.answer_starts[0], example.answers_text[0].split()
    pattern = r'\s+'.join(re.escape(word) for word in words)
    matches = re.finditer(pattern, example.context) if words else ()
    found = [match.span() for match in matches if abs(match.start() - start) <= MAX_START_ERROR]
    if not found:
        return None
    begin, end = min(found, key=lambda match_span: abs(match_span[0] - start))
    first = bisect_right(offsets, begin, key=lambda offset: offset[1])
    last = bisect_left(offsets, end, key=lambda offset: offset[0]) - 1
    return (first, last) if first <= last else None


def _cut(
    head: list[int], passage: Encoding, answer: tuple[int, int] | None, max_seq_len: int, stride: int, is_training: bool
) -> list[Window]:
    """Windows that begin with ``head``, which ends with [SEP]; ``answer``: first and last token of the passage."""
    ids, offsets = passage.ids, np.array(passage.offsets, np.int32).reshape(-1, 2)
    budget, length = max_seq_len - len(head) - 1, len(ids)
    # PAPER-SILENT: in short windows, the stride is reduced to half of a window's passage tokens.
    step = min(stride, max(1, budget // 2))
    starts = range(0, max(1, length - budget + step), step)
    best = np.empty(0) if is_training else _find_best_context(starts, budget, length)
    windows = []
    for index, begin in enumerate(starts):
        end = min(begin + budget, length)
        shift, target = len(head) - begin, (0, 0)
        if answer is not None and begin <= answer[0] and answer[1] < end:
            target = answer[0] + shift, answer[1] + shift
        row = np.array([*head, *ids[begin:end], head[-1]], np.int32)
        windows.append(Window(row, len(head), target, offsets[begin:end], best[begin:end] == index))
    return windows


def _find_best_context(starts: range, budget: int, length: int) -> np.ndarray:
    """(passage tokens,) index of the window with the most context around each token.

    The context of a token is the number of tokens on the shorter side, plus 0.01 times the window's length (BERT's
    max-context rule).
    """
    tokens = np.arange(length)
    begin = np.array(starts)[:, None]
    end = np.minimum(begin + budget, length)
    score = np.minimum(tokens - begin, end - 1 - tokens) + 0.01 * (end - begin)
    return np.where((begin <= tokens) & (tokens < end), score, -np.inf).argmax(0)


def predict_answers(
    examples: Sequence[SpanExample],
    windows_of_example: Sequence[Sequence[Window]],
    scores: Iterable[np.ndarray],
    span: SpanConfig,
) -> list[dict[str, Any]]:
    """The best answer text of every question, a slice of its context.

    Args:
        examples: only ``id`` and ``context`` are read.
        scores: (T or longer, 2) start and end scores of each window's tokens, in the order of the examples and their
            windows.

    Returns:
        One dictionary for each example: ``id``; ``prediction``, the text of the best non-null answer, '' if there is
        none; ``null_score_difference``, the score of "no answer", the least over the windows, minus the text's score.

    Raises:
        ValueError: an array contains NaN.
    """
    predictions, rows = [], iter(scores)
    pairs = zip(examples, windows_of_example, strict=True)
    for example, windows in track(pairs, len(examples), 'answers', 'questions'):
        nulls, found = [], []
        for window, row in zip(windows, rows, strict=False):  # the next example's rows follow
            start, end = row[: len(window.input_ids)].T
            nulls.append(float(start[0]) + float(end[0]))
            found.append(_find_best_text(example.context, window, start, end, span))
        null = float(np.min(nulls, initial=np.inf))  # NaN stays NaN
        if not np.isfinite(null):
            raise ValueError(f'question {example.id}: the score of "no answer" is {null}')
        text, score = max(found, key=lambda pair: pair[1])
        # An empty text scores as "no answer" at any threshold, so its difference only has to be finite.
        difference = null - score if text else null
        predictions.append({'id': example.id, 'prediction': text, 'null_score_difference': difference})
    return predictions


def _find_best_text(
    context: str, window: Window, start: np.ndarray, end: np.ndarray, span: SpanConfig
) -> tuple[str, float]:
    """The best text between the ``n_best`` starts and the ``n_best`` ends of a window, and its score.

    Text and score are '' and -inf if no allowed pair spans a text.
    """
    passage = slice(window.passage_start, len(window.input_ids) - 1)
    start, end = start[passage], end[passage]
    starts = _take_best(np.where(window.is_best_context, start, -np.inf), span.n_best)
    ends = _take_best(end, span.n_best)
    length = ends[None, :] - starts[:, None] + 1
    rows, columns = np.nonzero((length >= 1) & (length <= span.max_answer_length))
    starts, ends = starts[rows], ends[columns]
    scores = start[starts].astype(float) + end[ends].astype(float)
    for i in np.argsort(-scores, kind='stable'):
        (first, _), (_, last) = window.offsets[starts[i]], window.offsets[ends[i]]
        if text := context[first:last].strip():
            return text, float(scores[i])
    return '', -np.inf


def _take_best(scores: np.ndarray, count: int) -> np.ndarray:
    """Indices of the ``count`` greatest finite scores in descending order; of equal scores the earlier comes first."""
    if np.isnan(scores).any():
        raise ValueError('the scores of a window contain NaN')
    best = np.argsort(-scores, kind='stable')[:count]
    return best[np.isfinite(scores[best])]
