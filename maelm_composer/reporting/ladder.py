"""The ladder as rows: both models at every rung, their difference for equal rows and for equal FLOPs, and its trend."""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import pairwise

from maelm_composer.checkpoints.names import METRICS
from maelm_composer.records import PretrainingRecord
from maelm_composer.reporting.artefacts import (
    MAE_LM,
    MASK_IN_ENCODER,
    QUICK_AVERAGE,
    QUICK_COLUMNS,
    ROBERTA,
    RUNGS_OF,
    Model,
    Rung,
)
from maelm_composer.reporting.cells import (
    ENOUGH_SEEDS,
    Cell,
    combine,
    note_never,
    relate,
    slope,
    subtract,
    subtract_relative,
)
from maelm_composer.reporting.evidence import Evidence, Runs
from maelm_composer.reporting.formatting import format_x
from maelm_composer.reporting.rows import (
    MARGIN_RANK_SHARE,
    PERCENT,
    POINTS,
    RANK,
    Claim,
    Row,
    RowBuilder,
)
from maelm_composer.reporting.tables import MASKS, OUTSIDE, REAL, WITH_MASKS

TREND = 'change with ten times the compute'
AT_EQUAL_FLOPS = 'at equal FLOPs'
RELATIVE, MASK_GAIN = 'real_rank_excess', 'mask_rank_gain'
LOSS, FLOPS, DEPARTURE = 'eval_loss', 'flops', 'departure'
RATE = 'optimizer.learning_rate'
DEPARTURE_NATS, WINDOW = 1.0, 20  # lines of metrics.csv
Read = Callable[[Evidence, Model | Runs], Cell]
Cells = dict[str, dict[str, dict[Rung, Cell]]]  # by column, label of the model and rung


def build_ladder(builder: RowBuilder) -> list[Row]:
    """All models' numbers at every rung; then each MAE-LM − RoBERTa, and their slopes over log compute.

    The rungs of a score are one family for Holm's correction, and so are the slopes. The paper compares models
    that read equal rows, so the differences at equal FLOPs have no verdict.
    """
    rows: list[Row] = []
    rungs = RUNGS_OF[builder.scale]
    cells: Cells = {name: {} for name in NUMBERS}
    for name, (unit, read) in NUMBERS.items():
        for rung in rungs:
            for model in reversed(rung.models):
                cell = read(builder.evidence, model)
                cells[name].setdefault(model.label, {})[rung] = cell
                rows.append(builder.value(model.label, name, unit, cell).at(rung.flops, 'FLOPs'))
    for label in dict.fromkeys(model.label for rung in rungs for model in (rung.mae_lm, *rung.variants)):
        gap = f'{label} − {ROBERTA.label}'
        for rung, cell in cells[LOSS][label].items():  # the paper claims nothing about the loss
            loss = subtract(cell, cells[LOSS][ROBERTA.label][rung])
            rows.append(builder.value(gap, LOSS, 'nats', loss).at(rung.flops, 'FLOPs'))
        for rung, above in pairwise(rungs):
            if rung in cells[LOSS][label]:  # not only a variant of another rung
                rows += _compare_at_equal_flops(builder, label, cells, rung, above)
        rows += _compare(builder, cells, label, ROBERTA.label)
    rows += _compare(builder, cells, MAE_LM.label, MASK_IN_ENCODER.label)
    return rows + _judge_masks(builder, rungs)


def _compare(builder: RowBuilder, cells: Cells, ours: str, theirs: str) -> list[Row]:
    """The claims about ``ours`` − ``theirs``, two labels of models: ranks, in percent of RoBERTa's, and scores.

    Only MAE-LM − RoBERTa, the paper's comparison, has published numbers and trends.
    """
    is_paper, gap = (ours, theirs) == (MAE_LM.label, ROBERTA.label), f'{ours} − {theirs}'
    pairs = {
        name: {rung: (found[ours][rung], cell) for rung, cell in found[theirs].items() if rung in found[ours]}
        for name, found in cells.items()
    }
    baselines = cells[REAL][ROBERTA.label]
    excess = {rung: subtract_relative(*both, base=baselines[rung]) for rung, both in pairs[REAL].items()}
    of_ours, of_theirs = (builder.paper_of(model, 'pretrained') for model in (MAE_LM, ROBERTA))
    paper = None if of_ours is None or of_theirs is None else round(100 * (of_ours / of_theirs - 1), 2)
    differences: dict[str, tuple[str, dict[Rung, Cell], float | None, float | None]]
    differences = {RELATIVE: (PERCENT, excess, paper, 100 * MARGIN_RANK_SHARE)}
    for name, (unit, _) in NUMBERS.items():
        if unit == PERCENT:
            gaps = {rung: subtract(*both) for rung, both in pairs[name].items()}
            differences[name] = POINTS, gaps, builder.paper_gap(name), None
    rows: list[Row] = []
    for name, (unit, gaps, published, margin) in differences.items():
        published = published if is_paper else None
        of_rungs = (Claim(gap, name, unit, cell, published, margin, rung.flops) for rung, cell in gaps.items())
        rows += builder.claims(*of_rungs)
    if is_paper:
        trends = [_claim_trend(gap, name, unit, gaps) for name, (unit, gaps, *_) in differences.items()]
        rows += builder.claims(*trends)
    return rows


def _judge_masks(builder: RowBuilder, rungs: Iterable[Rung]) -> list[Row]:
    """The paper's explanation of RoBERTa's lower rank, dimensions kept for [MASK]: Figure 1(a) and Theorem 2.2."""
    rows: list[Row] = []
    for name, (unit, read) in EXPLANATIONS.items():
        gains = {rung: read(builder.evidence, rung.roberta) for rung in rungs}
        rows += builder.claims(*(Claim(ROBERTA.label, name, unit, gain, flops=r.flops) for r, gain in gains.items()))
    return rows


def _compare_at_equal_flops(builder: RowBuilder, label: str, cells: Cells, rung: Rung, above: Rung) -> list[Row]:
    """The model ``label`` of ``rung`` minus a RoBERTa that takes as many FLOPs as this model itself.

    That RoBERTa's numbers are interpolated, linearly in log FLOPs, between the RoBERTas of ``rung`` and ``above``.
    """
    rows, cost = [], cells[FLOPS][label][rung]
    for name, unit in ((LOSS, 'nats'), (REAL, RANK), (RELATIVE, PERCENT), (QUICK_AVERAGE.name, POINTS)):
        read = REAL if name == RELATIVE else name
        gap, baselines = cost, cells[read][ROBERTA.label]
        if cost.estimate is not None:
            weight = math.log(cost.estimate.value / rung.flops) / math.log(above.flops / rung.flops)
            here, there = (weight - 1, baselines[rung]), (-weight, baselines[above])
            ours = cells[read][label][rung]
            gap = combine([(1.0, combine([(1.0, ours), here])), there], are_rungs=True)
            if name == RELATIVE:
                theirs = [(-weight, cell) for weight, cell in (here, there)]
                gap = replace(relate([(1.0, ours), here, there], theirs, are_rungs=True), note=gap.note)
        row = builder.value(f'{label} − {ROBERTA.label} {AT_EQUAL_FLOPS}', name, unit, gap)
        if row.value is not None and (rates := _name_rates(gap.runs)):
            row = replace(row, verdict=f'{row.verdict}; interpolated {rates}')
        rows.append(row.at(rung.flops, 'FLOPs'))
    return rows


def _name_rates(runs: Iterable[PretrainingRecord]) -> str:
    """The learning rates of ``runs`` in words, unless they are equal."""
    rates = dict.fromkeys(f'{run.identity[RATE]:g}' for run in runs)
    return f'with unequal learning rates ({" and ".join(rates)})' if len(rates) > 1 else ''


def _measure_departure(evidence: Evidence, model: Model | Runs) -> Cell:
    """Tokens to the middle of the first window whose mean training loss is a nat below that of the first; inf: never.

    The head's bias starts at the unigram distribution, so the first window's loss is the unigram entropy. A log with
    fewer lines has longer windows, so it shows the point less exactly.
    """

    def find(run: PretrainingRecord) -> float | None:
        curve = evidence.curves.get(run.run_name, [])
        losses = [float(row['train_loss']) for row in curve]
        means = [sum(losses[start : start + WINDOW]) / WINDOW for start in range(len(losses) - WINDOW + 1)]
        if not means:
            return None
        first = next((start for start, mean in enumerate(means) if mean < means[0] - DEPARTURE_NATS), None)
        if first is None:
            return math.inf
        middle = (int(curve[first]['samples']) + int(curve[first + WINDOW - 1]['samples'])) / 2
        return middle * run.tokens / run.samples

    return note_never(evidence.measure_runs(model, METRICS, find))


NUMBERS: dict[str, tuple[str, Read]] = {  # column -> unit, and how a model's number is read
    LOSS: ('nats', partial(Evidence.measure_runs, what='validation loss', read=lambda run: run.eval_loss)),
    FLOPS: ('FLOPs', partial(Evidence.measure_runs, what='number of FLOPs', read=lambda run: run.flops)),
    **{key: (RANK, partial(Evidence.rank, key=key)) for key in (REAL, WITH_MASKS, MASKS)},
    DEPARTURE: ('tokens', _measure_departure),
    **{column.name: (PERCENT, partial(Evidence.score, column=column)) for column in (*QUICK_COLUMNS, QUICK_AVERAGE)},
}
EXPLANATIONS: dict[str, tuple[str, Read]] = {  # the same of RoBERTa, for the paper's explanation of its lower rank
    MASK_GAIN: (PERCENT, lambda e, model: subtract_relative(e.rank(model, WITH_MASKS), e.rank(model, REAL))),
    OUTSIDE: ('share', lambda e, model: e.mask_excess(model)[-1]),
}


def _claim_trend(gap: str, name: str, unit: str, gaps: dict[Rung, Cell]) -> Claim:
    """The slope of a difference over log10(FLOPs)."""
    found = {r: c for r, c in gaps.items() if (each := c.estimate) and each.pretraining_seeds >= ENOUGH_SEEDS}
    if len(found) < 2:
        trend, rungs = Cell(missing='a slope needs two rungs of at least three pretraining seeds'), ''
    else:
        trend = slope([(math.log10(rung.flops), cell) for rung, cell in found.items()], are_rungs=True)
        *names, last = [format_x(rung.flops) for rung in found]
        rungs = f'{", ".join(names)} and {last} FLOPs'
        if rates := _name_rates(run for cell in found.values() for run in cell.runs):
            rungs += f' {rates}'
    return Claim(f'{gap}, {TREND}', name, f'{unit} a decade', trend, rungs=rungs)
