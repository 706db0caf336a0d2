"""Equal to the official SQuAD 2.0 rules: by hand, by brute force, against Transformers' copy of them and torchmetrics'.

Transformers 5 has no copy any more. What that of 4.57.6 computes is recorded in ``squad_golden.json``, by
``record(official)`` below; where Transformers 4 is installed, the record is compared with what it computes now.
"""

import importlib
import json
import os
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet
import pytest
import transformers
from torchmetrics.functional.text import squad

from maelm_composer.tasks.metrics import (
    find_best_threshold,
    normalize_answer,
    score_exact,
    score_f1,
    score_questions,
)

FOLDER = os.environ.get('MAELM_DATA')
DIGITS = {'rel': 0, 'abs': 1e-12}
GOLDEN = json.loads(Path(__file__).with_name('squad_golden.json').read_text(encoding='utf-8'))
OFFICIAL = 'transformers.data.metrics.squad_metrics'
official = importlib.import_module(OFFICIAL) if transformers.__version__ < '5' else None
TEXT = 'the an of New York, École “ten” men A.B. an-d 3½% Zoë said: theatre'
NORMALIZED = [
    ('The  Cat,\n sat on a mat.', 'cat sat on mat'),
    ('A.B.C. an-d the', 'abc and'),
    ('theatre another an', 'theatre another'),
    ('The', ''),
    ('a-n', ''),  # the hyphen goes first, and leaves an article
    ('ÉCOLE', 'école'),
    ('“the” end…', '“ ” end…'),  # quotes and dots outside ASCII stay
    ('an\u00a0apple', 'apple'),
    ('the 3½% _x_', '3½ x'),
    ('', ''),
]


def evaluate(*of_questions):
    return score_questions(*of_questions)[0]


@pytest.mark.parametrize(
    'answer, prediction, exact, f1',
    [
        ('the Normans', 'Normans.', 1, 1),
        ('new york city', 'york', 0, 2 * 1 * (1 / 3) / (1 + 1 / 3)),
        ('a b c', 'b b c', 0, 2 * (2 / 3) * 1 / (2 / 3 + 1)),  # "a" is an article; one b of two counts
        ('to be or not to be', 'to to to be', 0, 2 * (3 / 4) * (3 / 6) / (3 / 4 + 3 / 6)),
        ('', '', 1, 1),
        ('', 'the', 1, 1),  # normalises to nothing
        ('', 'x', 0, 0),
        ('x', '', 0, 0),
        ('Müller', 'Muller', 0, 0),
    ],
)
def test_scores_by_hand(answer, prediction, exact, f1):
    assert score_exact(answer, prediction) == exact
    assert score_f1(answer, prediction) == pytest.approx(f1, **DIGITS)


def test_a_small_set_by_hand():
    gold = {'q1': ['in Paris', 'Paris'], 'q2': ['ten men'], 'q3': [], 'q4': []}
    predictions = {'q1': 'Paris', 'q2': 'ten', 'q3': 'x', 'q4': 'y'}
    difference = {'q1': -5.0, 'q2': 1.0, 'q3': -1.0, 'q4': 3.0}
    scores = evaluate(gold, predictions, difference)
    assert scores['exact'] == 2 / 4  # q1 answered, q4 declined; q2 declined and q3 answered wrongly
    assert scores['f1'] == 2 / 4
    assert (scores['has_answer_exact'], scores['no_answer_exact']) == (1 / 2, 1 / 2)
    assert (scores['best_exact'], scores['best_exact_threshold']) == (3 / 4, -5.0)  # only q1 is answered
    assert (scores['best_f1'], scores['best_f1_threshold']) == (3 / 4, -5.0)  # q2 brings 2/3, but q3 comes before it


def test_a_difference_of_exactly_zero_is_an_answer():
    assert evaluate({'q': ['x']}, {'q': 'x'}, {'q': 0.0})['exact'] == 1
    assert evaluate({'q': []}, {'q': 'x'}, {'q': 0.0})['exact'] == 0


def test_never_answering_is_a_threshold_too():
    scores = evaluate({'q1': [], 'q2': []}, {'q1': 'x', 'q2': 'y'}, {'q1': -1.0, 'q2': -2.0})
    assert (scores['best_exact'], scores['best_exact_threshold'], scores['exact']) == (1, 0.0, 0)
    assert 'has_answer_exact' not in scores


@pytest.mark.parametrize('seed', range(20))
def test_the_best_threshold_is_the_best_of_all(seed):
    """Against all thresholds; the differences are distinct, so that each threshold separates two questions."""
    generator = np.random.default_rng(seed)
    has_answer, raw = generator.random(60) < 0.5, generator.random(60).round(2)
    has_text = generator.random(60) < 0.9
    raw = np.where(has_answer, raw, ~has_text)
    difference = generator.permutation(60) - 30.5
    scores = {
        threshold: np.where(difference > threshold, ~has_answer, raw).mean() for threshold in [-np.inf, *difference]
    }
    threshold, is_answered = find_best_threshold(raw, difference, has_answer, has_text)
    best = np.where(is_answered, raw, ~has_answer).mean()
    assert best == pytest.approx(max(scores.values()), **DIGITS)
    never = best == pytest.approx(scores[-np.inf], **DIGITS)
    assert threshold == 0.0 if never else scores[threshold] == pytest.approx(best, **DIGITS)


def distort(text, context, random_state):
    """A random prediction: right, nearly right, or with features that the official rules treat specially."""
    words = context.split()
    start = random_state.randrange(len(words))
    return random_state.choice(
        [
            text,
            f'The {text}',
            f'“{text}”',
            f'"{text.upper()}"!',
            f'{text} {text}',
            f'an a {text[: len(text) // 2]}',
            text.replace(' ', '\u00a0'),
            text.replace('e', 'é'),
            ' '.join(words[start : start + 4]),
            '',
            'the',
            '.',
        ]
    )


def ask(official, gold, predictions, differences):
    """Transformers' scores of a whole set, in per cent, under its names."""
    examples = [SimpleNamespace(qas_id=key, answers=[{'text': text} for text in gold[key]]) for key in gold]
    return official.squad_evaluate(examples, predictions, differences, no_answer_probability_threshold=0.0)


def draw_set(seed):
    """Sixty questions on random text: answers, predictions and null score differences."""
    random_state = random.Random(seed)
    words = TEXT.split()
    gold, predictions, differences = {}, {}, {}
    for i in range(60):
        context = ' '.join(random_state.choices(words, k=30))
        start = random_state.randrange(25)
        texts = [' '.join(context.split()[start : start + length]) for length in (1, 3)]
        gold[f'q{i}'] = texts if random_state.random() < 0.6 else []
        predictions[f'q{i}'] = distort(random_state.choice(texts), context, random_state)
        difference = random_state.gauss(0 if gold[f'q{i}'] else 1, 2)
        differences[f'q{i}'] = float(round(difference)) if seed % 2 else difference  # odd seeds have ties
    return gold, predictions, differences


def record(official):
    """The part of ``squad_golden.json`` that needs no real data, computed anew."""
    return {
        'normalized': [official.normalize_answer(text) for text, _ in NORMALIZED],
        'sets': [dict(ask(official, *draw_set(seed))) for seed in range(8)],
    }


def assert_equal_scores(ours, theirs):
    """Assert that all our scores equal Transformers', which have other names and are in per cent."""
    names = {'has_answer_exact': 'HasAns_exact', 'has_answer_f1': 'HasAns_f1'}
    names |= {'no_answer_exact': 'NoAns_exact', 'no_answer_f1': 'NoAns_f1'}
    for name, value in ours.items():
        if name.endswith('_threshold'):
            assert value == theirs[name.replace('threshold', 'thresh')]
        else:
            assert 100 * value == pytest.approx(theirs[names.get(name, name)], rel=0, abs=1e-10), name


def test_recorded_scores_of_the_official_rules():
    if official is not None:
        assert record(official) == {name: GOLDEN[name] for name in ('normalized', 'sets')}
    by_hand = [normalized for _, normalized in NORMALIZED]
    assert [normalize_answer(text) for text, _ in NORMALIZED] == by_hand == GOLDEN['normalized']
    for seed, theirs in enumerate(GOLDEN['sets']):
        assert_equal_scores(evaluate(*draw_set(seed)), theirs)


@pytest.mark.skipif(official is None, reason='Transformers 5 has no copy of the official rules')
def test_every_pair_of_answer_and_prediction_scores_as_by_the_official_rules():
    pairs = {(answer, said[key]) for gold, said, _ in map(draw_set, range(8)) for key in gold for answer in gold[key]}
    ours = {pair: (score_exact(*pair), score_f1(*pair)) for pair in pairs}
    assert ours == {pair: (official.compute_exact(*pair), official.compute_f1(*pair)) for pair in pairs}
    assert len({f1 for _, f1 in ours.values()}) > 5  # not all right or wrong


@pytest.mark.skipif(FOLDER is None, reason='MAELM_DATA does not name a folder with squad_v2/dev.parquet')
@pytest.mark.parametrize('has_ties', [False, True])
def test_the_whole_dev_set_equals_the_official_rules(has_ties):
    rows = pyarrow.parquet.read_table(Path(str(FOLDER), 'squad_v2/dev.parquet')).to_pylist()
    random_state = random.Random(1)
    gold = {row['id']: row['answers']['text'] for row in rows}
    predictions = {
        row['id']: distort(random_state.choice(row['answers']['text'] or ['x']), row['context'], random_state)
        for row in rows
    }
    differences = {key: random_state.gauss(0 if answers else 1, 2) for key, answers in gold.items()}
    if has_ties:
        differences = {key: float(round(value)) for key, value in differences.items()}
    theirs = GOLDEN['dev_set_with_ties' if has_ties else 'dev_set']
    if official is not None:
        assert ask(official, gold, predictions, differences) == theirs
    ours = evaluate(gold, predictions, differences)
    assert_equal_scores(ours, theirs)
    assert 0.1 < ours['exact'] < ours['best_exact'] < 0.9  # neither trivial
    for row in rows[::7]:
        for answer in row['answers']['text']:
            prediction = predictions[row['id']]
            another = squad(
                [{'id': '0', 'prediction_text': prediction}],
                [{'id': '0', 'answers': {'text': [answer], 'answer_start': [0]}}],
            )
            assert 100 * score_exact(answer, prediction) == another['exact_match']
            assert 100 * score_f1(answer, prediction) == pytest.approx(float(another['f1']), rel=1e-6)
            if official is not None:
                assert score_exact(answer, prediction) == official.compute_exact(answer, prediction)
                assert score_f1(answer, prediction) == official.compute_f1(answer, prediction)


def test_the_scores_of_the_questions_have_the_metrics_as_their_means():
    metrics, each = score_questions(*draw_set(3))
    assert each.keys() == {'exact', 'f1', 'best_exact', 'best_f1'}
    assert {name: values.mean() for name, values in each.items()} == pytest.approx({n: metrics[n] for n in each})
