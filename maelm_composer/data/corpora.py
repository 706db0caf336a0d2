"""Reads documents from installed documentation, files or the Hugging Face Hub, always in the same order."""

import ast
import contextlib
import glob
import hashlib
import io
import itertools
import json
import os
import re
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from maelm_composer.config import SourceConfig, SourceKind
from maelm_composer.errors import InputError
from maelm_composer.files import assert_local
from maelm_composer.recipe import to_plain

SKIPPED_FOLDERS = {'test', 'tests', 'testing', '__pycache__', 'site-packages', 'lib2to3', '_vendor', 'vendor'}
MIN_DOCSTRING_CHARACTERS = 200
MAX_DOCSTRINGS_PER_PACKAGE = 3000  # some packages consist of generated code with repetitive docstrings
FREQUENT_ENGLISH = re.compile(r'\b(?:the|of|to|and|a|in|is|for|be|that|with|as|or|if|this|are|on|by|it|not|from|an)\b')


def iterate_documents(sources: list[SourceConfig]) -> Iterator[str]:
    """Yield the documents of all sources in order. Lines end at ``\\n``; blank lines and empty documents are dropped.

    Raises:
        InputError: a glob matches no file, a file is not UTF-8 or has another format than its name says, or a column is
            missing.
    """
    for source in sources:
        match source.kind:
            case SourceKind.documentation:
                documents = _read_documentation()
            case SourceKind.files:
                documents = (text for path in find_files(source) for text in _read_file(path, source.text_column))
            case SourceKind.huggingface:
                documents = _read_huggingface(source)
        cleaned = (_clean_lines(text, source.joins_lines) for text in documents)
        yield from itertools.islice(filter(None, cleaned), source.max_documents)


def _clean_lines(text: str, joins_lines: bool) -> str:
    """``text`` without blank lines and without blanks around a line."""
    lines: Iterable[str] = map(str.strip, text.split('\n'))
    if joins_lines:
        lines = (' '.join(paragraph) for is_text, paragraph in itertools.groupby(lines, bool) if is_text)
    return '\n'.join(filter(None, lines))


def assert_readable(sources: list[SourceConfig]) -> None:
    """Raise InputError for what would show hours later: the first document of a source cannot be read, or a file is of
    no known kind, or no Parquet file with the column.
    """
    for source in sources:
        if source.kind != SourceKind.documentation:
            next(iterate_documents([source]), None)
        if source.kind == SourceKind.files and source.max_documents is None:
            for path in find_files(source):
                if _find_kind(path) == '.parquet':
                    with _open_parquet(path, source.text_column):
                        pass


def group_documents(
    documents: Iterable[str], max_characters: int, max_documents: int | None = None
) -> Iterator[list[str]]:
    """Group consecutive documents; a group ends at ``max_documents``, or once it holds ``max_characters``."""
    group: list[str] = []
    characters = 0
    for text in documents:
        group.append(text)
        characters += len(text)
        if len(group) == max_documents or characters >= max_characters:
            yield group
            group, characters = [], 0
    if group:
        yield group


def describe_source(source: SourceConfig) -> dict[str, Any]:
    """The fields of ``source`` that determine its documents, with the files' names and sizes instead of the globs."""
    description = {key: value for key, value in to_plain(source).items() if key not in ('note', 'paths')}
    for key in ('revision', 'joins_lines'):  # which the hashes of older shards do not have
        if not description[key]:
            del description[key]
    if source.kind == SourceKind.files:
        description['files'] = [[Path(path).name, os.path.getsize(path)] for path in find_files(source)]
    return description


def name_sources(sources: list[SourceConfig]) -> str:
    """The globs, data sets and kinds of ``sources``, for a message."""
    names: list[str] = []
    for source in sources:
        own = {SourceKind.files: source.paths, SourceKind.huggingface: [str(source.dataset)]}
        names += own.get(source.kind, [source.kind.name])
    return ', '.join(names)


def find_files(source: SourceConfig) -> list[str]:
    """The files that the globs of ``source`` match, without duplicates, sorted within each glob.

    Raises:
        InputError: there is no glob, or one that is no local path or matches no file.
    """
    if not source.paths:
        raise InputError('a source of kind files needs paths: a list of globs')
    found: dict[str, None] = {}
    for pattern in source.paths:
        assert_local(pattern, 'text', 'file')
        there = sorted(glob.glob(pattern, recursive=True))
        if broken := [path for path in there if os.path.islink(path) and not os.path.exists(path)]:
            raise InputError(f'{broken[0]} is a link to {os.readlink(broken[0])}, which is not there: restore the file')
        matches = [path for path in there if os.path.isfile(path)]
        if unreadable := [path for path in matches if path != path.encode(errors='ignore').decode()]:
            raise InputError(f'{unreadable[0]!r}: the name of the file is not UTF-8: rename it')
        if not matches and os.path.isdir(pattern):
            raise InputError(
                f'{pattern} is a folder: write {os.path.join(pattern, "*.parquet")}, or another glob of its files'
            )
        if not matches:
            raise InputError(f'{pattern}: matches no file')
        found.update(dict.fromkeys(matches))
    return list(found)


def _find_kind(path: str) -> str:
    kind = os.path.splitext(path.removesuffix('.gz').removesuffix('.zst'))[1]
    if kind not in ('.txt', '.jsonl') and not path.endswith('.parquet'):
        raise InputError(f'{path}: not a .txt, .jsonl (plain, .gz or .zst) or .parquet file')
    return kind


def _read_file(path: str, column: str) -> Iterator[str]:
    match _find_kind(path):
        case '.parquet':
            yield from _read_parquet(path, column)
        case '.jsonl':
            yield from _read_jsonl(path, column)
        case '.txt':
            lines = (line.strip() for _, line in _read_lines(path))
            yield from ('\n'.join(paragraph) for is_text, paragraph in itertools.groupby(lines, bool) if is_text)


def _read_jsonl(path: str, column: str) -> Iterator[str]:
    for number, line in _read_lines(path):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:  # also of too long a number, or too many brackets
            raise InputError(f'{path}, line {number}: not JSON ({error})') from None
        text = _pick_text(record, column, f'{path}, line {number}')
        # JSON can encode half of a surrogate pair, which UTF-8 cannot.
        yield text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')


@contextlib.contextmanager
def _open_parquet(path: str, column: str) -> Iterator[Any]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False) as file:  # which would keep what was read
            _pick_text(dict.fromkeys(file.schema_arrow.names), column, path)  # refuses a file without the column
            yield file
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        raise InputError(f'{path}: not a readable Parquet file ({error})') from None


def _read_parquet(path: str, column: str) -> Iterator[str]:
    with _open_parquet(path, column) as file:
        for batch in file.iter_batches(batch_size=256, columns=[column]):
            for row in batch.to_pylist():
                yield _pick_text(row, column, path)


def _read_huggingface(source: SourceConfig) -> Iterator[str]:
    import datasets

    if source.dataset is None:
        raise InputError('a source of kind huggingface needs dataset: a name on the Hub or a local folder')
    column, where = source.text_column, f'dataset {source.dataset}'
    try:
        options = {'split': source.split, 'revision': source.revision, 'streaming': True}
        for row in datasets.load_dataset(source.dataset, source.config_name, **options):
            yield _pick_text(row, column, where)
    except InputError:
        raise
    except Exception as error:  # the error's class depends on the cause: a wrong name, a damaged file, no network
        raise InputError(f'{where}: cannot be read: {error}') from None


def _pick_text(row: Any, column: str, where: str) -> str:
    if not isinstance(row, Mapping) or column not in row:
        names = ', '.join(row) if isinstance(row, Mapping) else 'none'
        raise InputError(f'{where}: no column {column!r} (it has: {names}); set text_column')
    if not isinstance(row[column], (str, type(None))):
        raise InputError(f'{where}: column {column!r} holds {type(row[column]).__name__}, not text; set text_column')
    return row[column] or ''


def _read_lines(path: str) -> Iterator[tuple[int, str]]:
    """Yield the line numbers and lines of a UTF-8 file, plain, .gz or .zst, without line ends."""
    import pyarrow

    try:
        with io.BufferedReader(pyarrow.input_stream(path)) as file:  # decompresses according to the suffix
            for number, line in enumerate(file, start=1):
                yield number, line.decode('utf-8-sig' if number == 1 else 'utf-8').rstrip('\r\n')
    except UnicodeDecodeError as error:
        raise InputError(
            f'{path}, line {number}: not UTF-8 ({error.reason}); convert it first, as with iconv'
        ) from None
    except OSError as error:
        if error.errno is not None:  # the file is missing or unreadable; the message names it
            raise
        raise InputError(f'{path}: cannot be unpacked ({error})') from None


def _read_documentation() -> Iterator[str]:
    """Yield the English docstrings of the standard library and of the installed packages, without duplicates.

    The files are sorted by a hash of their path within the library, so that the first few thousand documents are an
    even sample of all packages, wherever Python is installed.
    """
    files = {
        relative: os.path.join(root, relative)
        for root in (sysconfig.get_path('stdlib'), sysconfig.get_path('purelib'))
        for relative in _find_modules(root)
    }
    seen: set[bytes] = set()
    per_package: Counter[str] = Counter()
    for relative in sorted(files, key=lambda name: hashlib.sha256(name.encode()).digest()):
        package = relative.split(os.sep)[0]
        if per_package[package] >= MAX_DOCSTRINGS_PER_PACKAGE:
            continue
        try:
            source = Path(files[relative]).read_bytes()
            with warnings.catch_warnings():  # invalid escapes in installed packages
                warnings.simplefilter('ignore')
                tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, OSError):  # a template, Python 2, or a file deleted meanwhile
            continue
        for docstring in _find_docstrings(tree):
            document = _join_paragraphs(docstring)
            digest = hashlib.sha256(document.encode(errors='surrogatepass')).digest()
            if digest not in seen and _is_english(document):
                seen.add(digest)
                per_package[package] += 1
                yield document


def _find_modules(root: str) -> Iterator[str]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        for name in names:
            if name.endswith('.py') and not name.startswith('test_'):
                yield os.path.relpath(os.path.join(folder, name), root)


def _find_docstrings(tree: ast.Module) -> Iterator[str]:
    pending: list[Any] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node) or ''
        # Only statements are visited: expressions are ten times as many and contain no docstrings.
        for name in ('finalbody', 'orelse', 'handlers', 'body'):
            pending.extend(reversed(getattr(node, name, [])))


def _join_paragraphs(docstring: str) -> str:
    """Join each run of equally indented lines to one line, and drop lines without letters or digits."""

    def measure_indent(line: str) -> int:
        return len(line) - len(line.lstrip()) if re.search(r'\w', line) else -1

    paragraphs = itertools.groupby(docstring.split('\n'), measure_indent)
    return '\n'.join(' '.join(' '.join(lines).split()) for indent, lines in paragraphs if indent >= 0)


def _is_english(text: str) -> bool:
    if len(text) < MIN_DOCSTRING_CHARACTERS or not text.replace('\n', '').isprintable():
        return False
    letters = sum(map(text.count, 'etaoinsrhldcumfpgwybvkxjqz '))
    frequent = len(FREQUENT_ENGLISH.findall(text.lower()))
    return letters > 0.7 * len(text) and frequent > 0.1 * len(text.split())
