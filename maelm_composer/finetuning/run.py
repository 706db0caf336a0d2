"""One fine-tuning run: a checkpoint, a task, one point of its search space and a seed -> one record."""

import dataclasses
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import torch

from maelm_composer.config import FinetuningConfig
from maelm_composer.data.storage import is_s3
from maelm_composer.device import find_device, keep_freed_memory, name_device
from maelm_composer.errors import InputError
from maelm_composer.finetuning.evaluation import Evaluator, Result, build_evaluator
from maelm_composer.finetuning.examples import encode_texts, encode_windows, fit_span
from maelm_composer.finetuning.fit import fit
from maelm_composer.finetuning.model import FinetuningModel
from maelm_composer.finetuning.pretrained import load_pretrained
from maelm_composer.finetuning.rank_curve import RankCurve
from maelm_composer.finetuning.saved_model import save_model
from maelm_composer.finetuning.sources import load_task_data
from maelm_composer.finetuning.tasks import SPAN, Task, find_task
from maelm_composer.recipe import to_plain
from maelm_composer.records import collect_provenance, write_json, write_text

POINT = ('learning_rate', 'batch_size', 'max_epochs', 'warmup_proportion')
PROTOCOL = (
    *('evaluation', 'max_seq_len', 'precision', 'dropout', 'adam_beta1', 'adam_beta2', 'adam_eps', 'weight_decay'),
    *('clip_norm', 'measures_rank'),
)
KEY_LENGTH = 16


def run_key(config: FinetuningConfig, identity: dict[str, Any], data_hash: str) -> str:
    """The name of a run's record: the task, and a hash of everything that decides the scores.

    Args:
        identity: of the checkpoint, ``Pretrained.identity``; its content counts, not its address.
        data_hash: ``TaskData.hash``.
    """
    deciding = {
        'task': config.task,
        'seed': config.seed,
        'point': describe_point(config),
        'protocol': describe_protocol(config),
        'checkpoint': [identity['hash'], identity['implementation']],
        'data': data_hash,
    }
    digest = hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()
    return f'{config.task}-{digest[:KEY_LENGTH]}'


def describe_point(config: FinetuningConfig) -> dict[str, Any]:
    """Where in its search space the run is."""
    return {name: getattr(config, name) for name in POINT}


def describe_protocol(config: FinetuningConfig) -> dict[str, Any]:
    """What is the same for every run of a sweep, and decides its scores too."""
    plain = to_plain(config)
    protocol = {name: plain[name] for name in PROTOCOL}
    protocol |= {name: plain['data'][name] for name in ('source', 'max_train_examples')}
    return protocol | ({'span': plain['span']} if find_task(config.task).kind == SPAN else {})


def finetune(config: FinetuningConfig) -> dict[str, Any]:
    """Train and evaluate one run in this process; a run whose record is there is not repeated.

    Writes ``save_folder``/KEY.json, the record that is returned, and KEY.predictions.jsonl, one line a dev example;
    with ``saves_model`` also the folder KEY (saved_model.py).

    Raises:
        InputError: the task, its data or the checkpoint cannot be used, or a loss is not finite. Nothing is written.
    """
    task = find_task(config.task)
    if is_s3(config.save_folder):
        raise InputError(f'save_folder {config.save_folder}: must be a local or shared folder')
    folder = Path(config.save_folder)
    data = load_task_data(task, config.data)
    pretrained = load_pretrained(config.checkpoint, config.implementation, config.dropout)
    if config.saves_model and pretrained.config is None:
        raise InputError(f'saves_model needs an encoder of ours: {config.checkpoint} cannot be imported as one')
    key = run_key(config, pretrained.identity, data.hash)
    record = read_record(folder / f'{key}.json')
    if record is not None and not (config.saves_model and not (folder / key).exists()):
        return record

    keep_freed_memory()
    max_seq_len = min(config.max_seq_len, pretrained.max_seq_len)
    span, tokenizer = fit_span(config.span, max_seq_len), pretrained.tokenizer
    num_left_out = 0
    if task.kind == SPAN:
        inputs, num_left_out = encode_windows(data.train, tokenizer, max_seq_len, span)
    else:
        inputs = encode_texts(data.train, task, tokenizer, max_seq_len)
    evaluator = build_evaluator(task, data.evaluation, config, tokenizer, max_seq_len, span)
    model = FinetuningModel(pretrained.encoder, pretrained.hidden_size, task, config.dropout, config.seed)
    model.to(find_device())
    best = _Best(task, evaluator, model, keeps_weights=config.saves_model)
    dev_inputs = evaluator.inputs[task.eval_splits[0]]
    specials = (tokenizer.cls_token_id, tokenizer.pad_token_id, tokenizer.sep_token_id)
    curve = RankCurve(model.encoder, dev_inputs, specials, tokenizer.pad_token_id)
    observe = curve.measure if config.measures_rank else None
    report = fit(model, inputs, config, tokenizer.pad_token_id, best.evaluate, observe)

    assert best.result is not None
    if config.saves_model:
        save_model(folder / key, best.weights, pretrained, task)
    plain = describe_protocol(config) | {'max_seq_len': max_seq_len}
    record = {
        'kind': 'finetuning',
        'key': key,
        'status': 'finished',
        'error': None,
        'task': task.name,
        'seed': config.seed,
        'point': describe_point(config),
        'protocol': plain | ({'span': dataclasses.asdict(span)} if task.kind == SPAN else {}),
        'checkpoint': pretrained.identity,
        'data_hash': data.hash,
        'metrics': best.result.metrics,
        'score': best.result.metrics[task.metric],
        'baseline': evaluator.score_constant(),
        'evaluations': best.history,
        'best_step': best.step,
        'effective_rank': curve.points[-1]['effective_rank'] if curve.points else None,  # of the last weights
        'rank_curve': curve.points,
        'steps': report.steps,
        'train_examples': len(data.train) - num_left_out,
        'answers_not_in_context': num_left_out,
        'padded_share': report.padded_share,
        'examples_per_second': len(inputs) * config.max_epochs / report.training_seconds,
        'training_seconds': report.training_seconds,
        'evaluation_seconds': best.seconds,
        'device_hours': (report.training_seconds + best.seconds) / 3600,
        'device': name_device(),
        'provenance': collect_provenance(config),
    }
    lines = [json.dumps(prediction, ensure_ascii=False) for prediction in best.result.predictions]
    write_text(folder / f'{key}.predictions.jsonl', '\n'.join(lines) + '\n')
    write_json(folder / f'{key}.json', record)  # last: it says that the rest is there
    return record


def read_record(path: Path) -> dict[str, Any] | None:
    """The record of a run that finished, or None."""
    try:
        record = json.loads(path.read_text(encoding='utf-8'))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise InputError(f'{path} is not a record ({error}): remove it') from None
    return record if record.get('status') == 'finished' else None


def summarize(record: dict[str, Any], save_folder: str) -> str:
    """A few lines for the console."""
    metrics = ', '.join(
        f'{name} {value:.2f}' if name.endswith('threshold') else f'{name} {value:.2%}'
        for name, value in record['metrics'].items()
    )
    lines = [
        f'{record["task"]}: {record["score"]:.2%} (a constant answer: {record["baseline"]:.2%})',
        metrics,
        f'{record["train_examples"]:,} training examples, {record["steps"]:,} steps, '
        f'{record["training_seconds"]:,.0f} seconds of training, {record["examples_per_second"]:,.0f} examples/s, '
        f'{record["padded_share"]:.1%} padding',
        f'record: {Path(save_folder, record["key"])}.json',
    ]
    if record['answers_not_in_context']:
        lines.insert(2, f'left out, as their answer is not in their context: {record["answers_not_in_context"]:,}')
    return '\n'.join(lines)


class _Best:
    """The best evaluation of a run so far; of equals the first."""

    def __init__(self, task: Task, evaluator: Evaluator, model: FinetuningModel, keeps_weights: bool) -> None:
        self.task, self.evaluator, self.model, self.keeps_weights = task, evaluator, model, keeps_weights
        self.result: Result | None = None
        self.step = 0
        self.seconds = 0.0
        self.history: list[dict[str, float]] = []
        self.weights: dict[str, torch.Tensor] = {}

    def evaluate(self, step: int) -> None:
        start = time.perf_counter()
        result = self.evaluator.evaluate(self.model)
        score = result.metrics[self.task.metric]
        if self.result is None or score > self.result.metrics[self.task.metric]:
            self.result, self.step = result, step
            if self.keeps_weights:
                self.weights = {name: value.cpu().clone() for name, value in self.model.state_dict().items()}
        self.history.append({'step': step, 'score': score})
        self.seconds += time.perf_counter() - start
