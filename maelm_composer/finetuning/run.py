"""One fine-tuning run: checkpoint, task, point of the search space and seed -> record."""

import dataclasses
import json
from pathlib import Path

from maelm_composer.checkpoints.pretrained import Pretrained, load_pretrained
from maelm_composer.checkpoints.saved_model import save_model
from maelm_composer.config import FinetuningConfig, Implementation
from maelm_composer.console import tell
from maelm_composer.device import explain_shortage, find_device, keep_freed_memory, name_device
from maelm_composer.errors import InputError
from maelm_composer.files import assert_local, assert_writable, write_text
from maelm_composer.finetuning.evaluation import Evaluator
from maelm_composer.finetuning.fit import fit, measure_last_layer
from maelm_composer.finetuning.identity import check_names, describe_run, find_finished, limit_length, run_key
from maelm_composer.finetuning.model import FinetuningModel
from maelm_composer.precision import choose_in
from maelm_composer.records import FinetuningRecord, RankAtEpoch, pack_numbers, write_record
from maelm_composer.tasks.catalogue import find_task
from maelm_composer.tasks.examples import encode
from maelm_composer.tasks.sources import load_task_data


def load_encoder(config: FinetuningConfig) -> Pretrained:
    """The encoder of ``config``; InputError as :func:`load_pretrained`, or if it is to be saved and is not ours."""
    pretrained = load_pretrained(config.checkpoint, config.implementation, config.dropout)
    if config.saves_model and pretrained.config is None:
        remedy = (
            'leave implementation=huggingface out'
            if config.implementation == Implementation.huggingface
            else 'RoBERTa, BERT and MPNet can (docs/export.md)'
        )
        raise InputError(f'saves_model: {config.checkpoint} is not imported as an encoder of ours: {remedy}')
    return pretrained


def finetune(config: FinetuningConfig, devices: float = 1.0) -> FinetuningRecord:
    """Train and evaluate one run in this process, or return its record if it has already finished.

    Writes ``save_folder``/KEY.json, the record that is returned, and KEY.predictions.jsonl, one line per dev
    example; with ``saves_model`` also the folder KEY (checkpoints/saved_model.py).

    Args:
        devices: how many the run occupies, a fraction if several runs share one; counted in ``device_hours``.

    Raises:
        InputError: the task, its data or the checkpoint cannot be used, ``save_folder`` cannot be written, or a loss is
            not finite. No record, predictions or model are written.
    """
    check_names(config)
    task = find_task(config.task, config.tasks)
    assert_local(config.save_folder, 'save_folder')
    folder = Path(config.save_folder)
    data = load_task_data(task, config.data)
    pretrained = load_encoder(config)
    choice = choose_in(folder, config.precision, 'precision')
    tell(choice.notice)
    config = limit_length(dataclasses.replace(config, precision=choice.precision), pretrained.max_seq_len)
    key = run_key(config, pretrained.identity, data.hash)
    if (record := find_finished(config, key, pretrained.identity)) is not None:
        return record

    assert_writable(folder)
    description = describe_run(config, key, pretrained.identity, data.hash)
    keep_freed_memory()
    tokenizer = pretrained.tokenizer
    inputs = encode(data.train, task, tokenizer, config.max_seq_len, config.span, is_training=True)
    if len(inputs) == 0:
        raise InputError(
            f'{task.name}: no training row is left: the contexts of {inputs.num_left_out} do not contain their answers'
        )
    evaluator = Evaluator(task, data.evaluation, config, tokenizer)
    model = FinetuningModel(pretrained.encoder, pretrained.hidden_size, task, config.dropout, config.seed)
    model.to(find_device())
    dev_inputs = evaluator.inputs[task.eval_splits[0]]
    specials = (tokenizer.cls_token_id, tokenizer.pad_token_id, tokenizer.sep_token_id)
    rank_curve: list[RankAtEpoch] = []
    remedy = 'device_train_microbatch_size' + (', or raise sweep.gpus_per_run' if devices < 1 else '')

    # Sec. 4.4: over the validation set. PAPER-SILENT: which of MNLI's, and how often; here the first, every epoch.
    def observe(epoch: int) -> None:
        with explain_shortage(evaluator.batch_size, remedy):
            rank = measure_last_layer(model.encoder, dev_inputs, specials, tokenizer.pad_token_id, evaluator.batch_size)
        rank_curve.append(RankAtEpoch(epoch=epoch, effective_rank=rank))

    def evaluate(step: int) -> None:
        with explain_shortage(evaluator.batch_size, remedy):
            evaluator.evaluate(model, step)

    with explain_shortage(config.device_train_microbatch_size or config.batch_size, remedy):
        report = fit(model, inputs, config, tokenizer.pad_token_id, evaluate, observe)

    best = evaluator.best
    assert best is not None
    if config.saves_model:
        save_model(folder / key, evaluator.weights, pretrained, task, config.max_seq_len, config.span)
    record = FinetuningRecord(
        **description,
        error=None,
        metrics=best.metrics,
        score=best.metrics[task.metric],
        baseline=evaluator.score_constant(),
        influences={name: pack_numbers(values) for name, values in best.influences.items()},
        evaluations=evaluator.history,
        best_step=evaluator.best_step,
        effective_rank=rank_curve[-1].effective_rank if rank_curve else None,  # of the last weights
        rank_curve=rank_curve,
        train_examples=len(data.train) - inputs.num_left_out,
        answers_not_in_context=inputs.num_left_out,
        examples_per_second=len(inputs) * config.max_epochs / report.training_seconds,
        **vars(report),
        evaluation_seconds=evaluator.seconds,
        device_hours=(report.training_seconds + evaluator.seconds) * devices / 3600,
        device=name_device(),
    )
    lines = [json.dumps(prediction, ensure_ascii=False) for prediction in best.predictions]
    write_text(folder / f'{key}.predictions.jsonl', '\n'.join(lines) + '\n')
    write_record(folder / f'{key}.json', record)  # last, as a record promises that the other files are complete
    return record


def summarize(record: FinetuningRecord, save_folder: str) -> str:
    """A few lines for the console."""
    metrics = ', '.join(
        f'{name} {value:.2f}' if name.endswith('threshold') else f'{name} {value:.2%}'
        for name, value in record.metrics.items()
    )
    lines = [
        f'{record.task}: {record.score:.2%} (a constant answer: {record.baseline:.2%})',
        metrics,
        f'{record.train_examples:,} training examples, {record.steps:,} steps, '
        f'{record.training_seconds:,.0f} seconds of training, {record.examples_per_second:,.0f} rows/s, '
        f'{record.padded_share:.1%} padding, {record.protocol["precision"]}',
        f'record: {Path(save_folder, record.key)}.json',
    ]
    if (model := Path(save_folder, record.key)).is_dir():
        lines.append(f'model: {model}')
    if record.answers_not_in_context:
        lines.insert(2, f'left out, as their contexts do not contain their answers: {record.answers_not_in_context:,}')
    return '\n'.join(lines)
