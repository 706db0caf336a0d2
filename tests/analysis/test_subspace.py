"""Known subspaces give known shares, angles and residuals."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from maelm_composer.analysis.effective_rank import Gram, find_directions
from maelm_composer.analysis.subspace import RankOneResidual, measure_outside_share, measure_principal_angles


def gram_of(rows: torch.Tensor) -> Gram:
    gram = Gram(rows.shape[1])
    gram.add(rows)
    return gram


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
    directions = find_directions(gram_of(spread(50, 0, 1, 2)), 1.0)
    assert measure_outside_share(gram_of(spread(40, 1, 2, seed=1)), directions) == pytest.approx(0, abs=1e-12)
    assert measure_outside_share(gram_of(spread(40, 3, 5)), directions) == pytest.approx(1)
    across = torch.tensor([[3.0, 0, 0, 4, 0, 0]])
    assert measure_outside_share(gram_of(across), directions) == pytest.approx(16 / 25)


@given(st.integers(0, 1000))
def test_outside_share_is_the_norm_of_what_projection_leaves(seed):
    generator = torch.Generator().manual_seed(seed)
    real, masks = (torch.randn(30, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    directions = find_directions(gram_of(real), 0.6)
    left = masks - masks @ directions @ directions.t()
    share = float(left.square().sum() / masks.square().sum())
    assert measure_outside_share(gram_of(masks), directions) == pytest.approx(share)


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
