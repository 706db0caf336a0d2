"""Windows of passages, and answer texts from scores of tokens."""

import dataclasses
import os
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from transformers import PreTrainedTokenizerFast

from maelm_composer.config import SpanConfig, TokenizerConfig
from maelm_composer.data.tokenizer import save_tokenizer, train_tokenizer
from maelm_composer.tasks.sources import SpanExample
from maelm_composer.tasks.squad import build_windows, predict_answers, tokenize_texts

FOLDER = os.environ.get('MAELM_DATA')
CONTEXT = (
    'The Normans (Norman: Nourmands) were the people who in the 10th and 11th centuries gave their name to Normandy, '
    'a region in France. Ålesund  and\nSão Tomé — “naïve café” — 東京 were never theirs.'
)
CLS, SEP = 0, 2


@pytest.fixture(scope='module')
def tokenizer(tmp_path_factory) -> PreTrainedTokenizerFast:
    folder = tmp_path_factory.mktemp('tokenizer')
    trained = train_tokenizer([CONTEXT] * 2, TokenizerConfig(vocab_size=340))
    save_tokenizer(trained, folder, 512)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def ask(answer=None, start=None, question='Who?', context=CONTEXT):
    """A question about CONTEXT; ``start`` is a recorded start that differs from the answer's true one."""
    if answer is None:
        return SpanExample('q', question, context, (), ())
    return SpanExample('q', question, context, (answer,), (context.index(answer) if start is None else start,))


def build(tokenizer, *example, max_seq_len=512, question='Who?', is_training=True, context=CONTEXT, **span):
    """Windows of one example."""
    examples = [ask(*example, question=question, context=context)]
    (windows,) = build_windows(examples, tokenizer, max_seq_len, SpanConfig(**span), is_training)
    return windows


def say(window):
    first, last = (window.offsets[token - window.passage_start] for token in window.target)
    return CONTEXT[first[0] : last[1]]


def passage_of(window):
    return window.input_ids[window.passage_start : -1].tolist()


def test_the_layout(tokenizer):
    (window,) = build(tokenizer)
    question, passage = (tokenize_texts([text], tokenizer)[text] for text in ('Who?', CONTEXT))
    assert window.input_ids.tolist() == [CLS, *question.ids, SEP, SEP, *passage.ids, SEP]
    (same,) = build(tokenizer, question='  Who?')
    assert same.input_ids.tolist() == window.input_ids.tolist()
    assert passage_of(window) == passage.ids
    assert [tuple(offset) for offset in window.offsets.tolist()] == passage.offsets


@pytest.mark.parametrize('max_seq_len', [24, 64, 65, 100, 512])
def test_a_window_is_never_too_long_and_the_windows_lose_nothing(tokenizer, max_seq_len):
    span = {'doc_stride': 16, 'max_query_length': 9}
    windows = build(tokenizer, max_seq_len=max_seq_len, question=CONTEXT, **span)
    passage = tokenize_texts([CONTEXT], tokenizer)[CONTEXT]
    assert all(window.passage_start == 9 + 3 for window in windows)
    assert all(window.input_ids[1:10].tolist() == passage.ids[:9] for window in windows)
    assert all(len(window.input_ids) == max_seq_len for window in windows[:-1])
    assert len(windows[-1].input_ids) <= max_seq_len
    step = min(16, (max_seq_len - 13) // 2)
    seen = []
    for i, window in enumerate(windows):
        first = i * step
        assert passage_of(window) == passage.ids[first : first + max_seq_len - 13]
        seen = seen[:first] + passage_of(window)
    assert seen == passage.ids


@pytest.mark.parametrize('answer', ['France', 'The Normans', 'São Tomé', 'naïve café', '東京', '11th', 'theirs', '京'])
def test_a_target_is_the_answer(tokenizer, answer):
    (window,) = build(tokenizer, answer)
    assert answer in say(window)
    assert len(say(window)) <= len(answer) + 2  # a piece may hold a bracket or a full stop with the word


def test_a_target_is_in_the_windows_that_hold_it_whole(tokenizer):
    answer = 'a region in France'  # not in the first window, nor in the last
    windows = build(tokenizer, answer, max_seq_len=40, doc_stride=1)
    holds = [window.target != (0, 0) for window in windows]
    (whole,) = build(tokenizer, answer)
    first, last = whole.target
    wanted = whole.input_ids[first : last + 1].tolist()
    for window, is_target in zip(windows, holds, strict=True):
        text = passage_of(window)
        is_inside = any(text[i : i + len(wanted)] == wanted for i in range(len(text)))
        assert is_target == is_inside
        assert not is_target or say(window) == answer
    assert set(holds) == {True, False}


def test_no_answer_and_evaluation_have_no_target(tokenizer):
    for windows in (build(tokenizer), build(tokenizer, 'France', is_training=False)):
        assert [window.target for window in windows] == [(0, 0)] * len(windows)


def test_white_space_and_a_start_nearby_are_tolerated(tokenizer):
    (window,) = build(tokenizer, 'Ålesund and São', CONTEXT.index('Ålesund') + 3)
    assert say(window) == 'Ålesund  and\nSão'
    repeated = 'the the the the the the the the the the the the'
    (window,) = build(tokenizer, 'the', 20, context=repeated)
    assert window.offsets[window.target[0] - window.passage_start][0] in (20, 19)


@pytest.mark.parametrize(
    'answer, start', [('Germany', 0), ('France', 0), ('france', CONTEXT.index('France')), (' ', 3)]
)
def test_an_answer_that_is_not_there_gives_no_window(tokenizer, answer, start):
    assert build(tokenizer, answer, start) == []
    assert build(tokenizer, answer, start, is_training=False)


@pytest.mark.parametrize('is_training', [True, False])
def test_all_at_once_is_one_by_one(tokenizer, is_training):
    answers = [('France',), (), ('Germany', 5), ('東京',)]
    examples = [ask(*answer, question=f'Who {i}?') for i, answer in enumerate(answers)]
    span = SpanConfig(doc_stride=16)
    together = list(build_windows(examples, tokenizer, 48, span, is_training))
    single = [next(build_windows([example], tokenizer, 48, span, is_training)) for example in examples]
    np.testing.assert_equal(
        *([list(map(dataclasses.astuple, windows)) for windows in side] for side in (together, single))
    )
    assert [bool(windows) for windows in together] == [True, True, not is_training, True]


@pytest.mark.parametrize('doc_stride', [9, 10])  # ties fall elsewhere
def test_one_window_shows_most_around_each_token(tokenizer, doc_stride):
    windows = build(tokenizer, max_seq_len=48, is_training=False, doc_stride=doc_stride)
    passage = tokenize_texts([CONTEXT], tokenizer)[CONTEXT].ids
    places = [[] for _ in passage]  # of every token: (room, is best) in each window
    for i, window in enumerate(windows):
        length = len(passage_of(window))
        for j in range(length):
            room = min(j, length - 1 - j) + 0.01 * length
            places[i * doc_stride + j].append((room, window.is_best_context[j]))
    for token in places:
        assert sum(is_best for _, is_best in token) == 1
        assert max(token)[0] == next(room for room, is_best in token if is_best)


def predict(windows, start, end, **span):
    scores = [np.stack(pair, 1) for pair in zip(start, end, strict=True)]
    return predict_answers([ask()], [windows], scores, SpanConfig(**span))[0]


def test_prediction_equals_brute_force(tokenizer):
    """The best text by brute force over every pair of starts and ends in every window."""
    windows = build(tokenizer, max_seq_len=48, is_training=False, doc_stride=10)
    generator = np.random.default_rng(0)
    for _ in range(20):
        start, end = ([generator.normal(size=60) for _ in windows] for _ in range(2))
        best = []
        for window, s, e in zip(windows, start, end, strict=True):
            s, e = s[window.passage_start :], e[window.passage_start :]
            for i in range(len(window.offsets)):
                for j in range(i, min(i + 7, len(window.offsets))):
                    if window.is_best_context[i]:
                        text = CONTEXT[window.offsets[i][0] : window.offsets[j][1]].strip()
                        best.append((s[i] + e[j], text))
        score, text = max((score, text) for score, text in best if text)
        null = min(s[0] + e[0] for s, e in zip(start, end, strict=True))
        prediction = predict(windows, start, end, n_best=60, max_answer_length=7)
        assert prediction['prediction'] == text
        assert prediction['prediction'] in CONTEXT
        assert prediction['null_score_difference'] == pytest.approx(null - score, abs=1e-12)


def test_only_the_best_starts_and_ends_are_paired(tokenizer):
    (window,) = build(tokenizer, is_training=False)
    start, end = np.full(200, -9.0), np.full(200, -9.0)
    first = window.passage_start
    start[[first + 9, first + 2]] = 5, 4
    end[[first + 4, first + 10]] = 6, 1
    one = predict([window], [start], [end], n_best=1)
    assert one['prediction'] == ''  # the best end lies before the best start
    two = predict([window], [start], [end], n_best=2)
    assert two['prediction'] == CONTEXT[window.offsets[2][0] : window.offsets[4][1]]
    assert two['null_score_difference'] == -18 - 10


def test_masked_scores_are_no_candidates(tokenizer):
    (window,) = build(tokenizer, is_training=False)
    start, end = np.full(200, -np.inf), np.full(200, -np.inf)
    start[0] = end[0] = 1.0
    assert predict([window], [start], [end]) == {'id': 'q', 'prediction': '', 'null_score_difference': 2.0}


def test_scores_that_are_no_numbers_are_refused(tokenizer):
    (window,) = build(tokenizer, is_training=False)
    good = np.zeros(200)
    for bad_place in (0, window.passage_start):
        bad = good.copy()
        bad[bad_place] = np.nan
        with pytest.raises(ValueError, match=r'NaN|nan'):
            predict([window], [bad], [good])


@pytest.mark.skipif(FOLDER is None, reason='MAELM_DATA does not name a folder with squad_v2/dev.parquet')
def test_real_answers_are_found_and_scored(tokenizer):
    """Scores that favour the tokens of the first gold answer predict a text that contains the answer."""
    rows = pyarrow.parquet.read_table(Path(str(FOLDER), 'squad_v2/dev.parquet')).to_pylist()[::8]
    examples = [
        SpanExample(r['id'], r['question'], r['context'], r['answers']['text'], r['answers']['answer_start'])
        for r in rows
    ]
    span = SpanConfig(max_answer_length=200)
    targets = list(build_windows(examples, tokenizer, 384, span, is_training=True))
    windows = list(build_windows(examples, tokenizer, 384, span, is_training=False))
    at = np.arange(384)[:, None]
    scores = [np.where(at == w.target, 10.0, 0.0) for of_example in targets for w in of_example]
    predictions = predict_answers(examples, windows, scores, span)
    right = 0
    for example, prediction in zip(examples, predictions, strict=True):
        assert prediction['prediction'] in example.context
        if example.answers_text:
            right += example.answers_text[0] in prediction['prediction']
        else:
            assert prediction['null_score_difference'] > 0
    assert right / sum(bool(example.answers_text) for example in examples) > 0.97
