"""The built-in tasks, declared with the keys that a recipe's own tasks have, and finding a task by name."""

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from maelm_composer.config import TaskConfig, TaskKind, TaskSource
from maelm_composer.errors import InputError

CLASSIFICATION, REGRESSION, SPAN = TaskKind.classification, TaskKind.regression, TaskKind.span
METRICS_OF_KIND = {  # that a task of each kind may list; default: all, of a classification the first
    CLASSIFICATION: ('accuracy', 'f1', 'matthews'),
    REGRESSION: ('spearman', 'pearson'),
    SPAN: ('best_exact', 'best_f1', 'exact', 'f1', 'best_exact_threshold', 'best_f1_threshold'),
}
OF_TWO_CLASSES = ('f1', 'matthews')  # F1 is that of the second class
TRAIN = 'train'
HUB_SPLITS = {TRAIN: 'train', 'dev': 'validation'}
GLUE_DATASET = 'nyu-mll/glue'
MAX_SIMILARITY = 5.0  # labels of STS-B are 0 to 5
_PAIR, _ENTAILMENT = ['sentence1', 'sentence2'], ['entailment', 'not_entailment']
_NLI, _WITH_F1 = ['entailment', 'neutral', 'contradiction'], ['accuracy', 'f1']
_NLI_SPLITS = {TRAIN: 'train', 'matched': 'validation_matched', 'mismatched': 'validation_mismatched'}


class Metric(NamedTuple):
    """A metric on one evaluation split; ``name`` is that in a record."""

    name: str
    split: str
    kind: str


@dataclass(kw_only=True)
class Task(TaskConfig):
    """A declared task with its name. Scores are fractions, correlations lie in −1 … 1."""

    name: str

    def __hash__(self) -> int:  # tasks are keys of caches, and no config is changed after it was loaded
        return hash(self.name)

    @property
    def is_own(self) -> bool:
        """Whether a recipe declares the task."""
        return self.name not in TASKS

    @property
    def is_demo(self) -> bool:
        return not self.files and self.dataset is None

    @property
    def eval_splits(self) -> list[str]:
        return [split for split in self.files or self.splits or HUB_SPLITS if split != TRAIN]

    @property
    def num_outputs(self) -> int:
        """Outputs of the head: one per class, one number, or the start and the end score of a token."""
        return {CLASSIFICATION: len(self.label_names), REGRESSION: 1, SPAN: 2}[self.kind]

    def normalize(self, label: float) -> float:
        """The head's target for a label of a regression task: 0 to 1 (the authors' code divides STS-B's by 5)."""
        low, high = self.label_range
        return (label - low) / (high - low)

    def denormalize(self, output: float) -> float:
        """The head's ``output`` on the scale of the labels of a regression task."""
        low, high = self.label_range
        return low + output * (high - low)

    @property
    def metric(self) -> str:
        """The score of a run: for a built-in task, the metric that the paper reports (Table 1)."""
        return self.list_metrics()[0].name

    def list_metrics(self) -> list[Metric]:
        """All metrics in a record; of several evaluation splits, the names begin with the split's."""
        splits = self.eval_splits
        kinds = self.metrics or METRICS_OF_KIND[self.kind][: 1 if self.kind is CLASSIFICATION else None]
        return [Metric(f'{split}_{kind}' if splits[1:] else kind, split, kind) for split in splits for kind in kinds]

    def find_source(self, configured: TaskSource) -> TaskSource:
        """Where the rows come from: ``data.source`` holds for the built-in tasks."""
        if not self.is_own:
            return configured
        return TaskSource.files if self.files else TaskSource.huggingface


def _classify(name: str, group: str, columns: list[str], label_names: list[str], **others: Any) -> Task:
    settings: dict[str, Any] = {'dataset': GLUE_DATASET, 'config_name': name, 'group': group} | others
    return Task(name=name, kind=CLASSIFICATION, text_columns=columns, label_names=label_names, **settings)


def _compare(name: str, dataset: str | None) -> Task:
    labels = [0.0, MAX_SIMILARITY]
    return Task(name=name, kind=REGRESSION, text_columns=_PAIR, label_range=labels, dataset=dataset, config_name=name)


def _ask(name: str, dataset: str | None) -> Task:
    settings: dict[str, Any] = {'dataset': dataset, 'config_name': 'squad_v2', 'group': 'squad2'}
    return Task(name=name, kind=SPAN, text_columns=['question', 'context'], label_column='answers', **settings)


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        _classify('mnli', 'glue_large', ['premise', 'hypothesis'], _NLI, splits=_NLI_SPLITS),
        _classify('qqp', 'glue_large', ['question1', 'question2'], ['not_duplicate', 'duplicate'], metrics=_WITH_F1),
        _classify('qnli', 'glue_large', ['question', 'sentence'], _ENTAILMENT),
        _classify('sst2', 'glue_large', ['sentence'], ['negative', 'positive']),
        _classify('cola', 'glue_small', ['sentence'], ['unacceptable', 'acceptable'], metrics=['matthews', 'accuracy']),
        _classify('rte', 'glue_small', _PAIR, _ENTAILMENT),
        _classify('mrpc', 'glue_small', _PAIR, ['not_equivalent', 'equivalent'], metrics=_WITH_F1),
        _compare('stsb', GLUE_DATASET),
        _ask('squad2', 'rajpurkar/squad_v2'),
        # Not GLUE: tasks/demo.py makes these from the documentation on this machine, so that every head runs offline.
        _classify('demo_sentence', 'glue_small', ['sentence'], ['shuffled', 'original'], dataset=None),
        _classify('demo_pair', 'glue_small', _PAIR, ['swapped', 'in_order'], dataset=None),
        _compare('demo_regression', None),
        _ask('demo_span', None),
    )
}

GLUE = ('mnli', 'qqp', 'qnli', 'sst2', 'cola', 'rte', 'mrpc', 'stsb')  # the eight tasks of the average
GROUPS = {task.group for task in TASKS.values()}


def find_task(name: str | None, own: Mapping[str, TaskConfig] | None = None) -> Task:
    """The task called ``name``, built-in or among the recipe's ``own``.

    Raises:
        InputError: there is no such task (the message suggests the nearest name), or its declaration cannot be used.
    """
    if name is None:
        raise InputError('task is not set: give it in the recipe or as task=rte')
    own = own or {}
    if name in own:
        if fault := next(_list_faults(name, own[name]), None):
            raise InputError(f'tasks.{name}{fault}')
        return Task(**vars(own[name]), name=name)
    if name not in TASKS:
        known = [*own, *TASKS]
        near = difflib.get_close_matches(name.lower().replace('-', ''), known, n=1)
        hint = f'did you mean {near[0]}? (tasks: {", ".join(known)})' if near else f'the tasks are {", ".join(known)}'
        raise InputError(f'unknown task {name}; {hint}')
    return TASKS[name]


def _list_faults(name: str, task: TaskConfig) -> Iterator[str]:
    """Why no run could use the declaration ``tasks.<name>``."""
    if name in TASKS or name in GROUPS:
        yield f': {name} is the name of a built-in {"task" if name in TASKS else "search space"}; choose another'
    if not re.fullmatch(r'[A-Za-z0-9_][A-Za-z0-9_.-]*', name):
        yield ": the name is part of file names; use letters, digits, '_', and after the first '.' and '-'"
    least = 2 if task.kind is SPAN else 1
    if not least <= len(task.text_columns) <= 2:
        yield f'.text_columns {task.text_columns}: a {task.kind.name} task reads {"one or " * (least == 1)}two columns'
    columns = [*task.text_columns, task.label_column]
    if twice := sorted({column for column in columns if columns.count(column) > 1}):
        yield f': {twice[0]!r} is two of its columns: text_columns and label_column name different ones'
    num_labels = len(set(task.label_names))
    if num_labels < len(task.label_names):
        yield f'.label_names {task.label_names}: a name is listed twice'
    if task.kind is CLASSIFICATION and num_labels < 2:
        yield f'.label_names {task.label_names}: name two or more classes'
    if task.kind is not CLASSIFICATION and num_labels:
        yield f'.label_names {task.label_names}: a {task.kind.name} task has no classes'
    if task.kind is REGRESSION and not (len(task.label_range) == 2 and task.label_range[0] < task.label_range[1]):
        yield f'.label_range {task.label_range}: give the least and the greatest label, as in [0, 5]'
    if task.kind is not REGRESSION and task.label_range:
        yield f'.label_range {task.label_range}: only a regression task has a range'
    if task.metrics and task.metrics[0].endswith('_threshold'):
        yield f'.metrics: the first is the score, and {task.metrics[0]} is none: name another one first'
    for metric in task.metrics:
        if metric not in METRICS_OF_KIND[task.kind]:
            yield f'.metrics: {metric} is no metric of a {task.kind.name} task: {", ".join(METRICS_OF_KIND[task.kind])}'
        if task.kind is CLASSIFICATION and metric in OF_TWO_CLASSES and num_labels != 2:
            yield f'.metrics: {metric} is defined for two classes, and label_names has {num_labels}'
    if bool(task.files) == (task.dataset is not None):
        yield ': give either files or dataset, with the rows for training and evaluation'
    if task.files and (task.splits or task.config_name):
        yield ': splits and config_name are about dataset, and the rows come from files'
    key, splits = ('files', task.files) if task.files else ('splits', task.splits or HUB_SPLITS)
    if TRAIN not in splits or len(splits) < 2 or (task.kind is SPAN and len(splits) > 2):
        count = 'one split' if task.kind is SPAN else 'one or more splits'
        yield f'.{key} names {", ".join(splits)}: give {TRAIN} and {count} for evaluation'
    if task.group not in GROUPS:
        yield f'.group {task.group}: one of {", ".join(sorted(GROUPS))}'
