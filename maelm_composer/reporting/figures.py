"""Draws rows as figures in PNG and SVG: reproducible byte for byte, readable in greyscale. Computes no number."""

import io
import math
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from maelm_composer.files import write_bytes
from maelm_composer.reporting.artefacts import (
    MASK_IN_ENCODER,
    PAPER_SETTINGS,
    ROBERTA,
    label_of,
)
from maelm_composer.reporting.cells import ENOUGH_SEEDS
from maelm_composer.reporting.forest import draw_claims
from maelm_composer.reporting.formatting import format_x
from maelm_composer.reporting.ladder import AT_EQUAL_FLOPS
from maelm_composer.reporting.rows import CONSTANT, GAP, PERCENT, RANK, Row

Style = dict[str, Any]
Points = list[tuple[float, Row]]

matplotlib.use('Agg')
RC_PARAMS: Any = {
    'svg.hashsalt': 'maelm-composer',  # else the SVG's ids are random
    'font.family': 'DejaVu Sans',
    'font.size': 10,
    'axes.spines.top': False,
    'axes.spines.right': False,
    'axes.grid': True,
    'axes.axisbelow': True,
    'grid.color': '#dddddd',
    'axes.titlesize': 10,
    'axes.titlelocation': 'left',
    'legend.frameon': False,
    'legend.fontsize': 9,
}
PANEL = (4.6, 3.6)  # inches
# The styles differ in brightness, marker and line.
DARK: Style = {'color': '#12355b', 'marker': 'o', 'linestyle': '-'}
LIGHT: Style = {'color': '#e07b39', 'marker': 's', 'linestyle': '--'}
MIDDLE: Style = {'color': '#5d8a66', 'marker': '^', 'linestyle': ':'}
DOTTED: Style = {'linewidth': 0.8, 'linestyle': (0, (1, 2))}
STYLES = {'RoBERTa': DARK, 'MAE-LM': LIGHT}
TITLE_LENGTH = 50  # of a panel's title
FLOPS = 'pretraining FLOPs'


def draw_figure1(rows: Sequence[Row]) -> Figure:
    figure, (left, right) = _panels(2)
    _plot(left, _find(rows, 'rank_with_masks'), 'input with [MASK]', DARK)
    _plot(left, _find(rows, 'rank_real'), 'input without [MASK]', LIGHT)
    _plot(right, _find(rows, 'rank_masks'), '[MASK] positions', DARK)
    _finish(left, 'RoBERTa, all tokens', 'layer', '0.9-effective rank')
    _finish(right, 'RoBERTa, [MASK] vectors', 'layer', '0.9-effective rank')
    return figure


def draw_figure3(rows: Sequence[Row]) -> Figure:
    scores = [r for r in rows if r.unit == 'percent' and r.value is not None]
    costs = {(r.row, r.column, r.x): r.value for r in rows if r.column in ('hours', 'flops') and r.value is not None}
    costs |= {(r.row, 'samples', r.x): r.x for r in scores if r.x is not None}
    names = {'hours': 'pretraining time [hours]', 'samples': 'pretraining samples', 'flops': FLOPS}
    known = {name: label for name, label in names.items() if any(column == name for _, column, _ in costs)}
    figure, panels = _panels(len(known))
    for panel, (name, label) in zip(panels, known.items(), strict=True):
        for model, style in STYLES.items():
            found = [(costs.get((model, name, r.x)), r) for r in scores if r.row == model]
            points = [(x, r) for x, r in found if x is not None]
            if not points:
                continue
            _plot(panel, points, f'{model}{", final" if len(points) == 1 else ""}', style)
            if model == 'RoBERTa':
                x, last = max(points, key=lambda point: point[0])
                panel.axhline(last.value or 0, **DOTTED, color=style['color'])
                panel.axvline(x, **DOTTED, color=style['color'])
        reached = [r.value for r in rows if r.column == f'{name}, interpolated' and r.value is not None]
        if reached and math.isfinite(reached[0]):
            panel.axvline(reached[0], **DOTTED, color=STYLES['MAE-LM']['color'], label="MAE-LM at RoBERTa's accuracy")
        for row in scores:
            if row.row == CONSTANT:
                panel.axhline(row.value or 0, linewidth=0.8, color='#777777', label=CONSTANT)
        panel.set_xlim(left=0)
        _finish(panel, '', label, f'{label_of(scores[0].column)} [%]', whole=False)
    return figure


def draw_figure4(rows: Sequence[Row]) -> Figure:
    found = Counter(r.column for r in rows if r.x is not None and r.value is not None)
    columns = [column for column in found if found[column] > 1] or [*found]  # one point is no curve
    figure, panels = _panels(len(columns))
    for panel, column in zip(panels, columns, strict=True):
        points = _find(rows, column)
        _plot(panel, points, None, LIGHT)
        paper = [(r.x, r.paper) for _, r in points if r.paper is not None]
        if paper and points[0][1].scale in PAPER_SETTINGS:
            panel.plot(*zip(*paper, strict=True), label='paper', linewidth=0, marker='x', color='#555555')
        elif paper:  # outside the axis at this scale, so printed as text
            numbers = ', '.join(f'{value:g} at δ = {x:g}' for x, value in paper)
            panel.text(0.0, 1.02, f'paper, base: {numbers}', transform=panel.transAxes, fontsize=8, color='#555555')
        unit = points[0][1].unit
        label = {PERCENT: f'{label_of(column)} [%]', RANK: '0.9-effective rank'}.get(unit, unit)
        title = '' if unit == PERCENT else label_of(column)
        _finish(panel, title, 'δ, share of the [MASK]s that the encoder sees', label, whole=False)
        panel.set_xticks([0, 0.25, 0.5, 0.75, 1])
    return figure


def draw_figure5(rows: Sequence[Row]) -> Figure:
    figure, (left, right) = _panels(2)
    _plot(left, _find(rows, 'rank_with_masks', 'RoBERTa'), 'RoBERTa, input with [MASK]', MIDDLE)
    for model, style in STYLES.items():
        _plot(left, _find(rows, 'rank_real', model), f'{model}, input without [MASK]', style)
        during = [(r.x, r) for r in rows if r.row == model and r.x_unit == 'epoch' and r.x is not None]
        _plot(right, during, model, style)
    _finish(left, 'after pretraining', 'layer', '0.9-effective rank')
    _finish(right, 'during fine-tuning, last layer', 'epoch', '0.9-effective rank')
    return figure


def draw_subspace(rows: Sequence[Row]) -> Figure:
    figure, panels = _panels(3)
    names = {
        'mask_outside_share': ("[MASK] energy outside the real tokens' leading directions", 'share'),
        'rank_one_residual': ('real tokens: distance from rank one', 'relative residual'),
        'principal_angle_2': ('median principal angle, real and [MASK] vectors', 'degrees'),
    }
    for panel, (column, (title, label)) in zip(panels, names.items(), strict=True):
        for model, style in STYLES.items():
            _plot(panel, _find(rows, column, model), model, style)
            if column == 'mask_outside_share':  # by definition, some of the real tokens' energy lies there, too
                thin = {**style, 'marker': '', 'linewidth': 0.8}
                _plot(panel, _find(rows, 'real_outside_share', model), f"{model}'s real tokens", thin)
        _finish(panel, title, 'layer', label)
        panel.set_ylim(0, 1.05 * panel.get_ylim()[1])
    return figure


def draw_training(rows: Sequence[Row]) -> Figure:
    figure, (panel,) = _panels(1)
    for model, style in STYLES.items():
        thin = {**style, 'marker': '', 'linestyle': '-', 'linewidth': 0.8}
        _plot(panel, _find(rows, 'train_loss', model), f'{model}, training', thin)
        _plot(panel, _find(rows, 'eval_loss', model), f'{model}, validation', style)
    if losses := [row.value or 0.0 for _, row in _find(rows, 'eval_loss')]:  # the first training losses are far above
        panel.set_ylim(top=1.03 * max(losses))
    _finish(panel, '', 'samples', 'loss at masked positions [nats]', whole=False)
    return figure


def draw_ladder(rows: Sequence[Row]) -> Figure:
    """Over FLOPs: both models in the upper row, each at its own FLOPs, and MAE-LM − RoBERTa in the lower."""
    figure = Figure(figsize=(PANEL[0] * 3, PANEL[1] * 2), layout='constrained')
    panels = figure.subplots(2, 3)
    costs = {(r.row, r.x): r.value for r in rows if r.column == 'flops' and r.value is not None}
    both = {'eval_loss': 'validation loss [nats]', 'rank_real': '0.9-effective rank', 'quick_avg': 'score [%]'}
    for panel, (column, label) in zip(panels[0], both.items(), strict=True):
        for model, style in STYLES.items():
            points = [(costs[model, x], row) for x, row in _find(rows, column, model) if (model, x) in costs]
            _plot(panel, points, model, style)
        _finish(panel, label_of(column), "FLOPs of the model's own pretraining", label, whole=False)
    gaps = {
        'eval_loss': 'validation loss [nats]',
        'real_rank_excess': "effective rank [% of RoBERTa's]",
        'quick_avg': 'score [points]',
    }
    for panel, (column, label) in zip(panels[1], gaps.items(), strict=True):
        points = _find(rows, column, GAP)
        _plot(panel, points, 'equal rows', DARK)
        equal, variant = f'{GAP} {AT_EQUAL_FLOPS}', f'{MASK_IN_ENCODER.label} − {ROBERTA.label}'
        for row, name, style, shift in (  # shifted, so that no interval covers another
            (equal, 'equal FLOPs', LIGHT, 0.94),
            (variant, '[MASK] in the encoder − RoBERTa', MIDDLE, 1.06),
        ):
            _plot(panel, [(shift * x, found) for x, found in _find(rows, column, row)], name, style)
        panel.axhline(0, color='#555555', linewidth=0.8)
        paper = next((row.paper for _, row in points if row.paper is not None), None)
        if paper is not None:
            panel.axhline(paper, color='#555555', label="the paper's, base", **DOTTED)
        _finish(panel, GAP, "FLOPs of RoBERTa's pretraining", label, whole=False)
    budgets = sorted({row.x for row in rows if row.x is not None})
    for line, shown in zip(panels, ((*budgets, *costs.values()), budgets), strict=True):
        for panel in line:
            panel.set_xscale('log')
            panel.set_xticks(budgets, list(map(format_x, budgets)))
            panel.set_xlim(0.85 * min(shown), 1.15 * max(shown))
            panel.minorticks_off()
    return figure


DRAWINGS: dict[str, Callable[[Sequence[Row]], Figure]] = {
    'figure1': draw_figure1,
    'figure3': draw_figure3,
    'figure4': draw_figure4,
    'figure5': draw_figure5,
    'subspace': draw_subspace,
    'training': draw_training,
    'ladder': draw_ladder,
    'recipes': lambda rows: draw_claims({'recipes': rows}),
}


def write_figure(folder: Path, name: str, draw: Callable[[], Figure] | None) -> bytes | None:
    """Write ``folder``/``name``.png and .svg and return the SVG; without ``draw`` remove both, return None."""
    paths = [folder / f'{name}.{suffix}' for suffix in ('png', 'svg')]
    if draw is None:
        for path in paths:
            path.unlink(missing_ok=True)
        return None
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # a user's matplotlibrc would change the bytes
        matplotlib.rcParams.update(RC_PARAMS)
        figure = draw()
        for path, metadata in zip(paths, ({'Software': None}, {'Date': None, 'Creator': None}), strict=True):
            buffer = io.BytesIO()
            figure.savefig(buffer, format=path.suffix[1:], dpi=150, metadata=metadata)
            write_bytes(path, buffer.getvalue())
    return buffer.getvalue()


def _find(rows: Sequence[Row], column: str, row: str | None = None) -> Points:
    """(x, row) of the points of ``column`` that have a value, ordered by x."""
    found = [(r.x, r) for r in rows if r.column == column and r.x is not None and r.value is not None]
    return sorted(((x, r) for x, r in found if row is None or r.row == row), key=lambda point: point[0])


def _panels(count: int) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(PANEL[0] * count, PANEL[1]), layout='constrained')
    return figure, figure.subplots(1, count, squeeze=False)[0]


def _plot(panel: Axes, points: Points, label: str | None, style: Style) -> None:
    """Draw a line; at markers, 95 % intervals as bars, and hollow points where there are too few seeds for one."""
    known: Any = [(x, r.value, r.drawn_interval) for x, r in points if r.value is not None]
    if not known:
        return
    panel.plot(*zip(*[point[:2] for point in known], strict=True), label=label, **{'markersize': 5, **style})
    for x, row in points:
        if style['marker'] and row.value is not None and row.pretraining_seeds < ENOUGH_SEEDS:
            hollow = {**style, 'linestyle': '', 'markerfacecolor': 'white'}
            panel.plot([x], [row.value], **{'markersize': 5, **hollow})
    for x, value, interval in known:
        if interval and style['marker']:
            low, high = interval
            panel.errorbar(x, value, [[value - low], [high - value]], color=style['color'], capsize=3, linewidth=1.2)


def _finish(panel: Axes, title: str, x_label: str, y_label: str, whole: bool = True) -> None:
    panel.set(title=textwrap.fill(title, TITLE_LENGTH), xlabel=x_label, ylabel=y_label)
    if whole:
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    if x_label.endswith('samples'):
        panel.xaxis.set_major_locator(MaxNLocator(5))
        panel.xaxis.set_major_formatter('{x:,.0f}')
    if x_label == FLOPS:
        panel.xaxis.set_major_locator(MaxNLocator(4))
        panel.xaxis.set_major_formatter(lambda x, _: format_x(x))
    panel.ticklabel_format(axis='y', useOffset=False)
    if y_label.endswith('[%]'):  # an axis of less than a point would magnify noise
        low, high = panel.get_ylim()
        if high - low < 1:
            panel.set_ylim((low + high - 1) / 2, (low + high + 1) / 2)
    if y_label.endswith('rank'):
        panel.yaxis.set_major_locator(MaxNLocator(integer=True))
    if panel.get_legend_handles_labels()[0]:
        panel.legend(loc='upper center', bbox_to_anchor=(0.5, -0.18), ncols=2)
    elif not panel.lines:
        panel.text(0.5, 0.5, 'not recorded', transform=panel.transAxes, ha='center', color='#777777')
