"""SQuAD 2.0: passages as windows of tokens, and scores of tokens back to texts.

What the paper leaves open follows the authors' code (docs/deviations.md), but for its windows, which run over the
position table by one: here the budget counts all four special tokens.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from maelm_composer.config import SpanConfig
from maelm_composer.errors import InputError

NEAR = 20  # characters between where an answer is said to start and where it is found
TEXTS_AT_ONCE = 2048


class AnswerNotInContext(ValueError):
    """The text of an answer is not where it is said to be."""


class SpanExample(Protocol):
    """One question and what it is asked about; no answer where the two lists are empty."""

    @property
    def id(self) -> str: ...
    @property
    def question(self) -> str: ...
    @property
    def context(self) -> str: ...
    @property
    def answers_text(self) -> Sequence[str]: ...
    @property
    def answer_starts(self) -> Sequence[int]: ...


@dataclass(frozen=True)
class Window:
    """One input of the model, T tokens; the passage's are [passage_start, T - 1)."""

    input_ids: list[int]
    passage_start: int
    start: int  # targets: the answer's first and last token; 0, 0 where this window does not hold it whole
    end: int
    offsets: list[tuple[int, int] | None]  # characters of the context; None for the question and special tokens
    is_best_context: list[bool]  # no other window shows more around this token; empty in training


@dataclass(frozen=True)
class EncodedText:
    input_ids: list[int]
    offsets: list[tuple[int, int]]  # characters of the text


def build_windows(
    question: str,
    context: str,
    answers_text: Sequence[str],
    answer_starts: Sequence[int],
    tokenizer: Any,
    max_seq_len: int,
    span: SpanConfig,
    is_training: bool,
) -> list[Window]:
    """``[CLS] question [SEP] [SEP] part of the passage [SEP]``, never longer than ``max_seq_len``.

    Args:
        answers_text: the first one is the target in training; none: no answer.
        answer_starts: characters of ``context``.
        tokenizer: a fast Hugging Face tokenizer.

    Raises:
        AnswerNotInContext: in training, and only there.
        InputError: ``max_seq_len`` leaves no room for the passage.
    """
    texts = encode_texts([question, context], tokenizer)
    answer = find_answer(context, answers_text, answer_starts, texts[context].offsets) if is_training else None
    return _cut(texts[question], texts[context], answer, _special_ids(tokenizer), max_seq_len, span, is_training)


def build_all_windows(
    examples: Sequence[SpanExample], tokenizer: Any, max_seq_len: int, span: SpanConfig, is_training: bool
) -> Iterator[list[Window]]:
    """As :func:`build_windows`, example by example, each text tokenised once and many at a time: four times as fast.

    In training an answer that is not in its context gives an empty list.
    """
    special_ids = _special_ids(tokenizer)
    for first in range(0, len(examples), TEXTS_AT_ONCE):
        some = examples[first : first + TEXTS_AT_ONCE]
        texts = encode_texts([text for example in some for text in (example.question, example.context)], tokenizer)
        for example in some:
            question, context = texts[example.question], texts[example.context]
            try:
                answer = (
                    find_answer(example.context, example.answers_text, example.answer_starts, context.offsets)
                    if is_training
                    else None
                )
            except AnswerNotInContext:
                yield []
                continue
            yield _cut(question, context, answer, special_ids, max_seq_len, span, is_training)


def encode_texts(texts: Sequence[str], tokenizer: Any) -> dict[str, EncodedText]:
    """Each different text once, without special tokens."""
    unique = list(dict.fromkeys(texts))
    encodings = tokenizer.backend_tokenizer.encode_batch(unique, add_special_tokens=False)
    return {text: EncodedText(e.ids, e.offsets) for text, e in zip(unique, encodings, strict=True)}


def _special_ids(tokenizer: Any) -> tuple[int, int]:
    return tokenizer.cls_token_id, tokenizer.sep_token_id


def find_answer(
    context: str, answers_text: Sequence[str], answer_starts: Sequence[int], offsets: list[tuple[int, int]]
) -> tuple[int, int] | None:
    """First and last token of the first answer, or None where there is none; its white space may differ.

    Args:
        offsets: of the context's tokens.

    Raises:
        AnswerNotInContext
    """
    if not answers_text:
        return None
    text, start = answers_text[0], answer_starts[0]
    words = text.split()
    pattern = r'\s+'.join(re.escape(word) for word in words)
    found = [match.span() for match in re.finditer(pattern, context) if words and abs(match.start() - start) <= NEAR]
    if not found:
        raise AnswerNotInContext(f'answer {text!r} is not at character {start} of its context')
    begin, end = min(found, key=lambda place: abs(place[0] - start))
    first = bisect_right(offsets, begin, key=lambda offset: offset[1])
    last = bisect_left(offsets, end, key=lambda offset: offset[0]) - 1
    if last < first:
        raise AnswerNotInContext(f'no token holds answer {text!r}')
    return first, last


def _cut(
    question: EncodedText,
    passage: EncodedText,
    answer: tuple[int, int] | None,  # first and last token of the passage
    special_ids: tuple[int, int],
    max_seq_len: int,
    span: SpanConfig,
    is_training: bool,
) -> list[Window]:
    cls, sep = special_ids
    head = [cls, *question.input_ids[: span.max_query_length], sep, sep]
    budget, length = max_seq_len - len(head) - 1, len(passage.input_ids)
    if budget < 1:
        raise InputError(
            f'max_seq_len {max_seq_len} leaves no room for the passage: {len(head) + 1} tokens are the question and '
            'special tokens; set a smaller span.max_query_length'
        )
    starts = _window_starts(length, budget, span.doc_stride)
    best = None if is_training else _find_best_context(starts, budget, length)
    windows = []
    for index, begin in enumerate(starts):
        end = min(begin + budget, length)
        target = (0, 0)
        if answer is not None and begin <= answer[0] and answer[1] < end:
            target = answer[0] - begin + len(head), answer[1] - begin + len(head)
        windows.append(
            Window(
                input_ids=[*head, *passage.input_ids[begin:end], sep],
                passage_start=len(head),
                start=target[0],
                end=target[1],
                offsets=[*[None] * len(head), *passage.offsets[begin:end], None],
                is_best_context=[]
                if best is None
                else [*[False] * len(head), *(best[begin:end] == index).tolist(), False],
            )
        )
    return windows


def _window_starts(length: int, budget: int, doc_stride: int) -> range:
    """First passage token of every window. PAPER-SILENT: rows too short for the stride overlap by half, not less."""
    step = min(doc_stride, max(1, budget // 2))
    num_more = max(0, -((budget - length) // step))
    return range(0, num_more * step + 1, step)


def _find_best_context(starts: range, budget: int, length: int) -> np.ndarray:
    """(passage tokens,) index of the window that shows most around each: the smaller side counts, then the length."""
    tokens = np.arange(length)
    begin = np.array(starts)[:, None]
    end = np.minimum(begin + budget, length)
    score = np.minimum(tokens - begin, end - 1 - tokens) + 0.01 * (end - begin)
    return np.where((begin <= tokens) & (tokens < end), score, -np.inf).argmax(0)


def predict_answers(
    examples: Sequence[SpanExample],
    windows_of_example: Sequence[Sequence[Window]],
    start_logits: Sequence[np.ndarray],
    end_logits: Sequence[np.ndarray],
    span: SpanConfig,
) -> list[dict[str, Any]]:
    """The best texts of every question, each an exact slice of its context.

    Args:
        examples: their ``id`` and ``context`` are read.
        start_logits: one array for each window, in the order of the examples and their windows: (T or longer,).
        end_logits: the same.

    Returns:
        For each example ``id``; ``text``, the best answer that is not "no answer" ('' where a passage has no tokens);
        ``null_score_difference``, the score of "no answer" (the smallest over the windows) minus that of the text;
        ``n_best``, up to ``span.n_best`` different texts with their scores.

    Raises:
        ValueError: the arrays are not as many as the windows, or hold NaN.
    """
    total = sum(len(windows) for windows in windows_of_example)
    if not total == len(start_logits) == len(end_logits):
        raise ValueError(f'{total} windows, but {len(start_logits)} rows of start and {len(end_logits)} of end scores')
    predictions, first = [], 0
    for example, windows in zip(examples, windows_of_example, strict=True):
        rows = range(first, first + len(windows))
        first += len(windows)
        nulls, candidates = [], []
        for window, row in zip(windows, rows, strict=True):
            start, end = start_logits[row][: len(window.input_ids)], end_logits[row][: len(window.input_ids)]
            nulls.append(float(start[0]) + float(end[0]))
            candidates.append(_score_spans(window, start, end, span))
        null = float(np.min(nulls, initial=np.inf))  # NaN stays NaN
        if not np.isfinite(null):
            raise ValueError(f'question {example.id}: the score of "no answer" is {null}')
        n_best = _rank_texts(example.context, windows, candidates, span.n_best)
        # Without any text the difference is to a score of 0; the text is empty, so nothing depends on it.
        text, score = (n_best[0]['text'], n_best[0]['score']) if n_best else ('', 0.0)
        predictions.append({'id': example.id, 'text': text, 'null_score_difference': null - score, 'n_best': n_best})
    return predictions


def _score_spans(window: Window, start: np.ndarray, end: np.ndarray, span: SpanConfig) -> tuple[np.ndarray, ...]:
    """(spans,) starts, ends and scores of the allowed pairs of the ``n_best`` starts and ends."""
    begin, stop = window.passage_start, len(window.input_ids) - 1
    is_best = np.array(window.is_best_context[begin:stop], bool)
    starts = _take_best(np.where(is_best, start[begin:stop], -np.inf), span.n_best) + begin
    ends = _take_best(end[begin:stop], span.n_best) + begin
    length = ends[None, :] - starts[:, None] + 1
    rows, columns = np.nonzero((length >= 1) & (length <= span.max_answer_length))
    starts, ends = starts[rows], ends[columns]
    return starts, ends, start[starts].astype(float) + end[ends].astype(float)


def _take_best(scores: np.ndarray, count: int) -> np.ndarray:
    """Indices of the ``count`` greatest finite scores, the greatest first, the earlier of equals."""
    if np.isnan(scores).any():
        raise ValueError('the scores of a window hold NaN')
    best = np.argsort(-scores, kind='stable')[:count]
    return best[np.isfinite(scores[best])]


def _rank_texts(
    context: str, windows: Sequence[Window], candidates: list[tuple[np.ndarray, ...]], count: int
) -> list[dict[str, Any]]:
    """The ``count`` best different texts of all windows of an example."""
    which = np.concatenate([np.full(len(scores), i) for i, (_, _, scores) in enumerate(candidates)])
    starts, ends, scores = (np.concatenate(parts) for parts in zip(*candidates, strict=True))
    ranked: dict[str, float] = {}
    for i in np.argsort(-scores, kind='stable'):
        offsets = windows[which[i]].offsets
        begin, end = offsets[starts[i]], offsets[ends[i]]
        assert begin is not None
        assert end is not None
        text = context[begin[0] : end[1]].strip()
        if text:
            ranked.setdefault(text, float(scores[i]))
        if len(ranked) == count:
            break
    return [{'text': text, 'score': score} for text, score in ranked.items()]
