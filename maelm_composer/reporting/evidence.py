"""The committed records of one scale, and the selection of those of a model and a task.

::

    results/<scale>/records/
      pretraining/<run name>.json   a run's record.json
      pretraining/<run name>.csv    its metrics.csv, whole or thinned
      finetuning/<key>.json
      rank/<key>.json
"""

import csv
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from maelm_composer.config import TaskKind
from maelm_composer.errors import InputError
from maelm_composer.records import (
    FailedFinetuning,
    FinetuningRecord,
    PretrainingRecord,
    RankRecord,
    load_folder,
    parse_finetuning,
    parse_pretraining,
    parse_rank,
)
from maelm_composer.reporting.artefacts import DEMO, Model
from maelm_composer.sweep.search import select_point
from maelm_composer.tasks.catalogue import METRICS


@dataclass(frozen=True)
class Evidence:
    """Everything recorded at one scale."""

    scale: str
    runs: dict[str, PretrainingRecord]  # by name
    curves: dict[str, list[dict[str, str]]]  # rows of metrics.csv by run name
    finetunings: list[FinetuningRecord]
    failures: list[FailedFinetuning]
    ranks: list[RankRecord]

    def find_runs(self, model: Model) -> list[PretrainingRecord]:
        """The finished pretraining runs of ``model``, one for each seed, ordered by seed.

        Raises:
            InputError: they differ in more than the seed.
        """
        base = re.escape(model.run_name(self.scale))
        found = [run for name, run in self.runs.items() if re.fullmatch(rf'{base}(-s\d+)?', name)]
        found.sort(key=lambda run: run.seed)
        for run in found[1:]:
            one, other = found[0].identity, run.identity
            different = [key for key in one.keys() | other.keys() if one.get(key) != other.get(key)]
            if different != ['seed']:
                what = ', '.join(sorted(set(different) - {'seed'})) or 'nothing, not even the seed'
                names = f'{found[0].run_name} and {run.run_name}'
                raise InputError(f'the records of {names} differ in {what}: keep those of one experiment')
        return found

    def find_ranks(self, model: Model) -> list[tuple[PretrainingRecord, RankRecord]]:
        """(pretraining run, rank record of its final checkpoint) for the runs of ``model`` that have such a record.

        Raises:
            InputError: a run has several.
        """
        pairs = []
        for run in self.find_runs(model):
            last = run.run_name, run.samples
            found = [r for r in self.ranks if (r.checkpoint.run_name, r.checkpoint.samples) == last]
            if len(found) > 1:
                keys = ', '.join(record.key for record in found)
                raise InputError(f'{len(found)} rank records of {run.run_name} ({keys}): keep one')
            pairs += [(run, record) for record in found]
        return pairs

    @cached_property
    def _grouped(self) -> Mapping[tuple[str, str | None, int | None], list[FinetuningRecord]]:
        """The fine-tuning records by task, run and checkpoint."""
        groups = defaultdict[tuple[str, str | None, int | None], list[FinetuningRecord]](list)
        for record in self.finetunings:
            groups[record.task, record.checkpoint.run_name, record.checkpoint.samples].append(record)
        return groups

    def checkpoints_with(self, model: Model, task: str) -> list[int]:
        """Samples of the checkpoints of ``model`` from which ``task`` was fine-tuned, ascending."""
        names = {run.run_name for run in self.find_runs(model)}
        found = [r for r in self.finetunings if r.task == task and r.checkpoint.run_name in names]
        return sorted({r.checkpoint.samples for r in found if r.checkpoint.samples is not None})

    def select_finetunings(
        self, model: Model, task: str, samples: int | None = None
    ) -> list[tuple[PretrainingRecord, list[FinetuningRecord]]]:
        """(pretraining run, its fine-tuning records of ``task``, one for each seed) for the runs of ``model``.

        All records are at the point of the search space that a sweep would select.

        Args:
            samples: names the checkpoint; None: the last one of each run.
        """
        pairs = []
        for run in self.find_runs(model):
            at = run.samples if samples is None else samples
            found = self._grouped[task, run.run_name, at]
            where = f'{task} from {run.run_name} at {at} samples'
            _assert_one_experiment(found, where)
            _assert_equal(found, where, 'checkpoint', lambda record: record.checkpoint.hash)
            if (point := select_point(found)) is not None:
                chosen = (record for record in found if record.point == point)
                pairs.append((run, sorted(chosen, key=lambda record: (record.seed, record.key))))
        _assert_one_experiment([records[0] for _, records in pairs], task)
        return pairs

    def list_own_scores(self) -> dict[str, str]:
        """Own task -> the metric that is its score, for every own task that was fine-tuned; ordered by task.

        Raises:
            InputError: the records of a task differ in protocol or data.
        """
        declared = {r.task: r.protocol.get('declaration') for r in (*self.failures, *self.finetunings)}
        scores = {}
        for task, declaration in sorted(declared.items()):
            if declaration is not None:
                finished = [record for record in self.finetunings if record.task == task]
                _assert_one_experiment(finished, task)
                first = (declaration.get('metrics') or METRICS[TaskKind[declaration['kind']]])[0]
                # Of several evaluation splits, the names in the records begin with the split's.
                names = [name for record in finished[:1] for name in record.metrics]
                scores[task] = names[0] if names and first not in names else first
        return scores

    def count_failures(self, finished: list[FinetuningRecord]) -> int:
        """The number of fine-tuning seeds that failed at the point of ``finished``, records of one search."""
        first = finished[0]
        same = (first.task, first.checkpoint.hash, first.point)
        found = {r.seed for r in self.failures if (r.task, r.checkpoint.hash, r.point) == same}
        return len(found - {r.seed for r in finished})


def load_evidence(folder: Path, scale: str) -> Evidence:
    """Read ``folder``/records.

    Raises:
        InputError: no records, a file that is no record, or a record of a demo task at another scale.
    """
    records = folder / 'records'
    if not records.is_dir():
        there = sorted(p.parent.name for p in folder.parent.glob('*/records'))
        raise InputError(f'no records in {records}: run the benchmark suite first; scales with records: {there}')
    evidence = read_evidence(records, scale)
    for record in (*evidence.finetunings, *evidence.failures):
        if scale != DEMO and record.protocol.get('source') == DEMO:
            raise InputError(f'{records}/finetuning: {record.key} is a demo task, which is no evidence at {scale}')
    return evidence


def read_evidence(records: Path, scale: str) -> Evidence:
    """Read the folder ``records`` as it is; where it does not exist, nothing is recorded."""
    runs = load_folder(records / 'pretraining', parse_pretraining)
    finetunings = load_folder(records / 'finetuning', parse_finetuning)
    return Evidence(
        scale=scale,
        runs={run.run_name: run for run in runs if isinstance(run, PretrainingRecord)},
        curves={path.stem: read_csv(path) for path in sorted((records / 'pretraining').glob('*.csv'))},
        finetunings=[record for record in finetunings if isinstance(record, FinetuningRecord)],
        failures=[record for record in finetunings if isinstance(record, FailedFinetuning)],
        ranks=load_folder(records / 'rank', parse_rank),
    )


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(encoding='utf-8', newline='') as file:
        return list(csv.DictReader(file))


def _assert_one_experiment(records: list[FinetuningRecord], where: str) -> None:
    _assert_equal(records, where, 'protocol', lambda record: record.protocol)
    _assert_equal(records, where, 'data_hash', lambda record: record.data_hash)


def _assert_equal(
    records: list[FinetuningRecord], where: str, what: str, read: Callable[[FinetuningRecord], Any]
) -> None:
    """Raise InputError if ``records`` differ in ``what``: they must not be compared with each other."""
    for record in records[1:]:
        if read(record) != read(records[0]):
            raise InputError(
                f'{where}: records {records[0].key} and {record.key} differ in {what}: keep those of one experiment'
            )
