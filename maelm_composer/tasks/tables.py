"""Reads the rows of a task from a .parquet, .csv or .jsonl file. Texts, ids and class names stay as written."""

import contextlib
import csv
import json
from pathlib import Path

import pyarrow
import pyarrow.csv
import pyarrow.parquet

from maelm_composer.errors import InputError
from maelm_composer.tasks.catalogue import CLASSIFICATION, REGRESSION, SPAN, Task

ID_COLUMNS = {CLASSIFICATION: 'idx', REGRESSION: 'idx', SPAN: 'id'}  # identify rows, as in GLUE and SQuAD


def read_table(task: Task, path: Path, is_labelled: bool = True) -> pyarrow.Table:
    """The rows of ``path``: all columns, of a .jsonl file those of ``task``; labels are read if ``is_labelled``.

    Raises:
        InputError: the file is not there or not readable, or two columns that the task needs have one name.
    """
    columns = [*task.text_columns, ID_COLUMNS[task.kind], *([task.label_column] if is_labelled else ())]
    try:
        match path.suffix:
            case '.parquet':
                table = pyarrow.parquet.read_table(path)
            case '.csv':
                table = _read_csv(path, task.label_column if is_labelled and task.kind == REGRESSION else None)
            case '.jsonl':
                table = _read_jsonl(task, path, columns)
            case _:
                raise InputError(f'{path}: rows are read from .parquet, .csv, .jsonl files')
        names = table.column_names
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(f'{path} does not exist') from None
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, RecursionError, csv.Error) as error:
        raise InputError(f'{path}: not a readable {path.suffix} file ({error})') from None
    if twice := [name for name in names if names.count(name) > 1 and name in columns]:
        raise InputError(f'{path}: two columns are called {twice[0]!r}: rename one')
    return table


def find_class_names(table: pyarrow.Table, column: str) -> list[str] | None:
    """The names of a ClassLabel of the datasets library, whose cells are numbers; None if ``column`` is none."""
    description = (table.schema.metadata or {}).get(b'huggingface', b'{}')
    with contextlib.suppress(ValueError, KeyError, TypeError):  # no JSON, or JSON of another shape
        names = json.loads(description)['info']['features'][column]['names']
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            return names
    return None


def _read_csv(path: Path, number_column: str | None) -> pyarrow.Table:
    """All columns but ``number_column`` are text: a type inferred from the first rows may not fit later ones."""
    parse = pyarrow.csv.ParseOptions(newlines_in_values=True)
    whole = pyarrow.csv.ReadOptions(block_size=min(max(path.stat().st_size, 1 << 20), 2**31 - 1))  # rows of any length
    with path.open(encoding='utf-8-sig', newline='') as file:
        names = next(csv.reader(file), [])
    if len(names) == 1 and (other := next((mark for mark in ';\t' if mark in names[0]), '')):
        raise InputError(f'{path}: the header has {other!r} and no comma: separate the columns by commas')
    types = {name: pyarrow.string() for name in names if name != number_column}
    convert = pyarrow.csv.ConvertOptions(column_types=types)
    return pyarrow.csv.read_csv(path, whole, parse, convert)


def _read_jsonl(task: Task, path: Path, wanted: list[str]) -> pyarrow.Table:
    rows = []
    with path.open(encoding='utf-8-sig') as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                rows.append(json.loads(line))
                if not isinstance(rows[-1], dict):
                    raise ValueError(f'line {number} is no object')
    known = dict.fromkeys(name for row in rows for name in row)
    if rows and (lacking := [name for name in wanted if name not in known and name not in ID_COLUMNS.values()]):
        raise ValueError(f'no column {lacking[0]!r}; it has: {", ".join(known)}')
    names = [name for name in wanted if name in known]
    columns = {name: [row.get(name) for row in rows] for name in names}
    key = ID_COLUMNS[task.kind]
    if key in columns:
        columns[key] = [None if cell is None else str(cell) for cell in columns[key]]
    return pyarrow.table(columns)
