"""Reads the rows of a task from a .parquet, .csv or .jsonl file. Texts, ids and class names stay as written."""

import contextlib
import json
from pathlib import Path

import pyarrow
import pyarrow.csv
import pyarrow.parquet

from maelm_composer.errors import InputError
from maelm_composer.tasks.catalogue import CLASSIFICATION, REGRESSION, SPAN, Task

ID_COLUMNS = {CLASSIFICATION: 'idx', REGRESSION: 'idx', SPAN: 'id'}  # identify rows, as in GLUE and SQuAD


def read_table(task: Task, path: Path) -> pyarrow.Table:
    """The rows of ``path``: all columns, of a .jsonl file those of ``task``.

    Raises:
        InputError: the file is not there or not readable, or two columns that the task needs have one name.
    """
    try:
        match path.suffix:
            case '.parquet':
                table = pyarrow.parquet.read_table(path)
            case '.csv':
                table = _read_csv(task, path)
            case '.jsonl':
                table = _read_jsonl(task, path)
            case _:
                raise InputError(f'{path}: rows are read from .parquet, .csv, .jsonl files')
        names = table.column_names
    except FileNotFoundError:
        raise InputError(f'{path} does not exist') from None
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise InputError(f'{path}: not a readable {path.suffix} file ({error})') from None
    if twice := [name for name in names if names.count(name) > 1 and name in _list_columns(task)]:
        raise InputError(f'{path}: two columns are called {twice[0]!r}: rename one')
    return table


def find_class_names(table: pyarrow.Table, column: str) -> list[str] | None:
    """The names of a ClassLabel of the datasets library, whose cells are numbers; None if ``column`` is none."""
    description = (table.schema.metadata or {}).get(b'huggingface', b'{}')
    with contextlib.suppress(ValueError, KeyError, TypeError):  # no JSON, or JSON of another shape
        return json.loads(description)['info']['features'][column]['names']
    return None


def _list_columns(task: Task) -> list[str]:
    return [*task.text_columns, task.label_column, ID_COLUMNS[task.kind]]


def _read_csv(task: Task, path: Path) -> pyarrow.Table:
    texts = [*task.text_columns, ID_COLUMNS[task.kind]]  # also where each is a number or a date
    if task.kind == CLASSIFICATION:
        texts.append(task.label_column)
    convert = pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(texts, pyarrow.string()))
    parse = pyarrow.csv.ParseOptions(newlines_in_values=True)
    return pyarrow.csv.read_csv(path, parse_options=parse, convert_options=convert)


def _read_jsonl(task: Task, path: Path) -> pyarrow.Table:
    rows = []
    with path.open(encoding='utf-8-sig') as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                rows.append(json.loads(line))
                if not isinstance(rows[-1], dict):
                    raise ValueError(f'line {number} is no object')
    names = [name for name in _list_columns(task) if any(name in row for row in rows)]
    columns = {name: [row.get(name) for row in rows] for name in names}
    key = ID_COLUMNS[task.kind]
    if key in columns:
        columns[key] = [None if cell is None else str(cell) for cell in columns[key]]
    return pyarrow.table(columns)
