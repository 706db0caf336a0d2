"""Tasks that a recipe declares: what is refused, and rows of files in other layouts."""

import csv
import dataclasses
import json
import re
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from maelm_composer.config import FinetuningConfig, SuiteConfig, TaskConfig, TaskDataConfig, TaskKind
from maelm_composer.errors import InputError
from maelm_composer.recipe import load_config, split_arguments
from maelm_composer.tasks import sources
from maelm_composer.tasks.catalogue import find_task
from maelm_composer.tasks.metrics import score_constant
from maelm_composer.tasks.sources import load_task_data, read_unlabelled

PAGE = Path(__file__).parents[2] / 'docs/tasks.md'
NUMBERS = {'kind': TaskKind.regression, 'label_names': [], 'label_range': [-1, 1]}
ANSWERS = {'kind': TaskKind.span, 'label_names': []}
HEADER = 'review', 'verdict'
ROWS = [('A "calm",\nwarm film', 'good'), ('007', 'bad'), ('dull', 'bad')]


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    sources._load.cache_clear()
    monkeypatch.chdir(tmp_path)


def write_csv(name: str, rows=ROWS, header=HEADER) -> str:
    with open(name, 'w', newline='') as file:
        csv.writer(file).writerows([header, *rows])
    return name


def declare(**changes) -> TaskConfig:
    declaration = TaskConfig(
        kind=TaskKind.classification,
        text_columns=['review'],
        label_column='verdict',
        label_names=['bad', 'good'],
        files={'train': 'train.csv', 'dev': 'dev.csv'},
    )
    return dataclasses.replace(declaration, **changes)


def load(declaration: TaskConfig, **config):
    return load_task_data(find_task('reviews', {'reviews': declaration}), TaskDataConfig(**config))


def test_the_recipes_of_the_page_declare_tasks():
    for number, text in enumerate(re.findall(r'```yaml\n(.*?)```', PAGE.read_text(), re.S)):
        Path(f'{number}.yaml').write_text(text)
    Path('0.yaml').rename('reviews.yaml')
    files, values = split_arguments(load_config(SuiteConfig, ['1.yaml']).finetuning)
    Path('a=b.yaml').touch()
    assert split_arguments(['a=b.yaml', 'a=b']) == (['a=b.yaml'], ['a=b'])
    values += ['checkpoint=x', 'tasks.reviews.files.train=more.csv']
    config = load_config(FinetuningConfig, [*files, '2.yaml'], values)
    assert config.data.limit('reviews') == 5000
    reviews, tweets = (find_task(name, config.tasks) for name in config.tasks)
    assert [metric.name for metric in reviews.list_metrics()] == ['accuracy', 'f1']
    assert reviews.files == {'train': 'more.csv', 'dev': 'reviews/dev.csv'}
    assert (tweets.eval_splits, tweets.num_outputs, tweets.metric) == (['dev'], 3, 'accuracy')


def test_names_and_numbers_of_classes_are_the_same_labels():
    write_csv('train.csv')
    write_csv('dev.csv')
    data = load(declare())
    assert [vars(row) for row in data.train] == [
        {'id': str(number), 'texts': (text,), 'label': int(label == 'good')}
        for number, (text, label) in enumerate(ROWS)
    ]
    write_csv('numbers.csv', [(text, ' 1' if label == 'good' else '0.0') for text, label in ROWS])
    lines = [json.dumps({'review': text, 'verdict': label}) for text, label in ROWS]
    Path('train.jsonl').write_text('\n'.join(lines))
    columns = {
        name: pyarrow.array(cells).dictionary_encode()
        for name, cells in zip(HEADER, zip(*ROWS, strict=True), strict=True)
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), 'train.parquet')
    for train in ('numbers.csv', 'train.jsonl', 'train.parquet'):
        assert load(declare(files={'train': train, 'dev': 'dev.csv'})).hash == data.hash
    names = [row.texts[0] for row in read_unlabelled(find_task('reviews', {'reviews': declare()}), Path('train.csv'))]
    assert names == [text for text, _ in ROWS]


def test_ids_stay_as_they_are_written():
    spelled = ['0001', '0x1F', '56e10514', 'x' * 2_000_000]  # and however long
    task = find_task('reviews', {'reviews': declare()})
    Path('rows.csv').write_text('idx,review\n' + ''.join(f'{name},{name}\n' for name in spelled))
    dates = ['2021-05-03', '2021-05-04']
    Path('rows.jsonl').write_text('\n'.join(json.dumps({'idx': date, 'review': date}) for date in dates))
    for file, names in (('rows.csv', spelled), ('rows.jsonl', dates)):
        assert [(row.id, *row.texts) for row in read_unlabelled(task, Path(file))] == [(n, n) for n in names]
    span = find_task('squad2')
    Path('mongo.jsonl').write_text(json.dumps({'id': {'$oid': 'a'}, 'question': 'Who?', 'context': 'He.'}))
    assert [row.id for row in read_unlabelled(span, Path('mongo.jsonl'))] == ["{'$oid': 'a'}"]


def test_classes_with_numbers_as_names_are_never_positions():
    for name in ('train.csv', 'dev.csv'):
        write_csv(name, [('a', 1), ('b', 2), ('c', 3)])
    assert [row.label for row in load(declare(label_names=['1', '2', '3'])).train] == [0, 1, 2]
    names = ['1.0', '-1', '01']
    for name in ('train.csv', 'dev.csv'):
        write_csv(name, zip('abc', names, strict=True))
    assert [row.label for row in load(declare(label_names=names)).train] == [0, 1, 2]


def test_only_the_tasks_columns_must_be_of_one_type():
    lines = [f'text {number},good,{number}\n' for number in range(100_000)]  # more than the reader looks at
    Path('train.csv').write_text('review,verdict,price\n' + ''.join(lines) + 'end,bad,free\n')
    write_csv('dev.csv')
    assert [row.label for row in load(declare()).train[-2:]] == [1, 0]
    task = find_task('reviews', {'reviews': declare(**NUMBERS)})
    Path('rows.csv').write_text('review,verdict,verdict\n' + ''.join(lines) + 'end,?,?\n')
    Path('rows.jsonl').write_text('{"review": "a", "verdict": 9}\n{"review": "b", "verdict": "?"}\n')
    for name, count in (('rows.csv', 100_001), ('rows.jsonl', 2)):  # labels are not read
        assert len(read_unlabelled(task, Path(name))) == count


def test_a_folder_of_the_datasets_library():
    Path('folder').mkdir()
    write_csv('folder/train.csv')
    write_csv('folder/test.csv', ROWS[:2])
    hub = declare(files={}, dataset='./folder', splits={'train': 'train', 'dev': 'test'})
    files = declare(files={'train': 'folder/train.csv', 'dev': 'folder/test.csv'})
    assert load(hub) == load(files)
    with pytest.raises(InputError, match=r'^dataset \./folder, nothing, cannot be loaded: Unknown split'):
        load(dataclasses.replace(hub, splits={'train': 'train', 'dev': 'nothing'}))


def write_class_labels(names):
    """A file and a data set of two rows, whose labels are 0 and 1 with these names; a task for each."""
    Path('numbered').mkdir()
    features = datasets.Features({'review': datasets.Value('string'), 'verdict': datasets.ClassLabel(2, names)})
    rows = datasets.Dataset.from_dict({'review': ['calm', 'dull'], 'verdict': [0, 1]}, features)
    rows.to_parquet('numbered/train.parquet')
    files = dict.fromkeys(('train', 'dev'), 'numbered/train.parquet')
    splits = {'train': 'train', 'dev': 'train'}
    return declare(files=files), declare(files={}, dataset='./numbered', splits=splits)


@pytest.mark.parametrize('names', [['good', 'bad'], ['Good', 'Bad'], ['good', 'neutral'], ['awful', 'bad']])
def test_classes_that_are_numbered_otherwise_are_refused(names):
    for task in write_class_labels(names):
        message = f'numbers its classes {", ".join(names)}: give label_names of reviews in this order'
        with pytest.raises(InputError, match=message):
            load(task)
        assert [row.label for row in load(dataclasses.replace(task, label_names=['good', 'bad'])).train] == [0, 1]


@pytest.mark.parametrize('ours', [['1', '0'], ['1', '2'], ['worst', 'best']])
def test_labels_of_known_classes_are_positions_whatever_their_names(ours):
    for task in write_class_labels(['1', '0'] if '0' in ours else ['1', '2']):
        assert [row.label for row in load(dataclasses.replace(task, label_names=ours)).train] == [0, 1]


@pytest.mark.parametrize('written', [b'{', b'[]', b'0', b'{"info": {"features": {"verdict": {"names": [0]}}}}'])
def test_a_description_that_is_not_of_the_datasets_library_names_no_classes(written):
    rows = pyarrow.table({'review': ['calm', 'dull'], 'verdict': [0, 1]}).replace_schema_metadata(
        {'huggingface': written}
    )
    pyarrow.parquet.write_table(rows, 'rows.parquet')
    task = declare(files=dict.fromkeys(('train', 'dev'), 'rows.parquet'))
    assert [row.label for row in load(task).train] == [0, 1]


def test_what_looks_like_a_date_or_nothing_is_a_name():
    names = ['2020-01-01', 'NA']
    for name in ('train.csv', 'dev.csv'):
        write_csv(name, zip('ab', names, strict=True))
    write_csv('one.csv', [('a', 'NA'), ('b', 'NA')])
    assert [row.label for row in load(declare(label_names=names)).train] == [0, 1]
    one = {'train': 'one.csv', 'dev': 'dev.csv'}
    assert [row.label for row in load(declare(label_names=names, files=one)).train] == [1, 1]


def test_columns_of_jsonl_that_are_not_read_may_hold_anything():
    rows = [
        {'review': text, 'verdict': label, 'user': user} for (text, label), user in zip(ROWS, (1, 'x', 2), strict=True)
    ]
    for name in ('train.jsonl', 'dev.jsonl'):
        Path(name).write_text('\n'.join(map(json.dumps, rows)) + '\n\n')
    task = declare(files={'train': 'train.jsonl', 'dev': 'dev.jsonl'})
    assert [row.texts for row in load(task).train] == [(text,) for text, _ in ROWS]
    answers = {'text': ['2021-05-03'], 'answer_start': [0]}
    span = {'id': 1, 'question': 'When?', 'context': '2021-05-03', 'answers': answers}
    Path('span.jsonl').write_text(json.dumps(span))
    declared = declare(**ANSWERS | {'text_columns': ['question', 'context'], 'label_column': 'answers'})
    found = load(dataclasses.replace(declared, files=dict.fromkeys(('train', 'dev'), 'span.jsonl'))).train
    assert [(row.id, row.answers_text) for row in found] == [('1', ('2021-05-03',))]


@pytest.mark.parametrize(
    'line, message', [('[1]', 'line 2 is no object'), ('{"review"', 'Expecting'), ('\xff', 'utf-8')]
)
def test_a_damaged_line_of_jsonl_is_named(line, message):
    first = json.dumps({'review': 'a', 'verdict': 'good'})
    Path('train.jsonl').write_bytes(f'{first}\n{line}\n'.encode('latin-1'))
    with pytest.raises(InputError, match=rf'train\.jsonl: not a readable \.jsonl file \(.*{message}'):
        load(declare(files=dict.fromkeys(('train', 'dev'), 'train.jsonl')))


def test_numbers_of_any_range():
    for name in ('train.csv', 'dev.csv'):
        write_csv(name, [('a', -1), ('b', 0.5)])
    config = load_config(FinetuningConfig, [], ['checkpoint=x', 'tasks.own={kind: regression, label_range: [-1, 1]}'])
    assert config.tasks['own'].label_range == [-1, 1]
    assert [row.label for row in load(declare(**NUMBERS)).train] == [-1, 0.5]
    task = find_task('reviews', {'reviews': declare(**NUMBERS)})
    assert [task.normalize(-1), task.normalize(0.5), task.denormalize(0.75)] == [0, 0.75, 0.5]
    with pytest.raises(InputError, match=r'row 0 has label -1, outside 0\.\.1 of task reviews'):
        load(declare(**NUMBERS | {'label_range': [0, 1]}))


def test_several_splits_have_their_own_metrics():
    for name in ('train.csv', 'easy.csv', 'hard.csv'):
        write_csv(name)
    declaration = declare(metrics=['f1'], files={name: f'{name}.csv' for name in ('easy', 'train', 'hard')})
    task = find_task('reviews', {'reviews': declaration})
    assert [metric.name for metric in task.list_metrics()] == ['easy_f1', 'hard_f1']
    data = load(declaration)
    assert score_constant(task, np.array([row.label for row in data.train])) == pytest.approx(
        0.5
    )  # precision 1/3, recall 1


def test_a_dev_sample_is_that_of_the_training_limit():
    write_csv('train.csv')
    write_csv('dev.csv')
    whole, two = load(declare()), load(declare(), max_train_examples=2, max_dev_examples=2)
    assert two.evaluation['dev'] == two.train
    assert (len(two.train), len(whole.evaluation['dev'])) == (2, 3)
    assert len({whole.hash, two.hash, load(declare(), max_dev_examples=2).hash}) == 3


@pytest.mark.parametrize(
    'change, message',
    [
        ({'label_names': ['awful', 'good']}, "row 1 has label 'bad', none of the label_names of reviews: awful, good"),
        ({'files': {'train': 'twice.csv', 'dev': 'dev.csv'}}, "twice.csv: two columns are called 'review': rename one"),
        ({'files': {'train': 'latin.csv', 'dev': 'dev.csv'}}, 'latin.csv: not a readable .csv file'),
        ({'label_column': 'label'}, "no column 'label' (it has: review, verdict)"),
        ({'text_columns': ['text']}, "no column 'text' (it has: review, verdict)"),
        ({'files': {'train': 'excel.csv', 'dev': 'dev.csv'}}, "excel.csv: the header has ';' and no comma: "),
        ({'files': {'train': 'train.csv', 'dev': 'empty.csv'}}, 'empty.csv: not a readable .csv file'),
        ({'files': {'train': 'train.csv', 'dev': 'header.csv'}}, 'header.csv: holds no rows'),
        ({'files': {'train': 'train.csv', 'dev': 'none.csv'}}, 'none.csv is not there'),
        ({'files': {'train': 'train.csv', 'dev': 'deep.jsonl'}}, 'deep.jsonl: not a readable .jsonl file'),
        (
            {'files': {'train': 'train.csv', 'dev': 'half.csv'}},
            'half.csv: row 0 has label 0.5, not a whole number in 0..1',
        ),
        ({'files': {'train': 'train.csv', 'dev': 'rows.txt'}}, 'rows are read from .parquet, .csv, .jsonl files'),
        (
            {'kind': TaskKind.regression, 'label_names': [], 'label_range': [0, 1]},
            "'verdict' holds string, not numbers",
        ),
        (
            {
                'kind': TaskKind.span,
                'label_names': [],
                'text_columns': ['review', 'passage'],
                'label_column': 'verdict',
                'files': {'train': 'asked.csv', 'dev': 'dev.csv'},
            },
            "column 'verdict' must hold the lists text and answer_start",
        ),
    ],
)
def test_rows_that_are_not_the_declared_ones(change, message):
    write_csv('train.csv')
    write_csv('dev.csv')
    write_csv('header.csv', [])
    write_csv('half.csv', [('a', 0.5)])
    write_csv('asked.csv', [('Who?', 'He.', 'He')], ('review', 'passage', 'verdict'))
    Path('deep.jsonl').write_text('[' * 100_000)
    write_csv('twice.csv', [('a', 'good', 'b')], ('review', 'verdict', 'review'))
    Path('excel.csv').write_text('review;verdict\na, and b;good\n')
    Path('latin.csv').write_bytes(b'review,verdict,caf\xe9\na,good,b\n')
    for name in ('empty.csv', 'rows.txt'):
        Path(name).touch()
    with pytest.raises(InputError, match=re.escape(message)) as error:
        load(declare(**change))
    assert str(error.value).count('not a readable') == message.count('not a readable')


@pytest.mark.parametrize(
    'name, change, message',
    [
        ('rte', {}, r'tasks\.rte: rte is the name of a built-in task; choose another'),
        ('squad2', {}, 'built-in task'),
        ('glue_small', {}, 'built-in search space'),
        ('my task', {}, 'the name is part of file names'),
        ('own', {'text_columns': []}, r'tasks\.own\.text_columns \[\]: a classification task reads one or two columns'),
        ('own', ANSWERS, 'a span task reads two columns'),
        ('own', {'text_columns': ['verdict']}, "'verdict' is two of its columns: text_columns and label_column name"),
        ('own', {'text_columns': ['a', 'a']}, "'a' is two of its columns"),
        ('own', {'label_names': ['one']}, r"label_names \['one'\]: name two or more classes"),
        ('own', {'label_names': ['a', 'a']}, 'a name is listed twice'),
        ('own', NUMBERS | {'label_names': ['a', 'b']}, 'a regression task has no classes'),
        ('own', NUMBERS | {'label_range': [1, 0]}, 'give the least and the greatest label'),
        ('own', {'label_range': [0, 1]}, 'only a regression task has a range'),
        (
            'own',
            ANSWERS | {'text_columns': ['q', 'p'], 'metrics': ['best_f1_threshold']},
            'the first is the score, and best_f1_thr',
        ),
        ('own', {'metrics': ['f2']}, 'f2 is no metric of a classification task: accuracy, f1, matthews'),
        ('own', {'metrics': ['f1'], 'label_names': ['a', 'b', 'c']}, 'f1 is defined for two classes'),
        ('own', {'files': {}}, 'give either files or dataset'),
        ('own', {'dataset': 'x'}, 'give either files or dataset'),
        ('own', {'config_name': 'x'}, 'splits and config_name are about dataset'),
        ('own', {'files': {'train': 'x'}}, r'tasks\.own\.files names train: give train and one or more splits'),
        ('own', {'group': 'glue'}, 'group glue: one of glue_large, glue_small, squad2'),
    ],
)
def test_a_declaration_that_no_run_could_use(name, change, message):
    with pytest.raises(InputError, match=message) as error:
        find_task(name, {name: declare(**change)})
    assert '\n' not in str(error.value)


@pytest.mark.parametrize(
    'override, message',
    [
        ('tasks.own.kind=ranking', "tasks.own.kind: Invalid value 'ranking', expected one of [classification, "),
        ('tasks.own.text_column=[a]', 'unknown key tasks.own.text_column; did you mean tasks.own.text_columns?'),
        ('tasks.own.metrics=[f1]', 'tasks.own.kind is not set'),
        ('tasks=[own]', 'tasks: the key, or one below it, must be key: value pairs, not a list'),
    ],
)
def test_a_recipe_that_declares_nothing(override, message):
    with pytest.raises(InputError) as error:
        load_config(FinetuningConfig, [], ['checkpoint=x', override])
    assert message in str(error.value)


def test_an_unknown_task_may_be_near_an_own_one():
    with pytest.raises(InputError, match=r'^unknown task review; did you mean reviews\?'):
        find_task('review', {'reviews': declare()})
