"""Every table and figure as data: the runs, tasks and checkpoints that it needs. Imports no torch.

The benchmark suite reads :data:`ARTEFACTS` to know what to run, and the report reads it to know what to look for.
Two artefacts that need the same run name the same :class:`Model`.
"""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import PurePosixPath

from maelm_composer.tasks.catalogue import GLUE

# Scale -> the name of its runs, where several scales share it. A name in `ladder` and in
# `ladder_batch_32` stands for two runs, with different batch sizes, except at the first rung.
RUN_NAMES = {
    'ladder_batch_32': 'ladder',
    'small': 'ladder-1e14',
    'small_batch_32': 'ladder-1e14',
    'small_3e14': 'ladder-3e14',
    'small_3e14_batch_32': 'ladder-3e14',
}
# The ladder that judges the same differences of the same runs.
JUDGES = dict.fromkeys(('small', 'small_3e14', 'ladder_batch_32'), 'ladder')
JUDGES |= dict.fromkeys(('small_batch_32', 'small_3e14_batch_32'), 'ladder_batch_32')


class Role(Enum):
    """The purpose of a fine-tuning task; :func:`columns_of` gives the tasks of a role at a scale."""

    glue = 'the eight tasks of AVG'
    mnli = 'the GLUE task of Table 3, and the one task of Figures 3 and 5'
    quick = 'three tasks that a small encoder learns in seconds'
    squad = 'span prediction'


@dataclass(frozen=True)
class Model:
    """One pretraining recipe: yamls/<scale>.yaml, with overlays where there are any. Equal recipes are equal models."""

    label: str = field(compare=False)  # the paper's name of the row
    overlays: tuple[str, ...] = ()  # YAML files that are merged over yamls/<scale>.yaml, in order
    # Candidate rows of results/paper, of which the first that exists counts; empty: the label.
    published: tuple[str, ...] = field(default=(), compare=False)
    seed: int | None = None  # pretraining seed; None: the recipe's own, and in a report every recorded seed

    @property
    def overlay_names(self) -> list[str]:
        return [PurePosixPath(path).stem for path in self.overlays]

    def run_name(self, scale: str) -> str:
        """The scale, or its name in :data:`RUN_NAMES`, then the overlays and, if set, ``seed``."""
        seed = [] if self.seed is None else [f's{self.seed}']
        return '-'.join([RUN_NAMES.get(scale, scale), *self.overlay_names, *seed])


@dataclass(frozen=True)
class Demand:
    """The measurements of one model that an artefact needs."""

    model: Model
    roles: tuple[Role, ...] = ()  # the final checkpoint is fine-tuned on the tasks of these roles
    own_tasks: bool = False  # and on the tasks that the recipe of fine-tuning declares
    every_checkpoint: bool = False  # earlier checkpoints are fine-tuned, too
    rank: bool = False  # effective rank of every layer of the final checkpoint, with and without [MASK] in the input
    finetuned_rank: bool = False  # effective rank during fine-tuning, stored in the fine-tuning records


@dataclass(frozen=True)
class Artefact:
    """One table or figure."""

    name: str  # results/<scale>/<name>.csv
    title: str
    claim: str  # the paper's claim, in our words; empty: none is judged
    demands: tuple[Demand, ...]

    @property
    def label(self) -> str:
        """'Table 1' of 'Table 1: GLUE ...'."""
        return self.title.split(':')[0]


@dataclass(frozen=True)
class Column:
    """One score of a fine-tuning record, or the mean of several scores."""

    name: str
    label: str
    task: str = ''  # empty: a mean
    metric: str | None = None  # key in the record's metrics; None: the record's score, i.e. the task's main metric
    parts: tuple['Column', ...] = ()  # of a mean: the scores that are averaged


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

BOTH = (ROBERTA, MAE_LM)  # the rows of Tables 1 and 3 and the curves of the figures: always these two


@dataclass(frozen=True)
class Rung:
    """Both models at one compute budget of the ladder, trained on the same rows."""

    flops: float  # of RoBERTa's pretraining
    mae_lm: Model
    roberta: Model
    variants: tuple[Model, ...] = ()  # compared with RoBERTa as MAE-LM is

    @property
    def models(self) -> tuple[Model, ...]:
        return self.roberta, self.mae_lm, *self.variants


def _make_rung(name: str, *variants: Model) -> Rung:
    overlay = f'yamls/ladder/{name}.yaml'
    mae_lm, roberta, *others = (Model(m.label, (overlay, *m.overlays)) for m in (MAE_LM, ROBERTA, *variants))
    return Rung(float(name), mae_lm, roberta, tuple(others))


_ONE_DECODER_LAYER = _overlay('MAE-LM, one decoder layer', 'ladder', 'decoder_1_layer')
MASK_IN_ENCODER = Model('MAE-LM, [MASK] in the encoder', ENCODER_WITH_MASK.overlays)

RUNGS = (
    _make_rung('3e13', _ONE_DECODER_LAYER, MASK_IN_ENCODER),
    _make_rung('1e14', MASK_IN_ENCODER),
    _make_rung('3e14'),
    _make_rung('1e15'),
)
# Scale -> its rungs. The scales differ in the batch sizes of these.
RUNGS_OF = {'ladder': RUNGS, 'ladder_batch_32': RUNGS[:3]}

ARTEFACTS: tuple[Artefact, ...] = (
    Artefact(
        'table1',
        'Table 1: GLUE and SQuAD 2.0 development sets',
        'MAE-LM beats the RoBERTa baseline trained on the same rows',
        tuple(Demand(model, (Role.glue, Role.squad)) for model in BOTH),
    ),
    Artefact(
        'table2',
        'Table 2: ablations, GLUE average',
        'Variants score lower than MAE-LM, those of position encodings not notably',
        tuple(Demand(model, (Role.glue,)) for model in ABLATIONS),
    ),
    Artefact(
        'table3',
        'Table 3: effective rank of the last layer after pretraining and after fine-tuning',
        'MAE-LM uses more dimensions for real tokens than RoBERTa',
        tuple(Demand(model, (Role.mnli, Role.squad), rank=True, finetuned_rank=True) for model in BOTH),
    ),
    Artefact(
        'figure1',
        'Figure 1: effective rank per layer of plain MLM, with and without [MASK] in the input',
        'Without [MASK] in the input the rank of the last layer is lower',
        (Demand(ROBERTA, rank=True),),
    ),
    Artefact(
        'figure3',
        'Figure 3: accuracy of intermediate checkpoints over pretraining time',
        "MAE-LM reaches RoBERTa's final accuracy in less pretraining time",
        tuple(Demand(model, (Role.mnli,), every_checkpoint=True) for model in BOTH),
    ),
    Artefact(
        'figure4',
        'Figure 4: fine-tuning and effective rank against δ, the share of the [MASK]s that the encoder sees',
        'The more [MASK]s the encoder sees, the lower the scores; that the rank falls, too, is our expectation',
        (*(Demand(model, (Role.glue, Role.squad), rank=True) for _, model in DELTAS), Demand(ROBERTA, rank=True)),
    ),
    Artefact(
        'figure5',
        'Figure 5: the rank gap per layer, and the rank during fine-tuning',
        '',
        tuple(Demand(model, (Role.mnli,), rank=True, finetuned_rank=True) for model in BOTH),
    ),
    Artefact(
        'subspace',
        "Where the [MASK] vectors lie: outside the real tokens' space, and how far from rank one",
        'In the last layer [MASK] vectors have more energy than real tokens outside the leading directions of the real '
        'tokens (our question of degree; Theorem 2.2 is about whole row spaces, in some layer)',
        tuple(Demand(model, rank=True) for model in BOTH),
    ),
    Artefact('training', 'Pretraining loss', '', tuple(Demand(model) for model in BOTH)),
)
# At scales whose recipe of fine-tuning declares tasks (docs/tasks.md).
OWN = Artefact(
    'own',
    'Own tasks: development sets',
    'MAE-LM beats the RoBERTa baseline trained on the same rows',
    tuple(Demand(model, own_tasks=True) for model in BOTH),
)
# Of the scales of RUNGS_OF: the ladder, and, if there are records of other recipes, their comparisons.
RECIPES = Artefact(
    'recipes',
    'Other recipes: the lead in rank, by encoder + decoder layers and the settings that the ladder does not have',
    'MAE-LM uses more dimensions for real tokens, whatever the recipe (our question)',
    (),
)
LADDERS = {
    scale: Artefact(
        'ladder',
        "The ladder: both models on equal rows, by FLOPs of RoBERTa's pretraining",
        'RoBERTa keeps dimensions for [MASK]; MAE-LM uses more for real tokens, and fine-tunes better',
        tuple(Demand(model, (Role.quick,), rank=True) for rung in rungs for model in rung.models),
    )
    for scale, rungs in RUNGS_OF.items()
}
LADDER = LADDERS['ladder']


def _list_span_columns(task: str, label: str) -> tuple[Column, ...]:
    # PAPER-SILENT: the threshold below which no answer is given. EM and F1 are those at the best threshold; the scores
    # at threshold 0 stand beside them.
    return (
        Column(f'{task}_em', f'{label} EM', task, 'best_exact'),
        Column(f'{task}_f1', f'{label} F1', task, 'best_f1'),
        Column(f'{task}_em_at_0', 'EM at threshold 0', task, 'exact'),
        Column(f'{task}_f1_at_0', 'F1 at threshold 0', task, 'f1'),
    )


GLUE_COLUMNS = (
    Column('mnli_m', 'MNLI-m', 'mnli', 'matched_accuracy'),
    Column('mnli_mm', 'MNLI-mm', 'mnli', 'mismatched_accuracy'),
    *(Column('qqp', 'QQP', 'qqp'), Column('qnli', 'QNLI', 'qnli'), Column('sst2', 'SST-2', 'sst2')),
    *(Column('cola', 'CoLA', 'cola'), Column('rte', 'RTE', 'rte'), Column('mrpc', 'MRPC', 'mrpc')),
    Column('stsb', 'STS-B', 'stsb'),
)
SQUAD_COLUMNS = _list_span_columns('squad2', 'SQuAD 2.0')
# The demo's own small tasks, one for every kind of head: not GLUE.
DEMO_COLUMNS = tuple(
    Column(f'demo_{kind}', f'demo {kind}', f'demo_{kind}') for kind in ('pair', 'sentence', 'regression')
)
DEMO_SPAN_COLUMNS = _list_span_columns('demo_span', 'demo span')
QUICK_COLUMNS = tuple(column for column in GLUE_COLUMNS if column.name in ('qqp', 'sst2', 'stsb'))
# AVG counts MNLI once, by its matched accuracy: the first column of the task.
GLUE_AVERAGE = Column(
    'glue_avg', 'GLUE AVG', parts=tuple(next(c for c in GLUE_COLUMNS if c.task == task) for task in GLUE)
)
DEMO_AVERAGE = Column('demo_avg', 'demo AVG (not GLUE)', parts=DEMO_COLUMNS)
QUICK_AVERAGE = Column('quick_avg', 'mean of ' + ', '.join(c.label for c in QUICK_COLUMNS), parts=QUICK_COLUMNS)
AVERAGES = (GLUE_AVERAGE, DEMO_AVERAGE, QUICK_AVERAGE)
_LABELS = {
    **{c.name: c.label for c in (*GLUE_COLUMNS, *SQUAD_COLUMNS, *DEMO_COLUMNS, *DEMO_SPAN_COLUMNS, *AVERAGES)},
    'rank_real': 'rank, input without [MASK]',
    'rank_with_masks': 'rank, input with [MASK]',
    'rank_masks': 'rank of the [MASK] vectors',
    'mask_outside_share': "[MASK] energy outside the real tokens' leading directions",
    'real_outside_share': "real tokens' energy outside their own leading directions",
    'rank_one_residual': 'distance from rank one',
    **{
        f'principal_angle_{index}': f'principal angle, {name}'
        for index, name in enumerate(('smallest', 'lower quartile', 'median', 'upper quartile', 'largest'))
    },
    'share_of_time_to_target': "share of RoBERTa's time",
    'time_to_target': 'time to the accuracy that both models reach',
    'pretrained': 'after pretraining',
    'eval_loss': 'validation loss',
    'train_loss': 'training loss',
    'mnli': 'after MNLI',
    'squad2': 'after SQuAD 2.0',
    'demo_span': 'demo span',
    'rank during demo_pair': 'rank during demo pair',
    'rank during mnli': 'rank during MNLI',
    'hours': 'pretraining time',
    'flops': 'FLOPs of pretraining',
    'samples': 'rows of pretraining',
    'real_rank_excess': 'effective rank',
    'mask_rank_gain': 'rank with − without [MASK] in the input',
    'mask_outside_excess': '[MASK] − real tokens: energy outside the leading directions',
    'departure': 'tokens until the training loss is a nat below its first value',
}
DEMO = 'demo'
# The paper's three settings by the name of our recipe. Every other scale is shown beside base, as not comparable.
PAPER_SETTINGS = {'base': 'base', 'base_pp': 'base++', 'large_pp': 'large++'}


def columns_of(scale: str, role: Role) -> tuple[Column, ...]:
    """The scores of ``role`` at ``scale``; figures show the first."""
    is_demo = scale == DEMO
    match role:
        case Role.glue:
            return DEMO_COLUMNS if is_demo else GLUE_COLUMNS
        case Role.mnli:
            return columns_of(scale, Role.glue)[:1]
        case Role.quick:
            return QUICK_COLUMNS
        case Role.squad:
            return DEMO_SPAN_COLUMNS if is_demo else SQUAD_COLUMNS


def average_of(scale: str) -> Column:
    """AVG of Table 1, or the mean of the demo's own tasks."""
    return DEMO_AVERAGE if scale == DEMO else GLUE_AVERAGE


def tasks_of(scale: str, roles: tuple[Role, ...]) -> list[str]:
    """The fine-tuning tasks of ``roles``, each once, in the paper's order."""
    return list(dict.fromkeys(column.task for role in roles for column in columns_of(scale, role)))


def artefacts_of(scale: str, has_own_tasks: bool = False, has_recipes: bool = False) -> tuple[Artefact, ...]:
    """The artefacts of ``scale``: its ladder, or the paper's and, if there are own tasks, their table."""
    return (LADDERS[scale],) + (RECIPES,) * has_recipes if scale in LADDERS else ARTEFACTS + (OWN,) * has_own_tasks


def find_artefact(name: str) -> Artefact:
    """The artefact called ``name``."""
    return next(artefact for artefact in (*ARTEFACTS, OWN, LADDER, RECIPES) if artefact.name == name)


def label_of(name: str) -> str:
    """A readable label for the column ``name``, or for the part of it before a comma; unknown names are unchanged."""
    first, comma, rest = name.partition(',')
    return _LABELS.get(name, _LABELS.get(first, first) + comma + rest)
