"""Effective rank from Gram matrices equals the paper's definition by singular values, for any split of the rows."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from maelm_composer.analysis.effective_rank import Gram, find_directions, measure_effective_rank
from maelm_composer.errors import InputError

THRESHOLDS = st.sampled_from([0.5, 0.9, 0.99])


def gram_of(*pieces: torch.Tensor) -> Gram:
    gram = Gram(pieces[0].shape[1])
    for piece in pieces:
        gram.add(piece)
    return gram


def rank_by_svd(rows: torch.Tensor, threshold: float) -> int:
    """The definition: the least k whose squared singular values reach the threshold."""
    squares = torch.linalg.svdvals(rows.double()).square()
    return next(k for k in range(1, len(squares) + 1) if squares[:k].sum() / squares.sum() >= threshold - 1e-9)


@st.composite
def draw_rows(draw: st.DrawFn) -> torch.Tensor:
    """(n, D) rows with a slowly or quickly falling spectrum, and a mean near or far from 0."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    size = draw(st.integers(1, 24))
    count = draw(st.integers(1, 80))
    decay = draw(st.sampled_from([0.5, 0.9, 1.0]))
    shift = draw(st.sampled_from([0.0, 3.0]))
    rows = torch.randn(count, size, generator=generator) * decay ** torch.arange(size)
    return rows + shift * torch.randn(size, generator=generator)


@given(draw_rows(), THRESHOLDS)
def test_it_is_the_definition_by_singular_values(rows, threshold):
    assert measure_effective_rank(gram_of(rows), threshold) == rank_by_svd(rows, threshold)


@given(draw_rows(), THRESHOLDS)
def test_centred_it_is_the_definition_of_the_rows_less_their_mean(rows, threshold):
    if len(rows) > 1:
        wanted = rank_by_svd(rows.double() - rows.double().mean(0), threshold)
        assert measure_effective_rank(gram_of(rows), threshold, centered=True) == wanted


@given(draw_rows(), st.floats(1e-4, 1e4), st.integers(0, 2**32))
def test_scale_rotation_and_order_do_not_matter(rows, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    size = rows.shape[1]
    rotation, _ = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
    moved = scale * rows.double()[torch.randperm(len(rows), generator=generator)] @ rotation
    assert measure_effective_rank(gram_of(moved)) == measure_effective_rank(gram_of(rows))


@given(draw_rows(), st.lists(st.integers(0, 80), max_size=4), st.booleans())
def test_pieces_and_sums_of_pieces_give_the_same_as_the_whole(rows, cuts, centered):
    edges = sorted({0, len(rows), *(cut for cut in cuts if cut < len(rows))})
    pieces = [rows[a:b] for a, b in itertools.pairwise(edges)]
    in_turn, whole = gram_of(*pieces), gram_of(rows)
    merged = sum((gram_of(piece) for piece in pieces), Gram(rows.shape[1]))
    for gram in (in_turn, merged):
        assert gram.count == len(rows)
        torch.testing.assert_close(gram.matrix, whole.matrix, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gram.total, whole.total, rtol=1e-12, atol=1e-12)
    if len(rows) > 1:
        ranks = {measure_effective_rank(gram, 0.9, centered) for gram in (in_turn, merged, whole)}
        assert len(ranks) == 1


def test_known_ranks():
    ten_equal = torch.eye(10)
    for scale in range(1, 60):  # 9 / 10 is enough; rounding must not ask for the tenth
        assert measure_effective_rank(gram_of(scale / 7 * ten_equal.double())) == 9
    assert measure_effective_rank(gram_of(ten_equal), 1.0) == 10
    assert measure_effective_rank(gram_of(torch.ones(50, 8))) == 1
    # Squares, not singular values: 3² of 3² + 1² is 0.9; 3 of 3 + 1 is 0.75.
    assert measure_effective_rank(gram_of(torch.diag(torch.tensor([3.0, 1.0])))) == 1


def test_a_mean_counts_unless_it_is_taken_away():
    rows = torch.randn(2000, 16, generator=torch.Generator().manual_seed(0)) + 20
    assert measure_effective_rank(gram_of(rows)) == 1
    assert measure_effective_rank(gram_of(rows), centered=True) == 15


def test_many_rows_are_summed_without_loss():
    """A direction with 4e-8 of the energy, not along an axis, would be lost in sums of fp32 products."""
    generator = torch.Generator().manual_seed(0)
    rotation, _ = torch.linalg.qr(torch.randn(4, 4, generator=generator))
    gram = Gram(4)
    for _ in range(50):
        rows = torch.randn(4000, 4, generator=generator) * torch.tensor([1000.0, 0.2, 0.0, 0.0])
        gram.add(rows @ rotation)
    assert gram.count == 200_000
    assert measure_effective_rank(gram, 1 - 1e-7) == 1
    assert measure_effective_rank(gram, 1 - 2e-8) == 2
    energy = torch.linalg.eigvalsh(gram.get_moment())
    assert float(energy[-2] / energy.sum()) == pytest.approx(4e-8, rel=0.02)


def test_bfloat16_rows_are_taken_as_they_are():
    rows = torch.randn(300, 12, generator=torch.Generator().manual_seed(0)).bfloat16()
    torch.testing.assert_close(gram_of(rows).matrix, rows.double().t() @ rows.double(), rtol=1e-12, atol=1e-12)


def test_directions_are_orthonormal_and_hold_the_threshold():
    rows = torch.randn(300, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.7 ** torch.arange(
        12
    )
    directions = find_directions(gram_of(rows))
    rank = rank_by_svd(rows, 0.9)
    assert directions.shape == (12, rank)
    torch.testing.assert_close(directions.t() @ directions, torch.eye(rank, dtype=torch.float64))
    share = (rows @ directions).square().sum() / rows.square().sum()
    fewer = (rows @ directions[:, :-1]).square().sum() / rows.square().sum()
    assert fewer < 0.9 <= share


@pytest.mark.parametrize('rows', [torch.zeros(0, 4), torch.zeros(5, 4), torch.full((5, 4), float('nan'))])
def test_rows_without_a_rank_are_refused(rows):
    with pytest.raises(InputError, match='effective rank'):
        measure_effective_rank(gram_of(rows))
