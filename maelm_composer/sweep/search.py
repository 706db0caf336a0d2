"""The runs of a search, each a config with task, point and seed, and its best point. Imports no torch.

Source: App. D, Tables 5 and 6 (the grids), and Sec. 4.1 (medians of five seeds). PAPER-SILENT: how a point is selected.
"""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from maelm_composer.config import EvaluationProtocol, FinetuningConfig, SearchSpace, SelectionProtocol
from maelm_composer.errors import InputError
from maelm_composer.finetuning.identity import check_names
from maelm_composer.recipe import read_keys, split_arguments
from maelm_composer.records import FailedFinetuning, Finetuning, FinetuningRecord, Point
from maelm_composer.tasks.catalogue import GLUE, SPAN, Task, find_task
from maelm_composer.training.plan import FORWARD_AND_BACKWARD


@dataclasses.dataclass(frozen=True)
class TaskResult:
    """The outcome of the search of one task."""

    task: Task
    point: Point | None  # selected; None if no run of the grid finished
    records: list[FinetuningRecord]  # of the selected point, one per seed
    finished: list[FinetuningRecord]  # of all points
    num_planned: int  # runs

    @property
    def scores(self) -> list[float]:
        """Fractions, one for each seed of the selected point."""
        return [record.score for record in self.records]


@dataclasses.dataclass(frozen=True)
class SweepResult:
    tasks: list[TaskResult]
    failures: list[FailedFinetuning]  # runs that raised an error or lost their worker too often

    @property
    def average(self) -> float | None:
        """AVG of the eight GLUE tasks, MNLI-m once: the mean of their medians (a fraction); None if one is missing."""
        medians = {result.task.name: median(result.scores) for result in self.tasks if result.records}
        return sum(medians[name] for name in GLUE) / len(GLUE) if medians.keys() >= set(GLUE) else None


def list_tasks(config: FinetuningConfig) -> list[Task]:
    """The tasks to sweep over: ``task`` alone if it is set, else ``sweep.tasks``.

    Raises:
        InputError: none is named, or one is unknown.
    """
    check_names(config)
    if not config.sweep.tasks and config.task is None:
        raise InputError('nothing to sweep over: give sweep.tasks or task in the recipe')
    names = config.sweep.tasks if config.task is None else [config.task]
    return [find_task(name, config.tasks) for name in dict.fromkeys(names)]


def list_points(config: FinetuningConfig, task: Task) -> list[Point]:
    """The grid of the task or else of its group, the last key fastest. An empty list means the recipe's own value.

    Raises:
        InputError: the recipe has no search space for either.
    """
    search = config.sweep.search
    space = search.get(task.name, search.get(task.group))
    if space is None:
        recipe = 'squad2' if task.kind == SPAN else 'glue'
        other = f', or set tasks.{task.name}.group' if task.is_own else ''
        raise InputError(
            f'sweep.search has neither {task.name} nor its group {task.group}: name one there, as in '
            f'yamls/finetune/{recipe}.yaml{other}'
        )
    names = [field.name for field in dataclasses.fields(SearchSpace)]
    values = [getattr(space, name) or [getattr(config, name)] for name in names]
    return list(dict.fromkeys(Point(*combination) for combination in itertools.product(*values)))


def refuse_searched(config: FinetuningConfig, entries: Sequence[str]) -> None:
    """Refuse keys that a sweep would ignore, since it searches their values.

    Args:
        entries: the files and ``key=value`` pairs of ``config``. A file with a search space of its own may have such
            keys: they are those of a single run.

    Raises:
        InputError: a pair or a file sets the seed, or a key for which the search space of a task has values.
    """
    files, pairs = split_arguments(entries)
    given = [pair.partition('=')[0] for pair in pairs]
    for file in files:
        keys = read_keys(file)
        if 'sweep.search' not in keys:
            given += sorted(keys)
    if 'seed' in given:
        raise InputError(f'seed: a sweep has its own, sweep.seeds={config.sweep.seeds}: set these')
    for name in (field.name for field in dataclasses.fields(SearchSpace) if field.name in given):
        for task in list_tasks(config):
            key = task.name if task.name in config.sweep.search else task.group
            if values := getattr(config.sweep.search.get(key), name, []):
                searched = f'sweep.search.{key}.{name}'
                raise InputError(f'{name}: the sweep over {task.name} tries {searched}={values}: set this list')


def plan_grid(config: FinetuningConfig, task: Task) -> list[FinetuningConfig]:
    """The runs of the grid: every point on the first seed, or on all seeds (:func:`_tries_all`)."""
    seeds = config.sweep.seeds if _tries_all(config, task) else config.sweep.seeds[:1]
    return [_configure(config, task, point, seed) for point in list_points(config, task) for seed in seeds]


def _tries_all(config: FinetuningConfig, task: Task) -> bool:
    """Whether the grid has every point on every seed: with ``full_grid``, or if no point is to be selected."""
    return config.sweep.selection is SelectionProtocol.full_grid or len(list_points(config, task)) == 1


def plan_repeats(config: FinetuningConfig, task: Task, records: Sequence[Finetuning]) -> list[FinetuningConfig]:
    """The runs after the grid: the best point of its ``records`` on the other seeds; none if no run finished."""
    point = select_point(records)
    if point is None or _tries_all(config, task):
        return []
    return [_configure(config, task, point, seed) for seed in config.sweep.seeds[1:]]


def count_runs(config: FinetuningConfig, task: Task) -> int:
    """Number of runs in the whole search of ``task``."""
    points, seeds = len(list_points(config, task)), len(config.sweep.seeds)
    return points * seeds if _tries_all(config, task) else points + seeds - 1


def run_cost(config: FinetuningConfig, epochs: float, training: float, evaluation: float) -> float:
    """The rows, or characters, that pass forward through the encoder in a run of ``epochs``; a step counts three times.

    Args:
        training: the size of the training set, in that unit.
        evaluation: the size of the dev sets.
    """
    evaluations = 1 if config.evaluation == EvaluationProtocol.final else 2 * epochs
    return FORWARD_AND_BACKWARD * epochs * training + evaluations * evaluation


def select_point(records: Sequence[Finetuning]) -> Point | None:
    """The best point of one task's records; None if no run finished.

    The best point has the most finished seeds. Among equals it has the highest median score over the seeds that were
    tried at every point (over its own where there is none), then the lowest learning rate, the smallest batch, the
    fewest epochs and the shortest warm-up. Runs of the best point on further seeds
    therefore never change the choice.
    """
    scores: dict[Point, dict[int, float]] = defaultdict(dict)
    tried: dict[Point, set[int]] = defaultdict(set)
    for record in records:
        tried[record.point].add(record.seed)
        if isinstance(record, FinetuningRecord):
            scores[record.point][record.seed] = record.score
    everywhere = set.intersection(*tried.values()) if tried else set()
    merits: dict[Point, tuple[int, float]] = {}
    for point, of_point in scores.items():
        seeds = of_point.keys() & everywhere or of_point.keys()
        merits[point] = len(of_point), median(of_point[seed] for seed in seeds)
    best = max(merits.values(), default=None)
    return min((point for point in merits if merits[point] == best), default=None)


def conclude(config: FinetuningConfig, task: Task, records: Sequence[Finetuning]) -> TaskResult:
    """The outcome of a search from the records of its runs."""
    finished = [record for record in records if isinstance(record, FinetuningRecord)]
    candidates = list(records)
    if not _tries_all(config, task):
        candidates = [record for record in records if record.seed == config.sweep.seeds[0]]
    point = select_point(candidates)
    chosen = [record for record in finished if record.point == point]
    chosen.sort(key=lambda record: config.sweep.seeds.index(record.seed))
    return TaskResult(task, point, chosen, finished, count_runs(config, task))


def _configure(config: FinetuningConfig, task: Task, point: Point, seed: int) -> FinetuningConfig:
    return dataclasses.replace(config, task=task.name, seed=seed, **dataclasses.asdict(point))
