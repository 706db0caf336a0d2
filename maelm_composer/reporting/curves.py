"""What the figures show, as rows: points with their x, then one row for each claim."""

from maelm_composer.checkpoints.names import METRICS
from maelm_composer.records import PretrainingRecord
from maelm_composer.reporting.artefacts import DELTAS, MAE_LM, ROBERTA, Model, Role, average_column, columns_of
from maelm_composer.reporting.cells import (
    Cell,
    combine,
    explain_absence,
    finetuned_rank,
    finetuned_rank_curve,
    rank,
    score,
    subtract,
)
from maelm_composer.reporting.estimate import Term, slope_weights
from maelm_composer.reporting.rows import Row, at
from maelm_composer.reporting.tables import GAP, PERCENT, POINTS, RANK, Book, rank_margin

REAL, WITH_MASKS, MASKS = 'rank_real', 'rank_with_masks', 'rank_masks'
ANGLES = 5  # quantiles of the principal angles in a rank record, smallest first
_BOTH = (MAE_LM, ROBERTA)
TRAINING_POINTS = 60  # of a training-loss curve: more cannot be seen


def build_figure1(book: Book) -> list[Row]:
    rows = [row for key in (REAL, WITH_MASKS, MASKS) for row in _layer_rows(book, ROBERTA, key, RANK)]
    layers = range(_count_layers(book, ROBERTA))
    gaps = [
        subtract(rank(book.evidence, ROBERTA, WITH_MASKS, layer), rank(book.evidence, ROBERTA, REAL, layer))
        for layer in layers
    ] or [rank(book.evidence, ROBERTA, REAL)]
    growth = combine(list(zip(slope_weights(layers), gaps, strict=True))) if len(layers) > 1 else gaps[-1]
    rise = subtract(rank(book.evidence, ROBERTA, MASKS), rank(book.evidence, ROBERTA, MASKS, 0))
    claims = {
        'rank with − without [MASK], last layer': gaps[-1],
        'growth of that gap per layer': growth,
        'rank of the [MASK] rows, last layer − embeddings': rise,
    }
    return rows + [book.claim(label, 'RoBERTa', RANK, cell) for label, cell in claims.items()]


def build_figure4(book: Book) -> list[Row]:
    rows, claims = [], []
    for column in (average_column(book.scale), columns_of(book.scale, Role.squad)[0]):
        cells = {delta: score(book.evidence, model, column) for delta, model in DELTAS}
        for delta, cell in cells.items():
            label = f'δ = {delta:g}'
            row = book.value(label, column.name, PERCENT, cell, book.paper((label,), column.name))
            rows.append(at(row, delta, 'δ'))
        first, last = (book.paper((f'δ = {delta}',), column.name) for delta in (0, 1))
        fall = None if first is None or last is None else round(last - first, 6)
        ends = subtract(cells[1.0], cells[0.0])
        slope = combine(list(zip(slope_weights(list(cells)), cells.values(), strict=True)))
        claims.append(book.claim('δ = 1 − δ = 0', column.name, POINTS, ends, fall, expects_more=False))
        claims.append(book.claim('slope in δ', column.name, POINTS, slope, expects_more=False))
    return rows + claims


def build_figure5(book: Book) -> list[Row]:
    rows = []
    for model, keys in ((ROBERTA, (REAL, WITH_MASKS)), (MAE_LM, (REAL,))):  # MAE-LM's encoder has never seen a [MASK]
        for key in keys:
            rows += _layer_rows(book, model, key, RANK)
    task = columns_of(book.scale, Role.mnli)[0].task
    for model in (MAE_LM, ROBERTA):
        for epoch, cell in finetuned_rank_curve(book.evidence, model, task).items():
            rows.append(at(book.value(model.label, f'rank during {task}', RANK, cell), epoch, 'epoch'))
    for column, paper, (ours, theirs) in (
        ('rank_real, last layer', book.paper_gap('pretrained'), [rank(book.evidence, m, REAL) for m in _BOTH]),
        (f'rank after {task}', None, [finetuned_rank(book.evidence, m, task) for m in _BOTH]),
    ):
        rows.append(book.claim(GAP, column, RANK, subtract(ours, theirs), paper, margin=rank_margin(theirs)))
    return rows


def build_subspace(book: Book) -> list[Row]:
    rows, claims = [], []
    for model in (ROBERTA, MAE_LM):
        for key in ('mask_outside_share', 'real_outside_share', 'rank_one_residual'):
            rows += _layer_rows(book, model, key, 'share')
        for quantile in range(ANGLES):
            rows += _layer_rows(book, model, 'principal_angles_degrees', 'degrees', quantile)
        # By the threshold, the real tokens' own rows lie partly outside their leading directions too.
        masks, real = (rank(book.evidence, model, f'{kind}_outside_share') for kind in ('mask', 'real'))
        column = 'mask − real outside share, last layer'
        claims.append(book.claim(model.label, column, 'share', subtract(masks, real)))
    return rows + claims


def build_training(book: Book) -> list[Row]:
    """Losses over samples; the training loss is averaged over neighbouring batches."""
    rows = []
    for model in (ROBERTA, MAE_LM):
        curves = [(run, curve) for run in book.evidence.find_runs(model) if (curve := _read_curve(book, run))]
        if not curves:
            reason = explain_absence(book.evidence, model, METRICS)
            rows.append(book.value(model.label, 'eval_loss', 'nats', Cell(missing=reason)))
            continue
        points = set.intersection(*(set(curve) for _, curve in curves))
        for samples, column in sorted(points, key=lambda point: (point[1] == 'eval_loss', point[0])):
            values = {run.seed: [curve[samples, column]] for run, curve in curves}
            cell = Cell((Term(1.0, values),), tuple(run for run, _ in curves))
            rows.append(at(book.value(model.label, column, 'nats', cell), samples, 'samples'))
    return rows


def _read_curve(book: Book, run: PretrainingRecord) -> dict[tuple[int, str], float]:
    """(samples, loss's name) -> value; the training loss averaged over neighbouring batches."""
    curve = book.evidence.curves.get(run.run_name, [])
    width = max(1, -(-len(curve) // TRAINING_POINTS))
    points = {(int(row['samples']), 'eval_loss'): float(row['eval_loss']) for row in curve if row['eval_loss']}
    for start in range(0, len(curve), width):
        group = curve[start : start + width]
        losses = [float(row['train_loss']) for row in group]
        points[int(group[-1]['samples']), 'train_loss'] = sum(losses) / len(losses)
    return points


def _layer_rows(book: Book, model: Model, key: str, unit: str, index: int | None = None) -> list[Row]:
    """One row a layer, or the one that says why there is none."""
    column = key if index is None else f'principal_angle_{index}'
    layers = range(_count_layers(book, model))
    if not layers:
        return [book.value(model.label, column, unit, rank(book.evidence, model, key))]
    cells = {layer: rank(book.evidence, model, key, layer, index) for layer in layers}
    return [at(book.value(model.label, column, unit, cell), layer, 'layer') for layer, cell in cells.items()]


def _count_layers(book: Book, model: Model) -> int:
    found = book.evidence.find_ranks(model)
    return len(found[0][1].layers) if found else 0
