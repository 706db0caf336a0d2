"""The subspaces of [MASK] and of real-token representations, and the distance to rank one (Theorem 2.2)."""

import torch
from torch import Tensor

from maelm_composer.analysis.effective_rank import Gram

QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)


def measure_outside_share(gram: Gram, directions: Tensor, centered: bool = False) -> float:
    """Share of the rows' energy outside the span of (D, r) orthonormal ``directions`` V: 1 - tr(VᵀGV) / tr(G), 0 to 1.

    Theorem 2.2 refutes that the real tokens' row space contains that of the [MASK]s, which would be a share of 0.
    """
    moment = gram.get_moment(centered)
    inside = ((moment @ directions) * directions).sum() / moment.trace()
    return min(max(1 - float(inside), 0.0), 1.0)


def measure_principal_angles(one: Tensor, other: Tensor) -> list[float]:
    """The ``QUANTILES`` of the min(r, s) principal angles, in degrees, between (D, r) and (D, s) orthonormal columns.

    An angle of 0 is a direction in both spans; at 90 degrees, a direction of one span is orthogonal to the other. If
    r + s exceeds D, at least r + s - D angles are 0.
    """
    cosines = torch.linalg.svdvals(one.t() @ other).clamp(max=1)
    angles = torch.rad2deg(cosines.acos())
    return torch.quantile(angles, torch.tensor(QUANTILES, dtype=angles.dtype, device=angles.device)).tolist()


class RankOneResidual:
    """Mean over sequences of ‖R‖_{1,∞} / ‖H_R‖_{1,∞} with R = H_R - 1hᵀ (App. A of the paper).

    ‖·‖_{1,∞} is the geometric mean of ‖·‖_1, the largest column sum of absolute values, and ‖·‖_∞, the largest row sum.
    The residual is 0 if all real tokens of a sequence have the same representation. Theorem 2.2 bounds it for one
    attention pass, hence per sequence, and for attention alone; the residual of the whole layer is measured, with skip
    connections and the feed-forward network.

    PAPER-SILENT: the norm that h minimises (here Frobenius, so h is the mean token), and the division by ‖H_R‖_{1,∞},
    which makes layers of different scale comparable.
    """

    def __init__(self) -> None:
        self._sum = 0.0
        self._count = 0

    def add(self, rows: Tensor, sizes: Tensor) -> None:
        """Add K sequences: (n, D) real tokens, sequence after sequence, and (K,) ``sizes``. Size 1 is ignored."""
        rows = rows.float()
        means = torch.segment_reduce(rows, 'mean', lengths=sizes)
        ratios = _measure_norms(rows - means.repeat_interleave(sizes, 0), sizes) / _measure_norms(rows, sizes)
        ratios = ratios[sizes > 1]
        self._sum += float(ratios.double().sum())
        self._count += len(ratios)

    def get_mean(self) -> float:
        return self._sum / max(self._count, 1)


def _measure_norms(rows: Tensor, sizes: Tensor) -> Tensor:
    """(n, D) rows of K matrices in turn, (K,) numbers of rows -> (K,) ‖·‖_{1,∞}."""
    magnitudes = rows.abs()
    column_sums = torch.segment_reduce(magnitudes, 'sum', lengths=sizes)
    row_sums = torch.segment_reduce(magnitudes.sum(1), 'max', lengths=sizes)
    return (column_sums.amax(1) * row_sums).sqrt()
