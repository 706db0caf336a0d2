"""The keys of a recipe as a table: name, type, default, range and one line of explanation, read from config.py."""

import dataclasses
import functools
import inspect
import json
import math
import re
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, get_args, get_origin, get_type_hints

from maelm_composer.config import MISSING, CorpusConfig, FinetuningConfig, PretrainingConfig, SuiteConfig
from maelm_composer.console import begin_table, open_console
from maelm_composer.errors import InputError

KINDS = {'corpus': CorpusConfig, 'pretraining': PretrainingConfig, 'finetuning': FinetuningConfig, 'suite': SuiteConfig}
SIGNS = {'above': '> ', 'at_least': '≥ ', 'below': '< ', 'at_most': '≤ ', 'or_else': 'or '}
FIELD = re.compile(r'^ {4}(\w+): [^#]*?(?:  # (.*))?$', re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Key:
    """One key of config.py."""

    name: str  # dotted, with ``[]`` for an item of a list and ``<name>`` for a name of one's own
    annotation: Any
    field: 'dataclasses.Field[Any]'
    meaning: str

    @property
    def values(self) -> str:
        """Its type, the choices of an Enum, the range of a number."""
        return _describe_type(self.annotation, self.field.metadata)

    @property
    def default(self) -> str:
        """Its default as a recipe has it; empty if there is none."""
        default = self.field.default
        if self.field.default_factory is not dataclasses.MISSING:
            default = self.field.default_factory()
        return '' if default == MISSING else json.dumps(default).strip('"')

    @property
    def type(self) -> type:
        """str of ``list[str]``, int of ``dict[str, list[int]]``, str of ``str | None``."""
        found = self.annotation
        while inner := [argument for argument in get_args(found) if argument is not type(None)]:
            found = inner[-1]
        return found  # type: ignore[no-any-return]

    def matches(self, name: str) -> bool:
        """Whether ``name`` is this key, with names of one's own in their places."""
        own = r'\.[^.]+' * (get_origin(self.annotation) is dict)
        return re.fullmatch(re.escape(self.name).replace('<name>', '[^.]+') + own, name) is not None


def list_keys(kind: str, section: str = '') -> list[Key]:
    """The keys of a ``kind`` of recipe, in the order of config.py; of a ``section``, this key and those below it.

    Raises:
        InputError: an unknown kind, or a section that has no key.
    """
    if kind not in KINDS:
        raise InputError(f'unknown kind of recipe {kind}: one of {", ".join(KINDS)}')
    within = section.replace('[]', '')
    keys = walk_keys(KINDS[kind])
    found = [key for key in keys if not section or f'{key.name}.'.replace('[]', '').startswith(f'{within}.')]
    if not found:
        raise InputError(f'a {kind} recipe has no key {section}: `maelm keys {kind}` lists them all')
    return found


def print_keys(kind: str, section: str = '') -> None:
    """Print the table of :func:`list_keys`."""
    table = begin_table('key', 'values', 'default', 'meaning')
    for key in list_keys(kind, section):
        table.add_row(key.name, key.values, key.default, key.meaning)
    open_console().print(table)


def format_markdown() -> str:
    """Every key of every kind of recipe, as docs/keys.md."""
    lines = ['# Keys', '', 'Made from `maelm_composer/config.py` by `maelm keys --markdown`. `null` is no value.']
    for kind, root in KINDS.items():
        lines += ['', f'## {kind}', '', str(inspect.getdoc(root)).replace('``', '`').split('\n\n')[0], '']
        lines += ['| key | values | default | meaning |', '|---|---|---|---|']
        for key in list_keys(kind):
            cells = (f'`{key.name}`', key.values, key.default and f'`{key.default}`', key.meaning)
            lines.append(f'| {" | ".join(cell.replace("|", "¦") for cell in cells)} |')
    return '\n'.join(lines) + '\n'


@functools.cache  # the source of config.py is read for every class, and a plan loads hundreds of recipes
def walk_keys(root: type, prefix: str = '') -> Sequence[Key]:
    """The fields of a dataclass and of its sections that are no sections themselves, in their order."""
    meanings = dict(FIELD.findall(inspect.getsource(root)))
    types = get_type_hints(root)
    keys: list[Key] = []
    for field in dataclasses.fields(root):
        name = prefix + field.name
        annotation = types[field.name]
        section: Any = next(filter(dataclasses.is_dataclass, (annotation, *get_args(annotation))), None)
        if section is not None:
            suffix = {list: '[]', dict: '.<name>'}.get(get_origin(annotation), '')
            keys += walk_keys(section, f'{name}{suffix}.')
        else:
            keys.append(Key(name, annotation, field, meanings.get(field.name, '')))
    return keys


def _describe_type(annotation: Any, limits: Mapping[str, float]) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return ', '.join(annotation.__members__)
    if origin is list:
        return f'list of {_describe_type(arguments[0], limits)}'
    if origin is dict:
        return f'by name: {_describe_type(arguments[1], limits)}'
    if type(None) in arguments:
        (inner,) = (argument for argument in arguments if argument is not type(None))
        return f'{_describe_type(inner, limits)}, or null'
    name = {str: 'text', bool: 'true, false', int: 'integer', float: 'number'}[annotation]
    if annotation in (int, float):
        limits = limits or {'above': 0}
        name += ' ' + ', '.join(f'{SIGNS[limit]}{value:,}' for limit, value in limits.items() if math.isfinite(value))
    return name.rstrip()
