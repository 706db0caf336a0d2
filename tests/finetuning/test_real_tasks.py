"""Tests on the real tasks; MAELM_DATA names a folder with glue/<task>/*.parquet and squad_v2/*.parquet."""

import os

import pytest

from maelm_composer.config import SpanConfig, TaskDataConfig, TaskSource, TokenizerConfig
from maelm_composer.data.tokenizer import train_tokenizer
from maelm_composer.finetuning.fit import measure_padding, order_by_length
from maelm_composer.tasks.catalogue import GLUE, TASKS
from maelm_composer.tasks.examples import encode
from maelm_composer.tasks.sources import load_task_data

FOLDER = os.environ.get('MAELM_DATA')
pytestmark = pytest.mark.skipif(FOLDER is None, reason='MAELM_DATA does not name a folder of real tasks')
NUM_TRAIN = 8000
# Whole dev sets. Of MNLI, QQP and SQuAD 2.0 the split of the standard release; QQP's is a subset in some folders.
DEV_ROWS = {
    'mnli': 9815,
    'qnli': 5463,
    'sst2': 872,
    'cola': 1043,
    'rte': 277,
    'mrpc': 408,
    'stsb': 1500,
    'squad2': 11873,
}


class OneTokenizer:
    """The attributes that tokenisation reads of a Hugging Face tokenizer."""

    cls_token_id, sep_token_id = 0, 2

    def __init__(self, texts: list[str]) -> None:
        self.backend_tokenizer = train_tokenizer(texts, TokenizerConfig(vocab_size=4096))


@pytest.fixture(scope='module')
def tokenizer() -> OneTokenizer:
    rows = load_task_data(TASKS['mnli'], TaskDataConfig(TaskSource.files, FOLDER, 5000)).train
    return OneTokenizer([' '.join(row.texts) for row in rows])


@pytest.mark.parametrize('name', [*GLUE, 'squad2'])
def test_hardly_anything_is_computed_for_padding(name, tokenizer):
    data = load_task_data(TASKS[name], TaskDataConfig(TaskSource.files, FOLDER, NUM_TRAIN))
    assert len(data.evaluation[TASKS[name].eval_splits[0]]) == DEV_ROWS.get(name, pytest.approx(24_000, rel=0.7))
    inputs = encode(data.train, TASKS[name], tokenizer, 512, SpanConfig(), is_training=True)
    assert inputs.num_left_out < 0.01 * len(data.train)
    lengths = inputs.lengths
    assert max(lengths) <= 512
    for size in (16, 32):
        share = measure_padding(lengths, order_by_length(lengths, size, seed=1, epoch=0))
        print(f'{name}, batch {size}: {share:.2%} padding')
        assert share < 0.1
