"""Reads a recipe: YAML files and ``key=value`` pairs become a checked config. No other module uses OmegaConf.

The files are merged in the order of the command line, then the pairs; later values win. A config is never changed after
it was loaded.
"""

import dataclasses
import difflib
import itertools
import json
import math
import operator
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, KeyValidationError, OmegaConfBaseException

from maelm_composer.config import (
    CorpusConfig,
    DecoderAttention,
    EncoderMaskContent,
    FinetuningConfig,
    PositionIds,
    PretrainingConfig,
    SourceConfig,
    SourceKind,
    SuiteConfig,
    TaskSource,
)
from maelm_composer.errors import InputError
from maelm_composer.files import hash_json
from maelm_composer.shipped import find_shipped

Config = TypeVar('Config', CorpusConfig, PretrainingConfig, FinetuningConfig, SuiteConfig)


def load_config(root: type[Config], paths: Sequence[str], overrides: Sequence[str] = ()) -> Config:
    """Merge ``paths`` in order, then the ``key=value`` ``overrides``, into a checked ``root``.

    A path that does not exist names a recipe that came with the package (:func:`find_shipped`).

    Raises:
        InputError: a file that cannot be read, an unknown key (with the nearest right one), a wrong type or value.
    """
    merged: Any = OmegaConf.structured(root)
    for path in paths:
        layer = _read_yaml(path)
        _assert_names_are_text(root, layer, path)
        merged = _merge(root, merged, layer, where=path)
    for override in overrides:
        if '=' not in override:
            raise InputError(f'{override!r} is neither a YAML file nor key=value')
        merged = _merge(root, merged, _parse_override(override), where='command line')
    try:
        if root is PretrainingConfig:
            _name_run(merged, paths)
        if missing := sorted(OmegaConf.missing_keys(merged)):
            raise InputError(f'{missing[0]} is not set: give it in the recipe or as {missing[0]}=VALUE')
        config: Config = _expand_home(OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:  # an interpolation ${...} of a missing key
        raise InputError(f'{error.full_key}: {str(error).splitlines()[0]}') from None
    _check(config)
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
    """The keys that a recipe's file sets. Raises InputError if the file cannot be read."""
    return {str(key) for key in _read_yaml(str(path))}


def to_yaml(config: CorpusConfig | PretrainingConfig | FinetuningConfig) -> str:
    """The resolved recipe as YAML; loading it again gives the same config."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def to_plain(config: Any) -> dict[str, Any]:
    """The config as nested dicts and lists that JSON can hold; an Enum becomes its member name."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config), default=lambda member: member.name))
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


def _assert_names_are_text(root: type, layer: Any, where: str) -> None:
    """Raise InputError if ``layer`` gives a text key what YAML has read as a number, such as 15 for ``017``."""
    from maelm_composer.keys import TEXT, walk_keys

    plain = OmegaConf.to_container(layer)
    for key in walk_keys(root):
        if key.values.startswith(TEXT) and isinstance(value := _look_up(plain, key.name), (bool, int, float)):
            raise InputError(f'{where}: {key.name}: YAML reads this value as {value}, so put it in quotes')


def _merge(root: type, base: Any, layer: Any, where: str) -> Any:
    try:
        return OmegaConf.unsafe_merge(base, layer)
    except ConfigKeyError as error:
        from maelm_composer.keys import walk_keys

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
    from maelm_composer.keys import walk_keys

    parts = [key.name.split('.')[:-1] for key in walk_keys(root) if not re.search(r'[\[<]', key.name)]
    sections = dict.fromkeys(name for names in parts for name in itertools.accumulate(names, '{}.{}'.format))
    plain = OmegaConf.to_container(layer)
    for name in sections:
        value = _look_up(plain, name)
        if value is not None and not isinstance(value, dict):
            return name
    return ', '.join(map(str, layer))


def _look_up(plain: Any, name: str) -> Any:
    """The value at the dotted ``name`` in nested dicts; None if there is none."""
    for part in name.split('.'):
        plain = plain.get(part) if isinstance(plain, dict) else None
    return plain


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


_COMPARISONS = {'above': operator.gt, 'at_least': operator.ge, 'below': operator.lt, 'at_most': operator.le}


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InputError(message)


def _check(config: Any) -> None:
    """Raise InputError for values that are wrong on every machine and with every data set."""
    _check_numbers(config, {})
    match config:
        case CorpusConfig():
            _require(bool(config.sources), 'sources is empty: name at least one')
            for number, source in enumerate(config.sources):
                _check_source(source, f'sources[{number}]')
        case PretrainingConfig():
            for name, folder in (('save_folder', config.save_folder), ('data.remote', config.data.remote)):
                _require(bool(folder.strip('/')), f'{name} is {folder!r}: name a folder of its own')
            _check_model(config)
            warmup, extends = config.optimizer.warmup_samples, config.training.extends
            ends, name = [*extends, config.training.max_samples], 'extends' if extends else 'max_samples'
            _require(warmup <= ends[0], f'optimizer.warmup_samples {warmup} exceeds training.{name} {ends[0]}')
            _require(
                all(end < later for end, later in itertools.pairwise(ends)),
                f'training.extends {extends}: must hold ascending numbers below training.max_samples {ends[-1]}',
            )
        case FinetuningConfig():
            data, seeds = config.data, config.sweep.seeds
            _require(
                data.source is not TaskSource.files or data.folder is not None,
                'data.source is files, so data.folder must name the folder that holds glue/<task>/ and squad_v2/',
            )
            _require(
                data.source is TaskSource.files or data.folder is None,
                f'data.folder {data.folder} is read with data.source=files only: add it, or remove data.folder',
            )
            _require(bool(seeds), 'sweep.seeds is empty: name at least one')
            _require(len(set(seeds)) == len(seeds), f'sweep.seeds {seeds}: a seed is listed twice')


def _check_source(source: SourceConfig, name: str) -> None:
    """Raise InputError for a key that a source of this kind does not read, as when ``kind`` was forgotten."""
    both = (SourceKind.files, SourceKind.huggingface)
    readers = {'paths': both[:1], 'text_column': both, **dict.fromkeys(('dataset', 'config_name', 'split'), both[1:])}
    for key, kinds in readers.items():
        if source.kind not in kinds and getattr(source, key) != getattr(SourceConfig(), key):
            raise InputError(
                f'{name}.{key} is read by the kind {" or ".join(kind.name for kind in kinds)} only, '
                f'and {name}.kind is {source.kind.name}: change one of them'
            )


def _check_numbers(value: Any, limits: Mapping[str, float], name: str = '') -> None:
    """Compare every number in ``value``, a config or a part of one, with the limits of its field in config.py."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        _check_number(value, limits or {'above': 0}, f'{name} {value}')
    elif isinstance(value, list):
        for item in value:
            _check_numbers(item, limits, name)
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_numbers(item, limits, f'{name}.{key}')
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            _check_numbers(getattr(value, field.name), field.metadata, f'{name}.{field.name}'.lstrip('.'))


def _check_number(value: float, limits: Mapping[str, float], shown: str) -> None:
    if value == limits.get('or_else'):
        return
    _require(math.isfinite(value), f'{shown}: must be a finite number')
    _require(isinstance(value, float) or value < 2**63, f'{shown}: must be below 2^63')
    or_else = f', or {limits["or_else"]}' if 'or_else' in limits else ''
    for name, holds in _COMPARISONS.items():
        if name in limits and not holds(value, limits[name]):
            demand = 'positive' if (name, limits[name]) == ('above', 0) else f'{name.replace("_", " ")} {limits[name]}'
            raise InputError(f'{shown}: must be {demand}{or_else}')


def _check_model(config: PretrainingConfig) -> None:
    model, masking = config.model, config.masking
    stacks: dict[str, Any] = {'model': model, 'model.decoder': model.decoder}
    for name, stack in stacks.items():
        if stack is None:
            continue
        size, heads = stack.hidden_size, stack.num_attention_heads
        _require(size % heads == 0, f'{name}.hidden_size {size} is not divisible by {name}.num_attention_heads {heads}')
        buckets, distance = stack.relative_position_buckets, model.relative_position_max_distance
        _require(
            buckets == 0 or (buckets % 4 == 0 and distance > buckets // 4 + 1),
            f'{name}.relative_position_buckets {buckets}: must be 0 or a multiple of 4 whose quarter is more than 1 '
            f'below model.relative_position_max_distance {distance}',
        )
    rate, fraction, length = masking.mlm_probability, masking.encoder_mask_fraction, model.max_seq_len
    fewest = (math.floor if masking.rounds_at_random else round)(rate * length)  # without a mask there is no loss
    some = 'some rows' if masking.rounds_at_random else 'a row'
    _require(fewest > 0, f'masking.mlm_probability {rate} masks nothing in {some} of {length} tokens')
    _require(fewest < length, f'masking.mlm_probability {rate} masks all of a row of {length} tokens')
    _require(
        model.decoder is not None or fraction == 1,
        f'model.decoder is null, so masking.encoder_mask_fraction must be 1, not {fraction}: without a decoder the '
        'encoder has to see every [MASK] (yamls/roberta.yaml sets both)',
    )
    without = 'masking.{} without effect: {}; leave the key out'
    _require(
        fraction > 0 or masking.encoder_mask_content is EncoderMaskContent.mask_token,
        without.format('encoder_mask_content', 'masking.encoder_mask_fraction is 0'),
    )
    reads_encoder = model.decoder is not None and model.decoder.attention is not DecoderAttention.causal_cross
    _require(
        (fraction > 0 and reads_encoder) or not masking.decoder_resets_masks,
        without.format('decoder_resets_masks', 'no decoder gets a masked position from the encoder'),
    )
    _require(
        fraction < 1 or masking.position_ids is PositionIds.aligned,
        without.format('position_ids', 'masking.encoder_mask_fraction is 1, so no position is left out'),
    )
