"""The task table, and Tables 5 and 6 of the paper in the recipes."""

from pathlib import Path

import pytest

from maelm_composer.config import FinetuningConfig, PretrainingConfig
from maelm_composer.errors import InputError
from maelm_composer.recipe import is_finetuning, load_config
from maelm_composer.tasks.catalogue import GLUE, TASKS, find_task

YAMLS = Path(__file__).parents[2] / 'yamls'
RECIPES = sorted((YAMLS / 'finetune').glob('*.yaml'))
# As printed: peak learning rates by setting, then batch sizes, epochs, warm-up proportions.
SMALL_REST = ([16, 32], [2, 3, 5, 10], [0.06, 0.10])
LARGE_REST = ([32], [2, 3, 5], [0.06])
SQUAD_REST = ([16, 32], [2, 3], [0.06, 0.10])
TABLES_5_AND_6 = {
    'base': {
        'glue_small': ([2e-5, 3e-5, 4e-5, 5e-5], *SMALL_REST),
        'glue_large': ([1e-5, 2e-5, 3e-5, 4e-5], *LARGE_REST),
        'squad2': ([2e-5, 3e-5, 4e-5, 5e-5], *SQUAD_REST),
    },
    'large_pp': {
        'glue_small': ([7e-6, 1e-5, 2e-5, 3e-5], *SMALL_REST),
        'glue_large': ([5e-6, 7e-6, 1e-5, 2e-5], *LARGE_REST),
        'squad2': ([7e-6, 1e-5, 2e-5, 3e-5], *SQUAD_REST),
    },
}


def load(*names: str, overrides: tuple[str, ...] = ()) -> FinetuningConfig:
    paths = [str(YAMLS / 'finetune' / f'{name}.yaml') for name in names]
    return load_config(FinetuningConfig, paths, ['checkpoint=runs/base/latest', *overrides])


@pytest.mark.parametrize('setting', TABLES_5_AND_6)
@pytest.mark.parametrize('name, tasks', [('glue', list(GLUE)), ('squad2', ['squad2'])])
def test_tables_5_and_6_value_by_value(name, tasks, setting):
    config = load(name) if setting == 'base' else load(name, setting)
    assert (config.sweep.tasks or [config.task]) == tasks
    for group in {TASKS[task].group for task in tasks}:
        space = config.sweep.search[group]
        found = (space.learning_rate, space.batch_size, space.max_epochs, space.warmup_proportion)
        assert found == TABLES_5_AND_6[setting][group]
    assert config.max_seq_len == 512
    assert (config.adam_eps, config.adam_beta1, config.adam_beta2) == (1e-6, 0.9, 0.98)
    assert (config.clip_norm, config.dropout, config.weight_decay) == (0, 0.1, 0.01)
    assert config.sweep.seeds == [1, 2, 3, 4, 5]


@pytest.mark.parametrize('name', [*GLUE, 'squad2'])
def test_a_single_run_is_a_point_of_its_search_space(name):
    config = load('squad2' if name == 'squad2' else 'glue', overrides=(f'task={name}',))
    space = config.sweep.search[TASKS[name].group]
    assert config.learning_rate in space.learning_rate
    assert config.batch_size in space.batch_size
    assert config.max_epochs in space.max_epochs
    assert config.warmup_proportion in space.warmup_proportion


def test_the_table_is_glue_and_squad():
    official = [name for name, task in TASKS.items() if not task.is_demo]
    assert official == [*GLUE, 'squad2']
    metrics = {name: TASKS[name].metric for name in official}
    assert metrics == dict.fromkeys(('qqp', 'qnli', 'sst2', 'rte', 'mrpc'), 'accuracy') | {
        'mnli': 'matched_accuracy',
        'cola': 'matthews',
        'stsb': 'spearman',
        'squad2': 'best_exact',
    }
    assert [metric.name for metric in TASKS['mnli'].list_metrics()] == ['matched_accuracy', 'mismatched_accuracy']
    assert {name: TASKS[name].num_outputs for name in official} == dict.fromkeys(official, 2) | {'mnli': 3, 'stsb': 1}
    assert all(task.name == name for name, task in TASKS.items())
    assert {name: TASKS[name].text_columns for name in official} == {
        'mnli': ['premise', 'hypothesis'],
        'qqp': ['question1', 'question2'],
        'qnli': ['question', 'sentence'],
        'squad2': ['question', 'context'],
        **{name: ['sentence'] for name in ('sst2', 'cola')},
        **{name: ['sentence1', 'sentence2'] for name in ('rte', 'mrpc', 'stsb')},
    }
    assert {name: TASKS[name].group for name in GLUE} == {  # Table 5's two columns
        **dict.fromkeys(('mnli', 'qqp', 'qnli', 'sst2'), 'glue_large'),
        **dict.fromkeys(('cola', 'rte', 'mrpc', 'stsb'), 'glue_small'),
    }
    assert {name: TASKS[name].splits for name in official if TASKS[name].splits} == {
        'mnli': {'train': 'train', 'matched': 'validation_matched', 'mismatched': 'validation_mismatched'}
    }


@pytest.mark.parametrize('name, near', [('mrcp', 'mrpc'), ('SST-2', 'sst2'), ('squad', 'squad2'), ('MNLI', 'mnli')])
def test_an_unknown_task_names_the_nearest(name, near):
    with pytest.raises(InputError, match=rf'^unknown task {name}; did you mean {near}\?'):
        find_task(name)


def test_a_task_unlike_any_gets_no_hint():
    with pytest.raises(InputError, match=r'^unknown task imdb; the tasks are mnli, qqp'):
        find_task('imdb')


@pytest.mark.parametrize('path', RECIPES, ids=lambda path: path.stem)
def test_recipes_are_told_apart(path):
    assert is_finetuning([str(path)])
    assert not is_finetuning([str(YAMLS / 'base.yaml'), str(YAMLS / 'roberta.yaml')], ['seed=1'])
    assert is_finetuning([str(YAMLS / 'base.yaml')], ['task=rte'])
    with pytest.raises(InputError, match='unknown key'):
        load_config(PretrainingConfig, [str(path)])


@pytest.mark.parametrize(
    'override, message',
    [
        ('data.source=files', 'data.folder must name'),
        ('data.folder=mine', 'data.folder mine is read with data.source=files only'),
        ('dropout=1', 'dropout 1.0: must be below 1'),
        ('warmup_proportion=-0.1', 'must be at least 0'),
        (
            'sweep.search.glue_small.learning_rate=[1e-5,0]',
            'sweep.search.glue_small.learning_rate 0.0: must be positive',
        ),
        ('sweep.search.glue_small.batch=[1]', 'unknown key sweep.search.glue_small.batch; did you mean'),
        ('data.max_train_examples_of.mnli=0', 'data.max_train_examples_of.mnli 0: must be positive'),
        ('sweep.search.mrpc=[1]', 'sweep: the key, or one below it, must be key: value pairs, not a list'),
        ('sweep.seeds=[1,1]', 'a seed is listed twice'),
        ('sweep.seeds=[]', 'sweep.seeds is empty'),
        ('max_seq_len=8', 'must be at least 16'),
        ('max_epoch=3', 'did you mean max_epochs'),
    ],
)
def test_what_no_run_could_use_is_refused(override, message):
    with pytest.raises(InputError) as error:
        load('glue', overrides=('task=rte', override))
    assert message in str(error.value)
