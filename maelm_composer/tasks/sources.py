"""Loading a task's examples from the Hugging Face Hub, from files, or from the generator of the demo tasks."""

import functools
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from maelm_composer.config import TaskDataConfig, TaskSource
from maelm_composer.errors import InputError, first_line
from maelm_composer.files import assert_local
from maelm_composer.tasks.catalogue import CLASSIFICATION, HUB_SPLITS, REGRESSION, SPAN, TRAIN, Task
from maelm_composer.tasks.demo import make_demo_tables
from maelm_composer.tasks.tables import ID_COLUMNS, find_class_names, read_table

# Column types: a name for error messages, then the tests of which one must hold.
TEXT = 'text', pyarrow.types.is_string, pyarrow.types.is_large_string, pyarrow.types.is_string_view
NUMBERS = 'numbers', pyarrow.types.is_integer, pyarrow.types.is_floating
CLASSES = 'text or numbers', *TEXT[1:], *NUMBERS[1:], pyarrow.types.is_boolean


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
    """The training rows and the dev sets, or the samples of them that ``config`` sets.

    The result is cached, that of files until one changes: a sweep's worker on CPUs runs many fine-tunings, and reading
    MNLI takes seconds (with GPUs Ray gives each run a new process). All callers get the same lists and must not change
    them.

    Raises:
        InputError: a missing folder, file or column, a label outside the task's range, an empty split, a task that the
            source does not have, or no network.
    """
    source = task.find_source(config.source)
    if (source == TaskSource.demo) != task.is_demo:
        kind = 'is made by data.source=demo only' if task.is_demo else 'is not in data.source=demo'
        raise InputError(f'task {task.name} {kind}')
    files = find_task_files(task, config) if source == TaskSource.files else []
    stamps = tuple((path, path.stat().st_mtime_ns, path.stat().st_size) for path in files)
    return _load(task, source, stamps, config.limit(task.name), config.max_dev_examples)


@functools.lru_cache(maxsize=4)  # MNLI has 400,000 rows; a sweep makes mostly one task's runs after another
def _load(
    task: Task,
    source: TaskSource,
    stamps: tuple[Any, ...],
    max_train_examples: int | None,
    max_dev_examples: int | None,
) -> TaskData:
    names = (TRAIN, *task.eval_splits)
    match source:
        case TaskSource.demo:
            tables = {name: (table, 'demo') for name, table in make_demo_tables(task).items()}
        case TaskSource.files:
            paths = [path for path, *_ in stamps]
            tables = {name: (read_table(task, path), str(path)) for name, path in zip(names, paths, strict=True)}
        case TaskSource.huggingface:
            tables = {name: _read_hub(task, name) for name in names}
    splits = {}
    for name, (table, where) in tables.items():
        limit = max_train_examples if name == TRAIN else max_dev_examples
        rows = _read_rows(task, table, where)
        splits[name] = rows if limit is None else sample_evenly(rows, limit)
    digest = hashlib.sha256()
    for name, rows in splits.items():
        digest.update(f'{name} {len(rows)}\n'.encode())
        for row in rows:
            digest.update(_serialize(row))
    train = splits.pop(TRAIN)
    return TaskData(train, splits, digest.hexdigest())


def sample_evenly(rows: list[Any], count: int) -> list[Any]:
    """The ``count`` rows of smallest hash, in their original order: the same rows for every model and seed."""
    if count >= len(rows):
        return rows
    digests = [hashlib.blake2b(_serialize(row), digest_size=8).digest() for row in rows]
    chosen = sorted(range(len(rows)), key=lambda i: (digests[i], i))[:count]
    return [rows[i] for i in sorted(chosen)]


def count_characters(rows: list[Any]) -> int:
    texts = (row.texts if isinstance(row, TextExample) else (row.question, row.context) for row in rows)
    return sum(len(text) for of_row in texts for text in of_row)


def count_rows(task: Task, config: TaskDataConfig) -> tuple[int, int]:
    """Rows of the training file and of all dev files of a GLUE or SQuAD task; the rows themselves are not read.

    Raises:
        InputError: a missing folder or file, or a file that is not Parquet.
    """
    try:
        train, *dev = (pyarrow.parquet.read_metadata(path).num_rows for path in find_task_files(task, config))
    except (OSError, pyarrow.ArrowException) as error:
        raise InputError(f'task {task.name}: {first_line(error)}') from None
    return train, sum(dev)


def _serialize(row: TextExample | SpanExample) -> bytes:
    return json.dumps(tuple(vars(row).values()), ensure_ascii=False).encode(errors='surrogatepass')


def find_task_files(task: Task, config: TaskDataConfig) -> list[Path]:
    """The existing files of the training rows and of each evaluation split."""
    splits, note = (TRAIN, *task.eval_splits), ''
    if task.is_own:
        paths = [Path(task.files[split]) for split in splits]
    else:
        assert config.folder is not None
        folder = Path(config.folder, 'squad_v2' if task.kind == SPAN else f'glue/{task.name}')
        paths = [folder / f'{"" if split in HUB_SPLITS else "dev_"}{split}.parquet' for split in splits]
        note = f' (data.folder is {config.folder})'
    for path in paths:
        assert_local(path, f'task {task.name}:', 'file')
        for needed in (*reversed(path.parents), path):
            if not needed.exists():
                raise InputError(f'task {task.name}: {needed} is not there{note}')
    return paths


def _is_number(name: str) -> bool:
    try:
        float(name)
    except ValueError:
        return False
    return True


def _read_hub(task: Task, split: str) -> tuple[pyarrow.Table, str]:
    import datasets

    assert task.dataset is not None
    name, subset, hub_split = task.dataset, task.config_name, (task.splits or HUB_SPLITS)[split]
    was_disabled = datasets.utils.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        dataset = datasets.load_dataset(name, subset, split=hub_split)
    except Exception as error:  # a missing network or a moved dataset raises one of many types
        remedy = f'tasks.{task.name}.files' if task.is_own else 'data.source=files data.folder=FOLDER'
        raise InputError(
            f'dataset {name}, {hub_split}, cannot be loaded: {first_line(error)}; where the Hugging Face Hub cannot be '
            f'reached, use {remedy}'
        ) from None
    finally:
        if not was_disabled:
            datasets.enable_progress_bars()
    return dataset.with_format('arrow')[:], f'dataset {name}, {hub_split}'


def _read_rows(task: Task, table: pyarrow.Table, where: str) -> list[Any]:
    """The examples of a table with the task's columns; ``where`` names the table in error messages."""
    ids, texts = _read_texts(task, table, where)
    if task.kind == SPAN:
        column = _take_column(table, task.label_column, where)
        cells = _list_cells(column, task.label_column, where)
        answers = [_as_answers(answer, task.label_column, where) for answer in cells]
        rows = zip(ids, texts, answers, strict=True)
        return [SpanExample(i, question, passage, *answer) for i, (question, passage), answer in rows]
    column = _take_column(table, task.label_column, where, *(NUMBERS if task.kind == REGRESSION else CLASSES))
    if task.kind == REGRESSION:
        labels = _check_labels(task, column.to_numpy(), where).tolist()
    else:
        labels = _as_classes(task, table, column, where)
    return [TextExample(i, row, label) for i, row, label in zip(ids, texts, labels, strict=True)]


def _read_texts(task: Task, table: pyarrow.Table, where: str) -> tuple[list[str], list[tuple[str, ...]]]:
    """The rows' ids (their numbers, if there is no column for ids) and their texts."""
    if table.num_rows == 0:
        raise InputError(f'{where}: holds no rows')
    texts = [_list_cells(_take_column(table, name, where, *TEXT), name, where) for name in task.text_columns]
    key = ID_COLUMNS[task.kind]
    ids = _list_cells(table.column(key), key, where) if key in table.column_names else range(table.num_rows)
    if None in ids or '' in ids:
        raise InputError(f'{where}: column {key!r} has empty cells')
    ids = [str(i) for i in ids]
    if task.kind == SPAN and len(set(ids)) < len(ids):  # answers are written and scored by id
        raise InputError(f'{where}: column {key!r} holds {len(ids) - len(set(ids))} ids twice')
    if task.kind == SPAN:  # the questions about a passage share one string
        seen: dict[str, str] = {}
        texts[1] = [seen.setdefault(passage, passage) for passage in texts[1]]
    return ids, list(zip(*texts, strict=True))


def read_unlabelled(task: Task, path: Path) -> list[Any]:
    """The rows of a .parquet, .csv or .jsonl file as examples without an answer: label 0, or an empty list.

    Raises:
        InputError: the file is not there or not readable, has no rows, or lacks a text column of the task, or a
            span task's ids are not all different.
    """
    ids, texts = _read_texts(task, read_table(task, path, is_labelled=False), str(path))
    if task.kind == SPAN:
        return [SpanExample(i, question, passage, (), ()) for i, (question, passage) in zip(ids, texts, strict=True)]
    return [TextExample(i, row, 0) for i, row in zip(ids, texts, strict=True)]


def _take_column(
    table: pyarrow.Table, name: str, where: str, type_name: str = '', *tests: Callable[[pyarrow.DataType], bool]
) -> pyarrow.ChunkedArray:
    if name not in table.column_names:
        raise InputError(f'{where}: no column {name!r} (it has: {", ".join(table.column_names)})')
    column = table.column(name)
    if pyarrow.types.is_dictionary(column.type):  # as pandas stores categories
        column = column.cast(column.type.value_type)
    if type_name and (column.null_count or not any(test(column.type) for test in tests)):
        content = f'{column.null_count} empty cells' if column.null_count else str(column.type)
        raise InputError(f'{where}: column {name!r} holds {content}, not {type_name}')
    return column


def _list_cells(column: pyarrow.ChunkedArray, name: str, where: str) -> list[Any]:
    try:
        return column.to_pylist()
    except UnicodeDecodeError as error:  # a Parquet file may hold any bytes as text
        raise InputError(f'{where}: column {name!r} is not UTF-8 ({error.reason}): convert it first') from None


def _check_labels(task: Task, values: np.ndarray, where: str) -> np.ndarray:
    """``values`` of a regression task, or numbers of classes, as floats."""
    values = values.astype(float)
    low, high = task.label_range if task.kind == REGRESSION else (0, len(task.label_names) - 1)
    is_wrong = ~((values >= low) & (values <= high))
    if task.kind == CLASSIFICATION:
        is_wrong |= values != np.floor(values)
    if is_wrong.any():
        row = int(is_wrong.argmax())
        problem = 'outside' if not low <= values[row] <= high else 'not a whole number in'
        raise InputError(
            f'{where}: row {row} has label {values[row]:g}, {problem} {low:g}..{high:g} of task {task.name}'
            + (' (-1 marks a test split, whose labels are not public)' if values[row] == -1 else '')
        )
    return values


def _as_classes(task: Task, table: pyarrow.Table, column: pyarrow.ChunkedArray, where: str) -> list[int]:
    """The numbers of classes, which the column gives as names or as numbers."""
    is_number = any(test(column.type) for test in NUMBERS[1:])
    if is_number and (theirs := find_class_names(table, task.label_column)):
        known, other = ([name.casefold() for name in names] for names in (task.label_names, theirs))
        # Numbers of classes with other names are positions in label_names; a name at another position is a mistake.
        if any(name in known and known[number : number + 1] != [name] for number, name in enumerate(other)):
            raise InputError(
                f'{where} numbers its classes {", ".join(theirs)}: give label_names of {task.name} in this order'
            )
        return _check_labels(task, column.to_numpy(), where).astype(int).tolist()
    numbers = {name: number for number, name in enumerate(task.label_names)}
    names = _list_cells(column.cast(pyarrow.string()), task.label_column, where)
    # A number is that of a class, unless a class has a number as its name.
    if not any(map(_is_number, task.label_names)) and all(map(_is_number, names)):
        return _check_labels(task, np.array(names, dtype=float), where).astype(int).tolist()
    for row, name in enumerate(names):
        if name not in numbers:
            raise InputError(
                f'{where}: row {row} has label {name!r}, none of the label_names of {task.name}: '
                + ', '.join(task.label_names)
            )
    return [numbers[name] for name in names]


def _as_answers(answers: Any, name: str, where: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    if not isinstance(answers, dict) or not all(isinstance(answers.get(k), list) for k in ('text', 'answer_start')):
        raise InputError(f'{where}: column {name!r} must hold the lists text and answer_start')
    texts, starts = answers['text'], answers['answer_start']
    if len(texts) != len(starts):
        raise InputError(f'{where}: {len(texts)} answers with {len(starts)} starts in one row')
    if not all(isinstance(text, str) for text in texts) or not all(isinstance(start, int) for start in starts):
        raise InputError(f'{where}: column {name!r}: text must hold texts, and answer_start whole numbers')
    return tuple(texts), tuple(starts)
