"""The rank record of a checkpoint: effective rank per layer, and the [MASK]s' subspace (Table 3 and Figure 1)."""

import dataclasses
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from maelm_composer.analysis.measures import THRESHOLD, Gram, RankOneResidual, measure_principal_angles
from maelm_composer.analysis.rows import TOKENS_PER_BATCH, RowSource, find_shards, find_text, iterate_views
from maelm_composer.checkpoints.find import find_encoder, read_recipe
from maelm_composer.checkpoints.pretrained import Pretrained, load_pretrained
from maelm_composer.config import DataConfig, Implementation, Precision, SourceConfig
from maelm_composer.console import begin_table, open_console, tell
from maelm_composer.data.manifest import find_manifest
from maelm_composer.data.storage import is_s3
from maelm_composer.device import find_device, keep_freed_memory, name_device
from maelm_composer.errors import InputError
from maelm_composer.files import assert_local, assert_writable, hash_json
from maelm_composer.precision import choose_in
from maelm_composer.recipe import to_plain
from maelm_composer.records import LayerRanks, RankRecord, collect_provenance, load_record, parse_rank, write_record

RANKS = 'ranks'
STATES_VERSION = 2  # in a Hugging Face encoder's key; 1 took the last layer of some before their final norm


@dataclass(frozen=True)
class RankOptions:
    """The settings that decide a rank record, beside checkpoint and rows."""

    max_tokens: int = 5_000_000  # real tokens; the paper's n
    mlm_probability: float = 0.15
    threshold: float = THRESHOLD
    centered: bool = False
    precision: Precision = Precision.fp32  # of the forward passes
    seed: int = 17  # of the masks


class _Layer:
    """Sums over the hidden states of one layer."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.real = Gram(size, device)  # real tokens in inputs without [MASK]
        self.kept = Gram(size, device)  # real tokens in inputs with [MASK]
        self.masks = Gram(size, device)
        self.residual = RankOneResidual()  # of the rows in ``kept``


def analyze_ranks(
    checkpoint: str,
    options: RankOptions = RankOptions(),
    *,
    data: str | None = None,
    text: Sequence[str] = (),
    text_column: str = SourceConfig.text_column,
    implementation: Implementation = Implementation.auto,
    folder: str | None = None,
) -> RankRecord:
    """Measure ``checkpoint``, or return the record ``folder``/<key>.json (docs/analysis.md) of an earlier, equal call.

    Args:
        checkpoint: as in :func:`load_pretrained`.
        data: shards with the validation rows to read; default: those of the checkpoint's recipe.
        text: globs of text files to read instead of shards.
        text_column: of .jsonl and .parquet files.
        folder: default: that of :func:`find_rank_folder`.

    Raises:
        InputError: an option is out of range, checkpoint or rows cannot be read, or the rows have fewer tokens than the
            encoder has dimensions.
    """
    if data is not None and text:
        raise InputError(f'both shards ({data}) and text files ({", ".join(text)}) are given: choose one')
    if text_column != SourceConfig.text_column and not text:
        raise InputError(f'--text-column {text_column} is for text files: give --text')
    if folder is not None:
        assert_local(folder, '--folder')
    for name in ('mlm_probability', 'threshold'):
        if not 0 < getattr(options, name) < 1:
            raise InputError(f'{name} {getattr(options, name)}: must be between 0 and 1')
    pretrained = load_pretrained(checkpoint, implementation)
    source = _find_rows(pretrained, checkpoint, data, text, text_column)
    home = folder or find_rank_folder(checkpoint)
    choice = choose_in(Path(home), options.precision, '--precision')
    tell(choice.notice)
    options = dataclasses.replace(options, precision=choice.precision)
    plain = to_plain(options)
    decisive = [pretrained.identity.hash, pretrained.identity.implementation, source.identity['hash'], plain]
    if pretrained.identity.implementation == 'huggingface':
        decisive.append(STATES_VERSION)
    key = hash_json(decisive)[:16]
    path = Path(home, f'{key}.json')
    if path.exists():  # of equal weights, perhaps made or moved again
        return load_record(path, parse_rank).model_copy(update={'checkpoint': pretrained.identity})
    assert_writable(path.parent)
    start, provenance = time.monotonic(), collect_provenance(options)
    try:
        layers = _accumulate(pretrained, source, options)
    except torch.OutOfMemoryError as error:
        raise InputError(
            f'{TOKENS_PER_BATCH:,} tokens in one forward pass do not fit into the memory of {name_device()}: end what '
            'else uses this GPU, or give CUDA_VISIBLE_DEVICES= to measure on the CPU'
        ) from error
    record = RankRecord(
        key=key,
        checkpoint=pretrained.identity,
        data=source.identity,
        tokens=layers[0].real.count,
        mask_tokens=layers[0].masks.count,
        **plain,
        layers=[_measure(number, layer, options) for number, layer in enumerate(layers)],
        hidden_size=pretrained.hidden_size,
        device=name_device(),
        seconds=time.monotonic() - start,
        provenance=provenance,
    )
    write_record(path, record)
    return record


def find_rank_folder(checkpoint: str) -> str:
    """ranks/ in the folder of a local run or fine-tuned model, else in the working directory."""
    found = find_encoder(checkpoint)
    home = '' if found is None else found.run or found.uri
    return RANKS if is_s3(home) else str(Path(home, RANKS))


def _find_rows(
    pretrained: Pretrained, checkpoint: str, data: str | None, text: Sequence[str], text_column: str
) -> RowSource:
    if text:
        return find_text(text, pretrained.tokenizer, pretrained.max_seq_len, text_column)
    if data is not None:
        return find_shards(DataConfig(remote=data), pretrained.tokenizer, pretrained.max_seq_len)
    found = find_encoder(checkpoint)
    if found is None or found.run is None:
        raise InputError(f'{checkpoint} has no pretraining recipe that names its shards: give --data or --text')
    remote = read_recipe(found).data.remote
    if find_manifest(remote) is None:
        raise InputError(
            f'{remote}, with the rows of {checkpoint}, is not there (a relative path begins in this folder): '
            'give --data or --text'
        )
    # Not into the recipe's data.local: a run of others does not choose where files are written.
    return find_shards(DataConfig(remote=remote), pretrained.tokenizer, pretrained.max_seq_len)


def _accumulate(pretrained: Pretrained, source: RowSource, options: RankOptions) -> list[_Layer]:
    keep_freed_memory()
    device, size = find_device(), pretrained.hidden_size
    encoder: Any = pretrained.encoder.to(device)
    layers: defaultdict[int, _Layer] = defaultdict(lambda: _Layer(size, device))
    views = iterate_views(
        source,
        max_tokens=options.max_tokens,
        mlm_probability=options.mlm_probability,
        seed=options.seed,
        is_packed=pretrained.identity.implementation == 'ours',
    )
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=options.precision == Precision.bf16)
    with torch.inference_mode(), autocast, tqdm(unit=' tokens', unit_scale=True, disable=None) as progress:
        for nth, view in enumerate(views):
            view = view.to(device)
            where = view.position_ids, view.segment_ids
            for number, states in enumerate(encoder.layer_states(view.plain_ids, *where)):
                layers[number].real.add(states[view.is_real])
            is_kept = view.is_real & ~view.is_masked
            _, sizes = view.number_blocks()[is_kept].unique_consecutive(return_counts=True)
            for number, states in enumerate(encoder.layer_states(view.masked_ids, *where)):
                kept = states[is_kept]
                layers[number].kept.add(kept)
                layers[number].masks.add(states[view.is_masked])
                layers[number].residual.add(kept, sizes)
            progress.update(int(view.is_real.sum()))
            if options.centered and nth == 0:  # fails early: without absolute positions all [MASK]s are equal
                _assert_some_variance(layers)
    for name, gram in (('real tokens', layers[0].kept), ('[MASK]s', layers[0].masks)):
        if gram.count < size:
            raise InputError(
                f'the rows hold {gram.count} {name} for {size} dimensions: give more text, or raise max_tokens'
            )
    return list(layers.values())


def _assert_some_variance(layers: Mapping[int, _Layer]) -> None:
    for number, layer in layers.items():
        try:
            layer.masks.get_moment(centered=True)
        except InputError as error:
            raise InputError(f'[MASK] vectors of layer {number}: {error}; or measure without --centered') from None


def _measure(number: int, layer: _Layer, options: RankOptions) -> LayerRanks:
    threshold, centered = options.threshold, options.centered
    kept = layer.kept.find_directions(threshold, centered)
    masks = layer.masks.find_directions(threshold, centered)
    return LayerRanks(
        layer=number,
        rank_real=layer.real.measure_effective_rank(threshold, centered),
        rank_with_masks=(layer.kept + layer.masks).measure_effective_rank(threshold, centered),
        rank_real_with_masks=kept.shape[1],
        rank_masks=masks.shape[1],
        mask_outside_share=layer.masks.measure_outside_share(kept, centered),
        real_outside_share=layer.kept.measure_outside_share(kept, centered),
        principal_angles_degrees=measure_principal_angles(kept, masks),
        rank_one_residual=layer.residual.get_mean(),
    )


def print_ranks(record: RankRecord) -> None:
    """Print a table of the record, one line per layer."""
    ranks = ('layer', 'rank without [MASK]', 'with, all', 'with, real', 'with, [MASK]')
    shares = ('[MASK] outside', 'real outside', 'median angle', 'rank-1 residual')
    table = begin_table(right=(*ranks, *shares))
    for layer in record.layers:
        table.add_row(
            *map(str, (layer.layer, layer.rank_real, layer.rank_with_masks, layer.rank_real_with_masks)),
            str(layer.rank_masks),
            f'{layer.mask_outside_share:.1%}',
            f'{layer.real_outside_share:.1%}',
            f'{layer.principal_angles_degrees[2]:.1f}°',
            f'{layer.rank_one_residual:.3f}',
        )
    open_console().print(table)
    print(
        f'{record.checkpoint.uri}: {record.threshold}-effective rank of '
        f'{record.hidden_size} dimensions, {"centred" if record.centered else "uncentred"}; {record.tokens:,} real '
        f'tokens, {record.mask_tokens:,} [MASK]s; {record.seconds:,.0f} s'
    )
