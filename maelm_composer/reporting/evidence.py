"""The numbers of a model that the committed records of one scale hold."""

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from maelm_composer.config import TaskKind
from maelm_composer.errors import InputError
from maelm_composer.records import (
    FailedFinetuning,
    FinetuningRecord,
    LayerRanks,
    Point,
    PretrainingRecord,
    RankRecord,
    UnfinishedPretraining,
    unpack_numbers,
)
from maelm_composer.reporting.artefacts import Column, Model
from maelm_composer.reporting.cells import OF_ROUNDING, Cell, Term, average, list_differences, subtract
from maelm_composer.sweep.search import select_point
from maelm_composer.tasks.catalogue import METRICS_OF_KIND, find_task

Runs = Sequence[PretrainingRecord]
Searches = Sequence[tuple[PretrainingRecord, Sequence[FinetuningRecord]]]  # each run and its records of one task


@dataclass(frozen=True)
class Evidence:
    """Everything recorded at one scale."""

    scale: str
    runs: dict[str, PretrainingRecord]  # by name
    curves: dict[str, list[dict[str, str]]]  # rows of metrics.csv by run name
    finetunings: list[FinetuningRecord]
    failures: list[FailedFinetuning]
    ranks: list[RankRecord]
    recipes: dict[str, 'Evidence'] = field(default_factory=dict)  # of a ladder: folder -> runs with other settings
    # Pretraining runs that ended with an error. One that is stopped or still running counts as not made.
    failed_runs: list[UnfinishedPretraining] = field(default_factory=list)

    def find_runs(self, model: Model | Runs) -> Runs:
        """The finished pretraining runs of ``model``, one for each seed, ordered by seed.

        Args:
            model: or these runs themselves.

        Raises:
            InputError: they differ in more than the seed.
        """
        if not isinstance(model, Model):
            return model
        return order_by_seed([run for name, run in self.runs.items() if self._is_named(model, name)])

    def _is_named(self, model: Model, run_name: str) -> bool:
        return re.fullmatch(rf'{re.escape(model.run_name(self.scale))}(-s\d+)?', run_name) is not None

    def _note_failed_runs(self, model: Model | Runs) -> list[str]:
        """The pretraining seeds of ``model`` that failed and have no finished run, in words."""
        done = {run.seed for run in self.find_runs(model)}

        def is_same(run: UnfinishedPretraining) -> bool:
            if isinstance(model, Model):
                return self._is_named(model, run.run_name)
            return {**run.identity, 'seed': None} == {**model[0].identity, 'seed': None}

        failed = [run for run in self.failed_runs if run.seed not in done and is_same(run)]
        return [f'pretraining of {run.run_name} failed: {run.ending}' for run in failed]

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
        return sorted({at for of, name, at in self._grouped if of == task and name in names and at is not None})

    def select_finetunings(self, model: Model, task: str, samples: int | None = None) -> Searches:
        """(pretraining run, its fine-tuning records of ``task``, one for each seed) for the runs of ``model``.

        All records are at the point of the search space that a sweep would select.

        Args:
            samples: names the checkpoint; None: the last one of each run.
        """
        pairs = []
        for run in self.find_runs(model):
            at = run.samples if samples is None else samples
            found = self._grouped.get((task, run.run_name, at), [])
            where = task, run.run_name, at
            failed = [f for f in self.failures if (f.task, f.checkpoint.run_name, f.checkpoint.samples) == where]
            if (point := select_point([*found, *failed])) is not None:
                chosen = sorted((r for r in found if r.point == point), key=lambda record: record.seed)
                for one, other in itertools.pairwise(chosen):
                    if one.seed == other.seed:
                        raise InputError(f'records {one.key} and {other.key} are of one fine-tuning seed: keep one')
                pairs.append((run, chosen))
        return pairs

    def list_own_scores(self) -> dict[str, str]:
        """Own task -> the metric that is its score, for every own task that was fine-tuned; ordered by task."""
        declared = {r.task: r.protocol.get('declaration') for r in (*self.failures, *self.finetunings)}
        scores = {}
        for task, declaration in sorted(declared.items()):
            if declaration is not None:
                finished = [record for record in self.finetunings if record.task == task]
                first = (declaration.get('metrics') or METRICS_OF_KIND[TaskKind[declaration['kind']]])[0]
                # Of several evaluation splits, the names in the records begin with the split's.
                names = [name for record in finished[:1] for name in record.metrics]
                scores[task] = names[0] if names and first not in names else first
        return scores

    @cached_property
    def _tried(self) -> Mapping[str, Mapping[str, Mapping[Point, dict[int, bool]]]]:
        """By task, checkpoint's hash and point: the seeds that were tried; True for those that have finished."""
        tried: Any = defaultdict(lambda: defaultdict(lambda: defaultdict(dict)))
        for record in (*self.failures, *self.finetunings):
            tried[record.task][record.checkpoint.hash][record.point][record.seed] = record.status != 'failed'
        return tried  # type: ignore[no-any-return]

    def _note_search(self, found: Searches) -> list[str]:
        """Remarks on seeds of ``found`` that failed, and on seeds and points that only another search of a task has."""
        notes: list[str] = []
        if not found:
            return notes
        searches = self._tried[found[0][1][0].task]
        most_points = max(map(len, searches.values()))
        most_seeds = max(sum(seeds.values()) for search in searches.values() for seeds in search.values())
        for run, records in found:
            first, points = records[0], searches[records[0].checkpoint.hash]
            tried, where = points[first.point], f'{first.task} from {run.run_name}'
            if failed := sorted(seed for seed, has_finished in tried.items() if not has_finished):
                notes.append(f'{where}: fine-tuning seed {", ".join(map(str, failed))} failed, of {len(tried)}')
            if len(tried) < most_seeds:
                notes.append(f'{where}: {len(tried)} of {most_seeds} fine-tuning seeds recorded')
            if len(points) < most_points:
                notes.append(f'{where}: {len(points)} of {most_points} points of the search recorded')
        return notes

    def score(self, model: Model, column: Column, samples: int | None = None) -> Cell:
        """One score of ``model`` in percent: the median over fine-tuning seeds, or the mean of such medians.

        Args:
            samples: the checkpoint that was fine-tuned; None: the last one.
        """
        if column.parts:
            return average([self.score(model, part, samples) for part in column.parts])

        def read(record: FinetuningRecord) -> float:
            return float(100 * (record.score if column.metric is None else record.metrics[column.metric]))

        found = self.select_finetunings(model, column.task, samples)
        values = [(run, records, [*map(read, records)]) for run, records in found]
        cell = self._gather(model, column.task, values, self._note_search(found), samples=samples)
        metric = column.metric or find_task(column.task).metric
        if cell.missing or not all(metric in r.influences for _, records in found for r in records):
            return cell
        (term,) = cell.terms
        influences = {run.seed: _influence_of_median(records, read, metric) for run, records in found}
        sample = f'{column.task} {metric.rpartition("_")[0]} {found[0][1][0].data_hash}'
        return replace(cell, terms=(replace(term, sample=sample, influences=influences),))

    def measure_runs(self, model: Model | Runs, what: str, read: Callable[[PretrainingRecord], float | None]) -> Cell:
        """A number of each pretraining run of ``model``; ``read`` returns None where a run lacks the number."""
        values = [(run, read(run)) for run in self.find_runs(model)]
        return self._gather(model, what, [(run, (), [value]) for run, value in values if value is not None])

    def constant_score(self, model: Model, column: Column) -> Cell:
        """The score of the best constant answer in percent, from the records of ``model``; only of main metrics."""
        if column.parts:
            return average([self.constant_score(model, part) for part in column.parts])
        cell = self.score(model, column)
        if cell.missing:
            return cell
        values, record = cell.terms[0].values, cell.records[0]
        assert isinstance(record, FinetuningRecord)
        return replace(cell, terms=(Term(1.0, {seed: [100 * record.baseline] for seed in values}),))

    def rank(self, model: Model | Runs, key: str, layer: int | None = None) -> Cell:
        """The value ``key`` of one layer after pretraining, by default the last."""
        cells = self.rank_by_layer(model, key)
        last = [*cells.values()][-1]  # without records, that of layer 0, which says why
        return last if layer is None else cells.get(layer, last)

    def rank_by_layer(self, model: Model | Runs, key: str, index: int | None = None) -> dict[int, Cell]:
        """Layer -> the value ``key`` in the rank records of ``model``'s last checkpoints.

        Without records, layer 0 has a cell that says why.

        Args:
            index: position in the value, where it is a list.

        Raises:
            InputError: a run has several records.
        """
        found = []
        for run in self.find_runs(model):
            last = run.run_name, run.samples
            of_run = [r for r in self.ranks if (r.checkpoint.run_name, r.checkpoint.samples) == last]
            if len(of_run) > 1:
                keys = ', '.join(record.key for record in of_run)
                raise InputError(f'{len(of_run)} rank records of {run.run_name} ({keys}): keep one')
            found += [(run, record) for record in of_run]

        def read(layer: LayerRanks) -> float:
            value = getattr(layer, key)
            return float(value if index is None else value[index])

        layers = range(len(found[0][1].layers) if found else 1)
        values = {i: [(run, [r], [read(r.layers[i])]) for run, r in found] for i in layers}
        is_whole = bool(found) and isinstance(getattr(found[0][1].layers[0], key), int)
        # The [MASK]s of layer 0, the embeddings, share one token and differ by positions alone: that all seeds have the
        # rank 1 is no chance of rounding.
        rounding = {i: OF_ROUNDING if is_whole and (key, i) != ('rank_masks', 0) else 0.0 for i in layers}
        return {i: self._gather(model, 'effective rank', of, rounding=rounding[i]) for i, of in values.items()}

    def mask_excess(self, model: Model | Runs) -> list[Cell]:
        """The share of the [MASK]s' energy outside the real tokens' leading directions, less the real tokens' own.

        One cell for each layer. The leading directions hold at least 90 % of the real tokens' energy.
        """
        masks, real = (self.rank_by_layer(model, f'{kind}_outside_share') for kind in ('mask', 'real'))
        return [subtract(masks[layer], real[layer]) for layer in real]

    def finetuned_rank(self, model: Model, task: str) -> Cell:
        """Effective rank of the last layer after fine-tuning."""
        found = self.select_finetunings(model, task)
        values = [(run, rs, [float(rank) for r in rs if (rank := r.effective_rank) is not None]) for run, rs in found]
        if lacking := [run.run_name for run, records, ranks in values if len(ranks) < len(records)]:
            return Cell(missing=f'a record of {task} from {lacking[0]} holds no rank after fine-tuning')
        return self._gather(model, task, values, self._note_search(found), OF_ROUNDING)

    def finetuned_rank_curve(self, model: Model, task: str) -> dict[float, Cell]:
        """Epoch -> effective rank of the last layer during fine-tuning, for the epochs that every record has.

        Without records, epoch 0 has a cell that says why.
        """
        found = self.select_finetunings(model, task)
        curves = [
            (run, records, [{p.epoch: float(p.effective_rank) for p in r.rank_curve} for r in records])
            for run, records in found
        ]
        epochs = set.intersection(*(set(curve) for *_, of_run in curves for curve in of_run)) if curves else set()
        if not epochs:
            lacking = next((run.run_name for run, _, of_run in curves if not all(of_run)), None)
            reason = f'a record of {task} from {lacking} holds no rank during fine-tuning' if lacking else ''
            return {0.0: Cell(missing=reason or self.explain_absence(model, task))}
        notes = self._note_search(found)
        by_epoch = {e: [(run, rs, [c[e] for c in of_run]) for run, rs, of_run in curves] for e in sorted(epochs)}
        return {e: self._gather(model, task, values, notes, OF_ROUNDING) for e, values in by_epoch.items()}

    def explain_absence(self, model: Model | Runs, what: str, samples: int | None = None) -> str:
        """Why ``model`` has no number of ``what``, a task or a kind of measurement, at a checkpoint."""
        runs = self.find_runs(model)
        if isinstance(model, Model) and not runs:
            lack = f'no finished pretraining run {model.run_name(self.scale)}'
            return '; '.join([lack, *self._note_failed_runs(model)])
        return self._explain_lack(what, runs, samples)

    def _explain_lack(self, what: str, runs: Runs, samples: int | None) -> str:
        where = {(run.run_name, run.samples if samples is None else samples) for run in runs}
        for failed in self.failures:
            if failed.task == what and (failed.checkpoint.run_name, failed.checkpoint.samples) in where:
                return f'{what} from {failed.checkpoint.run_name} failed: {failed.error}'
        return f'{what} of {", ".join(run.run_name for run in runs)} is not recorded'

    def _gather(
        self,
        model: Model | Runs,
        what: str,
        found: Sequence[tuple[PretrainingRecord, Sequence[FinetuningRecord | RankRecord], Sequence[float]]],
        notes: Sequence[str] = (),
        rounding: float = 0.0,
        samples: int | None = None,
    ) -> Cell:
        """The cell of one number of ``model``; ``what`` names the number in messages.

        Args:
            found: for each pretraining run its record, its other records, and one value for each fine-tuning seed.
            rounding: of :class:`Term`.
            samples: names the checkpoint; None: the last one of each run.
        """
        if not found:
            return Cell(missing=self.explain_absence(model, what, samples))
        there = {run.run_name for run, *_ in found}
        lacks = [self._explain_lack(what, [run], samples) for run in self.find_runs(model) if run.run_name not in there]
        return Cell(
            terms=(Term(1.0, {run.seed: values for run, _, values in found}, rounding=rounding),),
            runs=tuple(run for run, *_ in found),
            records=tuple(record for _, records, _ in found for record in records),
            note='; '.join([*notes, *lacks, *self._note_failed_runs(model)]),
        )


def order_by_seed(runs: Iterable[PretrainingRecord]) -> Runs:
    """``runs`` of one model, ordered by seed.

    Raises:
        InputError: they differ in more than the seed, or have one seed twice.
    """
    found = sorted(runs, key=lambda run: run.seed)
    for first, run in itertools.pairwise(found):  # equal seeds are neighbours
        different = list_differences(first.identity, run.identity)
        if different != ['seed']:
            what = ', '.join(key for key in different if key != 'seed') or 'nothing, not even the seed'
            names = f'{first.run_name} and {run.run_name}'
            raise InputError(f'the records of {names} differ in {what}: keep those of one experiment')
    return found


def _influence_of_median(
    records: Sequence[FinetuningRecord], read: Callable[[FinetuningRecord], float], metric: str
) -> np.ndarray:
    """(examples,) influences in percent: the mean over all records at the middle value, or at the two middle values."""
    ordered = sorted(map(read, records))
    parts = [
        np.mean([unpack_numbers(r.influences[metric]) for r in records if read(r) == ordered[i]], axis=0)
        for i in {(len(ordered) - 1) // 2, len(ordered) // 2}
    ]
    return 100 * np.mean(parts, axis=0)
