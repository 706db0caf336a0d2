"""Whole runs: every task and head, the record, repeatability, and input errors."""

import dataclasses
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file

from maelm_composer import precision
from maelm_composer.checkpoints.pretrained import load_pretrained
from maelm_composer.config import (
    EvaluationProtocol,
    FinetuningConfig,
    Implementation,
    Precision,
    SpanConfig,
    SweepConfig,
)
from maelm_composer.errors import InputError
from maelm_composer.finetuning import evaluation
from maelm_composer.finetuning.fit import plan_evaluations
from maelm_composer.finetuning.identity import run_key
from maelm_composer.finetuning.run import find_finished, finetune, summarize
from maelm_composer.precision import Speeds
from maelm_composer.records import EncoderIdentity, Evaluation, Point, load_record, parse_finetuning, unpack_numbers
from maelm_composer.sweep.run import Facts, record_failure
from maelm_composer.tasks.catalogue import TASKS
from maelm_composer.tasks.sources import load_task_data
from tests.records import make_finetuning

ROOT = Path(__file__).parents[2]
UNKNOWN = dict.fromkeys(('run_name', 'samples', 'recipe_hash', 'training_seconds'))
IDENTITY = EncoderIdentity(uri='here', hash='h', implementation='ours', **UNKNOWN)
MICROBATCHES = {'device_train_microbatch_size': 5}  # of batches of 16
OFFICIAL = [name for name, task in TASKS.items() if not task.is_demo]


@pytest.mark.parametrize('name', OFFICIAL)
def test_every_task_runs_and_learns(name, configure):
    task, config = TASKS[name], configure(name, max_epochs=8)
    record = finetune(config)
    metrics = {metric.name for metric in task.list_metrics()}
    assert metrics <= record.metrics.keys()
    assert record.score == record.metrics[task.metric]
    assert record.score > record.baseline + 0.1
    influences = {name: unpack_numbers(text) for name, text in record.influences.items()}
    assert influences.keys() == {name for name in metrics if not name.endswith('threshold')}
    assert all(abs(values.mean()) < 1e-3 and len(values) >= 24 for values in influences.values())
    assert record.baseline == pytest.approx({'mnli': 1 / 3, 'cola': 0, 'stsb': 0, 'squad2': 1 / 3}.get(name, 0.5))
    assert 0 <= record.padded_share < 0.15  # of three batches; real tasks: test_real_tasks.py
    assert (record.steps, record.train_examples, record.seed) == (48, 96, 1)
    folder = Path(config.save_folder)
    assert load_record(folder / f'{record.key}.json', parse_finetuning) == record
    lines = (folder / f'{record.key}.predictions.jsonl').read_text().splitlines()
    predictions = [json.loads(line) for line in lines]
    assert len(predictions) == 48 * len(task.eval_splits)
    if task.kind == 'classification':
        first = [line for line in predictions if line['split'] == task.eval_splits[0]]
        accuracy = sum(line['prediction'] == line['label'] for line in first) / 48
        assert accuracy == pytest.approx(record.metrics.get('accuracy', record.metrics.get('matched_accuracy')))
    assert sorted(path.name for path in folder.iterdir()) == [
        f'{record.key}.json',
        f'{record.key}.predictions.jsonl',
    ]


def test_the_record_says_what_ran(configure):
    config = configure('squad2', max_epochs=1, max_seq_len=512, data={'max_train_examples': 50})
    record = finetune(config)
    identity = load_pretrained(config.checkpoint).identity
    assert record.checkpoint == identity
    assert record.status == 'finished'
    assert record.train_examples == 50
    assert record.point == Point(3e-3, 16, 1, 0.06)
    protocol = record.protocol
    assert protocol['max_seq_len'] == 48  # the checkpoint's own
    assert (protocol['source'], protocol['max_train_examples'], protocol['evaluation']) == ('files', 50, 'final')
    assert protocol['span'] == dataclasses.asdict(SpanConfig(max_query_length=22))
    assert record.data_hash == load_task_data(TASKS['squad2'], config.data).hash
    assert record.evaluations == [Evaluation(step=record.best_step, score=record.score)]
    assert record.provenance.packages['torch'] == torch.__version__.split('+')[0]
    summary = summarize(record, config.save_folder)
    assert f'{record.score:.2%}' in summary
    assert f'{record.key}.json' in summary


def test_the_same_run_twice_is_the_same_and_done_once(configure, tmp_path):
    config = configure('rte', dropout=0.1)
    record = finetune(config)
    path = Path(config.save_folder, f'{record.key}.json')
    written = path.stat().st_mtime_ns
    assert finetune(config) == record
    assert path.stat().st_mtime_ns == written
    torch.rand(100)  # whatever the process did before
    again = finetune(dataclasses.replace(config, save_folder=str(tmp_path / 'again')))
    assert again.key == record.key
    predictions = [
        Path(folder, f'{record.key}.predictions.jsonl') for folder in (config.save_folder, tmp_path / 'again')
    ]
    assert predictions[0].read_text() == predictions[1].read_text()
    other = finetune(dataclasses.replace(config, seed=2))
    assert Path(config.save_folder, f'{other.key}.predictions.jsonl').read_text() != predictions[0].read_text()


def test_the_key_is_of_what_decides_the_scores(configure):
    config = configure('rte')
    key = run_key(config, IDENTITY, 'd')
    assert key.startswith('rte-')
    for change in (
        {'save_folder': 'elsewhere'},
        {'saves_model': True},
        {'checkpoint': 'copy'},
        {'sweep': SweepConfig(seeds=[9])},
        {'span': SpanConfig(n_best=1)},  # of no matter to RTE
        {'implementation': Implementation.ours},  # what it came to stands in the identity
    ):
        assert run_key(dataclasses.replace(config, **change), dataclasses.replace(IDENTITY, uri='there'), 'd') == key
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(FinetuningConfig)}
    numbers = {
        name: value for name, value in fields.items() if isinstance(value, (int, float)) and name != 'saves_model'
    }
    assert {'seed', 'learning_rate', 'batch_size', 'clip_norm', 'dropout', 'max_seq_len'} < numbers.keys()
    changes = [{name: value * 2 or 1} for name, value in numbers.items()]
    changes += [{'evaluation': EvaluationProtocol.half_epochs}, {'precision': Precision.bf16}, {'task': 'mrpc'}]
    keys = [run_key(dataclasses.replace(config, **change), IDENTITY, 'd') for change in changes]
    keys += [run_key(config, IDENTITY, 'other'), run_key(config, dataclasses.replace(IDENTITY, hash='i'), 'd')]
    keys += [run_key(config, dataclasses.replace(IDENTITY, implementation='huggingface'), 'd')]
    assert len(set(keys) | {key}) == len(keys) + 1
    squad = dataclasses.replace(config, task='squad2')
    assert run_key(dataclasses.replace(squad, span=SpanConfig(n_best=1)), IDENTITY, 'd') != run_key(
        squad, IDENTITY, 'd'
    )


def test_a_key_without_new_settings_is_that_of_earlier_revisions():
    """Recorded before a recipe could limit the development set or declare a task."""
    for key in ('rte-913080201d19a56b', 'mnli-d1af67cfa2bd564a', 'squad2-048aa9806ae75045', 'stsb-442786ee44252a34'):
        config = FinetuningConfig(task=key.split('-')[0], checkpoint='c', precision=Precision.fp32)
        assert run_key(config, IDENTITY, 'd') == key


def test_a_limited_development_set_is_another_protocol(configure):
    config = configure('rte', max_epochs=1)
    whole = finetune(config)
    limited = finetune(configure('rte', max_epochs=1, data={'max_dev_examples': 20}))
    assert limited.protocol == whole.protocol | {'max_dev_examples': 20}
    assert limited.train_loss == whole.train_loss
    few, all_of_them = (
        [json.loads(line) for line in Path(config.save_folder, f'{r.key}.predictions.jsonl').read_text().splitlines()]
        for r in (limited, whole)
    )
    assert len(few) == 20 < len(all_of_them)
    scores = {row['id']: row['scores'] for row in all_of_them}
    for row in few:  # batches of other sizes round otherwise
        assert row['scores'] == pytest.approx(scores[row['id']], abs=1e-5)


def test_a_step_in_microbatches_is_the_same_step(configure):
    """Windows of one length only would hide a wrong weight of the smaller last microbatch."""
    for task in ('squad2', 'stsb'):
        whole, split = (finetune(configure(task, max_epochs=1, **more)) for more in ({}, MICROBATCHES))
        assert split.protocol == whole.protocol | MICROBATCHES
        assert split.key != whole.key
        assert split.train_loss == pytest.approx(whole.train_loss, rel=1e-4)
        files = [Path(configure(task).save_folder, f'{r.key}.predictions.jsonl') for r in (whole, split)]
        rows = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
        numbers = [[row.get('null_score_difference', row['prediction']) for row in part] for part in rows]
        assert numbers[0] == pytest.approx(numbers[1], rel=1e-2, abs=1e-3)


def test_half_epochs_keep_the_best_evaluation(configure):
    assert plan_evaluations(EvaluationProtocol.half_epochs, 7, 2) == {4, 7, 11, 14}
    assert plan_evaluations(EvaluationProtocol.half_epochs, 1, 2) == {1, 2}
    assert plan_evaluations(EvaluationProtocol.final, 7, 2) == {14}
    config = configure('stsb', evaluation=EvaluationProtocol.half_epochs, max_epochs=3, dropout=0.1)
    record = finetune(config)
    assert [entry.step for entry in record.evaluations] == [3, 6, 9, 12, 15, 18]
    scores = [entry.score for entry in record.evaluations]
    assert record.score == max(scores) > scores[0]
    assert record.best_step == record.evaluations[scores.index(max(scores))].step
    assert record.protocol['evaluation'] == 'half_epochs'
    final = finetune(dataclasses.replace(config, evaluation=EvaluationProtocol.final))
    assert final.score == scores[-1]  # evaluating in between changes nothing


def test_a_model_is_saved_though_its_record_exists(configure):
    config = configure('rte')
    finetune(config)
    config = dataclasses.replace(config, saves_model=True)
    record = finetune(config)  # the record alone is not enough
    folder = Path(config.save_folder, record.key)
    assert summarize(record, config.save_folder).endswith(f'.json\nmodel: {folder}')
    described = json.loads((folder / 'finetuned.json').read_text())
    assert (described['task'], described['label_names']) == ('rte', ['entailment', 'not_entailment'])
    weights = load_file(folder / 'model.safetensors')
    assert {name.split('.')[0] for name in weights} == {'encoder', 'head'}
    assert (folder / 'tokenizer' / 'tokenizer.json').exists()
    start = load_pretrained(config.checkpoint)
    assert not weights['encoder.token_embeddings.weight'].equal(start.encoder.token_embeddings.weight)
    trained = load_pretrained(str(folder))
    assert trained.encoder.token_embeddings.weight.equal(weights['encoder.token_embeddings.weight'])


def test_what_fails_when_made_again_for_its_model_leaves_the_finished_record(configure):
    config = configure('rte', max_epochs=1)
    record = finetune(config, devices=0.25)
    assert record.device_hours == pytest.approx((record.training_seconds + record.evaluation_seconds) / 14400)
    facts = Facts(record.checkpoint, 128, record.data_hash, 1, 1)
    failure = record_failure(dataclasses.replace(config, saves_model=True), record.key, facts, 'out of memory')
    assert failure.status == 'failed'  # the sweep names it
    assert find_finished(config, record.key, record.checkpoint) == record
    moved = dataclasses.replace(record.checkpoint, uri='moved', recipe_hash='another')
    assert find_finished(config, record.key, moved).checkpoint == moved


def test_rows_longer_than_the_encoder_reads_are_the_same_run(configure):
    config = configure('rte', max_epochs=1, max_seq_len=512)
    record = finetune(config)
    longest = record.protocol['max_seq_len']
    assert longest < 512
    assert finetune(dataclasses.replace(config, max_seq_len=longest)) == record  # read, since its times are equal


def test_memory_that_the_evaluation_lacks_names_its_rows(configure, monkeypatch):
    def predict(*args):
        raise torch.OutOfMemoryError('CUDA out of memory')

    monkeypatch.setattr(evaluation, 'predict', predict)
    with pytest.raises(InputError, match=r'^64 rows in one forward pass .* lower device_train_microbatch_size'):
        finetune(configure('rte', max_epochs=1, batch_size=16))


def test_no_row_left_is_one_line(configure, tmp_path):
    rows = {'id': ['x'], 'title': ['t'], 'context': ['one two'], 'question': ['which']}
    (tmp_path / 'squad_v2').mkdir()
    for split, answer in (('train', 'three'), ('dev', 'two')):
        table = pyarrow.table(rows | {'answers': [{'text': [answer], 'answer_start': [4]}]})
        pyarrow.parquet.write_table(table, tmp_path / 'squad_v2' / f'{split}.parquet')
    config = configure('squad2')
    config.data.folder = str(tmp_path)
    with pytest.raises(InputError, match='squad2: no training row is left: the contexts of 1 do not'):
        finetune(config)


@pytest.mark.parametrize('measures_rank', [False, True])  # a rank of such states would say something else
def test_a_loss_that_is_not_finite_names_the_step(configure, measures_rank):
    config = configure('rte', learning_rate=1e30, measures_rank=measures_rank)
    with pytest.raises(InputError, match=r'^the loss is not finite at step [2-9]: try a smaller learning_rate'):
        finetune(config)
    assert not Path(config.save_folder).exists()


def test_an_output_that_is_not_finite_gives_no_score(configure):
    config = configure('rte', learning_rate=1e30, max_epochs=1, batch_size=4096)  # the first update is the last
    with pytest.raises(InputError, match=r'^an output of the model is not finite: try a smaller learning_rate'):
        finetune(config)
    assert not Path(config.save_folder).exists()


@pytest.mark.parametrize(
    'change, message',
    [
        ({'task': 'rt'}, 'did you mean rte'),
        ({'task': None}, 'task is not set'),
        ({'save_folder': 's3://bucket/out'}, 'must be a local or shared folder'),
        ({'checkpoint': '/no/where'}, '/no/where'),
    ],
)
def test_what_cannot_run_is_one_line(configure, change, message):
    with pytest.raises(InputError, match=message):
        finetune(dataclasses.replace(configure('rte'), **change))


def test_a_record_that_is_none(configure):
    config = configure('rte')
    path = Path(config.save_folder, 'x.json')
    path.parent.mkdir()
    assert find_finished(config, 'x', IDENTITY) is None
    path.write_text(json.dumps(make_finetuning('rte', error='no memory')))
    assert find_finished(config, 'x', IDENTITY) is None
    path.write_text('{"sta')
    with pytest.raises(InputError, match=r'x.json is damaged'):
        find_finished(config, 'x', IDENTITY)


@pytest.fixture
def main():
    """``main`` of train.py."""
    return runpy.run_path(str(ROOT / 'train.py'))['main']


def test_the_command(checkpoint, task_folder, tmp_path):
    arguments = [
        *(str(ROOT / 'yamls/finetune/glue.yaml'), 'task=rte', f'checkpoint={checkpoint}/latest', 'max_epochs=1'),
        *('precision=fp32', 'data.source=files', f'data.folder={task_folder}', f'save_folder={tmp_path}'),
    ]
    command = [sys.executable, str(ROOT / 'train.py'), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {'OMP_NUM_THREADS': '1'}
    )
    on_progress = re.compile(r'^\w+: [\d,]+/[\d,]+ \w+, \d+ s\n', re.MULTILINE)  # on a slow machine
    assert (done.returncode, on_progress.sub('', done.stderr)) == (0, '')
    (path,) = tmp_path.glob('rte-*.json')
    assert done.stdout == summarize(load_record(path, parse_finetuning), str(tmp_path)) + '\n'


def test_the_command_tells_what_is_wrong(main, capsys, monkeypatch):
    for recipe, override, message in (
        ('glue', 'task=rtf', 'error: unknown task rtf; did you mean rte?'),
        ('glue', 'seed=1', 'error: the recipe is for 8 tasks: add task=mnli, or use `maelm sweep`'),
    ):
        with pytest.raises(SystemExit, match='2'):
            main([str(ROOT / f'yamls/finetune/{recipe}.yaml'), 'checkpoint=x', override])
        printed = capsys.readouterr()
        assert printed.err.startswith(message)
        assert (printed.out, printed.err.count('\n')) == ('', 1)
    monkeypatch.setenv('RANK', '1')
    main([str(ROOT / 'yamls/finetune/glue.yaml'), 'task=rte', 'checkpoint=nowhere'])  # the first rank does the work


def test_runs_of_one_folder_share_the_precision_that_auto_came_to(configure, monkeypatch, tmp_path):
    config = dataclasses.replace(configure('rte'), precision=Precision.auto, max_epochs=1)
    keys = {}
    for name, bf16 in (('bf16', 9e11), ('fp32', 5e9)):
        monkeypatch.setattr(precision, 'measure_speeds', lambda bf16=bf16: Speeds(1e11, bf16, 'CPU'))
        record = finetune(dataclasses.replace(config, save_folder=str(tmp_path / name)))
        assert record.protocol['precision'] == name
        keys[name] = record.key
    again = finetune(dataclasses.replace(config, save_folder=str(tmp_path / 'bf16'), seed=2))  # where fp32 is faster
    assert again.protocol['precision'] == 'bf16'
    assert keys['bf16'] != keys['fp32']
