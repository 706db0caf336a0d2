"""The layout of token ids, and truncation, which never removes a separator."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maelm_composer.checkpoints.pretrained import load_pretrained
from maelm_composer.config import SpanConfig
from maelm_composer.data.special_tokens import CLS_ID, SEP_ID
from maelm_composer.tasks import examples as module
from maelm_composer.tasks.catalogue import TASKS
from maelm_composer.tasks.examples import _join, encode, fit_span
from maelm_composer.tasks.sources import SpanExample, TextExample


@pytest.fixture(scope='module')
def tokenizer(checkpoint):
    return load_pretrained(str(checkpoint)).tokenizer


def encode_one(texts, tokenizer, task='rte', label=1):
    return encode([TextExample('0', texts, label)], TASKS[task], tokenizer, 48, SpanConfig())


def test_layout_is_that_of_the_tokenizers_template(tokenizer):
    for texts in (('the boy sees a house',), ('the boy', 'walks to town'), ('', 'dog'), ('',)):
        (ids,) = encode_one(texts, tokenizer).input_ids
        assert ids.tolist() == tokenizer(*texts)['input_ids']
    (ids,) = encode_one(('the', 'dog'), tokenizer).input_ids
    the, dog = (tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids for text in ('the', 'dog'))
    assert ids.tolist() == [CLS_ID, *the, SEP_ID, SEP_ID, *dog, SEP_ID]


def test_special_tokens_in_the_text_are_text(tokenizer):
    (ids,) = encode_one(('[MASK] [SEP]',), tokenizer).input_ids
    assert SEP_ID not in ids[:-1]
    assert len(tokenizer) - 1 not in ids


@given(st.integers(0, 40), st.integers(0, 40), st.integers(16, 48))
def test_the_longer_text_loses_its_end_first(first, second, length):
    one, two = list(range(100, 100 + first)), list(range(200, 200 + second))
    ids = _join((one, two), cls=0, sep=2, max_seq_len=length)
    kept, other = (sum(low <= token < low + 100 for token in ids) for low in (100, 200))
    assert ids == [0, *one[:kept], 2, 2, *two[:other], 2]
    assert len(ids) == min(length, first + second + 4)
    if (kept, other) != (first, second):
        # Taking from the longer one token by token ends where they are equal, or where one was never touched.
        assert abs(kept - other) <= 1 or (kept == first and other > kept) or (other == second and kept > other)
    assert _join((one,), cls=0, sep=2, max_seq_len=length) == [0, *one[: length - 2], 2]


def test_texts_are_tokenized_in_parts(tokenizer, monkeypatch):
    monkeypatch.setattr(module, 'TEXTS_AT_ONCE', 2)
    texts = ('the', 'boy', 'walks', 'to', 'town')
    parts = encode([TextExample('0', (text,), 0) for text in texts], TASKS['rte'], tokenizer, 48, SpanConfig())
    assert [ids.tolist() for ids in parts.input_ids] == [tokenizer(text)['input_ids'] for text in texts]


def test_targets(tokenizer):
    assert encode_one(('a', 'b'), tokenizer, task='stsb', label=4.5).targets.tolist() == pytest.approx([0.9])
    assert encode_one(('a', 'b'), tokenizer).targets.dtype == np.int64


def test_windows_and_answers_that_are_not_there(tokenizer):
    context = 'the boy walks to town with his warm dog and a bright house'
    examples = [
        SpanExample('a', 'how is it', context, ('warm',), (context.index('warm'),)),
        SpanExample('b', 'how is it', context, ('cold',), (3,)),
        SpanExample('c', 'how is it', context, (), ()),
    ]
    inputs = encode(examples, TASKS['squad2'], tokenizer, 48, SpanConfig(), is_training=True)
    assert (len(inputs), inputs.num_left_out, inputs.windows) == (2, 1, [])
    (start, end), nothing = inputs.targets.tolist()
    assert nothing == [0, 0]
    assert tokenizer.decode(inputs.input_ids[0][start : end + 1]).strip() == 'warm'
    assert inputs.input_ids[0][inputs.passage_starts[0] - 2 : inputs.passage_starts[0]].tolist() == [SEP_ID, SEP_ID]


def test_questions_leave_room_in_short_rows():
    assert fit_span(SpanConfig(), 512) == SpanConfig()
    assert fit_span(SpanConfig(), 64).max_query_length == 30
