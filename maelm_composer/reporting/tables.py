"""The tables and figures as rows: the numbers of every model, then one row for each claim.

Figure 3, the ladder and its recipes have modules of their own.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from maelm_composer.checkpoints.names import METRICS
from maelm_composer.records import PretrainingRecord
from maelm_composer.reporting.artefacts import (
    ABLATIONS,
    BOTH,
    DELTAS,
    ENCODER_WITH_MASK,
    MAE_LM,
    ROBERTA,
    Column,
    Model,
    Role,
    average_of,
    columns_of,
)
from maelm_composer.reporting.cells import Cell, restrict, slope, subtract
from maelm_composer.reporting.rows import CONSTANT, GAP, PERCENT, POINTS, RANK, SLOPE, Claim, Row, RowBuilder

REAL, WITH_MASKS, MASKS = 'rank_real', 'rank_with_masks', 'rank_masks'
OUTSIDE = 'mask_outside_excess'
ANGLES = 5  # quantiles of the principal angles in a rank record, smallest first
TRAINING_POINTS = 60  # of a training-loss curve
Curve = dict[tuple[int, str], float]  # by samples and name of the loss


def build_table1(builder: RowBuilder) -> list[Row]:
    scale = builder.scale
    return _compare(builder, [*columns_of(scale, Role.glue), average_of(scale), *columns_of(scale, Role.squad)])


def build_own(builder: RowBuilder) -> list[Row]:
    scores = builder.evidence.list_own_scores().items()
    return _compare(builder, [Column(f'{task} {metric}', '', task, metric) for task, metric in scores])


def _compare(builder: RowBuilder, columns: Sequence[Column]) -> list[Row]:
    """Both models' scores, those of a constant answer, and MAE-LM − RoBERTa; a task's main metric is its first."""
    cells = {(model, c): builder.evidence.score(model, c) for model in BOTH for c in columns}
    rows = [builder.score(model, c, cell) for (model, c), cell in cells.items()]
    main = {column.task: column for column in reversed(columns)}  # the mean's task is ''
    rows += [
        builder.value(CONSTANT, c.name, PERCENT, builder.evidence.constant_score(ROBERTA, c))
        for c in columns
        if c is main[c.task]  # records hold the constant answer's score in the main metric only
    ]
    claims = {
        c: Claim(GAP, c.name, POINTS, subtract(cells[MAE_LM, c], cells[ROBERTA, c]), builder.paper_gap(c.name))
        for c in columns
    }
    rows += builder.claims(*(claim for c, claim in claims.items() if not c.parts))
    # The mean's claim is one of its own, outside the family of the tasks.
    return rows + builder.claims(*(claim for c, claim in claims.items() if c.parts))


def build_table2(builder: RowBuilder) -> list[Row]:
    column = average_of(builder.scale)
    cells = {model: builder.evidence.score(model, column) for model in ABLATIONS}
    rows = [builder.score(model, column, cell) for model, cell in cells.items()]
    name = column.name
    claims = []
    for model, cell in cells.items():
        if model is not MAE_LM:
            mine = restrict(cells[MAE_LM], [run.seed for run in cell.runs])  # an ablation may have fewer seeds
            gap = builder.paper_gap(name, MAE_LM, model)
            claims.append(Claim(f'{model.label} − MAE-LM', name, POINTS, subtract(cell, mine), gap))
    return rows + builder.claims(*claims, expects_more=False)


def build_table3(builder: RowBuilder) -> list[Row]:
    mnli, squad = (columns_of(builder.scale, role)[0].task for role in (Role.mnli, Role.squad))
    evidence, rows, claims = builder.evidence, [], []
    for column, published in (('pretrained', 'pretrained'), (mnli, 'mnli'), (squad, 'squad2')):
        both = [
            evidence.rank(model, REAL) if column == 'pretrained' else evidence.finetuned_rank(model, column)
            for model in BOTH
        ]
        for model, cell in zip(BOTH, both, strict=True):
            rows.append(builder.value(model.label, column, RANK, cell, builder.paper_of(model, published)))
        theirs, ours = both
        paper, margin = builder.paper_gap(published), builder.rank_margin(theirs)
        claims.append(Claim(GAP, column, RANK, subtract(ours, theirs), paper, margin))
    return rows + builder.claims(*claims)


def build_figure1(builder: RowBuilder) -> list[Row]:
    cells = {key: builder.evidence.rank_by_layer(ROBERTA, key) for key in (REAL, WITH_MASKS, MASKS)}
    rows = [row for key, of in cells.items() for row in builder.by_layer(ROBERTA, key, RANK, of.values())]
    gaps = [(layer, subtract(cells[WITH_MASKS][layer], real)) for layer, real in cells[REAL].items()]
    last = gaps[-1][1]
    *_, top = cells[MASKS].values()
    # No verdict: a gap may grow from below zero to zero, and the rank of the [MASK] vectors, 1 at first, must grow.
    for label, cell in (
        ('growth per layer of: rank with − without [MASK]', slope(gaps) if len(gaps) > 1 else last),
        ('rank of the [MASK] vectors, last layer − embeddings', subtract(top, cells[MASKS][0])),
    ):
        rows.append(builder.value('RoBERTa', label, RANK, cell))
    return rows + builder.claims(Claim('RoBERTa', 'rank with − without [MASK], last layer', RANK, last))


def build_figure4(builder: RowBuilder) -> list[Row]:
    """Scores against δ as in the paper, and the effective rank, which the paper does not plot over δ.

    ``OUTSIDE``: have [MASK] vectors more energy than real tokens outside the latter's leading directions? At δ = 1,
    MAE-LM differs from RoBERTa by its decoder.
    """
    numbers: dict[str, tuple[str, Callable[[Model], Cell]]] = {
        column.name: (PERCENT, partial(builder.evidence.score, column=column))
        for column in (average_of(builder.scale), columns_of(builder.scale, Role.squad)[0])
    }
    rank = partial(builder.evidence.rank, key=REAL)
    numbers[REAL] = RANK, rank
    rows, claims = [], []
    for name, (unit, read) in numbers.items():
        cells = {delta: read(model) for delta, model in DELTAS}
        papers = {delta: builder.paper((f'δ = {delta:g}',), name) for delta in cells}
        for delta, cell in cells.items():
            rows.append(builder.value(f'δ = {delta:g}', name, unit, cell, papers[delta]).at(delta, 'δ'))
        first, last = papers[0.0], papers[1.0]
        fall = None if first is None or last is None else round(last - first, 6)
        margin, unit = (builder.rank_margin(cells[0.0]), RANK) if unit == RANK else (None, POINTS)
        for claim in (
            Claim('δ = 1 − δ = 0', name, unit, subtract(cells[1.0], cells[0.0]), fall, margin),
            Claim(SLOPE, name, unit, slope(list(cells.items())), margin=margin),
        ):
            claims += builder.claims(claim, expects_more=False)
    rows.append(builder.value('δ = 1 − RoBERTa', REAL, RANK, subtract(rank(ENCODER_WITH_MASK), rank(ROBERTA))))
    for delta, model in DELTAS:
        excess = builder.evidence.mask_excess(model)[-1]
        rows.append(builder.value(f'δ = {delta:g}', OUTSIDE, 'share', excess).at(delta, 'δ'))
    return rows + claims


def build_figure5(builder: RowBuilder) -> list[Row]:
    evidence, rows = builder.evidence, []
    for model, keys in ((ROBERTA, (REAL, WITH_MASKS)), (MAE_LM, (REAL,))):  # MAE-LM's encoder has never seen a [MASK]
        for key in keys:
            rows += builder.by_layer(model, key, RANK, evidence.rank_by_layer(model, key).values())
    task = columns_of(builder.scale, Role.mnli)[0].task
    for model in (MAE_LM, ROBERTA):
        for epoch, cell in evidence.finetuned_rank_curve(model, task).items():
            rows.append(builder.value(model.label, f'rank during {task}', RANK, cell).at(epoch, 'epoch'))
    return rows  # not in the preprint; Table 3 has the verdicts


def build_subspace(builder: RowBuilder) -> list[Row]:
    evidence, rows, claims = builder.evidence, [], []
    for model in BOTH:
        for key in ('mask_outside_share', 'real_outside_share', 'rank_one_residual'):
            rows += builder.by_layer(model, key, 'share', evidence.rank_by_layer(model, key).values())
        for quantile in range(ANGLES):
            angles = evidence.rank_by_layer(model, 'principal_angles_degrees', quantile).values()
            rows += builder.by_layer(model, f'principal_angle_{quantile}', 'degrees', angles)
        gains = evidence.mask_excess(model)
        rows += builder.by_layer(model, OUTSIDE, 'share', gains)
        if model is ROBERTA:  # MAE-LM's encoder has never read [MASK]
            claims += builder.claims(Claim(model.label, f'{OUTSIDE}, last layer', 'share', gains[-1]))
    return rows + claims


def build_training(builder: RowBuilder) -> list[Row]:
    """Training and validation loss over samples."""
    rows = []
    for model in BOTH:
        runs = builder.evidence.find_runs(model)
        curves = {run.run_name: curve for run in runs if (curve := _read_curve(builder, run))}
        if not curves:
            reason = builder.evidence.explain_absence(model, METRICS)
            rows.append(builder.value(model.label, 'eval_loss', 'nats', Cell(missing=reason)))
            continue
        points = set.intersection(*map(set, curves.values()))
        for point in sorted(points, key=lambda point: (point[1] == 'eval_loss', point[0])):
            samples, column = point
            cell = builder.evidence.measure_runs(model, METRICS, partial(_find_loss, curves, point))
            rows.append(builder.value(model.label, column, 'nats', cell).at(samples, 'samples'))
        if any(len(curve) > len(points) for curve in curves.values()):
            differ = Cell(missing=f'the logs of {", ".join(curves)} have different rows: copy all of them whole')
            rows.append(builder.value(model.label, 'train_loss', 'nats', differ))
    return rows


def _find_loss(curves: Mapping[str, Curve], point: tuple[int, str], run: PretrainingRecord) -> float | None:
    return curves.get(run.run_name, {}).get(point)


def _read_curve(builder: RowBuilder, run: PretrainingRecord) -> Curve:
    """(samples, name of the loss) -> value; the training loss is averaged over neighbouring batches."""
    curve = builder.evidence.curves.get(run.run_name, [])
    width = max(1, -(-len(curve) // TRAINING_POINTS))
    points = {(int(row['samples']), 'eval_loss'): float(row['eval_loss']) for row in curve if row['eval_loss']}
    for start in range(0, len(curve), width):
        group = curve[start : start + width]
        losses = [float(row['train_loss']) for row in group]
        points[int(group[-1]['samples']), 'train_loss'] = sum(losses) / len(losses)
    return points


BUILDERS = {
    'table1': build_table1,
    'table2': build_table2,
    'table3': build_table3,
    'figure1': build_figure1,
    'figure4': build_figure4,
    'figure5': build_figure5,
    'subspace': build_subspace,
    'training': build_training,
    'own': build_own,
}
