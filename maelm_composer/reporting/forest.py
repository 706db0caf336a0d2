"""Every claim of a scale in one figure: difference, interval, margin and the paper's difference."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from maelm_composer.reporting.artefacts import find_artefact
from maelm_composer.reporting.findings import name_claim
from maelm_composer.reporting.rows import Row
from maelm_composer.reporting.verdicts import FAILS, HOLDS, NO_DIFFERENCE, UNDECIDED, is_claim

AXES = {
    'points': 'points',
    'rank': 'dimensions of the effective rank',
    'percent': "% of RoBERTa's",
    'share': 'share',
    'points a decade': 'points for ten times the compute',
    'percent a decade': "% of RoBERTa's for ten times the compute",
}
TIME = 'share_of_time_to_target'  # a ratio: no difference is 1, not 0
AXES[TIME] = "share of RoBERTa's time"
MARKERS = {
    HOLDS: ('#1d6b3a', 'o'),
    FAILS: ('#a12622', 'X'),
    NO_DIFFERENCE: ('#12355b', 's'),
    UNDECIDED: ('#777777', 'o'),
}
# Inches: height of a claim, space below a panel, space left of it for labels, width of the figure.
LINE, SPACE, LABELS, WIDTH = 0.27, 0.6, 5.6, 11.0


def draw_forest(tables: Mapping[str, Sequence[Row]]) -> Figure:
    """One panel for each unit, one line for each claim."""
    panels: dict[str, list[Row]] = {}
    for rows in tables.values():
        for row in rows:
            if is_claim(row):
                panels.setdefault(row.column if row.column == TIME else row.unit, []).append(row)
    height = sum(LINE * len(found) + SPACE for found in panels.values())
    figure, top = Figure(figsize=(WIDTH, height)), height
    left = LABELS / WIDTH
    # Panels are placed by hand, as the last digits of a layout engine's result vary from run to run.
    for unit, found in panels.items():
        top -= LINE * len(found) + SPACE
        axis = figure.add_axes((left, (top + SPACE) / height, 0.98 - left, LINE * len(found) / height))
        _draw_panel(axis, unit, found)
    return figure


def _draw_panel(axis: Axes, unit: str, claims: Sequence[Row]) -> None:
    for line, row in enumerate(claims):
        color, marker = MARKERS[row.verdict.split(':')[0]]
        if row.margin is not None:
            axis.plot(
                [-row.margin, row.margin], [line, line], color='#e3e6ea', linewidth=5, zorder=1, solid_capstyle='butt'
            )
        if row.low is not None and row.high is not None:
            axis.plot([row.low, row.high], [line, line], color=color, linewidth=1.6, zorder=2)
        filling = 'white' if row.low is None else color
        axis.plot([row.value or 0.0], [line], marker, color=color, markerfacecolor=filling, zorder=3)
        if row.paper is not None:
            axis.plot([row.paper], [line], '|', color='#e07b39', markersize=11, markeredgewidth=2, zorder=2)
    axis.axvline(1 if unit == TIME else 0, color='#555555', linewidth=0.8)
    labels = [f'{find_artefact(row.artefact).label}: {name_claim(row, ", ")}' for row in claims]
    axis.set_yticks(range(len(claims)), labels)
    axis.set_ylim(len(claims) - 0.4, -0.6)
    axis.set_xlabel(AXES.get(unit, unit))
    axis.grid(False, axis='y')
