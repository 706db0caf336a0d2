"""The table of `maelm runs`. Imports no torch."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maelm_composer.checkpoints.find import read_record
from maelm_composer.checkpoints.names import METRICS, RECORD
from maelm_composer.console import begin_table, open_console
from maelm_composer.data.storage import is_s3, join, read_file
from maelm_composer.errors import InputError
from maelm_composer.files import is_locked
from maelm_composer.records import PretrainingRecord, UnfinishedPretraining
from maelm_composer.training.run_record import parse_metrics

# Column -> the field of a record, or the number of an unfinished run's log, and its format.
NUMBERS = {
    'validation loss': ('eval_loss', '{:.4f}'),
    'unigram': ('unigram_entropy', '{:.2f}'),
    'accuracy': ('eval_accuracy', '{:.4f}'),
    'steps': ('batches', '{:,.0f}'),
    'tokens/s': ('tokens_per_second', '{:,.0f}'),
    'training': ('training_seconds', '{:,.0f} s'),
}


def print_runs(folders: Sequence[str]) -> None:
    """Print a row for each of ``folders`` that holds a run, the endings of unfinished runs, and the other folders.

    Raises:
        InputError: no folder holds a run, or a record cannot be read.
    """
    found = {folder: read_record(folder) for folder in folders}
    no_runs = [folder for folder, record in found.items() if record is None]
    if len(no_runs) == len(found):
        raise InputError(f'{no_runs[0]} holds no run: {join(no_runs[0], RECORD)} does not exist')
    table = begin_table('folder', 'status', right=tuple(NUMBERS), last=('run',))
    endings: list[str] = []
    for folder, record in found.items():
        if record is None:
            continue
        known = dict(record) if isinstance(record, PretrainingRecord) else dict(record) | _read_progress(folder)
        cells = ['-' if known.get(name) is None else form.format(known[name]) for name, form in NUMBERS.values()]
        status: str = record.status
        if isinstance(record, UnfinishedPretraining):
            ending = record.ending
            if status == 'running' and not is_s3(folder) and not is_locked(Path(folder)):
                status, ending = 'dead', 'killed; the same command resumes the run'
            endings += [f'{folder}: {status}: {ending}'] if ending else []
        table.add_row(folder, status, *cells, record.run_name)
    open_console().print(table)
    print(*endings, sep='\n', end='\n' if endings else '')
    print(f'logs: {METRICS} in each folder')
    if no_runs:
        print(f'no runs: {", ".join(no_runs)}')


def _read_progress(folder: str) -> dict[str, Any]:
    """The last number of every column in the log of an unfinished run; none if the log is damaged."""
    log = (read_file(join(folder, METRICS)) or b'').decode(errors='replace')
    last = dict[str, str]()
    for row in parse_metrics(io.StringIO(log)):
        last |= {name: value for name, value in row.items() if name and value}
    try:
        return {'batches' if name == 'batch' else name: float(value) for name, value in last.items()}
    except ValueError:
        return {}
