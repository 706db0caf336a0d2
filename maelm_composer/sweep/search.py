"""Which runs a search is made of, and which of its points is the best: planning, no torch.

A run is a :class:`FinetuningConfig` whose task, point and seed are set; a record is what it leaves (run.py).
"""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

from maelm_composer.config import EvaluationProtocol, FinetuningConfig, SearchSpace, SelectionProtocol
from maelm_composer.errors import InputError
from maelm_composer.finetuning.identity import check_names
from maelm_composer.statistics import Summary, summarize
from maelm_composer.tasks.catalogue import GLUE, Task, find_task

Record = dict[str, Any]
GROUP_RECIPES = 'yamls/finetune'


@dataclasses.dataclass(frozen=True, order=True)
class Point:
    """One point of a search space; in this order, the order of the grid where its lists ascend."""

    learning_rate: float
    batch_size: int
    max_epochs: int
    warmup_proportion: float

    def __str__(self) -> str:
        return (
            f'lr {self.learning_rate:g}, batch {self.batch_size}, epochs {self.max_epochs}, '
            f'warm-up {self.warmup_proportion:g}'
        )


@dataclasses.dataclass(frozen=True)
class TaskResult:
    """What a search says about one task."""

    task: Task
    point: Point | None  # the selected one; None: no run of the grid finished
    records: list[Record]  # of the selected point, one a seed, finished
    finished: list[Record]  # of all points
    num_planned: int

    @property
    def summary(self) -> Summary:
        """Of the scores over seeds (fractions)."""
        return summarize([record['score'] for record in self.records])


@dataclasses.dataclass(frozen=True)
class SweepResult:
    tasks: list[TaskResult]
    failures: list[Record]  # of runs that raised, or whose worker died too often

    @property
    def average(self) -> float | None:
        """AVG of the eight GLUE tasks, MNLI-m once: the mean of their medians (a fraction); None if one is missing."""
        medians = {result.task.name: result.summary.median for result in self.tasks if result.records}
        return sum(medians[name] for name in GLUE) / len(GLUE) if medians.keys() >= set(GLUE) else None


def list_tasks(config: FinetuningConfig) -> list[Task]:
    """The tasks to sweep over: ``sweep.tasks``, or the recipe's own.

    Raises:
        InputError: none is named, or one is unknown.
    """
    check_names(config)
    if not config.sweep.tasks and config.task is None:
        raise InputError('nothing to sweep over: give sweep.tasks or task in the recipe')
    names: list[str | None] = [*config.sweep.tasks] or [config.task]
    return [find_task(name) for name in dict.fromkeys(names)]


def list_points(config: FinetuningConfig, task: Task) -> list[Point]:
    """The grid of the task or else of its group, the last key fastest. An empty list means the recipe's own value.

    Raises:
        InputError: the recipe has no search space for either.
    """
    search = config.sweep.search
    space = search.get(task.name, search.get(task.group))
    if space is None:
        raise InputError(
            f'sweep.search has no {task.group}, the group of {task.name}: see {GROUP_RECIPES}/{task.group}.yaml'
        )
    names = [field.name for field in dataclasses.fields(SearchSpace)]
    values = [getattr(space, name) or [getattr(config, name)] for name in names]
    return list(dict.fromkeys(Point(*combination) for combination in itertools.product(*values)))


def plan_grid(config: FinetuningConfig, task: Task) -> list[FinetuningConfig]:
    """The runs to begin with: every point on the first seed, or with ``full_grid`` on all."""
    seeds = config.sweep.seeds
    if config.sweep.selection is SelectionProtocol.grid_on_one_seed:
        seeds = seeds[:1]
    return [_configure(config, task, point, seed) for point in list_points(config, task) for seed in seeds]


def plan_repeats(config: FinetuningConfig, task: Task, records: Sequence[Record]) -> list[FinetuningConfig]:
    """The runs to end with: the best point of the grid's ``records`` on the other seeds; none where none finished."""
    point = select_point(records)
    if point is None or config.sweep.selection is SelectionProtocol.full_grid:
        return []
    return [_configure(config, task, point, seed) for seed in config.sweep.seeds[1:]]


def count_runs(config: FinetuningConfig, task: Task) -> int:
    """How many runs the search of ``task`` comes to."""
    points, seeds = len(list_points(config, task)), len(config.sweep.seeds)
    match config.sweep.selection:
        case SelectionProtocol.grid_on_one_seed:
            return points + seeds - 1
        case SelectionProtocol.full_grid:
            return points * seeds


def count_evaluations(config: FinetuningConfig, epochs: float) -> float:
    """How often a run of so many epochs goes through the dev set."""
    return 1 if config.evaluation is EvaluationProtocol.final else 2 * epochs


def select_point(records: Sequence[Record]) -> Point | None:
    """The best point of one task's records; None where none is finished.

    The most seeds, then the highest median score; of equals the lowest learning rate, then the smallest batch, the
    fewest epochs, the shortest warm-up, which is the first of the paper's grids. So the records of a grid on one seed,
    those and the best point's other seeds, and those of a full grid are all read by one rule.
    """
    scores: dict[Point, dict[int, float]] = defaultdict(dict)
    for record in records:
        if record['status'] == 'finished':
            scores[Point(**record['point'])][record['seed']] = record['score']
    merits = {point: (len(of_point), median(of_point.values())) for point, of_point in scores.items()}
    return min((point for point in merits if merits[point] == max(merits.values())), default=None)


def conclude(config: FinetuningConfig, task: Task, records: Sequence[Record]) -> TaskResult:
    """What the records of one task's search come to."""
    finished = candidates = [record for record in records if record['status'] == 'finished']
    if config.sweep.selection is SelectionProtocol.grid_on_one_seed:
        candidates = [record for record in finished if record['seed'] == config.sweep.seeds[0]]
    point = select_point(candidates)
    chosen = [record for record in finished if Point(**record['point']) == point]
    chosen.sort(key=lambda record: config.sweep.seeds.index(record['seed']))
    return TaskResult(task, point, chosen, finished, count_runs(config, task))


def _configure(config: FinetuningConfig, task: Task, point: Point, seed: int) -> FinetuningConfig:
    return dataclasses.replace(config, task=task.name, seed=seed, **dataclasses.asdict(point))
