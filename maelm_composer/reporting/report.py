"""Makes tables, figures and one page from records. Imports no torch; the files are reproducible byte for byte."""

from functools import partial
from pathlib import Path

from maelm_composer.files import write_text
from maelm_composer.reporting.artefacts import OWN, artefacts_of
from maelm_composer.reporting.evidence import Evidence, load_evidence
from maelm_composer.reporting.figure3 import build_figure3
from maelm_composer.reporting.figures import DRAWINGS, draw_claims, write_figure
from maelm_composer.reporting.findings import describe_cost
from maelm_composer.reporting.ladder import build_ladder
from maelm_composer.reporting.page import CLAIMS, render_page
from maelm_composer.reporting.row_builder import RowBuilder
from maelm_composer.reporting.rows import Row, load_published, write_rows
from maelm_composer.reporting.tables import BUILDERS as TABLE_BUILDERS
from maelm_composer.reporting.verdicts import is_claim
from maelm_composer.shipped import find_shipped

BUILDERS = TABLE_BUILDERS | {'figure3': build_figure3, 'ladder': build_ladder}

PUBLISHED = 'results/paper'  # in the working folder, else in the package; not beside the measured results


Tables = dict[str, list[Row]]  # artefact name -> rows


def report(scale: str, results: Path) -> tuple[Path, Tables]:
    """Make every CSV file, every figure and the page of ``results``/``scale`` from its records.

    Returns:
        The page's path and the rows of the CSV files.

    Raises:
        InputError: no records, or records that contradict each other.
    """
    folder, evidence = results / scale, load_evidence(results / scale, scale)
    tables = write_tables(folder, evidence)
    drawn = {
        name: partial(DRAWINGS[name], rows)
        for name, rows in tables.items()
        if name in DRAWINGS and any(row.value is not None and row.x is not None for row in rows)
    }
    if any(is_claim(row) for rows in tables.values() for row in rows):
        drawn[CLAIMS] = partial(draw_claims, tables)
    pictures = {name: picture for name in (*tables, CLAIMS) if (picture := write_figure(folder, name, drawn.get(name)))}
    page = folder / 'report.html'
    write_text(page, render_page(scale, tables, pictures, describe_cost(evidence)))
    return page, tables


def write_tables(folder: Path, evidence: Evidence) -> Tables:
    """Make every CSV file of ``folder`` from ``evidence``. Raises InputError for records that contradict each other."""
    tables = build_tables(evidence)
    for name, rows in tables.items():
        write_rows(folder / f'{name}.csv', rows)
    if OWN.name not in tables:
        (folder / f'{OWN.name}.csv').unlink(missing_ok=True)  # its records are gone
    return tables


def build_tables(evidence: Evidence) -> Tables:
    """The rows of every artefact of the scale."""
    published = load_published(find_shipped(PUBLISHED))
    artefacts = artefacts_of(evidence.scale, bool(evidence.list_own_scores()))
    return {found.name: BUILDERS[found.name](RowBuilder(found.name, evidence, published)) for found in artefacts}
