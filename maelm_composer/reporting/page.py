"""The data of the page of one scale; page.html.j2 lays them out."""

import base64
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from maelm_composer.reporting.artefacts import DEMO, PAPER_SETTINGS, find_artefact, label_of
from maelm_composer.reporting.findings import describe_findings, format_interval, format_number
from maelm_composer.reporting.row_builder import CONSTANT, PERCENT
from maelm_composer.reporting.rows import Row
from maelm_composer.reporting.verdicts import NOT_COMPARABLE, is_claim

CLAIMS = 'claims'  # the name of the figure of all claims
PROVENANCE = {
    'run_keys': 'runs',
    'recipe_hash': 'recipes (SHA-256)',
    'git_revision': 'source revision',
    'data_hash': 'data (SHA-256)',
    'tokenizer_hash': 'tokenizer (SHA-256)',
    'seeds': 'seeds',
    'versions': 'versions',
    'hardware': 'hardware',
}


def render_page(scale: str, tables: Mapping[str, Sequence[Row]], pictures: Mapping[str, bytes], cost: str) -> str:
    """The page of one scale as HTML.

    Args:
        tables: artefact name -> rows
        pictures: artefact name, or :data:`CLAIMS`, -> SVG
        cost: a sentence on the compute that the records cost
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    functions = {'number': format_number, 'interval': format_interval, 'label_of': label_of}
    environment.globals |= {**functions, 'not_comparable': NOT_COMPARABLE}
    return environment.get_template('page.html.j2').render(
        scale=scale,
        demo=DEMO,
        setting=PAPER_SETTINGS.get(scale),
        findings=describe_findings(tables),
        cost=cost,
        images={name: base64.b64encode(picture).decode() for name, picture in pictures.items()},
        sections=[_make_section(name, rows, name in pictures) for name, rows in tables.items()],
        provenance=_collect_provenance([row for rows in tables.values() for row in rows]),
    )


def _make_section(name: str, rows: Sequence[Row], has_picture: bool) -> dict[str, Any]:
    """The rows of one artefact: values, claims, the points of a figure that is drawn, and missing numbers."""
    values = [row for row in rows if row.value is not None and not is_claim(row)]
    points = [row for row in values if has_picture and row.x is not None]
    missing: dict[str, list[str]] = defaultdict(list)  # reason -> numbers
    for row in rows:
        if row.value is None:
            missing[row.note].append(f'{row.row}, {row.column}')
    return {
        'artefact': find_artefact(name),
        'numbers': make_grid([row for row in values if row not in points]),
        'claims': [row for row in rows if is_claim(row)],
        'points': make_grid(points),
        'num_points': len(points),
        'missing': missing,
    }


def make_grid(rows: Sequence[Row]) -> dict[str, Any]:
    """``rows`` as the paper lays them out: a line for each model and x, a column for each score."""
    cells = {(row.row, row.x, row.column): row for row in rows}
    units = {row.column: row.unit for row in rows}
    return {
        'axis': next((row.x_unit for row in rows if row.x is not None), ''),
        'titles': [
            label_of(name) + ('' if unit in ('percent', 'rank', 'share') else f' [{unit}]')
            for name, unit in units.items()
        ],
        'best': {place for name in units for place in _find_best([row for row in rows if row.column == name])},
        'lines': [
            (label, x, [cells.get((label, x, name)) for name in units])
            for label, x in dict.fromkeys((row.row, row.x) for row in rows)
        ],
    }


def _find_best(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """(row, column) of the highest score in a column; empty where fewer than two models are compared."""
    scores = [row for row in rows if row.row != CONSTANT and row.x is None and row.unit == PERCENT]
    best = max((row.value for row in scores if row.value is not None), default=None)
    return [(row.row, row.column) for row in scores if len(scores) > 1 and row.value == best]


def _collect_provenance(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Label -> the distinct values over all rows that have a number."""
    known = [row for row in rows if row.value is not None]
    return {
        label: sorted({value for row in known for value in getattr(row, name).split(';') if value})
        for name, label in PROVENANCE.items()
    }
