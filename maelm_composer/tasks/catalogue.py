"""The table of the tasks: columns, labels, metrics and search space of each."""

import difflib
from dataclasses import dataclass

from maelm_composer.errors import InputError

CLASSIFICATION, REGRESSION, SPAN = 'classification', 'regression', 'span'


@dataclass(frozen=True)
class Task:
    """One task. All metrics are fractions."""

    name: str
    group: str  # glue_small, glue_large or squad2: selects the search space (Tables 5 and 6)
    kind: str  # classification, regression or span: selects the head
    text_columns: tuple[str, ...]
    label_names: tuple[str, ...]  # by label id, as on the Hugging Face Hub; empty for regression and span
    metric: str  # the metric that the paper reports (Sec. 4.1)
    metrics: tuple[str, ...]  # all metrics in a record, ``metric`` included
    hub: tuple[str, str] | None  # dataset and configuration on the Hugging Face Hub; None for a demo task
    eval_splits: tuple[str, ...] = ('dev',)

    @property
    def num_outputs(self) -> int:
        """Outputs of the head: one per class, one number, or the start and the end score of a token."""
        return {CLASSIFICATION: len(self.label_names), REGRESSION: 1, SPAN: 2}[self.kind]


def _classify(
    name: str,
    group: str,
    text_columns: tuple[str, ...],
    label_names: tuple[str, ...],
    metrics: tuple[str, ...] = ('accuracy',),
    eval_splits: tuple[str, ...] = ('dev',),
    is_demo: bool = False,
) -> Task:
    hub = None if is_demo else ('nyu-mll/glue', name)
    if len(eval_splits) > 1:
        metrics = tuple(f'{split}_{metric}' for split in eval_splits for metric in metrics)
    return Task(name, group, CLASSIFICATION, text_columns, label_names, metrics[0], metrics, hub, eval_splits)


_SENTENCES, _ENTAILMENT = ('sentence1', 'sentence2'), ('entailment', 'not_entailment')
_SPAN_METRICS = ('best_exact', 'best_f1', 'exact', 'f1', 'best_exact_threshold', 'best_f1_threshold')
_CORRELATIONS = ('spearman', 'pearson')
_NLI = ('entailment', 'neutral', 'contradiction')
_MATTHEWS = ('matthews', 'accuracy')
_WITH_F1 = ('accuracy', 'f1')  # of label 1

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        _classify('mnli', 'glue_large', ('premise', 'hypothesis'), _NLI, eval_splits=('matched', 'mismatched')),
        _classify('qqp', 'glue_large', ('question1', 'question2'), ('not_duplicate', 'duplicate'), _WITH_F1),
        _classify('qnli', 'glue_large', ('question', 'sentence'), _ENTAILMENT),
        _classify('sst2', 'glue_large', ('sentence',), ('negative', 'positive')),
        _classify('cola', 'glue_small', ('sentence',), ('unacceptable', 'acceptable'), _MATTHEWS),
        _classify('rte', 'glue_small', _SENTENCES, _ENTAILMENT),
        _classify('mrpc', 'glue_small', _SENTENCES, ('not_equivalent', 'equivalent'), _WITH_F1),
        Task(
            *('stsb', 'glue_small', REGRESSION, _SENTENCES, (), 'spearman', _CORRELATIONS),
            hub=('nyu-mll/glue', 'stsb'),
        ),
        Task(
            *('squad2', 'squad2', SPAN, ('question', 'context'), (), 'best_exact', _SPAN_METRICS),
            hub=('rajpurkar/squad_v2', 'squad_v2'),
        ),
        # Not GLUE: tasks/demo.py makes these from the documentation on this machine, so that every head runs offline.
        _classify('demo_sentence', 'glue_small', ('sentence',), ('shuffled', 'original'), is_demo=True),
        _classify('demo_pair', 'glue_small', _SENTENCES, ('swapped', 'in_order'), is_demo=True),
        Task('demo_regression', 'glue_small', REGRESSION, _SENTENCES, (), 'spearman', _CORRELATIONS, None),
        Task('demo_span', 'squad2', SPAN, ('question', 'context'), (), 'best_exact', _SPAN_METRICS, None),
    )
}

GLUE = ('mnli', 'qqp', 'qnli', 'sst2', 'cola', 'rte', 'mrpc', 'stsb')  # the eight tasks of the average
GROUPS = {task.group for task in TASKS.values()}
MAX_SIMILARITY = 5.0  # labels of STS-B are 0 to 5; the head's targets are labels divided by 5 (authors' code)


def find_task(name: str | None) -> Task:
    """The task called ``name``.

    Raises:
        InputError: there is no such task; the message suggests the nearest name.
    """
    if name is None:
        raise InputError('task is not set: give it in the recipe or as task=rte')
    if name not in TASKS:
        near = difflib.get_close_matches(name.lower().replace('-', ''), TASKS, n=1)
        hint = f'did you mean {near[0]}? (tasks: {", ".join(TASKS)})' if near else f'the tasks are {", ".join(TASKS)}'
        raise InputError(f'unknown task {name}; {hint}')
    return TASKS[name]
