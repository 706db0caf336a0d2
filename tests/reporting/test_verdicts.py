"""What an estimate says about a claim, and about the paper's number."""

import pytest

from maelm_composer.reporting.cells import Estimate
from maelm_composer.reporting.rows import judge_claim, judge_value


@pytest.mark.parametrize(
    'scale, verdict',
    [
        ('demo', "undecided: the demo is evidence of nothing; not comparable with the paper's absolute numbers"),
        ('medium', "holds: 3 pretraining seeds; not comparable with the paper's absolute numbers"),
        ('base', 'holds: 3 pretraining seeds'),
    ],
)
def test_a_verdict_says_no_more_than_its_scale_allows(scale, verdict):
    found = Estimate(1.25, 0.5, 2.0, 5, pretraining_seeds=3, p=0.01)
    assert judge_claim(scale, found, expects_more=True) == verdict


@pytest.mark.parametrize(
    'low, high, p, expects_more, word',
    [
        (0.2, 0.4, 0.01, True, 'holds'),
        (0.2, 0.4, 0.01, False, 'fails'),
        (0.2, 0.4, 0.06, True, 'undecided'),  # not zero by itself, but by Holm's correction: no evidence of absence
        (-0.9, 0.9, 0.9, True, 'no difference'),
        (-1.1, 0.9, 0.9, True, 'undecided'),
        (-9.0, -1.1, 0.04, True, 'fails'),
        (0.0, 1.2, 0.05, True, 'undecided'),
    ],
)
def test_verdicts(low, high, p, expects_more, word):
    found = Estimate((low + high) / 2, low, high, pretraining_seeds=3, p=p)
    assert judge_claim('base', found, expects_more, margin=1.0) == f'{word}: 3 pretraining seeds'


def test_no_difference_is_decided_without_holm():
    found = Estimate(0.0, -0.9, 0.9, pretraining_seeds=3, p=1.0)
    assert judge_claim('base', found, True, margin=1.0, among=3) == 'no difference: 3 pretraining seeds'
    assert judge_claim('base', found, True, margin=0.5, among=3) == 'undecided: 3 pretraining seeds, one of 3 by Holm'


@pytest.mark.parametrize(
    'seeds, verdict',
    [
        (3, "the interval holds the paper's number"),
        (2, "from two pretraining seeds: +1 from the paper's"),
    ],
)
def test_an_interval_of_two_seeds_is_not_said_to_hold_the_paper_s_number(seeds, verdict):
    assert judge_value('base', Estimate(80.0, 70.0, 90.0, pretraining_seeds=seeds), 79.0, 1) == verdict


def test_two_seeds_decide_nothing():
    found = Estimate(0.3, 0.2, 0.4, pretraining_seeds=2, p=0.01)
    assert judge_claim('base', found, True) == 'undecided: with the sign of the claim, but from two pretraining seeds'
