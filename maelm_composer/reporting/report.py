"""Makes tables, figures and one page from records, reproducible byte for byte, and prints tables. Imports no torch."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.table import Table
from rich.text import Text

from maelm_composer.console import begin_table, open_console, tell
from maelm_composer.errors import InputError
from maelm_composer.files import write_text
from maelm_composer.reporting.artefacts import OWN, PAPER_SETTINGS, RECIPES, artefacts_of, find_artefact
from maelm_composer.reporting.evidence import Evidence
from maelm_composer.reporting.figure3 import build_figure3
from maelm_composer.reporting.figures import DRAWINGS, write_figure
from maelm_composer.reporting.findings import is_table
from maelm_composer.reporting.forest import draw_claims
from maelm_composer.reporting.formatting import format_interval, format_number, format_value, name_score
from maelm_composer.reporting.ladder import build_ladder
from maelm_composer.reporting.load import load_evidence, load_published
from maelm_composer.reporting.page import CLAIMS, make_grid, render_page
from maelm_composer.reporting.recipes import build_recipes
from maelm_composer.reporting.rows import MINUS, NOT_COMPARABLE, WORDS, Row, RowBuilder, write_rows
from maelm_composer.reporting.tables import BUILDERS as TABLE_BUILDERS
from maelm_composer.shipped import find_shipped

BUILDERS = TABLE_BUILDERS | {'figure3': build_figure3, 'ladder': build_ladder, 'recipes': build_recipes}
PUBLISHED = 'results/paper'  # in the working folder, else in the package; not beside the measured results
COLORS = dict(zip(WORDS, ('green', 'red', 'cyan', 'yellow'), strict=True))
Tables = dict[str, list[Row]]  # artefact name -> rows


def report(scale: str, results: Path) -> tuple[Path, Tables]:
    """Make every CSV file, every figure and the page of ``results``/``scale`` from its records.

    Returns:
        The page's path and the rows of the CSV files.

    Raises:
        InputError: no records, or records that contradict each other.
    """
    folder = results / scale
    if folder.name != scale:
        raise InputError(f'{scale!r} is not the name of a scale, such as ladder')
    evidence = load_evidence(folder, scale)
    tables = write_tables(folder, evidence)
    drawn = {
        name: partial(DRAWINGS[name], rows)
        for name, rows in tables.items()
        if name in DRAWINGS and (_has_curve(rows) if name != RECIPES.name else any(row.is_claim for row in rows))
    }
    if any(row.is_claim for rows in tables.values() for row in rows):
        drawn[CLAIMS] = partial(draw_claims, tables)
    pictures = {name: picture for name in (*tables, CLAIMS) if (picture := write_figure(folder, name, drawn.get(name)))}
    page = folder / 'report.html'
    write_text(page, render_page(evidence, tables, pictures))
    return page, tables


def _has_curve(rows: Sequence[Row]) -> bool:
    """Whether a figure of ``rows`` has more than single points: a figure of final checkpoints alone shows no course."""
    return len({row.x for row in rows if row.value is not None and row.x is not None}) > 1


def write_tables(folder: Path, evidence: Evidence) -> Tables:
    """Make every CSV file of ``folder`` from ``evidence``. Raises InputError for records that contradict each other."""
    models = {demand.model for artefact in artefacts_of(evidence.scale) for demand in artefact.demands}
    read = {run.run_name for model in models for run in evidence.find_runs(model)}
    if not read:
        raise InputError(f'{folder}/records has no finished run of a model of {evidence.scale}: nothing was written')
    names = [record.checkpoint.run_name for record in (*evidence.finetunings, *evidence.failures)]
    recorded = {*evidence.runs, *names, *(record.checkpoint.run_name for record in evidence.ranks)}
    if strays := ', '.join(sorted(filter(None, recorded - read))):
        tell(
            f'{folder}/records: no table reads what is recorded of these runs, since no model of {evidence.scale} has '
            f'such a name or the record of the pretraining is missing: {strays}'
        )
    tables = build_tables(evidence)
    for name, rows in tables.items():
        write_rows(folder / f'{name}.csv', rows)
    for name in {OWN.name, RECIPES.name} - tables.keys():
        for suffix in ('csv', 'png', 'svg'):
            (folder / f'{name}.{suffix}').unlink(missing_ok=True)  # its records are gone
    return tables


def build_tables(evidence: Evidence) -> Tables:
    """The rows of every artefact of the scale."""
    published = load_published(find_shipped(PUBLISHED))
    artefacts = artefacts_of(evidence.scale, bool(evidence.list_own_scores()), bool(evidence.recipes))
    return {found.name: BUILDERS[found.name](RowBuilder(found.name, evidence, published)) for found in artefacts}


def print_tables(scale: str, tables: Tables) -> None:
    """Print tables whole, and the claims of every figure."""
    console = open_console()
    for name, rows in tables.items():
        console.print(Text(find_artefact(name).title, 'bold'))
        claims = [row for row in rows if row.is_claim]
        if is_table(name):  # comparisons without a number are in neither table
            console.print(_draw_values([row for row in rows if not row.is_claim and MINUS not in row.row]))
        if claims:
            console.print(_draw_claims(claims))
        if missing := sum(row.value is None for row in rows):
            console.print(f'{name}: {missing} of {len(rows)} numbers are missing; the page says why')
        if lacking := sum(row.is_missing and row.value is not None for row in rows):
            console.print(f'{name}: {lacking} of {len(rows)} numbers lack seeds; the page says which')
        console.print()
    if scale not in PAPER_SETTINGS:
        console.print(f'Scale {scale}: {NOT_COMPARABLE}.')


def _draw_values(rows: Sequence[Row]) -> Table:
    grid = make_grid(rows)
    table = begin_table('', right=grid['titles'])
    for label, _, cells in grid['lines']:
        table.add_row(label, *('' if row is None else format_number(row.value, row.unit) for row in cells))
    return table


def _draw_claims(rows: Sequence[Row]) -> Table:
    table = begin_table('claim', 'score', right=('paper', 'ours'), last=('95 % interval', 'verdict'))
    for row in rows:
        paper, ours = format_number(row.paper, row.unit, is_signed=True), format_value(row)
        word = Text(row.word, COLORS[row.word])
        table.add_row(row.row, name_score(row), paper, ours, format_interval(row), word)
    return table
