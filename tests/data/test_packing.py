"""No text is lost, doubled or divided, and rows are full."""

import hashlib
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maelm_composer.data.packing import assign_rows, build_blocks, count_ids, fit_rows, pack_blocks
from maelm_composer.data.special_tokens import CLS_ID, PAD_ID, SEP_ID

N = 16
documents = st.lists(st.lists(st.integers(0, 40).map(lambda n: list(range(100, 100 + n))), max_size=8), max_size=12)


@given(documents)
def test_blocks_hold_the_lines_of_a_document_in_order(documents):
    for lines in documents:
        blocks = build_blocks(lines, N)
        assert [i for block in blocks for line in block for i in line] == [i for line in lines for i in line]
        assert all(count_ids(block) <= N for block in blocks)
        whole = [line for line in lines if 0 < len(line) <= N - 2]
        pieces = [line for block in blocks for line in block]
        assert all(line in pieces for line in whole)


def test_a_line_longer_than_a_block_is_cut_into_consecutive_pieces():
    assert build_blocks([list(range(30)), [7]], N) == [[list(range(14))], [list(range(14, 28))], [[28, 29], [7]]]


@given(st.lists(st.integers(1, N), max_size=60))
def test_every_block_has_one_row_and_no_row_overflows(lengths):
    rows = assign_rows(lengths, N)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= N for row in rows)
    # Best fit leaves at most one row that is not more than half full.
    assert sum(2 * sum(lengths[i] for i in row) <= N for row in rows) <= 1


@settings(deadline=None)
@given(documents, st.integers(0, 5))
def test_rows_hold_every_line_once(documents, seed):
    blocks = [block for lines in documents for block in build_blocks(lines, N)]
    rows, dropped = pack_blocks(blocks, N, np.random.default_rng(seed), np.uint16)
    assert rows.shape[1:] == (N,)
    assert rows.dtype == np.uint16
    found = Counter()
    for row in rows.tolist():
        ids = row[: row.index(PAD_ID)] if PAD_ID in row else row
        assert set(row[len(ids) :]) <= {PAD_ID}
        for block in _split(ids, CLS_ID):
            assert block[-1] == SEP_ID
            found.update(tuple(line) for line in _split_lines(block))
    wanted = Counter(tuple(line) for block in blocks for line in block)
    assert found <= wanted
    assert (found == wanted) == (dropped == 0)
    lost = sum(n * (len(line) + 1) for line, n in (wanted - found).items())
    assert lost < dropped or lost == dropped == 0
    assert 2 * dropped < N  # best fit leaves at most one row less than half full


def test_a_row_less_than_half_full_is_dropped_and_counted_even_the_only_one():
    full, short = [list(range(100, 114))], [[100, 101]]
    rows, dropped = pack_blocks([full, short], N, np.random.default_rng(0), np.uint16)
    assert (len(rows), dropped) == (1, 4)
    rows, dropped = pack_blocks([short], N, np.random.default_rng(0), np.uint16)
    assert (len(rows), dropped) == (0, 4)


def test_few_blocks_are_opened_and_rows_are_full():
    generator = np.random.default_rng(0)
    lengths = generator.lognormal(3.5, 1.0, size=(3000, 10)).astype(int) + 1  # lines as encyclopaedias have them
    blocks = [block for lines in lengths for block in build_blocks([[9] * n for n in lines], 128)]
    rows = fit_rows(blocks, 128, generator)
    ids = sum(count_ids(block) for row in rows for block in row)
    assert ids / (len(rows) * 128) > 0.98
    assert sum(map(len, rows)) < 1.6 * len(blocks)


@pytest.mark.parametrize('dtype', [np.uint16, np.uint32])
def test_the_rows_depend_on_the_generator_alone_and_are_those_of_published_shards(dtype):
    """Another digest means other shards of the same recipe: FORMAT_VERSION of data/shards.py is then to be raised."""
    blocks = [block for i in range(10, 60) for block in build_blocks([[i] * (i % 13 + 1), [i] * (i % 5 + 1)], N)]
    rows, _ = pack_blocks(blocks, N, np.random.default_rng(3), dtype)
    digest = hashlib.sha256(rows.astype(np.uint16).tobytes()).hexdigest()
    assert digest == '76e63b8536a0f89f9749211f2c0dfb959f8b16208fa8daa904b96be33323f52b'
    other, _ = pack_blocks(blocks, N, np.random.default_rng(4), dtype)
    assert (rows != other).any()


@pytest.mark.parametrize('line, rows', [(14, 6), (2, 1)])  # six blocks as long as a row; four that share one
def test_rows_are_shuffled_and_so_are_the_blocks_of_a_row(line, rows):
    blocks = [[[i] * line] for i in range(10, 16 if rows > 1 else 14)]
    orders = set()
    for seed in range(20):
        packed, _ = pack_blocks(blocks, N, np.random.default_rng(seed), np.uint16)
        assert len(packed) == rows
        order = [i for row in packed.tolist() for i in dict.fromkeys(row) if i >= 10]
        assert sorted(order) == [block[0][0] for block in blocks]
        orders.add(tuple(order))
    assert len(orders) > 10


def _split(ids: list[int], at: int) -> list[list[int]]:
    starts = [i for i, token in enumerate(ids) if token == at]
    return [ids[i:j] for i, j in zip(starts, [*starts[1:], len(ids)], strict=True)]


def _split_lines(block: list[int]) -> list[list[int]]:
    lines, line = [], []
    for token in block[1:]:
        if token == SEP_ID:
            lines.append(line)
            line = []
        else:
            line.append(token)
    return lines
