"""Effective rank is the paper's definition by singular values; known subspaces give known shares, angles, residuals."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from maelm_composer.analysis.measures import Gram, RankOneResidual, measure_principal_angles
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
    assert gram_of(rows).measure_effective_rank(threshold) == rank_by_svd(rows, threshold)


@given(draw_rows(), THRESHOLDS)
def test_centred_it_is_the_definition_of_the_rows_less_their_mean(rows, threshold):
    if len(rows) > 1:
        wanted = rank_by_svd(rows.double() - rows.double().mean(0), threshold)
        assert gram_of(rows).measure_effective_rank(threshold, centered=True) == wanted


@given(draw_rows(), st.floats(1e-4, 1e4), st.integers(0, 2**32))
def test_scale_rotation_and_order_do_not_matter(rows, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    size = rows.shape[1]
    rotation, _ = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
    moved = scale * rows.double()[torch.randperm(len(rows), generator=generator)] @ rotation
    assert gram_of(moved).measure_effective_rank() == gram_of(rows).measure_effective_rank()


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
        ranks = {gram.measure_effective_rank(0.9, centered) for gram in (in_turn, merged, whole)}
        assert len(ranks) == 1


def test_known_ranks():
    ten_equal = torch.eye(10)
    for scale in range(1, 60):  # 9 / 10 is enough; rounding must not ask for the tenth
        assert gram_of(scale / 7 * ten_equal.double()).measure_effective_rank() == 9
    assert gram_of(ten_equal).measure_effective_rank(1.0) == 10
    assert gram_of(torch.ones(50, 8)).measure_effective_rank() == 1
    # Squares, not singular values: 3² of 3² + 1² is 0.9; 3 of 3 + 1 is 0.75.
    assert gram_of(torch.diag(torch.tensor([3.0, 1.0]))).measure_effective_rank() == 1


def test_a_mean_counts_unless_it_is_taken_away():
    rows = torch.randn(2000, 16, generator=torch.Generator().manual_seed(0)) + 20
    assert gram_of(rows).measure_effective_rank() == 1
    assert gram_of(rows).measure_effective_rank(centered=True) == 15


def test_many_rows_are_summed_without_loss():
    """A direction with 4e-8 of the energy, not along an axis, would be lost in sums of fp32 products."""
    generator = torch.Generator().manual_seed(0)
    rotation, _ = torch.linalg.qr(torch.randn(4, 4, generator=generator))
    gram = Gram(4)
    for _ in range(50):
        rows = torch.randn(4000, 4, generator=generator) * torch.tensor([1000.0, 0.2, 0.0, 0.0])
        gram.add(rows @ rotation)
    assert gram.count == 200_000
    assert gram.measure_effective_rank(1 - 1e-7) == 1
    assert gram.measure_effective_rank(1 - 2e-8) == 2
    energy = torch.linalg.eigvalsh(gram.get_moment())
    assert float(energy[-2] / energy.sum()) == pytest.approx(4e-8, rel=0.02)


def test_bfloat16_rows_are_taken_as_they_are():
    rows = torch.randn(300, 12, generator=torch.Generator().manual_seed(0)).bfloat16()
    torch.testing.assert_close(gram_of(rows).matrix, rows.double().t() @ rows.double(), rtol=1e-12, atol=1e-12)


def test_directions_are_orthonormal_and_hold_the_threshold():
    rows = torch.randn(300, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.7 ** torch.arange(
        12
    )
    directions = gram_of(rows).find_directions()
    rank = rank_by_svd(rows, 0.9)
    assert directions.shape == (12, rank)
    torch.testing.assert_close(directions.t() @ directions, torch.eye(rank, dtype=torch.float64))
    share = (rows @ directions).square().sum() / rows.square().sum()
    fewer = (rows @ directions[:, :-1]).square().sum() / rows.square().sum()
    assert fewer < 0.9 <= share


@pytest.mark.parametrize(
    'rows, centered, message',
    [
        (torch.zeros(0, 4), False, 'no effective rank: give rows that are not all zero'),
        (torch.zeros(5, 4), False, 'no effective rank: give rows that are not all zero'),
        (torch.full((5, 4), float('nan')), False, 'values that are not finite: the weights may be damaged'),
        (torch.tensor([[0.1, 0.7, 1.3, 2.9]]).expand(1001, 4), True, 'give rows that differ from each other'),
    ],
)
def test_rows_without_a_rank_are_refused(rows, centered, message):
    with pytest.raises(InputError, match=message):
        gram_of(rows).measure_effective_rank(centered=centered)


def test_rows_of_another_shape_and_a_threshold_that_is_no_share_are_refused():
    gram = Gram(4)
    with pytest.raises(ValueError, match=r'rows have shape \(2, 3, 4\): select \(n, 4\) of them first'):
        gram.add(torch.ones(2, 3, 4))
    gram.add(torch.eye(4, requires_grad=True))
    assert (gram.count, gram.matrix.requires_grad) == (4, False)
    with pytest.raises(ValueError, match=r'threshold 90 is no share of the energy, such as 0.9'):
        gram.measure_effective_rank(90)


def spread(count: int, *columns: int, size: int = 6, seed: int = 0) -> torch.Tensor:
    """(count, size) random in ``columns``, 0 elsewhere."""
    rows = torch.zeros(count, size)
    rows[:, list(columns)] = torch.randn(count, len(columns), generator=torch.Generator().manual_seed(seed))
    return rows


def residual_of(rows: torch.Tensor, *sizes: int) -> float:
    residual = RankOneResidual()
    residual.add(rows, torch.tensor(sizes))
    return residual.get_mean()


def test_outside_share_of_spaces_inside_beside_and_across():
    directions = gram_of(spread(50, 0, 1, 2)).find_directions(1.0)
    assert gram_of(spread(40, 1, 2, seed=1)).measure_outside_share(directions) == pytest.approx(0, abs=1e-12)
    assert gram_of(spread(40, 3, 5)).measure_outside_share(directions) == pytest.approx(1)
    across = torch.tensor([[3.0, 0, 0, 4, 0, 0]])
    assert gram_of(across).measure_outside_share(directions) == pytest.approx(16 / 25)


@given(st.integers(0, 1000))
def test_outside_share_is_the_norm_of_what_projection_leaves(seed):
    generator = torch.Generator().manual_seed(seed)
    real, masks = (torch.randn(30, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    directions = gram_of(real).find_directions(0.6)
    left = masks - masks @ directions @ directions.t()
    share = float(left.square().sum() / masks.square().sum())
    assert gram_of(masks).measure_outside_share(directions) == pytest.approx(share)


def test_principal_angles_of_known_planes():
    axes = torch.eye(4, dtype=torch.float64)
    turned = torch.stack([axes[0], (axes[1] * math.cos(0.3) + axes[2] * math.sin(0.3))], 1)
    angles = measure_principal_angles(axes[:, :2], turned)
    assert angles[0] == pytest.approx(0, abs=1e-5)
    assert angles[-1] == pytest.approx(math.degrees(0.3))
    assert angles == sorted(angles)
    assert measure_principal_angles(axes[:, :2], axes[:, 2:]) == pytest.approx([90.0] * 5)
    assert measure_principal_angles(axes[:, :1], axes) == pytest.approx([0.0] * 5, abs=1e-5)


def test_residual_is_zero_for_one_vector_a_sequence_and_not_for_two():
    """The residual is 0 if each sequence repeats one vector, even a different one in each sequence."""
    one, other = torch.tensor([1.0, 2.0, 2.0]), torch.tensor([5.0, 0.0, -1.0])
    assert residual_of(torch.stack([one, one, other, other]), 2, 2) == pytest.approx(0, abs=1e-6)
    assert residual_of(torch.stack([one, other]), 2) > 0.3


def test_residual_by_hand():
    rows = torch.tensor([[1.0, 0.0], [3.0, 4.0]])
    # H - 1h is [[-1, -2], [1, 2]]: column sums 2 and 4, row sums 3 and 3; H: 4 and 4, 1 and 7.
    assert residual_of(rows, 2) == pytest.approx(math.sqrt(4 * 3) / math.sqrt(4 * 7))


def test_residual_averages_sequences_of_two_tokens_or_more_over_batches():
    rows = torch.randn(9, 5, generator=torch.Generator().manual_seed(0))
    first, second = residual_of(rows[:4], 4), residual_of(rows[4:6], 2)
    residual = RankOneResidual()
    residual.add(rows[[6, 0, 1, 2, 3]], torch.tensor([1, 4]))
    residual.add(rows[4:6], torch.tensor([2]))
    assert residual.get_mean() == pytest.approx((first + second) / 2)
