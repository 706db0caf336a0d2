"""Loading a task's examples from the Hugging Face Hub, from Parquet files, or from the generator of the demo tasks."""

import functools
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet

from maelm_composer.config import TaskDataConfig, TaskSource
from maelm_composer.errors import InputError
from maelm_composer.tasks.catalogue import CLASSIFICATION, MAX_SIMILARITY, REGRESSION, SPAN, Task
from maelm_composer.tasks.demo import make_demo_tables

# Column types: a name for error messages, then the tests of which one must hold.
TEXT = 'text', pyarrow.types.is_string, pyarrow.types.is_large_string
NUMBERS = 'numbers', pyarrow.types.is_integer, pyarrow.types.is_floating


@dataclass(frozen=True)
class TextExample:
    """One row of a classification or regression task."""

    id: str
    texts: tuple[str, ...]  # one or two
    label: float  # an int in classification


@dataclass(frozen=True)
class SpanExample:
    """One question of a span task; both tuples are empty if the question has no answer."""

    id: str
    question: str
    context: str
    answers_text: tuple[str, ...]
    answer_starts: tuple[int, ...]  # characters of the context


@dataclass(frozen=True)
class TaskData:
    train: list[Any]  # of TextExample or SpanExample
    evaluation: dict[str, list[Any]]  # by evaluation split
    hash: str  # SHA-256 (hex) of every row used


def load_task_data(task: Task, config: TaskDataConfig) -> TaskData:
    """The training rows, or the sample of them that ``config`` sets, and the whole dev sets.

    The result is cached until a file changes: a sweep's worker runs many fine-tunings, and reading MNLI takes seconds.
    All callers get the same lists and must not change them.

    Raises:
        InputError: a missing folder, file or column, a label outside the task's range, an empty split, a task that the
            source does not have, or no network.
    """
    if (config.source is TaskSource.demo) != (task.hub is None):
        kind = 'is made by data.source=demo only' if task.hub is None else 'is not in data.source=demo'
        raise InputError(f'task {task.name} {kind}')
    files = sorted(_task_folder(task, config.folder).glob('*.parquet')) if config.folder else []
    stamps = tuple((path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in files)
    return _load(task, config.source, config.folder, config.limit(task.name), stamps)


@functools.lru_cache(maxsize=16)
def _load(
    task: Task, source: TaskSource, folder: str | None, max_train_examples: int | None, stamps: tuple[Any, ...]
) -> TaskData:
    match source:
        case TaskSource.demo:
            tables = {name: (table, 'demo') for name, table in make_demo_tables(task).items()}
        case TaskSource.files:
            assert folder is not None
            tables = {name: _read_parquet(task, Path(folder), name) for name in ('train', *task.eval_splits)}
        case TaskSource.huggingface:
            tables = {name: _read_hub(task, name) for name in ('train', *task.eval_splits)}
    splits = {name: _read_rows(task, table, where) for name, (table, where) in tables.items()}
    if max_train_examples is not None:
        splits['train'] = sample_evenly(splits['train'], max_train_examples)
    digest = hashlib.sha256()
    for name, rows in splits.items():
        digest.update(f'{name} {len(rows)}\n'.encode())
        for row in rows:
            digest.update(_serialize(row))
    train = splits.pop('train')
    return TaskData(train, splits, digest.hexdigest())


def sample_evenly(rows: list[Any], count: int) -> list[Any]:
    """The ``count`` rows of smallest hash, in their original order: the same rows for every model and seed."""
    if count >= len(rows):
        return rows
    digests = [hashlib.blake2b(_serialize(row), digest_size=8).digest() for row in rows]
    chosen = sorted(range(len(rows)), key=lambda i: (digests[i], i))[:count]
    return [rows[i] for i in sorted(chosen)]


def _serialize(row: TextExample | SpanExample) -> bytes:
    return json.dumps(tuple(vars(row).values()), ensure_ascii=False).encode(errors='surrogatepass')


def _task_folder(task: Task, folder: str | Path) -> Path:
    return Path(folder, 'squad_v2' if task.kind == SPAN else f'glue/{task.name}')


def _read_parquet(task: Task, folder: Path, split: str) -> tuple[pyarrow.Table, str]:
    task_folder = _task_folder(task, folder)
    path = task_folder / f'{"dev_" if split not in ("train", "dev") else ""}{split}.parquet'
    for needed in (folder, task_folder, path):
        if not needed.exists():
            raise InputError(f'task {task.name}: {needed} is not there (data.folder is {folder})')
    try:
        return pyarrow.parquet.read_table(path), str(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f'{path}: not a readable Parquet file ({error})') from None


def _read_hub(task: Task, split: str) -> tuple[pyarrow.Table, str]:
    import datasets

    assert task.hub is not None
    name, subset = task.hub
    hub_split = {'train': 'train', 'dev': 'validation'}.get(split, f'validation_{split}')
    was_disabled = datasets.utils.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        dataset = datasets.load_dataset(name, subset, split=hub_split)
    except Exception as error:  # a missing network or a moved dataset raises one of many types
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f'dataset {name} cannot be fetched from the Hugging Face Hub: {reason}; without network use '
            'data.source=files data.folder=FOLDER'
        ) from None
    finally:
        if not was_disabled:
            datasets.enable_progress_bars()
    return dataset.with_format('arrow')[:], f'dataset {name}, {hub_split}'


def _read_rows(task: Task, table: pyarrow.Table, where: str) -> list[Any]:
    """The examples of a table with the Hub's columns; ``where`` names the table in error messages."""
    if table.num_rows == 0:
        raise InputError(f'{where}: holds no rows')
    texts = [_take_column(table, name, where, *TEXT).to_pylist() for name in task.text_columns]
    if task.kind == SPAN:
        ids = _take_column(table, 'id', where, *TEXT).to_pylist()
        answers = [_as_answers(answer, where) for answer in _take_column(table, 'answers', where).to_pylist()]
        return [SpanExample(*row, *answer) for *row, answer in zip(ids, *texts, answers, strict=True)]
    labels = _as_labels(task, _take_column(table, 'label', where, *NUMBERS), where)
    numbers = table.column('idx').to_pylist() if 'idx' in table.column_names else range(table.num_rows)
    return [TextExample(str(i), tuple(row), label) for i, label, *row in zip(numbers, labels, *texts, strict=True)]


def read_unlabelled(task: Task, path: Path) -> list[Any]:
    """The rows of a .parquet, .csv or .jsonl file as examples without an answer: label 0, or an empty list.

    Raises:
        InputError: the file is not there or not readable, has no rows, or lacks a text column of the task.
    """
    readers = {'.parquet': pyarrow.parquet.read_table, '.csv': pyarrow.csv.read_csv, '.jsonl': pyarrow.json.read_json}
    if path.suffix not in readers:
        raise InputError(f'{path}: rows are read from {", ".join(readers)} files')
    try:
        table = readers[path.suffix](path)
    except FileNotFoundError:
        raise InputError(f'{path} does not exist') from None
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f'{path}: not a readable {path.suffix} file ({error})') from None
    if table.num_rows == 0:
        raise InputError(f'{path}: holds no rows')
    texts = [_take_column(table, name, str(path), *TEXT).to_pylist() for name in task.text_columns]
    key = 'id' if task.kind == SPAN else 'idx'
    ids = table.column(key).to_pylist() if key in table.column_names else range(table.num_rows)
    if task.kind == SPAN:
        return [
            SpanExample(str(i), question, context, (), ()) for i, question, context in zip(ids, *texts, strict=True)
        ]
    return [TextExample(str(i), tuple(row), 0) for i, *row in zip(ids, *texts, strict=True)]


def _take_column(
    table: pyarrow.Table, name: str, where: str, type_name: str = '', *tests: Callable[[pyarrow.DataType], bool]
) -> pyarrow.ChunkedArray:
    if name not in table.column_names:
        raise InputError(f'{where}: no column {name!r} (it has: {", ".join(table.column_names)})')
    column = table.column(name)
    if type_name and (column.null_count or not any(test(column.type) for test in tests)):
        content = f'{column.null_count} empty cells' if column.null_count else str(column.type)
        raise InputError(f'{where}: column {name!r} holds {content}, not {type_name}')
    return column


def _as_labels(task: Task, column: pyarrow.ChunkedArray, where: str) -> list[Any]:
    values = column.to_numpy().astype(float)
    high = MAX_SIMILARITY if task.kind == REGRESSION else len(task.label_names) - 1
    is_wrong = ~((values >= 0) & (values <= high))
    if task.kind == CLASSIFICATION:
        is_wrong |= values != np.floor(values)
    if is_wrong.any():
        row = int(is_wrong.argmax())
        raise InputError(
            f'{where}: row {row} has label {values[row]:g}, outside 0..{high:g} of task {task.name}'
            + (' (-1 marks a test split, whose labels are not public)' if values[row] == -1 else '')
        )
    return [int(value) for value in values] if task.kind == CLASSIFICATION else values.tolist()


def _as_answers(answers: Any, where: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    if not isinstance(answers, dict) or not all(isinstance(answers.get(k), list) for k in ('text', 'answer_start')):
        raise InputError(f"{where}: column 'answers' must hold the lists text and answer_start")
    texts, starts = answers['text'], answers['answer_start']
    if len(texts) != len(starts):
        raise InputError(f'{where}: {len(texts)} answers with {len(starts)} starts in one row')
    return tuple(texts), tuple(starts)
