"""MAE-LM − RoBERTa with other recipes than the ladder's, as rows: which settings the lead in rank depends on.

Every folder in results/<scale>/recipes/ is one like results/<scale>/records. A run of MAE-LM there is compared with the
RoBERTa of the same folder, or else of the ladder, whose recipe differs from its own in nothing but the decoder and the
masks; without such a RoBERTa the row says why. The layers, and the settings that the MAE-LM of the same rung does not
have, name the comparison.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from maelm_composer.errors import InputError
from maelm_composer.records import PretrainingRecord
from maelm_composer.reporting.artefacts import MAE_LM, ROBERTA, RUNGS_OF, Rung
from maelm_composer.reporting.cells import Cell, find_varied, list_differences, subtract, subtract_relative
from maelm_composer.reporting.evidence import Evidence, Runs, order_by_seed
from maelm_composer.reporting.formatting import format_x
from maelm_composer.reporting.ladder import EXPLANATIONS, FLOPS, LOSS, NUMBERS, RELATIVE
from maelm_composer.reporting.load import RANK_OPTIONS, RANKS, assert_equal
from maelm_composer.reporting.rows import GAP, MARGIN_RANK_SHARE, PERCENT, Claim, Row, RowBuilder
from maelm_composer.reporting.tables import MASKS, REAL, WITH_MASKS

ROWS, DECODER = 'training.max_samples', 'model.decoder'
LAYERS = 'model.num_hidden_layers', f'{DECODER}.num_hidden_layers'  # of the encoder and the decoder
# A decoder alone is known by its layers; of the precision, one rung has fp32, whose loss is bf16's but for 0.002 nats.
UNNAMED = {*LAYERS, DECODER, 'training.precision'}
NAMES = {'training.global_train_batch_size': 'batch size'}  # other settings have the name of their key
Settings = dict[str, Any]


@dataclass
class Group:
    """The runs of one model with one recipe, ordered by pretraining seed."""

    evidence: Evidence  # that has the runs
    settings: Settings  # without the seed
    runs: Runs

    @property
    def is_roberta(self) -> bool:
        return self.settings.get(DECODER, '') is None

    def find_differing(self, other: 'Group') -> list[str]:
        """The settings that differ, of those that both models of a recipe share."""
        varied = {key for key in find_varied() if key.startswith('masking.')}  # a recipe's models share their encoder
        here, there = (
            {key: value for key, value in settings.items() if not key.startswith(DECODER) and key not in varied}
            for settings in (self.settings, other.settings)
        )
        return list_differences(here, there)

    def rank(self, layer: int | None = None) -> Cell:
        """The effective rank of the real tokens in one layer, by default the last."""
        return self.evidence.rank(self.runs, REAL, layer)


@dataclass
class Comparison:
    """Both models of one recipe at one rung, and the labels of their settings."""

    folder: str
    rung: Rung
    label: str
    label_of_roberta: str
    mae_lm: Group
    roberta: Group | None
    is_rungs: bool = False  # whether RoBERTa is the rung's own
    missing: str = ''  # why there is no RoBERTa


def build_recipes(builder: RowBuilder) -> list[Row]:
    """Both models' losses and ranks for every recipe, their differences, and the claim about the last layer's rank.

    The claims are one family for Holm's correction.
    """
    found = sorted(_find_comparisons(builder.evidence), key=lambda c: (c.label, c.rung.flops))
    for one, other in pairwise(found):
        if (one.label, one.rung) == (other.label, other.rung):
            name = f'{one.label} at {format_x(one.rung.flops)} FLOPs'
            raise InputError(f'recipes/{one.folder} and recipes/{other.folder} both have {name}: keep one')
    rows, claims = dict[tuple[str, str, float], Row](), list[Claim]()
    for each in found:
        made, lead = _compare(builder, each)
        flops = each.rung.flops
        for row in made:  # each RoBERTa once
            same = rows.setdefault((row.row, row.column, flops), row.at(flops, 'FLOPs'))
            if same.run_keys != row.run_keys:
                raise InputError(
                    f'{row.row} at {format_x(flops)} FLOPs is {same.run_keys} as well as {row.run_keys}: '
                    'keep those of one recipe'
                )
        name = f'{GAP}, {each.label}'
        claims.append(Claim(name, RELATIVE, PERCENT, lead, margin=100 * MARGIN_RANK_SHARE, flops=flops))
    return [*rows.values(), *builder.claims(*claims)]


def _compare(builder: RowBuilder, each: Comparison) -> tuple[list[Row], Cell]:
    """The numbers of both models and their differences, and the lead in rank of the last layer."""
    gap, rows = f'{GAP}, {each.label}', _measure(builder, f'{MAE_LM.label}, {each.label}', each.mae_lm)
    if each.roberta is None:
        return rows, Cell(missing=each.missing)
    if not each.is_rungs:  # the ladder has its own
        rows += _measure(builder, f'{ROBERTA.label}, {each.label_of_roberta}', each.roberta)
    _, read = NUMBERS[LOSS]
    losses = [read(group.evidence, group.runs) for group in (each.mae_lm, each.roberta)]
    rows.append(builder.value(gap, LOSS, 'nats', subtract(*losses)))
    *lower, lead = [
        subtract_relative(each.mae_lm.rank(layer), each.roberta.rank(layer))
        for layer in range(1, each.mae_lm.settings[LAYERS[0]] + 1)
    ]
    for layer, cell in enumerate(lower, 1):
        rows.append(builder.value(gap, f'{RELATIVE}, layer {layer}', PERCENT, cell))
    return rows, lead


def _measure(builder: RowBuilder, label: str, group: Group) -> list[Row]:
    """Loss, FLOPs and last layer's ranks of one model; of RoBERTa also the measures of the paper's explanation."""
    numbers = {name: NUMBERS[name] for name in (LOSS, FLOPS, REAL, WITH_MASKS, MASKS)}
    if group.is_roberta:
        numbers |= EXPLANATIONS
    evidence, runs = group.evidence, group.runs
    return [builder.value(label, name, unit, read(evidence, runs)) for name, (unit, read) in numbers.items()]


def _find_comparisons(evidence: Evidence) -> Iterator[Comparison]:
    """Every MAE-LM with ranks in a folder of recipes, with its RoBERTa or the reason why there is none.

    Raises:
        InputError: it read as many rows as no MAE-LM of the ladder, or the two models' ranks were measured differently.
    """
    rungs = {run.identity[ROWS]: rung for rung in RUNGS_OF[evidence.scale] for run in evidence.find_runs(rung.mae_lm)}
    own = [group for group in _group(evidence) if group.is_roberta]
    identities = [run.identity for run in evidence.runs.values()]
    for folder, recipe in evidence.recipes.items():
        groups = _group(recipe)
        for run in recipe.runs.values():
            if run.identity in identities:
                raise InputError(f'recipes/{folder}: {run.run_name} is a run of the ladder itself: keep one of them')
        robertas = [*(group for group in groups if group.is_roberta), *own]
        for mae_lm in groups:
            if mae_lm.is_roberta or mae_lm.rank().missing:  # RoBERTa, or not measured
                continue
            num_rows = mae_lm.settings[ROWS]
            if num_rows not in rungs:
                name = f'recipes/{folder}: {mae_lm.runs[0].run_name}'
                raise InputError(f'{name} has {ROWS}={num_rows}, as no MAE-LM of {evidence.scale}')
            rung = rungs[num_rows]
            label = _describe(mae_lm.settings, evidence.find_runs(rung.mae_lm)[0].identity)
            differing = [(mae_lm.find_differing(roberta), roberta) for roberta in robertas]
            keys, roberta = min(differing, key=lambda pair: len(pair[0]), default=(['everything'], None))
            if keys or roberta is None:
                nearest = '' if roberta is None else f'; {roberta.runs[0].run_name} differs in {", ".join(keys)}'
                yield Comparison(
                    folder, rung, label, '', mae_lm, None, missing=f'no RoBERTa of these settings{nearest}'
                )
                continue
            ranks = [rank for group in (mae_lm, roberta) for rank in group.rank().records]
            assert_equal(ranks, RANKS, *RANK_OPTIONS)
            first = (evidence.find_runs(rung.roberta) or evidence.find_runs(rung.mae_lm))[0]
            theirs = _describe(roberta.settings, first.identity)
            yield Comparison(folder, rung, label, theirs, mae_lm, roberta, is_rungs=roberta in own)


def _group(evidence: Evidence) -> list[Group]:
    """The runs by recipe. Raises InputError if a recipe has a seed twice."""
    found = defaultdict[str, list[PretrainingRecord]](list)
    for run in evidence.runs.values():
        found[repr(sorted(_drop_seed(run).items()))].append(run)
    return [Group(evidence, _drop_seed(runs[0]), order_by_seed(runs)) for runs in found.values()]


def _drop_seed(run: PretrainingRecord) -> Settings:
    return {key: value for key, value in run.identity.items() if key != 'seed'}


def _describe(settings: Settings, usual: Settings) -> str:
    """The layers, then the settings that differ from ``usual``: ``2 + 1 layers, learning rate 0.002``."""
    layers = [settings[key] for key in LAYERS if settings.get(key) is not None]
    different = [key for key in sorted(settings.keys() - UNNAMED) if settings[key] != usual.get(key)]
    names = [NAMES.get(key, ('decoder ' if DECODER in key else '') + key.rpartition('.')[2]) for key in different]
    values = (f'{name.replace("_", " ")} {settings[key]}' for name, key in zip(names, different, strict=True))
    return ', '.join([f'{" + ".join(map(str, layers))} layers', *values])
