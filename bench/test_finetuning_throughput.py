"""Fine-tuning speed against Hugging Face's Trainer: same encoder, rows, batch size and precision.

    MAELM_DATA=folder pytest -s bench/test_finetuning_throughput.py [--record]

The Trainer pads each batch to its longest row, with its default AdamW and clipping. The rows are MNLI's if MAELM_DATA
is set, else those of demo_pair. Both train in turn; the figures are medians over rounds, without evaluation and
tokenisation. bf16 is skipped on a device that is slow in it.
"""

import os
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import (
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForSequenceClassification,
    Trainer,
    TrainingArguments,
)

from bench.machine import skip_if_slow
from maelm_composer.checkpoints.huggingface import import_encoder
from maelm_composer.checkpoints.pretrained import build
from maelm_composer.config import FinetuningConfig, Precision, SpanConfig, TaskDataConfig, TaskSource
from maelm_composer.data.special_tokens import PAD_ID, SPECIAL_TOKENS
from maelm_composer.device import find_device, keep_freed_memory
from maelm_composer.finetuning.fit import fit
from maelm_composer.finetuning.model import FinetuningModel
from maelm_composer.model.encoder import Encoder
from maelm_composer.tasks.catalogue import find_task
from maelm_composer.tasks.examples import Inputs, encode
from maelm_composer.tasks.sources import load_task_data

VOCAB, LAYERS, SIZE, HEADS, LENGTH, BATCH, EXAMPLES, ROUNDS = 8192, 6, 256, 4, 512, 32, 640, 3


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A tokenizer trained on the rows, with the vocabulary size of the small scale."""
    bpe = Tokenizer(models.BPE(unk_token='[UNK]'))
    bpe.normalizer = normalizers.Lowercase()
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel()
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=list(SPECIAL_TOKENS)))
    names = {'cls_token': '[CLS]', 'pad_token': '[PAD]', 'sep_token': '[SEP]', 'unk_token': '[UNK]'}
    return PreTrainedTokenizerFast(tokenizer_object=bpe, **names)


def build_peer(num_labels: int) -> RobertaForSequenceClassification:
    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=VOCAB,
        hidden_size=SIZE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * SIZE,
        max_position_embeddings=LENGTH + 2,
        type_vocab_size=1,
        pad_token_id=PAD_ID,
        num_labels=num_labels,
    )
    return RobertaForSequenceClassification(config)


def time_peer(
    inputs: Inputs, tokenizer: PreTrainedTokenizerFast, num_labels: int, precision: Precision, folder: Path
) -> float:
    rows = [
        {'input_ids': list(map(int, ids)), 'labels': int(label)}
        for ids, label in zip(inputs.input_ids, inputs.targets, strict=True)
    ]
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH,
        num_train_epochs=1,
        bf16=precision == Precision.bf16,
        use_cpu=not torch.cuda.is_available(),
        save_strategy='no',
        report_to='none',
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    collator = DataCollatorWithPadding(tokenizer)
    trainer = Trainer(build_peer(num_labels), arguments, train_dataset=rows, data_collator=collator)
    return float(trainer.train().metrics['train_runtime'])


def time_ours(inputs: Inputs, task_name: str, num_labels: int, precision: Precision) -> tuple[float, float]:
    """Training seconds and the share of padding."""
    peer = build_peer(num_labels).roberta
    config, weights = import_encoder(peer)
    task, settings = find_task(task_name), FinetuningConfig(task=task_name, max_epochs=1, batch_size=BATCH)
    settings.precision = precision
    device = find_device()
    encoder = build(Encoder, config, weights, 'the peer')
    model = FinetuningModel(encoder, SIZE, task, settings.dropout, seed=1).to(device)
    report = fit(model, inputs, settings, PAD_ID, evaluate=lambda step: None)
    return report.training_seconds, report.padded_share


@pytest.mark.parametrize('precision', [Precision.fp32, Precision.bf16], ids=str)
def test_finetuning_throughput(benchmark: Callable, record: Callable, tmp_path: Path, precision: Precision) -> None:
    skip_if_slow(precision)
    if (count := torch.cuda.device_count()) > 1:
        pytest.skip(f'the Trainer would train on {count} GPUs, {BATCH} rows on each: set CUDA_VISIBLE_DEVICES=0')
    folder = os.environ.get('MAELM_DATA')
    data_config = TaskDataConfig(TaskSource.files, folder) if folder else TaskDataConfig(TaskSource.demo)
    data_config.max_train_examples = EXAMPLES
    task = find_task('mnli' if folder else 'demo_pair')
    data = load_task_data(task, data_config)
    tokenizer = train_tokenizer([text for example in data.train for text in example.texts])
    inputs = encode(data.train, task, tokenizer, LENGTH, SpanConfig())
    ours, peers, shares = [], [], []

    def run_round() -> None:
        keep_freed_memory(False)  # the default of the allocator, as for any user of the Trainer
        peers.append(time_peer(inputs, tokenizer, task.num_outputs, precision, tmp_path))
        keep_freed_memory()
        seconds, share = time_ours(inputs, task.name, task.num_outputs, precision)
        ours.append(seconds)
        shares.append(share)

    benchmark.pedantic(run_round, rounds=ROUNDS, warmup_rounds=1)
    mine, theirs = statistics.median(ours[1:]), statistics.median(peers[1:])
    for name, seconds in (('Hugging Face Trainer, dynamic padding', theirs), ('our fine-tuning', mine)):
        row = {
            'contender': f'{name}, {task.name}',
            'precision': precision.name,
            'layers': LAYERS,
            'hidden_size': SIZE,
            'batch': BATCH,
            'examples': len(inputs),
            'examples_per_second': round(len(inputs) / seconds, 1),
            'times_hugging_face_trainer': round(theirs / seconds, 3),
            'rounds': ROUNDS,
        }
        record('finetuning', row)
        print(f'\n{row["contender"]}: {row["examples_per_second"]} examples/s, {theirs / seconds:.2f} ×', end='')
    print(f'\npadding: {shares[-1]:.1%}')
    assert len(inputs) == min(EXAMPLES, len(data.train))
