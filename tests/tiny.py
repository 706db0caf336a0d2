"""A checkpoint and task files so small that a run takes about a second."""

import json
import socket
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from safetensors.torch import save_file

from maelm_composer.config import (
    DataConfig,
    DecoderConfig,
    FinetuningConfig,
    MaskingConfig,
    ModelConfig,
    Precision,
    PretrainingConfig,
    TaskDataConfig,
    TaskSource,
    TokenizerConfig,
)
from maelm_composer.data.tokenizer import save_tokenizer, train_tokenizer
from maelm_composer.model.maelm import build_model
from maelm_composer.recipe import to_yaml
from maelm_composer.tasks.catalogue import TASKS
from tests.records import PROVENANCE, make_pretraining

V, N = 320, 48
GOOD = ['bright', 'kind', 'calm', 'warm']
BAD = ['dull', 'cruel', 'loud', 'cold']
FILLER = ['the', 'boy', 'sees', 'a', 'house', 'and', 'walks', 'to', 'town', 'with', 'his', 'dog']
TEXTS = [' '.join([*GOOD, *BAD, *FILLER, 'how is it'] * 20)]
SIZES = {'hidden_size': 32, 'num_hidden_layers': 2, 'num_attention_heads': 2, 'intermediate_size': 64}
HF_SETTINGS = {'vocab_size': V, 'max_position_embeddings': N + 2, 'pad_token_id': 1, **SIZES}  # of a stock RoBERTa
MODEL = ModelConfig(vocab_size=V, max_seq_len=N, decoder=DecoderConfig(**SIZES), **SIZES)
SAMPLES, CHECKPOINT = 64, 'samples-000000000064'
_HELD: list[socket.socket] = []


def find_free_port() -> int:
    """A port of loopback for one server with SO_REUSEADDR, as torch's; no other process is given the port meanwhile."""
    probe = socket.socket()
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    probe.bind(('127.0.0.1', 0))
    _HELD.append(probe)
    return int(probe.getsockname()[1])


def write_rows(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def make_rows(name: str, count: int, seed: int) -> list[dict]:
    """Rows of a task with the Hub's columns; the answer is in which kind of words the text has."""
    task, generator = TASKS[name], np.random.default_rng(seed)
    rows = []
    for i in range(count):
        words = generator.choice(FILLER, generator.integers(3, 12)).tolist()
        if task.kind == 'span':
            answer = str(generator.choice(GOOD + BAD)) if i % 3 else ''
            place = int(generator.integers(len(words)))
            context = ' '.join([*words[:place], *([answer] if answer else []), *words[place:]])
            answers = {'text': [answer] if answer else [], 'answer_start': [context.index(answer)] if answer else []}
            rows.append(
                {'id': f'q{seed}-{i}', 'title': 't', 'context': context, 'question': 'how is it', 'answers': answers}
            )
            continue
        label = i % (len(task.label_names) or 6)
        marks = generator.choice(
            [GOOD, BAD, FILLER][label] if task.label_names else BAD, 4 if task.label_names else label
        )
        texts = {column: ' '.join(words) for column in task.text_columns}
        texts[task.text_columns[0]] += ' ' + ' '.join(marks)
        rows.append(texts | {'label': label if task.label_names else float(label), 'idx': i})
    return rows


@pytest.fixture(scope='session')
def task_folder(tmp_path_factory) -> Path:
    """What data.folder names: every task that is not the demo's."""
    folder = tmp_path_factory.mktemp('tasks')
    for name, task in TASKS.items():
        if task.is_demo:
            continue
        place = folder / ('squad_v2' if task.kind == 'span' else f'glue/{name}')
        write_rows(place / 'train.parquet', make_rows(name, 96, seed=0))
        for number, split in enumerate(task.eval_splits, start=1):
            write_rows(
                place / (f'dev_{split}.parquet' if name == 'mnli' else 'dev.parquet'), make_rows(name, 48, number)
            )
    return folder


def write_tokenizer(folder: Path, texts: Sequence[str] = TEXTS, vocab_size: int = V, length: int = N) -> None:
    save_tokenizer(train_tokenizer(texts, TokenizerConfig(vocab_size=vocab_size)), folder, length)


def write_run(
    folder: Path, model: ModelConfig, weights: dict, remote: str, masking: MaskingConfig | None = None, **record
) -> Path:
    """A run folder of pretraining as training leaves it, but for its tokenizer."""
    (folder / CHECKPOINT).mkdir(parents=True)
    masking = masking or MaskingConfig(encoder_mask_fraction=float(model.decoder is None))
    data = DataConfig(remote=remote)
    config = PretrainingConfig(run_name=folder.name, save_folder=remote, data=data, masking=masking, model=model)
    (folder / 'recipe.yaml').write_text(to_yaml(config))
    (folder / 'record.json').write_text(json.dumps(make_pretraining(folder.name, provenance=PROVENANCE, **record)))
    save_file(weights, folder / CHECKPOINT / 'model.safetensors')
    progress = {'samples': SAMPLES, 'training_seconds': 1.5}
    (folder / CHECKPOINT / 'progress.json').write_text(json.dumps(progress))
    (folder / 'latest').symlink_to(CHECKPOINT)
    return folder


@pytest.fixture(scope='session')
def checkpoint(tmp_path_factory) -> Path:
    """A run folder of pretraining with random weights."""
    parent = tmp_path_factory.mktemp('runs')
    folder = write_run(parent / 'tiny', MODEL, build_model(MODEL, seed=1).state_dict(), remote=str(parent / 'shards'))
    write_tokenizer(folder / 'tokenizer')
    return folder


@pytest.fixture
def configure(checkpoint, task_folder, tmp_path):
    """``configure('rte', seed=2)``: a run on the small files."""

    def build(task: str, **changes) -> FinetuningConfig:
        source = TaskSource.demo if task.startswith('demo') else TaskSource.files
        data = TaskDataConfig(source=source, folder=str(task_folder), **changes.pop('data', {}))
        fields = {'learning_rate': 3e-3, 'batch_size': 16, 'max_epochs': 4, 'precision': Precision.fp32, 'dropout': 0.0}
        return FinetuningConfig(
            task=task, checkpoint=str(checkpoint), save_folder=str(tmp_path / 'out'), data=data, **fields | changes
        )

    return build
