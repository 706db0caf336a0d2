"""Predictions for a file equal those of the run that saved the model."""

import json
import sys
from pathlib import Path

import pyarrow.csv
import pyarrow.json
import pyarrow.parquet
import pytest

from maelm_composer import cli
from maelm_composer.errors import InputError
from maelm_composer.finetuning.predict import _format, predict_file
from maelm_composer.finetuning.run import finetune
from maelm_composer.tasks.catalogue import TASKS
from tests.tiny import write_rows


@pytest.fixture
def train(configure, task_folder):
    """``train('rte')``: the folder of a saved model, its predictions for the dev set, and the dev set's file."""

    def run(task: str) -> tuple[str, list[dict], Path]:
        config = configure(task, saves_model=True, max_epochs=1, max_seq_len=40)
        folder = Path(config.save_folder, finetune(config).key)
        lines = folder.with_suffix('.predictions.jsonl').read_text().splitlines()
        place = 'squad_v2' if task == 'squad2' else f'glue/{task}'
        return str(folder), [json.loads(line) for line in lines], task_folder / place / 'dev.parquet'

    return run


@pytest.mark.parametrize('task', ['rte', 'stsb', 'squad2'])
def test_rows_of_a_file_are_predicted_as_in_the_evaluation(train, tmp_path, task):
    model, evaluated, dev = train(task)
    target = tmp_path / 'out.jsonl'
    assert predict_file(model, dev, target) == len(evaluated)
    predicted = [json.loads(line) for line in target.read_text().splitlines()]
    assert [row['id'] for row in predicted] == [row['id'] for row in evaluated]
    for mine, theirs in zip(predicted, evaluated, strict=True):
        assert mine['prediction'] == pytest.approx(theirs['prediction'])
        for name in ('scores', 'null_score_difference'):
            assert mine.get(name) == pytest.approx(theirs.get(name))


def test_submissions_have_the_benchmarks_formats(train, tmp_path, monkeypatch):
    model, evaluated, dev = train('rte')
    assert predict_file(model, dev, tmp_path / 'RTE.tsv') == 48
    head, *rows = (tmp_path / 'RTE.tsv').read_text().splitlines()
    assert head == 'index\tprediction'
    names = ('entailment', 'not_entailment')
    assert rows == [f'{i}\t{names[row["prediction"]]}' for i, row in enumerate(evaluated)]

    model, evaluated, dev = train('squad2')
    differences = sorted(row['null_score_difference'] for row in evaluated)
    threshold = (differences[10] + differences[11]) / 2  # no row's own, whose last bit depends on the batch
    options = ['--threshold', str(threshold), '--precision', 'fp32', '--batch-size', '7']
    monkeypatch.setattr(sys, 'argv', ['maelm', 'predict', model, str(dev), str(tmp_path / 'answers.json'), *options])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert not caught.value.code
    answers = json.loads((tmp_path / 'answers.json').read_text())
    expected = {r['id']: r['prediction'] if r['null_score_difference'] <= threshold else '' for r in evaluated}
    assert answers == expected
    assert '' in answers.values()


def test_a_submission_holds_numbers_unless_its_task_is_about_entailment():
    assert _format(TASKS['sst2'], [{'prediction': 1}], '.tsv', 0.0).splitlines()[1:] == ['0\t1']
    assert _format(TASKS['qnli'], [{'prediction': 1}], '.tsv', 0.0).splitlines()[1:] == ['0\tnot_entailment']


def test_scores_of_a_submission_stay_on_the_scale_of_stsb():
    scores = [{'prediction': value} for value in (-0.15, 2.5, 5.2)]
    assert _format(TASKS['stsb'], scores, '.tsv', 0.0).splitlines()[1:] == ['0\t0.0', '1\t2.5', '2\t5.0']
    assert json.loads(_format(TASKS['stsb'], scores, '.jsonl', 0.0).splitlines()[2]) == {'prediction': 5.2}


def test_csv_and_jsonl_hold_the_same_rows(train, tmp_path):
    model, _, dev = train('rte')
    table = pyarrow.parquet.read_table(dev).select(['sentence1', 'sentence2'])
    pyarrow.csv.write_csv(table, tmp_path / 'rows.csv')
    (tmp_path / 'rows.jsonl').write_text('\n'.join(map(json.dumps, table.to_pylist())))
    for suffix in ('csv', 'jsonl'):
        predict_file(model, tmp_path / f'rows.{suffix}', tmp_path / f'{suffix}.tsv')
    assert (tmp_path / 'csv.tsv').read_text() == (tmp_path / 'jsonl.tsv').read_text()


def test_predictions_in_object_storage_are_refused(tmp_path):
    with pytest.raises(InputError, match=r'^the predictions s3:/bucket/o\.jsonl: must be a local or shared file$'):
        predict_file(str(tmp_path), tmp_path / 'rows.jsonl', Path('s3://bucket/o.jsonl'))


def test_what_cannot_be_predicted_is_one_line(train, checkpoint, tmp_path):
    model, _, dev = train('rte')
    write_rows(tmp_path / 'other.parquet', [{'text': 'a'}])
    (tmp_path / 'other.jsonl').write_text('{"text": "a", "idx": 1}\n')
    (tmp_path / 'damaged.parquet').write_text('no parquet')
    (tmp_path / 'empty.jsonl').write_text('')
    (tmp_path / 'latin.jsonl').write_bytes(b'{"sentence1": "caf\xe9", "sentence2": "a"}\n')
    for folder, rows, target, message in (
        (str(checkpoint), dev, 'o.jsonl', 'is no fine-tuned model: make one with saves_model=true'),
        (model, dev, 'o.json', 'predictions of rte cannot be written as .json'),
        (model, tmp_path / 'none.parquet', 'o.tsv', 'none.parquet does not exist'),
        (model, tmp_path / 'none.txt', 'o.tsv', 'rows are read from .parquet, .csv, .jsonl files'),
        (model, tmp_path / 'damaged.parquet', 'o.tsv', 'not a readable .parquet file'),
        (model, tmp_path / 'empty.jsonl', 'o.tsv', 'empty.jsonl'),
        (model, tmp_path / 'latin.jsonl', 'o.tsv', 'latin.jsonl'),
        (model, tmp_path / 'other.parquet', 'o.tsv', "no column 'sentence1' (it has: text)"),
        (
            model,
            tmp_path / 'other.jsonl',
            'o.tsv',
            "other.jsonl: not a readable .jsonl file (no column 'sentence1'",
        ),
        (model, Path('s3://bucket/rows.csv'), 'o.tsv', 'the rows s3:/bucket/rows.csv: must be a local or shared file'),
    ):
        with pytest.raises(InputError) as error:
            predict_file(folder, rows, tmp_path / target)
        assert message in str(error.value)
        assert '\n' not in str(error.value)
        assert not (tmp_path / target).exists()
    with pytest.raises(
        InputError, match=r'--threshold is for a SQuAD 2\.0 submission, a \.json file, and not for .*o\.tsv'
    ):
        predict_file(model, dev, tmp_path / 'o.tsv', threshold=1.0)
    rows = tmp_path / 'other.jsonl'
    rows.write_text('{"sentence1": "a", "sentence2": "b"}\n')
    with pytest.raises(InputError, match=r'other\.jsonl holds the rows'):
        predict_file(model, rows, rows)
    (tmp_path / 'folder.tsv').mkdir()
    with pytest.raises(InputError, match=r'folder\.tsv is a folder: name a file'):
        predict_file(model, dev, tmp_path / 'folder.tsv')
    with pytest.raises(InputError, match='--threshold must be a number'):
        predict_file(model, dev, tmp_path / 'o.tsv', threshold=float('nan'))
    with pytest.raises(NotADirectoryError):  # before the work
        predict_file(model, dev, tmp_path / 'empty.jsonl/o.tsv')
