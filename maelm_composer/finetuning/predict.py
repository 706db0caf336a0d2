"""Predictions of a saved fine-tuned model for the rows of a file, or for the test set of GLUE or SQuAD 2.0."""

import json
from pathlib import Path
from typing import Any

from maelm_composer.checkpoints.find import find_encoder, read_weights
from maelm_composer.checkpoints.names import FINETUNED
from maelm_composer.checkpoints.pretrained import load_pretrained, place_encoder
from maelm_composer.config import Precision, SpanConfig, TaskKind
from maelm_composer.device import find_device
from maelm_composer.errors import InputError
from maelm_composer.files import write_text
from maelm_composer.finetuning.fit import predict
from maelm_composer.finetuning.model import FinetuningModel
from maelm_composer.precision import choose, tell
from maelm_composer.tasks.catalogue import CLASSIFICATION, SPAN, TASKS, Task
from maelm_composer.tasks.examples import encode_texts, fit_span, stack_windows
from maelm_composer.tasks.sources import read_unlabelled
from maelm_composer.tasks.squad import build_windows, predict_answers

FORMATS = '.jsonl (every row with its scores), .tsv (a GLUE submission) or .json (a SQuAD 2.0 submission)'


def predict_file(
    saved_model: str, source: Path, target: Path, precision: Precision = Precision.fp32, threshold: float = 0.0
) -> int:
    """Write the predictions for the rows of ``source`` to ``target``; returns their number.

    Args:
        saved_model: folder of a run with ``saves_model``, local or s3://.
        source: a .parquet, .csv or .jsonl file with the task's text columns.
        target: its suffix decides the format, see :data:`FORMATS`.
        threshold: of a SQuAD submission; a question whose null score difference is greater has no answer.

    Raises:
        InputError: the model or the file cannot be read, or the format is not the task's.
    """
    found = find_encoder(saved_model)
    if found is None or found.run is not None or not (description := found.read_json(FINETUNED)):
        raise InputError(f'{saved_model} is no fine-tuned model: make one with saves_model=true')
    task = _restore_task(description)
    if target.suffix not in {'.jsonl', '.json' if task.kind == SPAN else '.tsv'}:
        raise InputError(f'{target}: predictions of {task.name} cannot be written as {target.suffix}; use {FORMATS}')
    rows = read_unlabelled(task, source)
    choice = choose(precision, '--precision')
    tell(choice.notice)
    pretrained = load_pretrained(saved_model)
    encoder = place_encoder(pretrained.encoder, find_device())
    model = FinetuningModel(encoder, pretrained.hidden_size, task, dropout=0.0, seed=0).to(find_device())
    model.head.load_state_dict(read_weights(found, 'head.')[0])
    tokenizer, pad_id = pretrained.tokenizer, int(pretrained.tokenizer.pad_token_id)
    max_seq_len = description.get('max_seq_len', pretrained.max_seq_len)
    predictions: list[dict[str, Any]]
    if task.kind == SPAN:
        span = fit_span(SpanConfig(**description.get('span', {})), max_seq_len)
        windows = list(build_windows(rows, tokenizer, max_seq_len, span, is_training=False))
        scores = predict(model, stack_windows(windows)[0], choice.precision, pad_id)
        predictions = predict_answers(rows, windows, scores, span)
    else:
        scores = predict(model, encode_texts(rows, task, tokenizer, max_seq_len), choice.precision, pad_id)
        predictions = [
            {'id': row.id, 'prediction': (label := int(score.argmax()))}
            | {'name': task.label_names[label], 'scores': score.tolist()}
            if task.kind == CLASSIFICATION
            else {'id': row.id, 'prediction': task.denormalize(float(score))}
            for row, score in zip(rows, scores, strict=True)
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
    return '\n'.join(['index\tprediction', *(f'{index}\t{value}' for index, value in enumerate(values))]) + '\n'
