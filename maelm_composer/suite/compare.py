"""Two encoders fine-tuned by one protocol, and the differences of their scores (``maelm compare``).

The replicates of such a comparison are fine-tuning seeds: a Term holds them where a report's holds pretraining seeds.
"""

from collections.abc import Sequence
from dataclasses import replace

from maelm_composer.cluster import connect_ray
from maelm_composer.config import FinetuningConfig
from maelm_composer.console import begin_table, open_console
from maelm_composer.errors import InputError, telling_of_stop
from maelm_composer.finetuning.run import load_encoder
from maelm_composer.records import unpack_numbers
from maelm_composer.reporting.cells import Term, estimate
from maelm_composer.sweep.report import print_failures
from maelm_composer.sweep.run import STOPPED, pin_checkpoint, sweep
from maelm_composer.sweep.search import TaskResult, list_tasks

EXPLANATION = """\
Scores in percent: the mean over the fine-tuning seeds, each encoder at the best point of its own search.
The 95 % intervals are Student's t over the differences by seed and, where examples are counted, over those of the dev
set. They hold for other fine-tuning seeds and examples of these two checkpoints, not for other pretraining runs."""
Pair = tuple[TaskResult, TaskResult]  # of one task: the first encoder's and the second one's


def compare_and_print(first: FinetuningConfig, second: FinetuningConfig) -> int:
    """Sweep over two checkpoints, and print the first one's scores minus the second one's.

    Args:
        first: a sweep; ``second`` has another checkpoint and is otherwise equal.

    Returns:
        The exit code: 1 where a run failed.

    Raises:
        InputError: before any run, as :func:`maelm_composer.sweep.run.sweep`, or the encoders have the same weights, or
            would read rows of different length.
    """
    with telling_of_stop(STOPPED):
        first, second = map(pin_checkpoint, (first, second))
        _check(first, second)
        with connect_ray():
            results = [sweep(config) for config in (first, second)]
    numbers = ('A', 'B', 'A − B', '95 %', 'seeds', 'examples')
    table = begin_table('task', right=numbers, last=('point of A', 'point of B'))
    pairs: list[Pair] = list(zip(results[0].tasks, results[1].tasks, strict=True))
    compared = [(pair[0].task.name, [pair]) for pair in pairs]
    for name, chosen in compared if len(pairs) == 1 else [*compared, ('mean', pairs)]:
        if found := _subtract(chosen):
            points = [str(result.point) for result in chosen[0]] if len(chosen) == 1 else []
            table.add_row(name, *found, *points)
    open_console().print(table)
    print(f'A: {first.checkpoint}\nB: {second.checkpoint}')
    print(EXPLANATION)
    failures = [failure for result in results for failure in result.failures]
    print_failures(failures)
    print(f'records: {first.save_folder}')
    return 1 if failures else 0


def _check(first: FinetuningConfig, second: FinetuningConfig) -> None:
    list_tasks(first)  # raises if a name is wrong, before the encoders are read
    identities, lengths = [], []
    for config in (first, second):
        pretrained = load_encoder(config)
        identities.append((pretrained.identity.hash, pretrained.identity.implementation))
        lengths.append(min(config.max_seq_len, pretrained.max_seq_len))
    if identities[0] == identities[1]:
        raise InputError(f'{first.checkpoint} and {second.checkpoint} have the same weights: name two encoders')
    if lengths[0] != lengths[1]:
        raise InputError(
            f'{first.checkpoint} would read {lengths[0]} tokens and {second.checkpoint} {lengths[1]}: '
            f'give max_seq_len={min(lengths)}'
        )


def _subtract(pairs: Sequence[Pair]) -> list[str]:
    """The numbers of a row, means over ``pairs``, of a task each; none if they have no fine-tuning seed in common."""
    seeds = set.intersection(*({record.seed for record in result.records} for pair in pairs for result in pair))
    if not seeds:
        return []
    sides = zip(*pairs, strict=True)
    first, second = ([_build_term(result, seeds, 1 / len(pairs)) for result in side] for side in sides)
    found = estimate([*first, *(replace(term, weight=-term.weight) for term in second)])
    interval = '' if found.low is None else f'{found.low:+.2f} to {found.high:+.2f}'
    means = f'{estimate(first).value:.2f}', f'{estimate(second).value:.2f}', f'{found.value:+.2f}'
    return [*means, interval, str(found.pretraining_seeds), str(found.examples)]


def _build_term(result: TaskResult, seeds: set[int], weight: float) -> Term:
    """The scores of ``seeds``, and how much every development example contributes to them."""
    metric, records = result.task.metric, {record.seed: record for record in result.records if record.seed in seeds}
    return Term(
        weight,
        {seed: [100 * record.score] for seed, record in records.items()},
        sample=f'{result.task.name} {result.records[0].data_hash}',
        influences={
            seed: 100 * unpack_numbers(record.influences[metric])
            for seed, record in records.items()
            if metric in record.influences
        },
    )
