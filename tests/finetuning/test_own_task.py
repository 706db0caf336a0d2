"""A task that a recipe declares, from its CSV files to predictions and an exported model."""

import csv
import dataclasses
import json
from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from maelm_composer.checkpoints.export import export
from maelm_composer.config import TaskConfig, TaskKind
from maelm_composer.errors import InputError
from maelm_composer.finetuning.predict import predict_file
from maelm_composer.finetuning.run import finetune
from maelm_composer.tasks.catalogue import find_task
from maelm_composer.tasks.sources import read_unlabelled
from tests.tiny import make_rows

KINDS = {
    'classification': TaskConfig(TaskKind.classification, ['text'], 'verdict', ['bad', 'good'], metrics=['f1']),
    'regression': TaskConfig(TaskKind.regression, ['text'], 'stars', label_range=[1, 6], metrics=['pearson']),
}


def write(folder: Path, kind: str) -> TaskConfig:
    """The declaration of files in ``folder`` whose rows are those of a GLUE task."""
    task, files = KINDS[kind], {}
    for seed, split in enumerate(('train', 'dev')):
        rows = make_rows({'classification': 'sst2', 'regression': 'stsb'}[kind], 96, seed)
        labels = [['good', 'bad'][row['label']] if task.label_names else row['label'] + 1 for row in rows]
        texts = [row.get('sentence') or row['sentence1'] for row in rows]
        files[split] = str(folder / f'{split}.csv')
        with open(files[split], 'w', newline='') as file:
            csv.writer(file).writerows([['text', task.label_column], *zip(texts, labels, strict=True)])
    return dataclasses.replace(task, files=files)


@pytest.mark.parametrize('kind', KINDS)
def test_from_files_to_predictions_and_export(configure, tmp_path, kind):
    config = configure('own', tasks={'own': write(tmp_path, kind)}, saves_model=True, max_epochs=6)
    record = finetune(config)
    assert record.score == record.metrics[{'classification': 'f1', 'regression': 'pearson'}[kind]]
    assert record.score > record.baseline + 0.1
    assert record.protocol['source'] == 'files'
    assert record.protocol['declaration']['kind'] == kind
    assert str(tmp_path) not in str(record.protocol)
    folder = Path(config.save_folder, record.key)
    evaluated = [json.loads(line) for line in folder.with_suffix('.predictions.jsonl').read_text().splitlines()]
    assert predict_file(str(folder), tmp_path / 'dev.csv', tmp_path / 'out.jsonl') == 96
    predicted = [json.loads(line) for line in (tmp_path / 'out.jsonl').read_text().splitlines()]
    predict_file(str(folder), tmp_path / 'dev.csv', tmp_path / 'out.tsv')
    values = [line.split('\t')[1] for line in (tmp_path / 'out.tsv').read_text().splitlines()[1:]]
    export(str(folder), str(tmp_path / 'exported'))
    exported = AutoModelForSequenceClassification.from_pretrained(tmp_path / 'exported')
    text = read_unlabelled(find_task('own', config.tasks), tmp_path / 'dev.csv')[0].texts[0]
    outputs = exported(**AutoTokenizer.from_pretrained(tmp_path / 'exported')(text, return_tensors='pt')).logits[0]
    assert outputs.tolist() == pytest.approx(predicted[0].get('scores', [predicted[0]['prediction']]), abs=1e-4)
    for ours, row, value in zip(evaluated, predicted, values, strict=True):
        assert row['prediction'] == pytest.approx(ours['prediction'], abs=1e-4)
        assert value == (row['name'] if kind == 'classification' else str(row['prediction']))
    if kind == 'classification':
        assert {row['name'] for row in predicted} == {'bad', 'good'}
        assert exported.config.id2label == {0: 'bad', 1: 'good'}
    else:
        assert {1, 6} == {round(f(row['label'] for row in evaluated)) for f in (min, max)}
        assert exported.config.problem_type == 'regression'


def test_the_key_is_of_the_declaration_and_the_rows(configure, tmp_path):
    declaration = write(tmp_path, 'classification')
    config = configure('own', tasks={'own': declaration}, max_epochs=1)
    key = finetune(config).key

    def rerun(**changes) -> str:
        return finetune(dataclasses.replace(config, tasks={'own': dataclasses.replace(declaration, **changes)})).key

    moved = {'train': str((tmp_path / 'train.csv').rename(tmp_path / 'moved.csv')), 'dev': declaration.files['dev']}
    assert rerun(files=moved, group='glue_large') == key
    assert rerun(files=moved, metrics=['accuracy']) != key
    assert rerun(files=moved | {'train': declaration.files['dev']}) != key


def test_what_is_wrong_is_said_before_the_checkpoint_is_read(configure, tmp_path):
    own = {'rte': write(tmp_path, 'classification')}
    with pytest.raises(InputError, match=r'^tasks\.rte: rte is the name of a built-in task'):
        finetune(dataclasses.replace(configure('cola', tasks=own), checkpoint='nowhere'))
