"""Masked positions: their number, their uniform distribution, and that they depend on (seed, epoch, row) alone."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maelm_composer.config import MaskingConfig
from maelm_composer.errors import InputError
from maelm_composer.masking.draw import count_masked, draw_bits, draw_masked_positions


def draw(is_maskable, rows=None, epochs=None, seed=0, mlm_probability=0.15, rounds_at_random=False):
    count = len(is_maskable)
    return draw_masked_positions(
        is_maskable,
        MaskingConfig(mlm_probability=mlm_probability, rounds_at_random=rounds_at_random),
        seed,
        np.zeros(count, np.int64) if epochs is None else np.asarray(epochs, np.int64),
        np.arange(count) if rows is None else np.asarray(rows, np.int64),
    )


@given(length=st.integers(8, 200), rate=st.floats(0.05, 0.5), seed=st.integers(0, 2**63))
def test_every_row_masks_the_rounded_count_of_distinct_maskable_positions(length, rate, seed):
    is_maskable = np.random.default_rng(length).random((7, length)) < 0.9
    is_maskable[:, : int(np.ceil(rate * length))] = True
    positions, counts = draw(is_maskable, seed=seed, mlm_probability=rate)
    assert counts.tolist() == [round(rate * length)] * 7
    assert positions.shape == (7, round(rate * length))
    for row, chosen in enumerate(positions):
        assert len(set(chosen.tolist())) == len(chosen)
        assert is_maskable[row, chosen].all()


def test_paper_counts():
    assert count_masked(MaskingConfig(), 512) == (77, 77)
    assert count_masked(MaskingConfig(rounds_at_random=True), 512) == (76, 77)
    assert count_masked(MaskingConfig(rounds_at_random=True), 100) == (15, 15)


def test_random_rounding_gives_floor_or_ceil_with_the_mean_expected():
    _, counts = draw(np.ones((4000, 50), bool), rounds_at_random=True)  # 7.5 expected
    assert set(counts.tolist()) == {7, 8}
    assert abs(counts.mean() - 7.5) < 4 * 0.5 / 4000**0.5
    _, counts = draw(np.ones((4000, 21), bool), rounds_at_random=True)  # 3.15 expected
    assert set(counts.tolist()) == {3, 4}
    assert abs(counts.mean() - 3.15) < 4 * (0.15 * 0.85 / 4000) ** 0.5


def test_random_rounding_keeps_the_positions_and_only_changes_their_number():
    is_maskable = np.ones((20, 50), bool)
    positions, _ = draw(is_maskable, rounds_at_random=True)
    np.testing.assert_array_equal(positions, draw(is_maskable)[0])


def test_seeds_epochs_and_rows_all_draw_differently():
    drawn = set()
    for seed, epoch in itertools.product(range(5), range(5)):
        positions, _ = draw(np.ones((20, 64), bool), epochs=[epoch] * 20, seed=seed)
        drawn |= {tuple(row) for row in positions.tolist()}
    assert len(drawn) == 5 * 5 * 20


@pytest.mark.parametrize('neighbour', ['row', 'epoch', 'seed'])
def test_neighbours_share_masks_only_by_chance(neighbour):
    count, length, masked = 3000, 64, 10
    is_maskable, rows, epochs = np.ones((count, length), bool), np.arange(count), np.zeros(count, np.int64)
    step = {name: int(name == neighbour) for name in ('row', 'epoch', 'seed')}
    first, _ = draw(is_maskable, rows, epochs, seed=3)
    second, _ = draw(is_maskable, rows + step['row'], epochs + step['epoch'], 3 + step['seed'])
    shared = (first[:, :, None] == second[:, None, :]).sum((1, 2))
    rate = masked / length
    deviation = (masked * rate * (1 - rate) * (length - masked) / (length - 1)) ** 0.5  # hypergeometric
    assert abs(shared.mean() - masked * rate) < 4 * deviation / count**0.5


@pytest.mark.parametrize('share', [0.5, 1.0])
def test_masks_are_uniform_over_the_maskable_positions(share):
    """Chi-square of how often each of 62 positions is among the first ``share`` drawn, with a fixed seed."""
    is_maskable = np.ones((6000, 64), bool)
    is_maskable[:, [0, 63]] = False
    positions, counts = draw(is_maskable, seed=11)
    taken = positions[:, : int(share * counts[0])]
    observed = np.bincount(taken.ravel(), minlength=64)[1:63]
    rate = taken.shape[1] / 62
    # Without replacement the counts vary by 1 - rate less than a multinomial's.
    statistic = ((observed - 6000 * rate) ** 2 / (6000 * rate * (1 - rate))).sum() * 61 / 62
    assert 30 < statistic < 107  # 0.0005 and 0.9997 quantiles at 61 degrees of freedom


def test_streams_of_bits_are_independent_and_balanced():
    rows, epochs = np.arange(200), np.zeros(200, np.int64)
    streams = [draw_bits(5, epochs, rows, 64, stream) for stream in (0, 1, 2)]
    assert len(np.unique(np.concatenate(streams))) == 3 * 200 * 64
    for bits in (*streams, *(one ^ other for one, other in itertools.combinations(streams, 2))):
        ones = np.unpackbits(bits.view(np.uint8)).mean()
        assert abs(ones - 0.5) < 4 * 0.5 / (bits.size * 64) ** 0.5


def test_the_masks_of_published_runs_are_drawn_again():
    """Another draw would make a resumed run another one, and its records no longer reproducible."""
    positions, _ = draw(np.ones((4, 64), bool), [0, 1, 70_000, 2**33], [0, 3, 0, 1], seed=17, mlm_probability=0.1)
    assert positions.tolist() == [
        [15, 37, 63, 60, 38, 51],
        [2, 19, 5, 13, 34, 41],
        [40, 59, 27, 54, 49, 18],
        [24, 43, 61, 25, 44, 15],
    ]
    _, counts = draw(np.ones((16, 10), bool), epochs=[2] * 16, seed=17, rounds_at_random=True)
    assert counts.tolist() == [1, 1, 2, 1, 1, 2, 1, 1, 2, 2, 1, 1, 2, 1, 1, 2]


def test_a_row_with_too_few_maskable_tokens_is_named():
    is_maskable = np.ones((3, 40), bool)
    is_maskable[1, 5:] = False
    with pytest.raises(InputError, match=r'asks for 6 masked tokens, but row 71 has only 5 '):
        draw(is_maskable, rows=[70, 71, 72])
