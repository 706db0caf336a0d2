"""results/<scale>/records holds one experiment."""

import json

import pytest

from maelm_composer.files import parse_json
from maelm_composer.records import parse_finetuning, parse_rank
from maelm_composer.suite.run import CURVE_ROWS, collect_finetunings, collect_rank, collect_run, thin_curve
from tests.records import make_finetuning, make_pretraining, make_rank

from .conftest import write_record

HEAD = 'samples,train_loss,eval_loss'


def names(folder):
    return sorted(path.name for path in folder.glob('*.json'))


def finetuning(key, run='demo', samples=9600, task='rte'):
    return make_finetuning(task, run, samples, key=key)


@pytest.fixture
def records(tmp_path):
    """Of the run demo and of another."""
    folder = tmp_path / 'records'
    write_record(folder / 'pretraining/demo.json', make_pretraining('demo', training_seconds=17))
    for key, run, samples, task in (
        ('old', 'demo', 9600, 'rte'), ('early', 'demo', 3200, 'rte'), ('cola', 'demo', 9600, 'cola'),
        ('other', 'demo-roberta', 9600, 'rte'),
    ):  # fmt: skip
        write_record(folder / f'finetuning/{key}.json', finetuning(key, run, samples, task))
    write_record(folder / 'rank/r.json', make_rank('demo', 9600, key='r'))
    return folder


@pytest.mark.parametrize('seed, left', [(17, ['cola', 'early', 'old', 'other']), (18, ['other'])])
def test_another_run_of_the_same_name_takes_the_old_ones_records_away(tmp_path, records, seed, left):
    run = make_pretraining('demo', training_seconds=seed)  # 18: the same recipe run again
    write_record(tmp_path / 'demo/record.json', run)
    (tmp_path / 'demo/metrics.csv').write_text(f'{HEAD}\n64,7.0,\n')
    collect_run(tmp_path / 'demo', records)
    assert parse_json((records / 'pretraining/demo.json').read_text(), 'demo.json') == run
    assert names(records / 'finetuning') == [f'{key}.json' for key in left]
    assert names(records / 'rank') == ([] if seed == 18 else ['r.json'])


def test_records_of_another_protocol_go_and_all_others_stay(records):
    collect_finetunings([parse_finetuning(json.dumps(finetuning('new')), 'x.json')], records)
    assert names(records / 'finetuning') == ['cola.json', 'early.json', 'new.json', 'other.json']


def test_a_search_that_fails_now_leaves_what_had_finished(records):
    write_record(records / 'finetuning/second.json', finetuning('second'))
    for key in ('old', 'new'):
        failed = make_finetuning('rte', 'demo', 9600, key=key, status='failed', error='no memory left')
        collect_finetunings([parse_finetuning(json.dumps(failed), 'x.json')], records)
    assert names(records / 'finetuning') == [
        f'{key}.json' for key in ('cola', 'early', 'new', 'old', 'other', 'second')
    ]
    assert parse_finetuning((records / 'finetuning/old.json').read_text(), 'old.json').status == 'finished'


def test_a_published_failure_names_no_place_of_a_machine(records):
    trace = 'File "/home/me/maelm_composer/finetuning/fit.py", line 88'
    failed = make_finetuning(
        'rte', 'demo', 9600, key='new', status='failed', error='/home/me/rte: loss is nan', traceback=trace
    )
    collect_finetunings([parse_finetuning(json.dumps(failed), 'x.json')], records)
    published = (records / 'finetuning/new.json').read_text()
    assert '"rte: loss is nan"' in published
    assert '/home/me' not in published


def test_a_checkpoint_has_one_rank_record(records):
    for key, run in (('one', 'demo'), ('two', 'demo'), ('other', 'demo-roberta')):
        collect_rank(parse_rank(json.dumps(make_rank(run, key=key)), 'x.json'), records)
    assert names(records / 'rank') == ['other.json', 'two.json']


def test_a_long_log_is_thinned_but_keeps_every_validation():
    rows = [f'{i},7.0,{"6.5" if i % 977 == 0 else ""}' for i in range(1, 10_001)]
    kept = thin_curve('\n'.join([HEAD, *rows]) + '\n').splitlines()
    assert kept[0] == HEAD
    assert [row for row in kept if row.endswith('6.5')] == [row for row in rows if row.endswith('6.5')]
    assert CURVE_ROWS <= len(kept) <= CURVE_ROWS + 1 + 10
    assert thin_curve(f'{HEAD}\n1,7.0,\n') == f'{HEAD}\n1,7.0,\n'


def test_published_records_name_no_place_of_a_machine(records):
    collect_rank(parse_rank(json.dumps(make_rank('demo', 9600, key='r')), 'x.json'), records)
    text = (records / 'rank' / 'r.json').read_text()
    assert '/a/machine' not in text
    assert '"samples-9600"' in text


def test_a_published_record_of_the_same_values_is_left_as_it_is(records):
    """Its fields may stand in the order of an earlier version."""
    path, plain = records / 'rank/r.json', make_rank('demo', 9600, key='r')
    record = parse_rank(json.dumps(plain), 'x.json')
    collect_rank(record, records)  # with file names in place of paths
    published = json.loads(path.read_text())
    path.write_text(json.dumps(dict(reversed(published.items()))))
    before = path.read_text()
    collect_rank(record, records)
    assert path.read_text() == before
