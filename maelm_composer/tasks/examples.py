"""Examples as token ids and targets: ``[CLS] A [SEP]`` or ``[CLS] A [SEP] [SEP] B [SEP]`` (authors' code)."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from maelm_composer.config import SpanConfig
from maelm_composer.console import track
from maelm_composer.tasks.catalogue import REGRESSION, SPAN, Task
from maelm_composer.tasks.sources import TextExample
from maelm_composer.tasks.squad import Window, build_windows

SPECIALS_OF_PAIR = 4
TEXTS_AT_ONCE = 10_000


@dataclass(frozen=True)
class Inputs:
    """Token ids and targets, one row per example or, in a span task, per window."""

    input_ids: list[np.ndarray]  # each (T,) int32
    targets: np.ndarray  # (rows,) class or number; span: (rows, 2) first and last token of the answer, 0 0 if none
    passage_starts: np.ndarray | None = None  # (rows,), span only: the passage's tokens are [start, T - 1)
    windows: Sequence[list[Window]] = ()  # of each example; span only, and not in training
    num_left_out: int = 0  # span only: training examples without a window

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def lengths(self) -> list[int]:
        return [len(ids) for ids in self.input_ids]


def encode(
    examples: Sequence[Any], task: Task, tokenizer: Any, max_seq_len: int, span: SpanConfig, is_training: bool = False
) -> Inputs:
    """Tokenise the examples of a task, in batches on all cores; :func:`build_windows` makes the rows of a span task.

    A row of more than ``max_seq_len`` tokens is truncated at the end of its text; of a pair, the longer text first.
    """
    if task.kind == SPAN:
        return _stack(build_windows(examples, tokenizer, max_seq_len, span, is_training), keeps_windows=not is_training)
    cls, sep = tokenizer.cls_token_id, tokenizer.sep_token_id
    tokenized = track(_tokenize(examples, tokenizer), len(examples), 'tokenising', 'examples')
    rows = [np.array(_join(ids, cls, sep, max_seq_len), np.int32) for ids in tokenized]
    if task.kind == REGRESSION:
        targets = np.array([task.normalize(example.label) for example in examples], np.float32)
    else:
        targets = np.array([example.label for example in examples], np.int64)
    return Inputs(rows, targets)


def fit_span(span: SpanConfig, max_seq_len: int) -> SpanConfig:
    """Limit ``max_query_length``, so that a question takes at most half of a row's tokens beside the special ones."""
    room = (max_seq_len - SPECIALS_OF_PAIR) // 2
    return dataclasses.replace(span, max_query_length=min(span.max_query_length, room))


def _stack(windows_of_examples: Iterator[list[Window]], keeps_windows: bool) -> Inputs:
    rows, starts, targets, kept, num_left_out = [], [], [], [], 0
    for windows in windows_of_examples:  # an iterator: all offsets of a training set would not fit into memory
        num_left_out += not windows
        if keeps_windows:
            kept.append(windows)
        for window in windows:
            rows.append(window.input_ids)
            starts.append(window.passage_start)
            targets.append(window.target)
    return Inputs(rows, np.array(targets, np.int64).reshape(-1, 2), np.array(starts, np.int64), kept, num_left_out)


def _tokenize(examples: Sequence[TextExample], tokenizer: Any) -> Iterator[list[list[int]]]:
    """Yield the token ids of each example's texts."""
    for first in range(0, len(examples), TEXTS_AT_ONCE):
        sides = zip(*(example.texts for example in examples[first : first + TEXTS_AT_ONCE]), strict=True)
        encode_batch = tokenizer.backend_tokenizer.encode_batch_fast
        encodings = [encode_batch(list(side), add_special_tokens=False) for side in sides]
        for texts in zip(*encodings, strict=True):
            yield [text.ids for text in texts]


def _join(ids: list[list[int]], cls: int, sep: int, max_seq_len: int) -> list[int]:
    if len(ids) == 1:
        return [cls, *ids[0][: max_seq_len - 2], sep]
    first, second = ids
    budget = max_seq_len - SPECIALS_OF_PAIR
    # The second text gets half the positions, and those that the first one leaves.
    keep = min(len(second), max(budget // 2, budget - len(first)))
    return [cls, *first[: budget - keep], sep, sep, *second[:keep], sep]
