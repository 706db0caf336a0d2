"""The protocol's counts from the recipes themselves, and one rule of selection."""

import dataclasses
import json
import random
from pathlib import Path
from statistics import median

import pytest
import ray

from maelm_composer.config import FinetuningConfig, SearchSpace, SelectionProtocol, SweepConfig
from maelm_composer.errors import InputError
from maelm_composer.recipe import load_config
from maelm_composer.records import Point, parse_finetuning
from maelm_composer.sweep.run import _count_slots
from maelm_composer.sweep.search import (
    SweepResult,
    TaskResult,
    conclude,
    count_runs,
    list_points,
    list_tasks,
    plan_grid,
    plan_repeats,
    refuse_searched,
    select_point,
)
from maelm_composer.tasks.catalogue import GLUE, find_task
from tests.records import make_finetuning

RECIPES = Path(__file__).resolve().parents[2] / 'yamls/finetune'
SMALL = SearchSpace(learning_rate=[1e-5, 2e-5], batch_size=[16, 32], max_epochs=[2], warmup_proportion=[0.06])


def make_config(**sweep) -> FinetuningConfig:
    search = {'glue_small': dataclasses.replace(SMALL)}  # a copy, which a test may change
    return FinetuningConfig(checkpoint='none', task='rte', sweep=SweepConfig(search=search, **sweep))


def make_record(score, point=(1e-5, 16, 2, 0.06), seed=1, task='rte'):
    """Of a failed run without a score."""
    changes = {'error': 'no memory'} if score is None else {'score': score}
    point = dataclasses.asdict(Point(*point))
    return parse_finetuning(json.dumps(make_finetuning(task, seed=seed, point=point, **changes)), 'x.json')


@pytest.mark.parametrize('selection, runs', [('grid_on_one_seed', 372), ('full_grid', 1680)])
@pytest.mark.parametrize('overlay', [[], ['large_pp.yaml']])
def test_tables_5_and_6_come_to_the_protocols_runs(selection, runs, overlay):
    total = 0
    for recipe in ('glue.yaml', 'squad2.yaml'):
        paths = [str(RECIPES / name) for name in [recipe, *overlay]]
        config = load_config(FinetuningConfig, paths, ['checkpoint=none', f'sweep.selection={selection}'])
        for task in list_tasks(config):
            planned = plan_grid(config, task)
            record = make_record(0.5, tuple(vars(list_points(config, task)[0]).values()))
            planned += plan_repeats(config, task, [record])
            points = [
                (c.task, c.seed, c.learning_rate, c.batch_size, c.max_epochs, c.warmup_proportion) for c in planned
            ]
            assert len(set(points)) == len(points) == count_runs(config, task)
            total += len(points)
    assert total == runs


def test_a_grid_is_in_the_order_of_its_lists():
    points = list_points(make_config(), find_task('rte'))
    assert points == [Point(lr, batch, 2, 0.06) for lr in (1e-5, 2e-5) for batch in (16, 32)]
    assert points == sorted(points)


def test_an_empty_list_is_the_recipes_own_value_and_a_repeated_value_one_run():
    config = make_config()
    config.sweep.search['glue_small'] = SearchSpace(learning_rate=[1e-5, 1e-5])
    assert list_points(config, find_task('rte')) == [Point(1e-5, 32, 3, 0.06)]


def test_a_task_may_have_a_search_space_of_its_own():
    config = make_config()
    config.sweep.search['rte'] = SearchSpace(learning_rate=[7e-5])
    assert list_points(config, find_task('rte')) == [Point(7e-5, 32, 3, 0.06)]
    assert Point(7e-5, 32, 3, 0.06) not in list_points(config, find_task('mrpc'))


def test_what_cannot_be_planned_is_said():
    config = make_config()
    with pytest.raises(InputError, match=r'sweep.search has neither squad2 nor its group squad2: .*squad2.yaml$'):
        list_points(config, find_task('squad2'))
    config.task = None
    with pytest.raises(InputError, match=r'give sweep.tasks or task'):
        list_tasks(config)
    config.sweep.tasks = ['rte', 'colla']
    with pytest.raises(InputError, match='did you mean cola'):
        list_tasks(config)
    config.sweep.tasks = ['rte']
    config.sweep.search['mrcp'] = SearchSpace()
    with pytest.raises(
        InputError, match=r'mrcp: unknown task mrcp; did you mean mrpc\?.*; the groups are glue_large, '
    ):
        list_tasks(config)
    del config.sweep.search['mrcp']
    config.task = 'cola'  # in place of the recipe's list
    assert [task.name for task in list_tasks(config)] == ['cola']
    config.data.max_train_examples_of['mnly'] = 10
    with pytest.raises(InputError, match=r'unknown task mnly; did you mean mnli\?'):
        list_tasks(config)


@pytest.mark.parametrize(
    'pair, message',
    [
        ('seed=7', r'seed: a sweep has its own, sweep\.seeds=\[1, 2\]: set these'),
        ('learning_rate=1e-3', r'learning_rate: the sweep over rte tries sweep\.search\.glue_small\.learning_rate=\['),
    ],
)
def test_a_setting_that_the_sweep_would_ignore_is_refused(pair, message, tmp_path):
    with pytest.raises(InputError, match=message):
        refuse_searched(make_config(seeds=[1, 2]), ['max_seq_len=64', pair])
    file = tmp_path / 'mine.yaml'
    file.write_text(pair.replace('=', ': '))
    with pytest.raises(InputError, match=message):
        refuse_searched(make_config(seeds=[1, 2]), [str(file)])
    file.write_text(file.read_text() + '\nsweep: {search: {}}')
    refuse_searched(make_config(seeds=[1, 2]), [str(file)])


def test_a_setting_that_is_not_searched_is_the_recipes_own():
    config = make_config()
    pairs = ['max_epochs=7', 'task=rte']
    config.max_epochs, config.task = 7, 'rte'
    with pytest.raises(InputError, match=r'max_epochs: the sweep over rte tries'):
        refuse_searched(config, pairs)
    config.sweep.search['glue_small'].max_epochs = []
    refuse_searched(config, pairs)
    assert {point.max_epochs for point in list_points(config, find_task('rte'))} == {7}


def test_a_run_needs_a_machine_that_holds_it_alone(monkeypatch):
    config = make_config()
    config.sweep.cpus_per_run = 2
    machines = [{'CPU': 5, 'GPU': 1}, {'CPU': 4, 'GPU': 4}, {'CPU': 3}]
    monkeypatch.setattr(ray, 'nodes', lambda: [{'Alive': True, 'Resources': there} for there in machines])
    assert _count_slots(config, 0) == 2 + 2 + 1
    assert _count_slots(config, 1) == 1 + 2
    assert _count_slots(config, 0.6) == 1 + 2  # four GPUs have no room for six runs
    assert _count_slots(config, 0.25) == 2 + 2
    del machines[:2]
    with pytest.raises(InputError, match=r'cpus_per_run 2 and .*gpus_per_run 0\.5: no machine .*\(3 CPU, 0 GPU\)'):
        _count_slots(config, 0.5)


def test_a_grid_of_one_point_is_run_on_all_seeds_at_once():
    config, task = make_config(seeds=[1, 2, 3]), find_task('rte')
    config.sweep.search['glue_small'] = SearchSpace(learning_rate=[1e-5])
    assert [run.seed for run in plan_grid(config, task)] == [1, 2, 3]
    records = [make_record(None, seed=1), make_record(0.6, seed=2), make_record(0.5, seed=3)]
    assert plan_repeats(config, task, records) == []
    assert conclude(config, task, records).scores == [0.6, 0.5]


def test_the_best_point_is_repeated_on_the_other_seeds():
    config = make_config(seeds=[3, 1, 2])
    grid = plan_grid(config, find_task('rte'))
    assert [run.seed for run in grid] == [3] * 4
    records = [
        make_record(score, seed=3, point=(c.learning_rate, c.batch_size, 2, 0.06))
        for score, c in zip([0.5, 0.7, 0.6, 0.7], grid, strict=True)
    ]
    repeats = plan_repeats(config, find_task('rte'), records)
    assert [(r.learning_rate, r.batch_size, r.seed) for r in repeats] == [(1e-5, 32, 1), (1e-5, 32, 2)]
    # The repeats may do worse than another point's one seed: the choice was made on the first seed.
    records += [make_record(0.1, (1e-5, 32, 2, 0.06), seed) for seed in (1, 2)]
    result = conclude(config, find_task('rte'), records)
    assert (result.point, [r.seed for r in result.records]) == (Point(1e-5, 32, 2, 0.06), [3, 1, 2])
    assert (median(result.scores), len(result.finished), result.num_planned) == (0.1, 6, 6)


def test_a_full_grid_is_decided_by_the_median():
    config = make_config(selection=SelectionProtocol.full_grid, seeds=[1, 2, 3])
    task = find_task('rte')
    scores = {(1e-5, 16): [0.9, 0.1, 0.2], (2e-5, 16): [0.5, 0.6, 0.4]}
    records = [
        make_record(score, (*point, 2, 0.06), seed)
        for point, of_point in scores.items()
        for seed, score in enumerate(of_point, start=1)
    ]
    assert len(plan_grid(config, task)) == 12
    assert plan_repeats(config, task, records) == []
    assert conclude(config, task, records).point == Point(2e-5, 16, 2, 0.06)


def test_ties_and_failures_do_not_depend_on_the_order_of_the_records():
    records = [make_record(0.7, (lr, batch, 2, 0.06)) for lr in (3e-5, 2e-5) for batch in (32, 16)]
    records.append(make_record(None))
    for seed in range(20):
        random.Random(seed).shuffle(records)
        assert select_point(records) == Point(2e-5, 16, 2, 0.06)
    failed = [record for record in records if record.status == 'failed']
    assert select_point(failed) is None
    assert plan_repeats(make_config(), find_task('rte'), failed) == []
    result = conclude(make_config(), find_task('rte'), failed)
    assert (result.point, result.records, result.finished) == (None, [], [])


def test_a_point_that_was_beaten_after_its_repeats_stays_beaten():
    beaten = [make_record(0.7, (2e-5, 16, 2, 0.06), seed) for seed in range(1, 6)]
    best = [make_record(score, (3e-5, 16, 2, 0.06), seed) for seed, score in enumerate([0.75, *[0.62] * 4], start=1)]
    records = [*beaten, *best, make_record(0.6, (4e-5, 16, 2, 0.06), 1)]
    assert select_point(records) == conclude(make_config(), find_task('rte'), records).point == Point(3e-5, 16, 2, 0.06)


def test_a_point_that_mostly_failed_does_not_change_which_of_the_others_is_best():
    scores = {2e-5: [0.6, *[0.8] * 4], 3e-5: [0.65, *[0.5] * 4], 1e-3: [0.3, *[None] * 4]}
    records = [
        make_record(score, (rate, 16, 2, 0.06), seed)
        for rate, of_rate in scores.items()
        for seed, score in enumerate(of_rate, start=1)
    ]
    assert select_point(records) == Point(2e-5, 16, 2, 0.06)


def test_avg_counts_mnli_matched_once_and_needs_all_eight():
    medians = dict(zip(GLUE, [0.844, 0.917, 0.918, 0.934, 0.631, 0.769, 0.89, 0.88], strict=True))
    tasks = [TaskResult(find_task(name), None, [make_record(score)], [], 1) for name, score in medians.items()]
    assert SweepResult(tasks, []).average == pytest.approx(sum(medians.values()) / 8)
    squad = TaskResult(find_task('squad2'), None, [make_record(0.1)], [], 1)
    assert SweepResult([*tasks, squad], []).average == SweepResult(tasks, []).average
    assert SweepResult(tasks[1:], []).average is None
