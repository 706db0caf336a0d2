"""The data of the page of one scale, which page.html.j2 lays out: findings in sentences, cost, tables, provenance."""

import base64
from collections import defaultdict
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import jinja2

from maelm_composer.records import FinetuningRecord, PretrainingRecord
from maelm_composer.reporting.artefacts import (
    ABLATIONS,
    DEMO,
    JUDGES,
    MAE_LM,
    PAPER_SETTINGS,
    ROBERTA,
    RUNGS_OF,
    find_artefact,
    label_of,
)
from maelm_composer.reporting.evidence import Evidence
from maelm_composer.reporting.findings import describe_findings, describe_lacks, is_table, is_wanted
from maelm_composer.reporting.formatting import (
    format_interval,
    format_number,
    format_p,
    format_value,
    format_x,
    name_score,
    name_unit,
    shorten_note,
)
from maelm_composer.reporting.rows import CONSTANT, NO_DIFFERENCE, NOT_COMPARABLE, PERCENT, Row

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
SIZES = {  # of a ladder's models
    'rows of a batch': 'training.global_train_batch_size',
    'layers of the encoder': 'model.num_hidden_layers',
    "of MAE-LM's decoder": 'model.decoder.num_hidden_layers',
    'width': 'model.hidden_size',
    'learning rate': 'optimizer.learning_rate',
}
CORE_WATTS, GPU_WATTS = 10.0, 700.0  # assumed, of a busy CPU core with its share of the machine, and of an H100 or H200


def render_page(evidence: Evidence, tables: Mapping[str, Sequence[Row]], pictures: Mapping[str, bytes]) -> str:
    """The page of one scale as HTML.

    Args:
        tables: artefact name -> rows
        pictures: artefact name, or :data:`CLAIMS`, -> SVG
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals |= {
        'number': format_number,
        'interval': format_interval,
        'name_score': name_score,
        'value': format_value,
        'unit': name_unit,
        'axis': format_x,
        'p_value': format_p,
        'shorten': shorten_note,
        'not_comparable': NOT_COMPARABLE,
        'no_difference': NO_DIFFERENCE,
        'constant': CONSTANT,
    }
    return environment.get_template('page.html.j2').render(
        scale=evidence.scale,
        demo=DEMO,
        setting=PAPER_SETTINGS.get(evidence.scale),
        judge=JUDGES.get(evidence.scale),
        findings=describe_findings(tables),
        lacks=describe_lacks(tables),
        models=_describe_models(evidence),
        rungs=_lay_out_rungs(evidence),
        cost=_describe_cost(evidence),
        images={name: base64.b64encode(picture).decode() for name, picture in pictures.items()},
        sections=[_make_section(name, rows, name in pictures) for name, rows in tables.items()],
        decoders=_describe_decoders(evidence),
        provenance={
            **_collect_provenance([row for rows in tables.values() for row in rows]),
            'training rows of the tasks': sorted({f'{r.task} {r.train_examples:,}' for r in evidence.finetunings}),
        },
    )


def _make_section(name: str, rows: Sequence[Row], has_picture: bool) -> dict[str, Any]:
    """The rows of one artefact: values, claims, the points of a figure that is drawn, and missing numbers."""
    values = [row for row in rows if is_wanted(row) and (row.value is not None or is_table(name))]
    points = [row for row in values if has_picture and row.x is not None]
    axes = dict.fromkeys(row.x_unit for row in points)  # Figure 5 has two
    # The numbers without a value, and those without a part of their seeds: reason -> numbers.
    missing, partial = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    for row in filter(attrgetter('is_missing'), rows):
        (missing if row.value is None else partial)[shorten_note(row.note)].append(f'{row.row}, {name_score(row)}')
    return {
        'artefact': find_artefact(name),
        'numbers': make_grid([row for row in values if row not in points]),
        'claims': [row for row in rows if row.is_claim],
        'points': [make_grid([row for row in points if row.x_unit == unit]) for unit in axes],
        'num_points': len(points),
        'has_paper': any(row.paper is not None for row in values),
        'lacks': {'are missing': missing, 'lack seeds': partial},
    }


def make_grid(rows: Sequence[Row]) -> dict[str, Any]:
    """``rows`` as the paper lays them out: a line for each model and x, a column for each score."""
    cells = {(row.row, row.x, row.column): row for row in rows}
    units: dict[str, str] = {}
    for row in rows:
        units.setdefault(row.column, row.unit)  # a model's, not that of the differences below
    return {
        'axis': next((row.x_unit for row in rows if row.x is not None), ''),
        'titles': [
            label_of(name) + ('' if unit in ('percent', 'rank', 'share') else f' [{unit}]')
            for name, unit in units.items()
        ],
        'seeds': max((row.pretraining_seeds for row in rows), default=0),
        'best': {place for name in units for place in _find_best([row for row in rows if row.column == name])},
        'lines': [
            (label, x, [cells.get((label, x, name)) for name in units])
            for label, x in dict.fromkeys((row.row, row.x) for row in rows)
        ],
    }


def _find_best(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """(row, column) of the highest score in a column; empty where fewer than two models are compared."""
    rows = [row for row in rows if row.row != CONSTANT and row.x is None and row.value is not None]
    scores = [row for row in rows if row.unit == PERCENT]
    best = max((row.value for row in scores if row.value is not None), default=None)
    return [(row.row, row.column) for row in scores if len(scores) > 1 and row.value == best]


def _collect_provenance(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Label -> the distinct values over all rows that have a number."""
    known = [row for row in rows if row.value is not None]
    return {
        label: sorted({value for row in known for value in getattr(row, name).split(';') if value})
        for name, label in PROVENANCE.items()
    }


def _describe_models(evidence: Evidence) -> str:
    """Size and training of the encoders in two sentences; empty if they differ, as those of a ladder do."""
    keys = ('model.num_hidden_layers', 'model.hidden_size', 'training.global_train_batch_size', 'model.max_seq_len')
    found = {
        (run.samples, *(run.identity.get(key) for key in (*keys, 'optimizer.learning_rate')))
        for run in evidence.runs.values()
    }
    if len(found) != 1 or None in (sizes := found.pop()):
        return ''
    samples, layers, width, batch, length, rate = sizes
    flops = next((run.flops for run in evidence.find_runs(ROBERTA) if run.flops), None)
    return (
        f'Encoders of {layers} layers of width {width}, pretrained on {samples:,} rows of {length} tokens in batches '
        f'of {batch} rows at a learning rate of {rate:g}.'
        + (f' RoBERTa’s pretraining takes {format_x(float(f"{flops:.1e}"))} FLOPs.' if flops else '')
    )


def _describe_decoders(evidence: Evidence) -> str:
    """The decoders that Table 2 calls by the paper's sizes; '' at a scale that has these sizes."""
    size = 'model.decoder.num_hidden_layers', 'model.decoder.hidden_size'
    named = [
        f'“{model.label}” is {" × ".join(str(run.identity[key]) for key in size)}'
        for model in ABLATIONS
        if model is MAE_LM or ' dimension' in model.label
        for run in evidence.find_runs(model)[:1]
        if run.identity.keys() >= {*size}
    ]
    if len(named) < 2 or evidence.scale in PAPER_SETTINGS:
        return ''
    return f'Decoders here, layers × width: {", ".join(named)}.'


def _lay_out_rungs(evidence: Evidence) -> list[dict[str, str]]:
    """The sizes and settings of each rung's models by their titles; empty at scales that are no ladder."""
    found = []
    for rung in RUNGS_OF.get(evidence.scale, ()):
        ours, theirs = evidence.find_runs(rung.mae_lm), evidence.find_runs(rung.roberta)
        flops = [run.flops for run in (*ours[:1], *theirs[:1]) if run.flops]
        if len(flops) == 2 and ours[0].identity.keys() >= {*SIZES.values()}:
            found.append(
                {
                    "FLOPs of RoBERTa's pretraining": format_x(rung.flops),
                    "MAE-LM's, times as many": f'{flops[0] / flops[1]:.2f}',
                    'rows': f'{ours[0].samples:,}',
                    **{title: f'{ours[0].identity[key]:g}' for title, key in SIZES.items()},
                    'pretraining seeds': str(min(len(ours), len(theirs))),
                }
            )
    return found


def _describe_cost(evidence: Evidence) -> str:
    """Core-hours and GPU-hours of all recorded pretraining and fine-tuning runs, with an estimate of their energy."""
    cores = gpus = 0.0
    records: list[PretrainingRecord | FinetuningRecord] = []
    for found in (evidence, *evidence.recipes.values()):
        records += [*found.runs.values(), *found.finetunings]
    for record in records:
        if record.device.startswith('CPU'):
            cores += record.device_hours * int(record.device.split()[1])
        else:
            gpus += record.device_hours
    watts = (cores, 'hours of a CPU core', CORE_WATTS), (gpus, 'GPU-hours', GPU_WATTS)
    parts = [f'{hours:,.1f} {name}' for hours, name, _ in watts if hours]
    energy = sum(hours * power for hours, _, power in watts) / 1000
    digits = '.2g' if energy < 10 else '.0f'
    return (
        f'The recorded pretraining and fine-tuning runs took {" and ".join(parts) or "no recorded time"}: about '
        f'{energy:,{digits}} kWh at an assumed {CORE_WATTS:g} W a core and {GPU_WATTS:g} W a GPU. Not counted: '
        'validation, saving and compilation in pretraining, failed and discarded runs, rank measurements.'
    )
