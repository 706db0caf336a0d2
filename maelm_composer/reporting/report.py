"""Records -> tables, figures and one page. Needs no torch, and changes nothing when repeated."""

from collections.abc import Callable
from pathlib import Path

from maelm_composer.records import write_text
from maelm_composer.reporting.artefacts import artefacts_of
from maelm_composer.reporting.curves import build_figure1, build_figure4, build_figure5, build_subspace, build_training
from maelm_composer.reporting.evidence import load_evidence
from maelm_composer.reporting.figures import DRAWINGS, write_figure
from maelm_composer.reporting.ladder import build_ladder
from maelm_composer.reporting.page import render_page
from maelm_composer.reporting.race import build_figure3
from maelm_composer.reporting.rows import Row, load_published, write_rows
from maelm_composer.reporting.tables import Book, build_table1, build_table2, build_table3

BUILDERS: dict[str, Callable[[Book], list[Row]]] = {
    'table1': build_table1,
    'table2': build_table2,
    'table3': build_table3,
    'figure1': build_figure1,
    'figure3': build_figure3,
    'figure4': build_figure4,
    'figure5': build_figure5,
    'subspace': build_subspace,
    'training': build_training,
    'ladder': build_ladder,
}

PUBLISHED = Path('results/paper')  # of the checkout, wherever the measured results lie


def report(scale: str, results: Path) -> Path:
    """Make every CSV, figure and the page of ``results``/``scale`` again from its records; returns the page's path.

    Raises:
        InputError: no records, or records that contradict each other.
    """
    folder = results / scale
    tables = build_tables(scale, results)
    pictures = {}
    for name, rows in tables.items():
        write_rows(folder / f'{name}.csv', rows)
        if name in DRAWINGS and (picture := write_figure(folder, name, rows)):
            pictures[name] = picture
    page = folder / 'report.html'
    write_text(page, render_page(scale, tables, pictures))
    return page


def build_tables(scale: str, results: Path) -> dict[str, list[Row]]:
    """Rows of every artefact, that the scale has."""
    found = load_evidence(results / scale, scale), load_published(PUBLISHED)
    return {artefact.name: BUILDERS[artefact.name](Book(artefact.name, *found)) for artefact in artefacts_of(scale)}
