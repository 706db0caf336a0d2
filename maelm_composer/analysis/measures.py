"""Effective rank, subspaces of [MASK] and real tokens, and the distance of real tokens from a matrix of rank one.

Source: Meng et al., arXiv:2302.02060 (preprint), Sec. 2.2, "Empirical Evidence":
rank_τ(H) = the least k with σ_1² + ... + σ_k² >= τ (σ_1² + ... + σ_d²). σ_i² is the i-th largest eigenvalue of HᵀH.
The sum of all σ_i² is called energy here (paper: variance).

Ranks and subspaces come from the Gram matrix HᵀH: one pass over any number of rows, in the memory of one D x D matrix.
"""

import torch
from torch import Tensor

from maelm_composer.errors import InputError

THRESHOLD = 0.9
QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the principal angles
# Relative tolerance of rounding errors: with ten equal σ the rank at 0.9 is 9, not 10; and centred rows that are all
# equal leave an energy near zero, not zero.
ROUNDING = 1e-9


class Gram:
    """HᵀH and the column sums of rows that are added in pieces, in float64 on the device of the rows.

    PAPER-SILENT: precision. In float64, the energy shares of n rows are accurate to about n·1e-16, while neighbouring
    shares are about 1 / D apart. Products in fp32 are twice as fast but have no such bound.
    """

    def __init__(self, size: int, device: torch.device | str = 'cpu') -> None:
        self.count = 0
        self.total = torch.zeros(size, dtype=torch.float64, device=device)
        self.matrix = torch.zeros(size, size, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, rows: Tensor) -> None:
        """Add (n, D) rows of any floating type, without their gradients. Raises ValueError for another shape."""
        if rows.shape[1:] != self.total.shape:
            raise ValueError(f'rows have shape {(*rows.shape,)}: select (n, {len(self.total)}) of them first')
        rows = rows.double()
        self.count += len(rows)
        self.total += rows.sum(0)
        self.matrix.addmm_(rows.t(), rows)

    def __add__(self, other: 'Gram') -> 'Gram':
        """The Gram matrix of the rows of both."""
        both = Gram(len(self.total), self.total.device)
        both.count = self.count + other.count
        both.total = self.total + other.total
        both.matrix = self.matrix + other.matrix
        return both

    def get_moment(self, centered: bool = False) -> Tensor:
        """(D, D) float64 HᵀH; with ``centered``, of the rows minus their mean.

        Raises:
            InputError: there are no rows, or they are not finite or all zero and so have no effective rank.
        """
        moment = self.matrix
        if centered and self.count:
            moment = moment - torch.outer(self.total, self.total) / self.count
        energy = moment.trace()
        if not energy.isfinite():
            raise InputError(f'{self.count} rows hold values that are not finite: the weights may be damaged')
        if not self.count or not energy > ROUNDING * self.matrix.trace():
            kind = 'differ from each other' if centered else 'are not all zero'
            raise InputError(f'{self.count} rows with energy {energy:g} have no effective rank: give rows that {kind}')
        return moment

    def find_directions(self, threshold: float = THRESHOLD, centered: bool = False) -> Tensor:
        """(D, rank_τ) orthonormal leading directions, which hold ``threshold`` of the energy, largest first."""
        values, vectors = torch.linalg.eigh(self.get_moment(centered))
        return vectors.flip(1)[:, : _count_leading(values, threshold)]

    def measure_effective_rank(self, threshold: float = THRESHOLD, centered: bool = False) -> int:
        """rank_τ of the rows, 1 to D, uncentred by default, as in the formula of Sec. 2.2.

        Raises:
            ValueError: ``threshold`` is not in (0, 1].
            InputError: as :meth:`get_moment`.
        """
        return _count_leading(torch.linalg.eigvalsh(self.get_moment(centered)), threshold)

    def measure_outside_share(self, directions: Tensor, centered: bool = False) -> float:
        """Share of the energy outside the span of (D, r) orthonormal ``directions`` V: 1 - tr(VᵀGV) / tr(G), 0 to 1.

        The share is 0 for rows within the span. Theorem 2.2 is about whole row spaces, not leading directions.
        """
        moment = self.get_moment(centered)
        inside = ((moment @ directions) * directions).sum() / moment.trace()
        return min(max(1 - float(inside), 0.0), 1.0)


def _count_leading(eigenvalues: Tensor, threshold: float) -> int:
    """How many of the largest of the (D,) ascending ``eigenvalues`` sum to ``threshold`` of the total."""
    if not 0 < threshold <= 1:
        raise ValueError(f'threshold {threshold} is no share of the energy, such as {THRESHOLD}')
    energy = eigenvalues.flip(0).clamp(min=0)  # rounding can leave a zero slightly negative
    shares = energy.cumsum(0) / energy.sum()
    return int((shares < threshold - ROUNDING).sum()) + 1


def measure_principal_angles(one: Tensor, other: Tensor) -> list[float]:
    """The ``QUANTILES`` of the min(r, s) principal angles, in degrees, between (D, r) and (D, s) orthonormal columns.

    An angle of 0 is a direction in both spans; at 90 degrees, a direction of one span is orthogonal to the other. If
    r + s exceeds D, at least r + s - D angles are 0.
    """
    cosines = torch.linalg.svdvals(one.t() @ other).clamp(max=1)
    angles = torch.rad2deg(cosines.acos())
    return torch.quantile(angles, torch.tensor(QUANTILES, dtype=angles.dtype, device=angles.device)).tolist()


class RankOneResidual:
    """Mean over blocks of ‖R‖_{1,∞} / ‖H_R‖_{1,∞} with R = H_R - 1hᵀ (Theorem 2.2; Sec. 2.2 and App. A of the paper).

    ‖·‖_{1,∞} is the geometric mean of ‖·‖_1, the largest column sum of absolute values, and ‖·‖_∞, the largest row sum.
    The residual is 0 if all real tokens of a block have one representation. The proof of Theorem 2.2 bounds ‖R‖ through
    attention alone. Attention does not leave a block, so each block has its own residual. Here whole layers are
    measured, with skip connections and the feed-forward network.

    PAPER-SILENT: the norm that h minimises (here Frobenius, so h is the mean token), and the division by ‖H_R‖_{1,∞},
    which makes layers of different scale comparable.
    """

    def __init__(self) -> None:
        self._sum = 0.0
        self._count = 0

    def add(self, rows: Tensor, sizes: Tensor) -> None:
        """Add K blocks: (n, D) real tokens, block after block, and (K,) ``sizes``. A block of size 1 is ignored."""
        if not len(sizes):
            return
        rows = rows.float()
        means = torch.segment_reduce(rows, 'mean', lengths=sizes)
        ratios = _measure_norms(rows - means.repeat_interleave(sizes, 0), sizes) / _measure_norms(rows, sizes)
        ratios = ratios[sizes > 1].nan_to_num()  # rows that are all zero are equal
        self._sum += float(ratios.double().sum())
        self._count += len(ratios)

    def get_mean(self) -> float:
        """The mean. Raises InputError if no block had two real tokens."""
        if self._count == 0:
            raise InputError('no block of the rows has two real tokens without a [MASK]: give longer texts')
        return self._sum / self._count


def _measure_norms(rows: Tensor, sizes: Tensor) -> Tensor:
    """(n, D) rows of K matrices in turn, (K,) numbers of rows -> (K,) ‖·‖_{1,∞}."""
    magnitudes = rows.abs()
    column_sums = torch.segment_reduce(magnitudes, 'sum', lengths=sizes)
    row_sums = torch.segment_reduce(magnitudes.sum(1), 'max', lengths=sizes)
    return (column_sums.amax(1) * row_sums).sqrt()
