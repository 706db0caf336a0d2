"""Values of a recipe that are wrong on every machine and with every data set."""

import dataclasses
import itertools
import math
import operator
from collections.abc import Mapping
from typing import Any

from maelm_composer.config import (
    CorpusConfig,
    EncoderMaskContent,
    FinetuningConfig,
    PositionIds,
    PretrainingConfig,
    SourceConfig,
    SourceKind,
    TaskSource,
)
from maelm_composer.errors import InputError

_COMPARISONS = {'above': operator.gt, 'at_least': operator.ge, 'below': operator.lt, 'at_most': operator.le}


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InputError(message)


def _require_folders(**folders: str) -> None:
    for name, folder in folders.items():
        _require(bool(folder.strip('/')), f'{name} is {folder!r}: name a folder of its own')


def check_config(config: Any) -> None:
    """Raise InputError for the first such value in ``config``, a recipe's root."""
    _check_numbers(config, {})
    match config:
        case CorpusConfig():
            _require_folders(remote=config.remote)
            _require(bool(config.sources), 'sources is empty: name at least one')
            for number, source in enumerate(config.sources):
                _check_source(source, f'sources[{number}]')
        case PretrainingConfig():
            _require_folders(save_folder=config.save_folder, **{'data.remote': config.data.remote})
            _check_model(config)
            warmup, extends = config.optimizer.warmup_samples, config.training.extends
            ends, name = [*extends, config.training.max_samples], 'extends' if extends else 'max_samples'
            _require(warmup <= ends[0], f'optimizer.warmup_samples {warmup} exceeds training.{name} {ends[0]}')
            _require(
                all(end < later for end, later in itertools.pairwise(ends)),
                f'training.extends {extends}: must hold ascending numbers below training.max_samples {ends[-1]}',
            )
        case FinetuningConfig():
            _require_folders(save_folder=config.save_folder)
            data, seeds = config.data, config.sweep.seeds
            _require(
                data.source != TaskSource.files or data.folder is not None,
                'data.source is files, so data.folder must name the folder that holds glue/<task>/ and squad_v2/',
            )
            _require(
                data.source == TaskSource.files or data.folder is None,
                f'data.folder {data.folder} is read with data.source=files only: add it, or remove data.folder',
            )
            _require(bool(seeds), 'sweep.seeds is empty: name at least one')
            _require(len(set(seeds)) == len(seeds), f'sweep.seeds {seeds}: a seed is listed twice')


def _check_source(source: SourceConfig, name: str) -> None:
    """Raise InputError for a key that a source of this kind does not read, as when ``kind`` was forgotten."""
    both = (SourceKind.files, SourceKind.huggingface)
    readers = {
        'paths': both[:1],
        **dict.fromkeys(('text_column', 'joins_lines'), both),
        **dict.fromkeys(('dataset', 'config_name', 'split', 'revision'), both[1:]),
    }
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
        fraction > 0 or masking.encoder_mask_content == EncoderMaskContent.mask_token,
        without.format('encoder_mask_content', 'masking.encoder_mask_fraction is 0'),
    )
    reads_encoder = model.decoder is not None and not model.predicts_every_token
    _require(
        (fraction > 0 and reads_encoder) or not masking.decoder_resets_masks,
        without.format('decoder_resets_masks', 'no decoder gets a masked position from the encoder'),
    )
    _require(
        fraction < 1 or masking.position_ids == PositionIds.aligned,
        without.format('position_ids', 'masking.encoder_mask_fraction is 1, so no position is left out'),
    )
