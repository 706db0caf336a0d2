"""Rows of tasks from files, the Hub's library and the demo's generator; bad data gives one line of error."""

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from maelm_composer.config import TaskDataConfig, TaskSource
from maelm_composer.errors import InputError
from maelm_composer.tasks import sources
from maelm_composer.tasks.catalogue import TASKS
from maelm_composer.tasks.sources import TextExample, count_rows, load_task_data, sample_evenly

RTE = {'sentence1': ['a', 'b', 'c'], 'sentence2': ['d', 'e', 'f'], 'label': [0, 1, 0], 'idx': [7, 8, 9]}
LATIN_1 = pyarrow.array([b'caf\xe9 a', b'b', b'c']).view(pyarrow.string())
SQUAD = {
    'id': ['x', 'y'],
    'title': ['t', 't'],
    'context': ['one two', 'three'],
    'question': ['which', 'what'],
    'answers': [{'text': ['two'], 'answer_start': [4]}, {'text': [], 'answer_start': []}],
}


@pytest.fixture(autouse=True)
def nothing_read_before():
    sources._load.cache_clear()


@pytest.fixture
def load(tmp_path):
    """``load('rte', train={...}, dev={...})``: write the columns, then read the task."""

    def load(name, max_train_examples=None, max_train_examples_of=None, **splits):
        folder = tmp_path / ('squad_v2' if TASKS[name].kind == 'span' else f'glue/{name}')
        folder.mkdir(parents=True, exist_ok=True)
        for split, columns in splits.items():
            pyarrow.parquet.write_table(pyarrow.table(columns), folder / f'{split}.parquet')
        config = TaskDataConfig(TaskSource.files, str(tmp_path), max_train_examples, max_train_examples_of or {})
        return load_task_data(TASKS[name], config)

    return load


def test_rows_of_files(load):
    data = load('rte', train=RTE, dev=RTE)
    assert vars(data.train[0]) == {'id': '7', 'texts': ('a', 'd'), 'label': 0}
    assert list(data.evaluation) == ['dev']
    assert data.evaluation['dev'] == data.train
    data = load('squad2', train=SQUAD, dev=SQUAD)
    row = {'id': 'x', 'question': 'which', 'context': 'one two', 'answers_text': ('two',), 'answer_starts': (4,)}
    assert vars(data.train[0]) == row
    assert data.train[1].answers_text == ()
    one, two = load('squad2', train=SQUAD | {'context': ['one two', 'one two']}, dev=SQUAD).train
    assert one.context is two.context  # a passage is kept once


def test_files_are_read_once_unless_they_change(load):
    data = load('rte', train=RTE, dev=RTE)
    assert load('rte') is data
    assert load('rte', max_train_examples=2) is not data
    changed = load('rte', train=RTE | {'label': [1, 1, 1]})
    assert [row.label for row in changed.train] == [1, 1, 1]


def test_a_task_may_have_a_sample_of_its_own_size(load):
    sizes = {'rte': 1}
    assert len(load('rte', 2, sizes, train=RTE, dev=RTE).train) == 1
    assert len(load('mrpc', 2, sizes, train=RTE | {'sentence1': ['a', 'b', 'e']}, dev=RTE).train) == 2


def test_every_task_is_read(task_folder):
    for name, task in TASKS.items():
        if not task.is_demo:
            config = TaskDataConfig(TaskSource.files, str(task_folder))
            data = load_task_data(task, config)
            assert len(data.train) == 96
            assert count_rows(task, config) == (96, 48 * len(task.eval_splits))
            assert {split: len(rows) for split, rows in data.evaluation.items()} == dict.fromkeys(task.eval_splits, 48)
            if name == 'mnli':
                assert data.evaluation['matched'] != data.evaluation['mismatched']


def test_the_hash_is_of_the_rows_used(load):
    before = load('rte', train=RTE, dev=RTE).hash
    assert load('rte', train=RTE, dev=RTE).hash == before
    assert load('rte', max_train_examples=3).hash == before
    assert load('rte', max_train_examples=2).hash != before
    assert load('rte', dev=RTE | {'label': [0, 1, 1]}).hash != before
    assert load('rte', train=RTE | {'sentence1': ['a', 'b', 'd']}, dev=RTE).hash != before


def test_a_sample_is_even_nested_and_in_order(task_folder):
    rows = load_task_data(TASKS['sst2'], TaskDataConfig(TaskSource.files, str(task_folder))).train
    numbers = [int(row.id) for row in sample_evenly(rows, 40)]
    assert numbers == sorted(numbers)
    assert len(numbers) == 40
    assert {row.id for row in sample_evenly(rows, 20)} < {str(n) for n in numbers}
    assert 8 < sum(n < 48 for n in numbers) < 32  # from the whole file
    assert [row.id for row in sample_evenly(rows[::-1], 40)] == [str(n) for n in numbers[::-1]]
    plain = [TextExample(str(i), (f'text {i}',), i % 2) for i in range(40)]
    assert [int(row.id) for row in sample_evenly(plain, 8)] == [1, 9, 12, 22, 27, 28, 29, 36]  # as in published results


@pytest.mark.parametrize(
    'change, message',
    [
        ({'sentence2': None}, "no column 'sentence2' (it has: sentence1, label, idx)"),
        ({'label': [0, 2, 0]}, 'row 1 has label 2, outside 0..1 of task rte'),
        ({'label': [0, 1, -1]}, 'row 2 has label -1, outside 0..1 of task rte (-1 marks a test split'),
        ({'label': [0, 0.5, 1]}, 'row 1 has label 0.5'),
        ({'label': ['a', 'b', 'c']}, "row 0 has label 'a', none of the label_names of rte: entailment, not_entailment"),
        ({'label': [0, None, 1]}, "column 'label' holds 1 empty cells"),
        ({'sentence1': [1, 2, 3]}, "column 'sentence1' holds int64, not text"),
        ({'sentence1': ['a', None, 'c']}, "column 'sentence1' holds 1 empty cells"),
        ({'sentence1': LATIN_1}, "column 'sentence1' is not UTF-8 (invalid continuation byte): convert it first"),
        ({'label': LATIN_1}, "column 'label' is not UTF-8"),
        ({name: pyarrow.array([], pyarrow.string()) for name in RTE}, 'holds no rows'),
    ],
)
def test_rows_that_are_not_the_tasks(load, change, message):
    wrong = {name: column for name, column in (RTE | change).items() if column is not None}
    for splits in ({'train': wrong, 'dev': RTE}, {'train': RTE, 'dev': wrong}):
        with pytest.raises(InputError) as error:
            load('rte', **splits)
        assert message in str(error.value)
        assert f'{"train" if splits["train"] is wrong else "dev"}.parquet' in str(error.value)


def test_files_that_are_not_there(load, tmp_path):
    with pytest.raises(InputError, match=r'task rte: .*glue/rte/train\.parquet is not there'):
        load('rte')
    with pytest.raises(InputError, match=r'dev\.parquet is not there'):
        load('rte', train=RTE)
    with pytest.raises(InputError, match=r'glue/mrpc is not there'):
        load_task_data(TASKS['mrpc'], TaskDataConfig(TaskSource.files, str(tmp_path)))
    with pytest.raises(InputError, match=r'nowhere is not there'):
        load_task_data(TASKS['mrpc'], TaskDataConfig(TaskSource.files, str(tmp_path / 'nowhere')))
    (tmp_path / 'glue/rte/dev.parquet').write_text('text')
    with pytest.raises(InputError, match=r'dev\.parquet: not a readable \.parquet file'):
        load('rte')


def test_answers_and_starts_belong_together(load):
    with pytest.raises(InputError, match="column 'id' holds 1 ids twice"):
        load('squad2', train=SQUAD | {'id': ['x', 'x']}, dev=SQUAD)
    wrong = SQUAD | {'answers': [{'text': ['two'], 'answer_start': [4, 5]}, {'text': [], 'answer_start': []}]}
    with pytest.raises(InputError, match='1 answers with 2 starts'):
        load('squad2', train=wrong, dev=SQUAD)
    for answer in ({'text': [None], 'answer_start': [0]}, {'text': ['two'], 'answer_start': [None]}):
        with pytest.raises(InputError, match='text must hold texts, and answer_start whole numbers'):
            load('squad2', train=SQUAD | {'answers': [answer] * 2}, dev=SQUAD)
    with pytest.raises(InputError, match="'answers' must hold the lists"):
        load('squad2', train=SQUAD | {'answers': ['two', '']}, dev=SQUAD)
    with pytest.raises(InputError, match="'answers' must hold the lists"):
        load('squad2', train=SQUAD | {'answers': [{'text': None, 'answer_start': None}] * 2}, dev=SQUAD)


def test_the_hub_gives_the_same_rows(load, monkeypatch):
    """`load_dataset` is replaced by a function that records its arguments and returns a real Dataset."""
    asked = []

    def load_dataset(name, subset, split):
        asked.append((name, subset, split))
        return datasets.Dataset.from_dict(RTE)

    monkeypatch.setattr(datasets, 'load_dataset', load_dataset)
    data = load_task_data(TASKS['rte'], TaskDataConfig(TaskSource.huggingface))
    assert asked == [('nyu-mll/glue', 'rte', 'train'), ('nyu-mll/glue', 'rte', 'validation')]
    assert data == load('rte', train=RTE, dev=RTE)


def test_no_network_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', tmp_path)  # where GLUE may lie
    monkeypatch.setattr(datasets.config, 'HF_HUB_OFFLINE', True)
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
    with pytest.raises(
        InputError, match=r'^dataset nyu-mll/glue, train, cannot be loaded.*data\.source=files'
    ) as error:
        load_task_data(TASKS['rte'], TaskDataConfig(TaskSource.huggingface))
    assert '\n' not in str(error.value)


@pytest.mark.parametrize('name', [name for name, task in TASKS.items() if task.is_demo])
def test_demo_tasks(name):
    data = load_task_data(TASKS[name], TaskDataConfig(TaskSource.demo))
    assert (len(data.train), len(data.evaluation['dev'])) == (600, 200)
    if TASKS[name].kind == 'span':
        train, dev = ({row.context for row in rows} for rows in (data.train, data.evaluation['dev']))
        is_answered = [bool(row.answers_text) for row in data.train]
        assert 0.6 < sum(is_answered) / 600 < 0.7
        for row in data.train:
            for text, start in zip(row.answers_text, row.answer_starts, strict=True):
                assert row.context[start : start + len(text)] == text
    else:
        train, dev = ({' '.join(row.texts) for row in rows} for rows in (data.train, data.evaluation['dev']))
        labels = [row.label for row in data.train]
        assert abs(sum(labels) / max(labels) - 300) < 40
    assert not train & dev


def test_a_source_without_the_task(task_folder):
    with pytest.raises(InputError, match=r'task demo_span is made by data\.source=demo only'):
        load_task_data(TASKS['demo_span'], TaskDataConfig(TaskSource.files, str(task_folder)))
    with pytest.raises(InputError, match=r'task rte is not in data\.source=demo'):
        load_task_data(TASKS['rte'], TaskDataConfig(TaskSource.demo))
