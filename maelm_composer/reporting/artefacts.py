"""Every table and figure of the evidence as data: which runs, which tasks, which checkpoints. Pure, no torch.

The benchmark suite walks through :data:`ARTEFACTS` to know what to run; the tables read the same data to know what to
look for. Two artefacts that need the same run name the same :class:`Model`.
"""

from dataclasses import dataclass
from enum import Enum
from pathlib import PurePosixPath


class Role(Enum):
    """What a fine-tuning task is wanted for; which task that is depends on the scale."""

    glue = 'the eight tasks of AVG'
    mnli = 'the one task of Table 3, Figure 3 and Figure 5'
    quick = 'three tasks that even a small encoder learns, in seconds'
    squad = 'span prediction'


@dataclass(frozen=True)
class Model:
    """One pretraining recipe: a scale's own (no overlay) or that with overlays."""

    label: str  # the paper's name of the row
    overlays: tuple[str, ...] = ()  # YAML files over yamls/<scale>.yaml
    published: tuple[str, ...] = ()  # rows of results/paper to compare with, the first that is there; empty: the label
    seed: int | None = None  # of pretraining; None: the recipe's own, or in a report every one that is recorded

    def run_name(self, scale: str) -> str:
        """As :func:`maelm_composer.recipe.load_config` names the run; with a seed of its own, that seed after it."""
        seed = [] if self.seed is None else [f's{self.seed}']
        return '-'.join([scale, *(PurePosixPath(path).stem for path in self.overlays), *seed])


@dataclass(frozen=True)
class Demand:
    """What one artefact needs of one model."""

    model: Model
    roles: tuple[Role, ...] = ()  # fine-tuned on these, from the final checkpoint
    every_checkpoint: bool = False  # and from every checkpoint before it
    rank: bool = False  # effective rank per layer, of the final checkpoint, with and without [MASK]
    finetuned_rank: bool = False  # rank during and after fine-tuning, kept in the fine-tuning records


@dataclass(frozen=True)
class Artefact:
    """One table or figure."""

    name: str  # results/<scale>/<name>.csv
    title: str
    claim: str  # the paper's, in our words
    demands: tuple[Demand, ...]


@dataclass(frozen=True)
class Column:
    """One score of a fine-tuning record, or the average of some."""

    name: str
    label: str
    task: str  # '': the average
    metric: str | None = None  # key in the record's metrics; None: its score, the task's main metric
    is_averaged: bool = False  # counts in AVG

    @property
    def is_average(self) -> bool:
        return not self.task


def _overlay(label: str, folder: str, stem: str) -> Model:
    return Model(label, (f'yamls/{folder}/{stem}.yaml',))


MAE_LM = Model('MAE-LM')
ROBERTA = Model('RoBERTa', ('yamls/roberta.yaml',), ('RoBERTa (Ours)', 'RoBERTa (Liu et al., 2019)'))
PLAIN_MLM = 'enc. w. [MASK], no dec. (i.e., MLM)'  # the label of ROBERTA in Table 2
ENCODER_WITH_MASK = _overlay('enc. w. [MASK]', 'ablations', 'encoder_with_mask')

# Table 2, row by row: MAE-LM, the handling of [MASK], position encoding, the decoder's attention and its size.
ABLATIONS: tuple[Model, ...] = (
    MAE_LM,
    Model(PLAIN_MLM, ROBERTA.overlays),
    ENCODER_WITH_MASK,
    _overlay('enc. w. [MASK], dec. resets [MASK]', 'ablations', 'decoder_resets_masks'),
    _overlay('random replace w. real token', 'ablations', 'random_replace'),
    _overlay('misaligned position encoding', 'ablations', 'misaligned'),
    _overlay('no relative position encoding', 'ablations', 'no_relative_position'),
    _overlay('bi. self-attention + cross-attention', 'ablations', 'bidirectional_cross'),
    _overlay('uni. self-attention + cross-attention', 'ablations', 'causal_cross'),
    _overlay('cross-attention', 'ablations', 'cross'),
    _overlay('2 layer, 768 dimension', 'ablations', 'decoder_2_layers'),
    _overlay('6 layer, 768 dimension', 'ablations', 'decoder_6_layers'),
    _overlay('4 layer, 512 dimension', 'ablations', 'decoder_512_wide'),
    _overlay('4 layer, 1024 dimension', 'ablations', 'decoder_1024_wide'),
)

# Figure 4: δ and its model. The ends are runs that Table 2 needs anyway: the same recipes under another file name.
DELTAS: tuple[tuple[float, Model], ...] = (
    (0.0, MAE_LM),
    (0.25, _overlay('δ = 0.25', 'delta', 'delta_0.25')),
    (0.5, _overlay('δ = 0.5', 'delta', 'delta_0.50')),
    (0.75, _overlay('δ = 0.75', 'delta', 'delta_0.75')),
    (1.0, ENCODER_WITH_MASK),
)

_BOTH = (MAE_LM, ROBERTA)


@dataclass(frozen=True)
class Rung:
    """Both models at one budget of the ladder: FLOPs of RoBERTa's pretraining; MAE-LM sees the same rows."""

    name: str  # yamls/ladder/<name>.yaml

    @property
    def flops(self) -> float:
        return float(self.name)

    @property
    def roberta(self) -> Model:
        return Model(ROBERTA.label, (self._overlay, *ROBERTA.overlays))

    @property
    def mae_lm(self) -> Model:
        return Model(MAE_LM.label, (self._overlay,))

    @property
    def _overlay(self) -> str:
        return f'yamls/ladder/{self.name}.yaml'


RUNGS = (Rung('3e13'), Rung('1e14'), Rung('3e14'))

ARTEFACTS: tuple[Artefact, ...] = (
    Artefact(
        'table1',
        'Table 1: GLUE and SQuAD 2.0 development sets, medians over seeds',
        'MAE-LM beats the RoBERTa baseline trained on the same rows',
        tuple(Demand(model, (Role.glue, Role.squad)) for model in _BOTH),
    ),
    Artefact(
        'table2',
        'Table 2: ablations, GLUE average',
        'No variant is better than MAE-LM',
        tuple(Demand(model, (Role.glue,)) for model in ABLATIONS),
    ),
    Artefact(
        'table3',
        'Table 3: effective rank of the last layer after pretraining and after fine-tuning',
        'MAE-LM uses more dimensions for real tokens than RoBERTa',
        tuple(Demand(model, (Role.mnli, Role.squad), rank=True, finetuned_rank=True) for model in _BOTH),
    ),
    Artefact(
        'figure1',
        'Figure 1: effective rank per layer of plain MLM, with and without [MASK] in the input',
        'Without [MASK] the rank is lower, the more so in deeper layers; the rank of the [MASK] rows rises with depth',
        (Demand(ROBERTA, rank=True),),
    ),
    Artefact(
        'figure3',
        'Figure 3: accuracy of intermediate checkpoints over pretraining time',
        "MAE-LM reaches RoBERTa's final accuracy in less pretraining time",
        tuple(Demand(model, (Role.mnli,), every_checkpoint=True) for model in _BOTH),
    ),
    Artefact(
        'figure4',
        'Figure 4: fine-tuning against δ, the share of the [MASK]s that the encoder sees',
        'The more [MASK]s the encoder sees, the worse',
        tuple(Demand(model, (Role.glue, Role.squad)) for _, model in DELTAS),
    ),
    Artefact(
        'figure5',
        'Figure 5: the rank gap per layer, and the rank during fine-tuning',
        'MAE-LM closes the rank gap that [MASK] leaves, and keeps its lead through fine-tuning',
        tuple(Demand(model, (Role.mnli,), rank=True, finetuned_rank=True) for model in _BOTH),
    ),
    Artefact(
        'subspace',
        "Where the [MASK] rows lie: outside the real tokens' space, and how far from rank one",
        'Part of the [MASK] rows lies outside the space of the real tokens (Theorem 2.2)',
        tuple(Demand(model, rank=True) for model in _BOTH),
    ),
    Artefact('training', 'Pretraining loss', 'No claim of the paper', tuple(Demand(model) for model in _BOTH)),
)
# The one artefact of the scale of that name, which has no other.
LADDER = Artefact(
    'ladder',
    'The ladder: both models against the compute of pretraining',
    'MAE-LM uses more dimensions for real tokens than RoBERTa, and fine-tunes better',
    tuple(Demand(m, (Role.quick,), rank=True) for rung in RUNGS for m in (rung.roberta, rung.mae_lm)),
)


def _averaged(task: str, label: str) -> Column:
    return Column(task, label, task, is_averaged=True)


def _list_span_columns(task: str, label: str) -> tuple[Column, ...]:
    # PAPER-SILENT: at which threshold an answer is withheld; the best one is printed, the other recorded beside it.
    return (
        Column(f'{task}_em', f'{label} EM', task, 'best_exact'),
        Column(f'{task}_f1', f'{label} F1', task, 'best_f1'),
        Column(f'{task}_em_at_0', 'EM at threshold 0', task, 'exact'),
        Column(f'{task}_f1_at_0', 'F1 at threshold 0', task, 'f1'),
    )


GLUE_COLUMNS = (
    Column('mnli_m', 'MNLI-m', 'mnli', 'matched_accuracy', is_averaged=True),
    Column('mnli_mm', 'MNLI-mm', 'mnli', 'mismatched_accuracy'),  # AVG counts MNLI once
    *(_averaged('qqp', 'QQP'), _averaged('qnli', 'QNLI'), _averaged('sst2', 'SST-2'), _averaged('cola', 'CoLA')),
    *(_averaged('rte', 'RTE'), _averaged('mrpc', 'MRPC'), _averaged('stsb', 'STS-B')),
)
SQUAD_COLUMNS = _list_span_columns('squad2', 'SQuAD 2.0')
# The demo's own small tasks, one for every kind of head: not GLUE.
DEMO_COLUMNS = tuple(_averaged(f'demo_{kind}', f'demo {kind}') for kind in ('pair', 'sentence', 'regression'))
DEMO_SPAN_COLUMNS = _list_span_columns('demo_span', 'demo span')
QUICK_COLUMNS = tuple(column for column in GLUE_COLUMNS if column.name in ('qqp', 'sst2', 'stsb'))
GLUE_AVERAGE = Column('glue_avg', 'GLUE AVG', task='')
DEMO_AVERAGE = Column('demo_avg', 'demo AVG (not GLUE)', task='')
_LABELS = {
    **{c.name: c.label for c in (*GLUE_COLUMNS, *SQUAD_COLUMNS, *DEMO_COLUMNS, *DEMO_SPAN_COLUMNS)},
    **{c.name: c.label for c in (GLUE_AVERAGE, DEMO_AVERAGE)},
    'rank_real': 'rank, input without [MASK]',
    'rank_with_masks': 'rank, input with [MASK]',
    'rank_masks': 'rank of the [MASK] rows',
    'mask_outside_share': "[MASK] energy outside the real tokens' space",
    'real_outside_share': "the real tokens' own energy outside it",
    'rank_one_residual': 'distance from rank one',
    'share_of_time_to_target': "share of RoBERTa's time",
    'pretrained': 'after pretraining',
    'eval_loss': 'validation loss',
    'train_loss': 'training loss',
    'mnli': 'after MNLI',
    'squad2': 'after SQuAD 2.0',
    'rank after mnli': 'rank after MNLI',
    'rank during mnli': 'rank during MNLI',
    'hours': 'pretraining time',
    'flops': 'FLOPs of pretraining',
    'samples': 'rows of pretraining',
    'quick_avg': 'mean of ' + ', '.join(c.label for c in QUICK_COLUMNS),
    'real_rank_excess': "rank, input without [MASK], in % of RoBERTa's",
    'departure': 'tokens until the training loss is 1 nat below its beginning',
}
DEMO = 'demo'
# The paper's three settings by the name of our recipe; every other scale is set beside base, and is not comparable.
SETTINGS = {'base': 'base', 'base_pp': 'base++', 'large_pp': 'large++'}


def columns_of(scale: str, role: Role) -> tuple[Column, ...]:
    """The scores that ``role`` means at ``scale``; the first is the one that a figure shows."""
    is_demo = scale == DEMO
    match role:
        case Role.glue:
            return DEMO_COLUMNS if is_demo else GLUE_COLUMNS
        case Role.mnli:
            return columns_of(scale, Role.glue)[:1]
        case Role.quick:
            return DEMO_COLUMNS if is_demo else QUICK_COLUMNS
        case Role.squad:
            return DEMO_SPAN_COLUMNS if is_demo else SQUAD_COLUMNS


def tasks_of(scale: str, roles: tuple[Role, ...]) -> list[str]:
    """The fine-tuning tasks behind ``roles``, each once, in the paper's order."""
    return list(dict.fromkeys(column.task for role in roles for column in columns_of(scale, role)))


def artefacts_of(scale: str) -> tuple[Artefact, ...]:
    """What can be made at ``scale``: the ladder at its own, else the paper's tables and figures."""
    return (LADDER,) if scale == LADDER.name else ARTEFACTS


def find_artefact(name: str) -> Artefact:
    """The artefact called ``name``."""
    return next(artefact for artefact in (*ARTEFACTS, LADDER) if artefact.name == name)


def label_of(name: str) -> str:
    """How a reader is shown the score ``name``, or what stands before its first comma; any other name as it is."""
    first, comma, rest = name.partition(',')
    return _LABELS.get(name, _LABELS.get(first, first) + comma + rest)


def average_column(scale: str) -> Column:
    """The mean over the averaged columns: AVG of Table 1, or the demo's own."""
    return DEMO_AVERAGE if scale == DEMO else GLUE_AVERAGE
