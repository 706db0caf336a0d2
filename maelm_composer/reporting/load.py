"""Reads the committed records of one scale, and refuses those that cannot be compared.

::

    results/<scale>/records/
      pretraining/<run name>.json   a run's record.json
      pretraining/<run name>.csv    its metrics.csv, whole or thinned
      finetuning/<key>.json
      rank/<key>.json
    results/<scale>/recipes/<name>/ of a ladder: the same folders, of runs with other settings
"""

import csv
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

from maelm_composer.errors import InputError
from maelm_composer.files import assert_local
from maelm_composer.records import (
    FailedFinetuning,
    FinetuningRecord,
    PretrainingRecord,
    RankRecord,
    UnfinishedPretraining,
    load_folder,
    parse_finetuning,
    parse_pretraining,
    parse_rank,
)
from maelm_composer.reporting.artefacts import DEMO
from maelm_composer.reporting.evidence import Evidence

RANKS = 'effective rank'
RANK_OPTIONS = 'data_hash', 'max_tokens', 'mlm_probability', 'threshold', 'centered', 'precision', 'seed'
REMEDY = 'copy the metrics.csv of the run again'


def load_evidence(folder: Path, scale: str) -> Evidence:
    """Read ``folder``/records.

    Raises:
        InputError: no records, a file that is no record, a record of a demo task at another scale, or records that
            differ in what must be equal for all models that are compared.
    """
    assert_local(folder, '--results')
    records = folder / 'records'
    if not records.is_dir():
        there = sorted(p.parent.name for p in folder.parent.glob('*/records'))
        raise InputError(f'no records in {records}: run the benchmark suite first; scales with records: {there}')
    recipes = {path.name: read_evidence(path, scale) for path in sorted(folder.glob('recipes/*/'))}
    evidence = replace(read_evidence(records, scale), recipes=recipes)
    for record in (*evidence.finetunings, *evidence.failures):
        if scale != DEMO and record.protocol.get('source') == DEMO:
            raise InputError(
                f'{records}/finetuning: {record.key} is a demo task, which is no evidence at {scale}: remove it'
            )
    for found in (evidence, *recipes.values()):
        _assert_comparable(found)
    return evidence


def read_evidence(records: Path, scale: str) -> Evidence:
    """Read the folder ``records`` as it is; where it does not exist, nothing is recorded."""
    found = load_folder(records / 'pretraining', parse_pretraining)
    finished = [run for run in found if isinstance(run, PretrainingRecord)]
    runs = {run.run_name: run for run in finished}
    if len(runs) < len(finished):
        name = next(run.run_name for run in finished if run is not runs[run.run_name])
        raise InputError(f'{records}/pretraining has two records of {name}: keep one')
    curves = {path.stem: _read_curve(path) for path in sorted((records / 'pretraining').glob('*.csv'))}
    for name, run in runs.items():
        if name in curves and not (curves[name] and int(curves[name][-1]['samples']) >= run.samples):
            raise InputError(f'{records}/pretraining/{name}.csv is cut off: {REMEDY}')
        losses = [float(row['eval_loss']) for row in curves.get(name, []) if row['eval_loss']]
        if losses and not math.isclose(losses[-1], run.eval_loss, rel_tol=1e-6):
            raise InputError(
                f'{records}/pretraining/{name}.csv is the log of another run: it ends with a validation loss of '
                f'{losses[-1]:.4f}, the record has {run.eval_loss:.4f}: {REMEDY}'
            )
    finetunings = load_folder(records / 'finetuning', parse_finetuning)
    return Evidence(
        scale=scale,
        runs=runs,
        curves=curves,
        finetunings=[record for record in finetunings if isinstance(record, FinetuningRecord)],
        failures=[record for record in finetunings if isinstance(record, FailedFinetuning)],
        ranks=load_folder(records / 'rank', parse_rank),
        failed_runs=[run for run in found if isinstance(run, UnfinishedPretraining) and run.status == 'failed'],
    )


def _read_curve(path: Path) -> list[dict[str, str]]:
    try:
        rows = read_csv(path)
    except (UnicodeDecodeError, csv.Error):
        raise InputError(f'{path} is damaged: {REMEDY}') from None
    if not path.read_bytes().endswith(b'\n'):
        raise InputError(f'{path} is cut off: {REMEDY}')
    for number, row in enumerate(rows, 2):
        try:
            int(row['samples']), float(row['train_loss']), float(row['training_seconds']), float(row['eval_loss'] or 0)
        except (KeyError, TypeError, ValueError):
            raise InputError(f'{path}: line {number} is damaged: {REMEDY}') from None
    return rows


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(encoding='utf-8', newline='') as file:
        return list(csv.DictReader(file))


def _assert_comparable(evidence: Evidence) -> None:
    """Every task must be fine-tuned by one protocol on one set of rows, and every rank measured alike."""
    by_task = defaultdict[str, list[FinetuningRecord]](list)
    for record in evidence.finetunings:
        # Whether ranks are measured, too, changes no score.
        protocol = {name: value for name, value in record.protocol.items() if name != 'measures_rank'}
        by_task[record.task].append(record.model_copy(update={'protocol': protocol}))
    for task, records in by_task.items():
        assert_equal(records, task, 'protocol', 'data_hash')
    assert_equal(evidence.ranks, RANKS, *RANK_OPTIONS)
    _assert_one_checkpoint(evidence)


def _assert_one_checkpoint(evidence: Evidence) -> None:
    """All measurements of one checkpoint must be of the same weights, and of the recorded run's recipe."""
    of_checkpoint: dict[tuple[str | None, int | None], FinetuningRecord | RankRecord] = {}
    measured: list[FinetuningRecord | RankRecord] = [*evidence.ranks, *evidence.finetunings]
    for record in measured:
        found = record.checkpoint
        first = of_checkpoint.setdefault((found.run_name, found.samples), record)
        if found.hash != first.checkpoint.hash:
            where = f'records {first.key} and {record.key} of {found.run_name} at {found.samples} samples'
            raise InputError(f'{where} are of different weights: keep those of one')
        run = evidence.runs.get(found.run_name or '')
        if run is not None and found.recipe_hash != run.provenance.recipe_hash:
            raise InputError(
                f'record {record.key} is of another recipe than the run {run.run_name}: keep those of one experiment'
            )


def assert_equal(records: Sequence[FinetuningRecord | RankRecord], where: str, *names: str) -> None:
    """Raise InputError if ``records`` differ in a field of ``names``; ``where`` names them."""
    for name in names:
        read = attrgetter(name)
        for record in records[1:]:
            if read(record) != read(records[0]):
                raise InputError(
                    f'{where}: records {records[0].key} and {record.key} differ in {name}: keep those of one experiment'
                )


def load_published(folder: Path) -> dict[tuple[str, str, str], float]:
    """The paper's numbers from every CSV file in ``folder``: (setting, row, column) -> value.

    Raises:
        InputError: no such file, or one that is damaged.
    """
    paths = sorted(folder.glob('*.csv'))
    if not paths:
        raise InputError(f'no published numbers in {folder}: without that folder, those of the package are used')
    published: dict[tuple[str, str, str], float] = {}
    for path in paths:
        try:
            for line in read_csv(path):  # Tables 1 and 2 print the same GLUE averages
                published.setdefault((line['setting'], line['row'], line['column']), float(line['value']))
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f'{path} holds no published numbers ({type(error).__name__}: {error}): repair the file, or remove '
                f'{folder}, in whose place those of the package are used'
            ) from None
    return published
