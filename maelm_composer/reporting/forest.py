"""The forest plot of claims: differences with intervals and margins, a panel for each unit. Computes no number."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from maelm_composer.reporting.artefacts import LADDER, find_artefact
from maelm_composer.reporting.cells import ENOUGH_SEEDS
from maelm_composer.reporting.figure3 import LEAD
from maelm_composer.reporting.formatting import name_claim
from maelm_composer.reporting.rows import FAILS, WORDS, Row

# The labels of axes by unit, and the color and the marker of a verdict.
AXES = {
    'rank': 'dimensions of the effective rank',
    'percent': "% of RoBERTa's rank",
    'points a decade': 'points for ten times the compute',
    'percent a decade': "% of RoBERTa's rank for ten times the compute",
    LEAD: "share of RoBERTa's time",  # a column, since other shares are not of time
}
# They differ in brightness, marker or line, too.
MARKERS = dict(zip(WORDS, (('#1d6b3a', 'o'), ('#d2552d', 'X'), ('#12355b', 's'), ('#777777', 'D')), strict=True))
LINES: dict[str, Any] = {FAILS: '--'}
MARGIN_COLOR = '#b8c0ca'
# Inches: height of a claim, space below a panel, width of a panel, of a character of its labels, height of the legend.
LINE, SPACE, AXIS, CHARACTER, KEY = 0.27, 0.6, 5.4, 0.076, 0.35
LABEL_LENGTH = 90  # characters of a line of a label


def draw_claims(tables: Mapping[str, Sequence[Row]]) -> Figure:
    """Every claim of a scale: one panel for each unit, one line for each claim."""
    panels: dict[str, list[Row]] = {}
    for rows in tables.values():
        for row in rows:
            if row.is_claim:
                panels.setdefault(row.column if row.column == LEAD else row.unit, []).append(row)
    labels = {unit: [_label_claim(row, len(tables) > 1) for row in found] for unit, found in panels.items()}
    left = CHARACTER * max(len(line) for each in labels.values() for label in each for line in label.split('\n')) + 0.2
    width, height = left + AXIS, sum(LINE * len(found) + SPACE for found in panels.values()) + KEY
    figure, top = Figure(figsize=(width, height)), height
    # Panels are placed by hand, as the last digits of a layout engine's result vary from run to run.
    for unit, found in panels.items():
        top -= LINE * len(found) + SPACE
        place = left / width, (top + SPACE) / height, 0.97 * AXIS / width, LINE * len(found) / height
        _draw_panel(figure.add_axes(place), unit, found, labels[unit])
    keys = [
        Line2D([], [], color=color, marker=marker, linestyle=LINES.get(word, '-'), label=word)
        for word, (color, marker) in MARKERS.items()
    ]
    keys += [Line2D([], [], color=MARGIN_COLOR, linewidth=5, label='margin')]
    keys += [Line2D([], [], color='black', marker='|', linestyle='', markersize=11, label="the paper's difference")]
    figure.legend(handles=keys, loc='lower right', ncols=len(keys))
    return figure


def _label_claim(row: Row, is_named: bool) -> str:
    of_artefact = f'{find_artefact(row.artefact).label}: ' if is_named and row.artefact != LADDER.name else ''
    return textwrap.fill(of_artefact + name_claim(row, ', '), LABEL_LENGTH)


def _draw_panel(axis: Axes, unit: str, claims: Sequence[Row], labels: Sequence[str]) -> None:
    for line, row in enumerate(claims):
        color, marker = MARKERS[row.word]
        if row.margin is not None:
            margin = [-row.margin, row.margin]
            axis.plot(margin, [line, line], color=MARGIN_COLOR, linewidth=5, zorder=1, solid_capstyle='butt')
        if row.drawn_interval:
            style = LINES.get(row.word, '-')
            axis.plot(row.drawn_interval, [line, line], color=color, linewidth=1.6, linestyle=style, zorder=2)
        filling = color if row.pretraining_seeds >= ENOUGH_SEEDS else 'white'
        axis.plot([row.value or 0.0], [line], marker, color=color, markerfacecolor=filling, zorder=3)
        if row.paper is not None and row.difference is not None:  # ranks of a small model are not compared
            axis.plot([row.paper], [line], '|', color='black', markersize=11, markeredgewidth=1.5, zorder=4)
    axis.axvline(0, color='#555555', linewidth=0.8)
    axis.set_yticks(range(len(claims)), labels)
    axis.set_ylim(len(claims) - 0.4, -0.6)
    axis.set_xlabel(AXES.get(unit, unit))
    axis.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))  # short numbers, which do not overlap
    axis.grid(False, axis='y')
