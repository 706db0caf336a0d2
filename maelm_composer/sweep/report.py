"""The progress of a sweep, a live table on a terminal and else a line per run, and its results."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from statistics import median, stdev

from rich.console import Console
from rich.live import Live
from rich.table import Table

from maelm_composer.console import begin_table, format_duration, open_console
from maelm_composer.records import FailedFinetuning, Finetuning, FinetuningRecord, Point
from maelm_composer.statistics import estimate_mean
from maelm_composer.sweep.lease import LEASE_SECONDS
from maelm_composer.sweep.search import SweepResult, TaskResult
from maelm_composer.tasks.catalogue import GLUE, Task


@dataclass(frozen=True)
class Standing:
    """Progress of one task."""

    task: Task
    total: int  # runs
    records: list[Finetuning]
    running: int
    cost_left: float  # characters that pass forward through the encoder, as Job.cost (sweep/run.py)
    cost_done: float  # as cost_left


class Progress:
    """Finished and remaining runs on standard error. The table is drawn while ``with progress.live`` runs."""

    def __init__(self, list_standings: Callable[[], list[Standing]]) -> None:
        self.list_standings = list_standings
        self.start, self.cost_at_start = time.monotonic(), sum(standing.cost_done for standing in list_standings())
        self.is_live, self.has_announced_wait = sys.stderr.isatty(), False
        console = Console(stderr=True, force_terminal=self.is_live, highlight=False, markup=False, emoji=False)
        # No thread refreshes the table, as it would read records while the sweep changes them.
        self.live = Live(console=console, get_renderable=self._build_table, auto_refresh=False, transient=True)

    def announce(self, record: Finetuning) -> None:
        """Print a line for a run that has ended; beside a live table only for a failure."""
        if self.is_live and isinstance(record, FinetuningRecord):
            return
        standings = self.list_standings()
        done, total = sum(len(s.records) for s in standings), sum(s.total for s in standings)
        outcome = record.error if isinstance(record, FailedFinetuning) else f'{_percent(record.score)} %'
        self.live.console.print(f'[{done}/{total}] {_name_run(record)}: {outcome}', soft_wrap=not self.is_live)

    def announce_wait(self, count: int) -> None:
        """Say once that ``count`` runs are those of another sweep, which may have been killed."""
        if not self.has_announced_wait:
            wait = f'another sweep makes {count} runs; if it was killed, they begin within {LEASE_SECONDS} s'
            self.live.console.print(wait, soft_wrap=not self.is_live)
        self.has_announced_wait = True

    def _build_table(self) -> Table:
        standings = self.list_standings()
        table = begin_table('task', right=('done', 'under way', 'failed', 'best score', 'constant'))
        table.caption, table.caption_justify = self._describe_time(standings), 'left'
        for standing in standings:
            finished = [record for record in standing.records if isinstance(record, FinetuningRecord)]
            best = max(finished, key=lambda record: record.score, default=None)
            table.add_row(
                standing.task.name,
                f'{len(standing.records)}/{standing.total}',
                str(standing.running),
                str(len(standing.records) - len(finished)),
                '' if best is None else _percent(best.score),
                '' if best is None else _percent(best.baseline),
            )
        return table

    def _describe_time(self, standings: list[Standing]) -> str:
        elapsed = time.monotonic() - self.start
        done = sum(standing.cost_done for standing in standings) - self.cost_at_start
        text = f'{format_duration(elapsed)} so far'
        if done <= 0:
            return text
        return f'{text}, about {format_duration(elapsed * sum(s.cost_left for s in standings) / done)} left'


def print_result(result: SweepResult) -> None:
    """Print scores, selected points and the GLUE average on standard output, and failed runs on standard error."""
    scores = begin_table('task', right=('runs', 'median', 'mean', 'std', '95 % of mean', 'seeds', 'constant'))
    points = begin_table('task', 'metric', right=('lr', 'batch', 'epochs', 'warm-up'), last=('other metrics, median',))
    for of_task in result.tasks:
        scores.add_row(*_describe_scores(of_task))
        points.add_row(*_describe_point(of_task))
    open_console().print(scores, points, sep='\n')
    if result.average is not None:
        print(f'AVG of the {len(GLUE)} GLUE tasks, MNLI matched: {_percent(result.average)}')
    print_failures(result.failures)


def print_failures(failures: Sequence[FailedFinetuning]) -> None:
    """Print a line for each failed run on standard error."""
    for record in failures:
        print(f'failed: {_name_run(record)}: {record.error}', file=sys.stderr, flush=True)


def _name_run(record: Finetuning) -> str:
    return f'{record.task}, {record.point}, seed {record.seed}'


def _describe_scores(result: TaskResult) -> list[str]:
    runs = f'{len(result.finished)}/{result.num_planned}'
    if not result.records:
        return [result.task.name, runs]
    scores, found = result.scores, estimate_mean(result.scores)
    interval = [] if found.low is None else [_percent(found.low), _percent(found.high)]
    std = stdev(scores) if len(scores) > 1 else None
    return [
        *(result.task.name, runs, _percent(median(scores)), _percent(found.mean), _percent(std)),
        *('–'.join(interval), str(len(scores)), _percent(result.records[0].baseline)),
    ]


def _describe_point(result: TaskResult) -> list[str]:
    name, metric = result.task.name, result.task.metric
    if result.point is None:
        return [name, metric, *[''] * len(fields(Point)), 'no run of the grid finished']
    medians = {
        other: median(record.metrics[other] for record in result.records)
        for other, *_ in result.task.list_metrics()
        if other != metric and not other.endswith('threshold')
    }
    others = ', '.join(f'{other} {_percent(value)}' for other, value in medians.items())
    return [name, metric, *(f'{value:g}' for value in astuple(result.point)), others]


def _percent(fraction: float | None) -> str:
    return '' if fraction is None else f'{100 * fraction:.2f}'
