"""Reads a recipe: YAML files and ``key=value`` pairs become a checked config. No other module uses OmegaConf.

The files are merged in the order of the command line, then the pairs; later values win. The lists of a suite's settings
are merged in their own order. A config is never changed after it was loaded.
"""

import dataclasses
import difflib
import itertools
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, KeyValidationError, OmegaConfBaseException

from maelm_composer.config import CorpusConfig, FinetuningConfig, PretrainingConfig, SuiteConfig
from maelm_composer.errors import InputError
from maelm_composer.files import hash_json
from maelm_composer.keys import walk_keys
from maelm_composer.recipe_checks import check_config
from maelm_composer.shipped import find_shipped

Config = TypeVar('Config', CorpusConfig, PretrainingConfig, FinetuningConfig, SuiteConfig)


def load_config(root: type[Config], paths: Sequence[str], overrides: Sequence[str] = ()) -> Config:
    """Merge ``paths`` in order, then the ``key=value`` ``overrides``, into a checked ``root``.

    A path that does not exist names a recipe that came with the package (:func:`find_shipped`). A pair among the paths
    is merged in its place.

    Raises:
        InputError: a file that cannot be read, an unknown key (with the nearest right one), a wrong type or value.
    """
    files, pairs = split_arguments([*paths, *overrides])
    merged: Any = OmegaConf.structured(root)
    plain = ''  # the file that takes the decoder away, as yamls/roberta.yaml
    try:
        for entry in [*paths, *overrides]:
            if entry in pairs:
                merged = _merge(root, merged, _parse_override(entry), where='command line')
            else:
                layer = _read_yaml(entry)
                _assert_read_as_meant(root, layer, entry)
                merged = _merge(root, merged, layer, where=entry)
            if root is PretrainingConfig and plain and merged.model.decoder is not None:
                remedy = 'leave the pair out' if entry in pairs else 'name it earlier'
                raise InputError(f'{entry} sets keys of model.decoder, which {plain} makes null: {remedy}')
            if root is PretrainingConfig and entry in files and merged.model.decoder is None:
                plain = plain or entry
        if root is PretrainingConfig:
            _name_run(merged, files)
        if missing := sorted(OmegaConf.missing_keys(merged)):
            raise InputError(f'{missing[0]} is not set: give it in the recipe or as {missing[0]}=VALUE')
        config: Config = _expand_home(OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:  # an interpolation ${...} of a missing key
        raise InputError(f'{error.full_key}: {str(error).splitlines()[0]}') from None
    check_config(config)
    return config


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate a command line's files from its ``key=value`` pairs; both may come in any order.

    A pair that is also the path of a file, as ``runs/lr=1e-3/recipe.yaml``, is that file.
    """
    pairs = [argument for argument in arguments if '=' in argument and not os.path.isfile(argument)]
    return [argument for argument in arguments if argument not in pairs], pairs


def is_finetuning(paths: Sequence[str], overrides: Sequence[str] = ()) -> bool:
    """Whether a recipe is for fine-tuning: its files or pairs set ``task`` or a key of ``tasks`` or ``sweep``.

    Raises:
        InputError: a file that cannot be read.
    """
    keys = {key for path in paths for key in read_keys(path)} | {pair.split('=')[0] for pair in overrides}
    return any(key.split('.')[0] in ('task', 'tasks', 'sweep') for key in keys)


def read_keys(path: str | Path) -> set[str]:
    """The keys that a recipe's file sets, with their sections, as ``model`` and ``model.decoder``.

    Raises:
        InputError: the file cannot be read.
    """
    found = (name for name, _ in _walk_values(OmegaConf.to_container(_read_yaml(str(path)))))
    return {key for name in found for key in itertools.accumulate(name.split('.'), '{}.{}'.format)}


def to_yaml(config: CorpusConfig | PretrainingConfig | FinetuningConfig) -> str:
    """The resolved recipe as YAML; loading it again gives the same config."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def to_plain(config: Any) -> dict[str, Any]:
    """The config as nested dicts and lists that JSON can hold."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return plain


def hash_config(config: Any) -> str:
    """:func:`hash_json` of the config's values, whatever files they came from."""
    return hash_json(to_plain(config))


def _read_yaml(path: str) -> Any:
    try:
        loaded = OmegaConf.load(find_shipped(path))
    except FileNotFoundError:
        raise InputError(f'no such recipe: {path}') from None
    except Exception as error:  # PyYAML and OmegaConf raise many kinds
        raise InputError(f'{path} is not readable YAML: {error}') from None
    if not OmegaConf.is_dict(loaded):
        raise InputError(f'{path} must hold key: value pairs')
    return loaded


def _parse_override(override: str) -> Any:
    try:
        loaded, (key, _, text) = OmegaConf.from_dotlist([override]), override.partition('=')
        value = None if '${' in text else OmegaConf.select(loaded, key)  # an interpolation is resolved later
    except Exception as error:
        raise InputError(f'{override!r} cannot be read: {error}') from None
    if isinstance(value, (bool, int, float)):
        OmegaConf.update(loaded, key, text)  # the key's type converts the text: a run may be called 1e15
    if isinstance(value, str) and ' #' in text and ' #' not in value:
        raise InputError(f"{override!r}: ' #' begins a comment: put the value in quotes of its own")
    return loaded


def _expand_home(value: Any) -> Any:
    """``value`` with the home folder for the ~ that begins a path; a shell leaves that of ``save_folder=~/runs``."""
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return dataclasses.replace(value, **{name: _expand_home(getattr(value, name)) for name in names})  # type: ignore[type-var]
    if isinstance(value, dict):
        return {key: _expand_home(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_expand_home(item) for item in value]
    return str(Path(value).expanduser()) if isinstance(value, str) and value.startswith('~/') else value


def _assert_read_as_meant(root: type, layer: Any, where: str) -> None:
    """Raise InputError where YAML has read text as a number or a truth value: ``017`` as 15, ``on`` as True.

    ``label_names`` may be whole numbers.
    """
    for name, value in _walk_values(OmegaConf.to_container(layer)):
        if not isinstance(value, (bool, int, float)) or (name.endswith('label_names') and type(value) is int):
            continue
        kind = next((key.type for key in walk_keys(root) if key.matches(name)), float)
        if kind is str:
            raise InputError(f'{where}: {name}: YAML reads this value as {value}, so put it in quotes')


def _walk_values(plain: Any, name: str = '') -> Iterator[tuple[str, Any]]:
    """(dotted name, value) for every value in nested dicts and lists; ``[]`` stands for a section of a list."""
    if isinstance(plain, dict) and plain:
        for key, value in plain.items():
            yield from _walk_values(value, f'{name}.{key}'.lstrip('.'))
    elif isinstance(plain, list) and plain:
        for item in plain:
            yield from _walk_values(item, f'{name}[]' if isinstance(item, dict) else name)
    else:
        yield name, plain


def _merge(root: type, base: Any, layer: Any, where: str) -> Any:
    try:
        return OmegaConf.unsafe_merge(base, layer)
    except ConfigKeyError as error:
        section, dot, key = re.sub(r'\[\d+]', '', error.full_key or '').rpartition('.')
        beside = [f'{section}{dot}{field.name}' for field in dataclasses.fields(error.object_type)]  # type: ignore[arg-type]
        parts = [found.name.split('.') for found in walk_keys(root)]
        everywhere = [name for names in parts for name in itertools.accumulate(names, '{}.{}'.format)]  # and sections
        near = _find_nearest(key, beside, everywhere)
        hint = f'did you mean {near}?' if near else f'there are {", ".join(beside)}'
        raise InputError(f'{where}: unknown key {section}{dot}{key}; {hint}') from None
    except OmegaConfBaseException as error:
        key, reason = error.full_key or error.key, str(error).splitlines()[0]
        if 'is not a ListConfig' in reason:
            reason = f'must be a list, as in {key}=[...]'
        if isinstance(error, KeyValidationError):  # as of the ladder's rung 1e15
            reason = 'YAML reads this name as a number, so put it in quotes'
        if key is None:
            key, reason = _find_flat_section(root, layer), 'must be key: value pairs'
        raise InputError(f'{where}: {key}: {reason}') from None
    except TypeError:  # OmegaConf does not wrap this one
        keys = ', '.join(map(str, layer))
        raise InputError(
            f'{where}: {keys}: the key, or one below it, must be key: value pairs, not a list (or the reverse)'
        ) from None


def _find_flat_section(root: type, layer: Any) -> str:
    """The dotted name of the section to which ``layer`` gives a single value; OmegaConf's error does not name it."""
    parts = [key.name.split('.')[:-1] for key in walk_keys(root) if not re.search(r'[\[<]', key.name)]
    sections = dict.fromkeys(name for names in parts for name in itertools.accumulate(names, '{}.{}'.format))
    values = dict(_walk_values(OmegaConf.to_container(layer)))
    return next((name for name in sections if values.get(name) not in (None, {})), ', '.join(map(str, layer)))


def _find_nearest(key: str, beside: list[str], everywhere: list[str]) -> str | None:
    """The known key that an unknown ``key`` may stand for: one of equal name, equal initials or similar spelling.

    ``beside`` and ``everywhere`` are the dotted names of the keys in the same section, which are preferred, and of all.
    """
    by_last_part = {name.rpartition('.')[2]: name for name in reversed([*beside, *everywhere])}
    parts = [part for part in by_last_part if '_' in part]
    by_initials = {''.join(word[0] for word in part.split('_')): by_last_part[part] for part in parts}
    if key not in by_last_part and key in by_initials:
        return by_initials[key]
    near = difflib.get_close_matches(key, by_last_part, n=1)  # first of all the key itself
    return by_last_part[near[0]] if near else None


def _name_run(merged: Any, paths: Sequence[str]) -> None:
    """Name the run after all its files, so that a recipe with an overlay never resumes the run without."""
    if OmegaConf.is_missing(merged, 'run_name'):
        merged.run_name = '-'.join(Path(path).stem for path in paths)
    if not re.fullmatch(r'[A-Za-z0-9_][A-Za-z0-9._+-]*', str(merged.run_name)):
        raise InputError(
            f"run_name {merged.run_name!r}: use letters, digits and '_', and after the first '.', '+' and '-'"
        )
    if OmegaConf.is_missing(merged, 'save_folder'):
        merged.save_folder = f'runs/{merged.run_name}'
