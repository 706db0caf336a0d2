"""Batches of similar length: every row once, in an order of seed and epoch alone, with little padding."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maelm_composer.finetuning.fit import collate, measure_padding, order_by_length, sort_for_evaluation
from maelm_composer.tasks.examples import Inputs


@given(st.lists(st.integers(2, 64), min_size=1, max_size=300), st.integers(1, 40), st.integers(0, 3))
def test_every_row_once_in_batches_of_the_asked_size(lengths, size, seed):
    batches = order_by_length(lengths, size, seed, epoch=0)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))
    assert sorted(map(len, batches), reverse=True)[:-1] == [size] * (len(batches) - 1)
    assert len(batches) == -(-len(lengths) // size)


def test_the_order_is_of_seed_and_epoch():
    lengths = np.random.default_rng(0).integers(5, 60, 500)

    def order(seed, epoch):
        return np.concatenate(order_by_length(lengths, 16, seed, epoch)).tolist()

    assert order(1, 0) == order(1, 0)
    assert len({tuple(order(seed, epoch)) for seed in (1, 2) for epoch in (0, 1)}) == 4
    partners = [{frozenset(b.tolist()) for b in order_by_length(lengths, 16, 1, epoch)} for epoch in (0, 1)]
    assert not partners[0] & partners[1]  # not only the order of fixed batches


def test_the_order_of_published_runs_is_drawn_again():
    batches = order_by_length([5, 9, 7, 5, 8, 6, 9, 7, 5, 6], 4, seed=1, epoch=2)
    assert [batch.tolist() for batch in batches] == [[6, 1], [9, 7, 2, 4], [8, 0, 3, 5]]


@pytest.mark.parametrize('size', [16, 32])
def test_padding_stays_under_a_tenth(size):
    lengths = np.random.default_rng(0).lognormal(3.5, 0.5, 10_000).astype(int) + 3
    batches = order_by_length(lengths, size, 1, 0)
    assert measure_padding(lengths, batches) < 0.04
    rows = np.arange(len(lengths))
    assert measure_padding(lengths, [rows[i : i + size] for i in range(0, len(rows), size)]) > 0.4
    assert measure_padding([4, 2], [np.array([0, 1])]) == 0.25
    lengths_of_batches = [int(lengths[batch].max()) for batch in batches]
    assert lengths_of_batches != sorted(lengths_of_batches)


def test_a_batch():
    inputs = Inputs([np.array([0, 9, 8, 2]), np.array([0, 2]), np.array([0, 7, 2])], np.array([5, 6, 7]))
    batch = collate(inputs, [2, 0], pad_id=1)
    assert batch.input_ids.tolist() == [[0, 7, 2, 1], [0, 9, 8, 2]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0], [0, 1, 2, 3]]
    assert batch.segment_ids.tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert (batch.targets.tolist(), batch.is_candidate) == ([7, 5], None)


def test_answers_may_stand_in_the_passage_or_at_the_first_token():
    ids = [np.array([0, 9, 2, 2, 5, 6, 2]), np.array([0, 9, 9, 2, 2, 5, 2, 9, 2])]
    inputs = Inputs(ids, np.array([[4, 5], [0, 0]]), np.array([4, 5]))
    is_candidate = collate(inputs, np.array([0, 1]), pad_id=1).is_candidate
    assert [row.nonzero().flatten().tolist() for row in is_candidate] == [[0, 4, 5], [0, 5, 6, 7]]


def test_evaluation_batches():
    assert [b.tolist() for b in sort_for_evaluation([3, 9, 5, 9, 1], 2)] == [[1, 3], [2, 0], [4]]
