"""Predictions of a saved fine-tuned model for the rows of a file, or for the test set of GLUE or SQuAD 2.0."""

import json
import math
from pathlib import Path
from typing import Any

from maelm_composer.checkpoints.find import find_encoder, take_part
from maelm_composer.checkpoints.pretrained import HEAD, find_misfit, load_ours
from maelm_composer.config import Precision, SpanConfig, TaskKind
from maelm_composer.console import tell
from maelm_composer.device import explain_shortage, find_device
from maelm_composer.errors import InputError
from maelm_composer.files import assert_local, assert_writable, write_text
from maelm_composer.finetuning.evaluation import read_scores
from maelm_composer.finetuning.fit import EVAL_BATCH_SIZE, predict
from maelm_composer.finetuning.model import FinetuningModel
from maelm_composer.precision import choose
from maelm_composer.tasks.catalogue import CLASSIFICATION, REGRESSION, SPAN, TASKS, Task
from maelm_composer.tasks.examples import encode, fit_span
from maelm_composer.tasks.sources import read_unlabelled

FORMATS = '.jsonl (every row with its logits), .tsv (a GLUE submission) or .json (a SQuAD 2.0 submission)'


def predict_file(
    saved_model: str,
    source: Path,
    target: Path,
    precision: Precision = Precision.fp32,
    threshold: float = 0.0,
    batch_size: int = EVAL_BATCH_SIZE,
) -> int:
    """Write the predictions for the rows of ``source`` to ``target``; returns their number.

    Args:
        saved_model: folder of a run with ``saves_model``, local or s3://.
        source: a .parquet, .csv or .jsonl file with the task's text columns.
        target: its suffix decides the format, see :data:`FORMATS`.
        threshold: of a SQuAD submission; a question whose null score difference is greater has no answer.
        batch_size: rows in one forward pass; fewer need less memory.

    Raises:
        InputError: the model or the file cannot be read, the format is not the task's, ``target`` is an address such
            as s3://bucket/out.jsonl, or the memory does not suffice.
    """
    assert_local(source, 'the rows', 'file')
    assert_local(target, 'the predictions', 'file')
    found = find_encoder(saved_model)
    if found is None or found.run is not None:
        raise InputError(f'{saved_model} is no fine-tuned model: make one with saves_model=true')
    description = found.read_description()
    task = _restore_task(description)
    if target.suffix not in {'.jsonl', '.json' if task.kind == SPAN else '.tsv'}:
        raise InputError(f'{target}: predictions of {task.name} cannot be written as {target.suffix}; use {FORMATS}')
    if math.isnan(threshold):
        raise InputError('--threshold must be a number')
    if threshold and target.suffix != '.json':
        raise InputError(f'--threshold is for a SQuAD 2.0 submission, a .json file, and not for {target}')
    if target.exists() and target.samefile(source):
        raise InputError(f'{target} holds the rows: name another file for the predictions')
    if target.is_dir():
        raise InputError(f'{target} is a folder: name a file for the predictions')
    rows = read_unlabelled(task, source)
    assert_writable(target.parent)
    choice = choose(precision, '--precision')
    tell(choice.notice)
    pretrained, weights = load_ours(found)
    model = FinetuningModel(pretrained.encoder, pretrained.hidden_size, task, dropout=0.0, seed=0).to(find_device())
    head = take_part(weights, HEAD)
    if misfit := find_misfit({name: tuple(value.shape) for name, value in head.items()}, model.head):
        raise InputError(f'{saved_model}: the head does not match finetuned.json: {misfit}')
    model.head.load_state_dict(head)
    max_seq_len = description.get('max_seq_len', pretrained.max_seq_len)
    span = fit_span(SpanConfig(**description.get('span', {})), max_seq_len)
    inputs = encode(rows, task, pretrained.tokenizer, max_seq_len, span)
    with explain_shortage(batch_size, '--batch-size'):
        scores = predict(model, inputs, choice.precision, int(pretrained.tokenizer.pad_token_id), batch_size)
    predictions = read_scores(task, rows, inputs, scores, span)
    if task.kind == CLASSIFICATION:
        predictions = [
            {'id': p['id'], 'prediction': p['prediction'], 'name': task.label_names[p['prediction']]} | p
            for p in predictions
        ]
    write_text(target, _format(task, predictions, target.suffix, threshold))
    return len(predictions)


def _restore_task(description: dict[str, Any]) -> Task:
    """The task in the content of finetuned.json. Models of built-in tasks from earlier revisions lack its columns."""
    if (name := description['task']) in TASKS:
        return TASKS[name]
    columns = {key: description[key] for key in ('text_columns', 'label_names', 'label_range')}
    return Task(name=name, kind=TaskKind(description['kind']), **columns)


def _format(task: Task, predictions: list[dict[str, Any]], suffix: str, threshold: float) -> str:
    if suffix == '.jsonl':
        return ''.join(json.dumps(prediction, ensure_ascii=False) + '\n' for prediction in predictions)
    if suffix == '.json':
        answers = {p['id']: '' if p['null_score_difference'] > threshold else p['prediction'] for p in predictions}
        return json.dumps(answers, ensure_ascii=False) + '\n'
    # gluebenchmark.com: names of the classes for the inference tasks, numbers for its other tasks
    names = task.label_names if task.is_own or 'entailment' in task.label_names else ()
    values = [names[p['prediction']] if names else p['prediction'] for p in predictions]
    if task.kind == REGRESSION and not task.is_own:  # STS-B's scores end at 0 and 5
        values = [min(max(value, task.label_range[0]), task.label_range[1]) for value in values]
    return '\n'.join(['index\tprediction', *(f'{index}\t{value}' for index, value in enumerate(values))]) + '\n'
