"""Where the [MASK] representations lie beside the real tokens', and how far these are from rank one (Theorem 2.2)."""

import torch
from torch import Tensor

from maelm_composer.analysis.effective_rank import Gram

QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)


def measure_outside_share(gram: Gram, directions: Tensor, centered: bool = False) -> float:
    """Share of the rows' energy outside the span of (D, r) orthonormal ``directions``: 1 - tr(VᵀGV) / tr(G), 0 to 1.

    0 is the hypothesis that Theorem 2.2 refutes: that the real tokens' row space contains that of the [MASK]s.
    """
    moment = gram.get_moment(centered)
    inside = ((moment @ directions) * directions).sum() / moment.trace()
    return min(max(1 - float(inside), 0.0), 1.0)


def measure_principal_angles(one: Tensor, other: Tensor) -> list[float]:
    """Angles in degrees between the spans of (D, r) and (D, s) orthonormal columns, at ``QUANTILES`` of the min(r, s).

    From the smallest to the largest; an angle of 0 is a shared direction, 90 one that the other span does not have.
    Where r + s exceeds D, at least r + s - D of them are 0.
    """
    cosines = torch.linalg.svdvals(one.t() @ other).clamp(max=1)
    angles = torch.rad2deg(cosines.acos())
    return torch.quantile(angles, torch.tensor(QUANTILES, dtype=angles.dtype, device=angles.device)).tolist()


class RankOneResidual:
    """Mean over sequences of ‖R‖_{1,∞} / ‖H_R‖_{1,∞}, R = H_R - 1hᵀ: 0 where all tokens of a sequence are one vector.

    (Meng et al., arXiv:2302.02060, preprint, App. A): ‖·‖_{1,∞} is the geometric mean of the matrix norms ‖·‖_1, the
    largest column sum, and ‖·‖_∞, the largest row sum. The theorem bounds it within what attention reads together, so
    it is taken per sequence. PAPER-SILENT: the norm that h minimises; here Frobenius, so h is the mean; and the
    division by ‖H_R‖, without which layers would be compared by their scale. The theorem is about attention alone;
    measured is the whole layer, with its residual connection and feed-forward network.
    """

    def __init__(self) -> None:
        self._sum = 0.0
        self._count = 0

    def add(self, rows: Tensor, sizes: Tensor) -> None:
        """(n, D) real tokens of K sequences in turn and their (K,) ``sizes``; a token alone in its own is left out."""
        rows = rows.float()
        means = torch.segment_reduce(rows, 'mean', lengths=sizes)
        ratios = _measure_norms(rows - means.repeat_interleave(sizes, 0), sizes) / _measure_norms(rows, sizes)
        ratios = ratios[sizes > 1]
        self._sum += float(ratios.double().sum())
        self._count += len(ratios)

    def get_mean(self) -> float:
        return self._sum / max(self._count, 1)


def _measure_norms(rows: Tensor, sizes: Tensor) -> Tensor:
    """(n, D) rows of K matrices, one after another, of (K,) ``sizes`` -> (K,) ‖·‖_{1,∞}."""
    magnitudes = rows.abs()
    column_sums = torch.segment_reduce(magnitudes, 'sum', lengths=sizes)
    row_sums = torch.segment_reduce(magnitudes.sum(1), 'max', lengths=sizes)
    return (column_sums.amax(1) * row_sums).sqrt()
