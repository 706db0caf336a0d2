"""What a sweep prints: whole words and numbers, whoever reads them."""

import contextlib
import dataclasses
import json
import os
import re

from maelm_composer.records import Point, parse_finetuning
from maelm_composer.sweep.report import Progress, Standing, print_result
from maelm_composer.sweep.search import SweepResult, TaskResult
from maelm_composer.tasks.catalogue import GLUE, find_task
from tests.records import make_finetuning

POINT = Point(2e-5, 16, 3, 0.06)


def make_record(name, score, seed=1):
    """Of a failed run without a score."""
    changes = {'point': dataclasses.asdict(POINT), 'baseline': 0.5}
    if score is None:
        changes = {'point': changes['point'], 'error': 'the loss is not finite at step [3]'}
    else:
        changes |= {'score': score, 'metrics': {metric.name: score for metric in find_task(name).list_metrics()}}
    return parse_finetuning(json.dumps(make_finetuning(name, seed=seed, **changes)), 'x.json')


def make_result(name, scores):
    records = [make_record(name, score, seed) for seed, score in enumerate(scores, start=1)]
    return TaskResult(find_task(name), POINT if records else None, records, records, 68)


def test_the_table_the_average_and_the_failures(capsys):
    tasks = [make_result(name, [0.61, 0.6234, 0.66]) for name in GLUE]
    failure = make_record('squad2', None)
    print_result(SweepResult([*tasks, make_result('squad2', [])], [failure]))
    out, err = capsys.readouterr()
    rows = [re.split(r' {2,}', line.strip()) for line in out.splitlines()]
    assert ['mnli', '3/68', '62.34', '63.11', '2.59', '56.68–69.54', '3', '50.00'] in rows
    assert ['mnli', 'matched_accuracy', '2e-05', '16', '3', '0.06', 'mismatched_accuracy 62.34'] in rows
    assert ['squad2', '0/68'] in rows
    assert ['squad2', 'best_exact', 'no run of the grid finished'] in rows
    assert ['AVG of the 8 GLUE tasks, MNLI matched: 62.34'] in rows
    assert '…' not in out
    point = 'lr 2e-05, batch 16, epochs 3, warm-up 0.06'
    assert err == f'failed: squad2, {point}, seed 1: the loss is not finite at step [3]\n'


def test_one_seed_has_no_spread_and_too_few_tasks_no_average(capsys):
    print_result(SweepResult([make_result('rte', [0.5])], []))
    out, err = capsys.readouterr()
    assert re.search(r'rte +1/68 +50.00 +50.00 +1 +50.00', out)
    assert 'AVG' not in out
    assert err == ''


def test_where_nobody_looks_on_it_is_a_line_a_run(capsys):
    done = []
    progress = Progress(lambda: [Standing(find_task('rte'), 68, done, 1, 5.0, 1.0)])
    with progress.live:
        for record in (make_record('rte', 0.6), make_record('rte', None, seed=2)):
            done.append(record)
            progress.announce(record)
            progress.live.refresh()
    assert capsys.readouterr().err.splitlines() == [
        '[1/68] rte, lr 2e-05, batch 16, epochs 3, warm-up 0.06, seed 1: 60.00 %',
        '[2/68] rte, lr 2e-05, batch 16, epochs 3, warm-up 0.06, seed 2: the loss is not finite at step [3]',
    ]


def read_to_the_end(master):
    """All that a closed pseudo-terminal was sent: one read may return less, and Linux ends the last with EIO."""
    screen = b''
    with os.fdopen(master, 'rb', buffering=0) as terminal, contextlib.suppress(OSError):
        while part := terminal.read(1 << 16):
            screen += part
    return screen.decode()


def test_on_a_terminal_it_is_a_table_and_a_line_only_for_a_failure(monkeypatch):
    done = []
    master, slave = os.openpty()
    with os.fdopen(slave, 'w') as terminal:
        monkeypatch.setattr('sys.stderr', terminal)
        for name, value in (('TERM', 'xterm'), ('COLUMNS', '120'), ('NO_COLOR', '1')):
            monkeypatch.setenv(name, value)
        progress = Progress(lambda: [Standing(find_task('rte'), 68, done, 2, 66.0, 1.0 * len(done))])
        with progress.live:
            for record in (make_record('rte', 0.6), make_record('rte', 0.7), make_record('rte', None, 3)):
                done.append(record)
                progress.announce(record)
            progress.live.refresh()
    lines = [re.sub(r'\x1b\[[^A-Za-z]*[A-Za-z]', '', line).strip() for line in read_to_the_end(master).splitlines()]
    assert [line for line in lines if line.startswith('[')] == [
        '[3/68] rte, lr 2e-05, batch 16, epochs 3, warm-up 0.06, seed 3: the loss is not finite at step [3]'
    ]
    assert ['rte', '3/68', '2', '1', '70.00', '50.00'] in [line.split() for line in lines]
    assert any(re.search(r'so far, about \d+ min \d\d s left', line) for line in lines)
