"""The table of `maelm runs`. Imports no torch."""

from collections.abc import Sequence
from pathlib import Path

from maelm_composer.checkpoints.find import read_record
from maelm_composer.checkpoints.names import METRICS, RECORD
from maelm_composer.console import begin_table, open_console
from maelm_composer.data.storage import is_s3, join
from maelm_composer.errors import InputError
from maelm_composer.files import is_locked
from maelm_composer.records import PretrainingRecord, UnfinishedPretraining


def print_runs(folders: Sequence[str]) -> None:
    """Print a row for each of ``folders`` that holds a run, the endings of unfinished runs, and the other folders.

    Raises:
        InputError: no folder holds a run, or a record cannot be read.
    """
    found = {folder: read_record(folder) for folder in folders}
    no_runs = [folder for folder, record in found.items() if record is None]
    if len(no_runs) == len(found):
        raise InputError(f'{no_runs[0]} holds no run: {join(no_runs[0], RECORD)} does not exist')
    numbers = ('validation loss', 'unigram', 'accuracy', 'steps', 'tokens/s', 'training')
    table = begin_table('folder', 'status', right=numbers, last=('run',))
    endings: list[str] = []
    for folder, record in found.items():
        if record is None:
            continue
        cells = ['-'] * len(numbers)
        if isinstance(record, PretrainingRecord):
            cells = [
                f'{record.eval_loss:.4f}',
                '-' if record.unigram_entropy is None else f'{record.unigram_entropy:.2f}',
                f'{record.eval_accuracy:.4f}',
                f'{record.batches:,}',
                f'{record.tokens_per_second:,.0f}',
                f'{record.training_seconds:,.0f} s',
            ]
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
