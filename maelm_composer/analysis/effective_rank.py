"""Effective rank from a Gram matrix: one pass over any number of rows, in the memory of one D x D matrix.

(Meng et al., arXiv:2302.02060, preprint, Sec. 2.2, "Empirical Evidence"):
rank_τ(H) = the least k with σ_1² + ... + σ_k² >= τ (σ_1² + ... + σ_d²), and σ_i² are the eigenvalues of HᵀH.
"""

import torch
from torch import Tensor

from maelm_composer.errors import InputError

THRESHOLD = 0.9
ROUNDING = 1e-9  # tolerance of the threshold: with ten equal σ and rounding errors, the rank at 0.9 is 9, not 10


class Gram:
    """HᵀH and the column sums of rows that are added in pieces, in float64 on the device of the rows.

    PAPER-SILENT: precision. In float64, the energy shares of n rows are accurate to about n·1e-16, while neighbouring
    shares are about 1 / D apart. Products in fp32 are twice as fast but have no such bound.
    """

    def __init__(self, size: int, device: torch.device | str = 'cpu') -> None:
        self.count = 0
        self.total = torch.zeros(size, dtype=torch.float64, device=device)
        self.matrix = torch.zeros(size, size, dtype=torch.float64, device=device)

    def add(self, rows: Tensor) -> None:
        """Add (n, D) rows of any floating type."""
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
        if not self.count or not energy > 0 or not energy.isfinite():
            raise InputError(
                f'{self.count} rows with energy {energy:g} have no effective rank: give rows that are not all zero'
            )
        return moment


def find_directions(gram: Gram, threshold: float = THRESHOLD, centered: bool = False) -> Tensor:
    """(D, rank_τ) orthonormal leading directions, which hold ``threshold`` of the rows' energy, largest first."""
    values, vectors = torch.linalg.eigh(gram.get_moment(centered))
    return vectors.flip(1)[:, : _count_leading(values, threshold)]


def measure_effective_rank(gram: Gram, threshold: float = THRESHOLD, centered: bool = False) -> int:
    """rank_τ of the rows. PAPER-SILENT: uncentred by default, as in the formula."""
    return _count_leading(torch.linalg.eigvalsh(gram.get_moment(centered)), threshold)


def _count_leading(eigenvalues: Tensor, threshold: float) -> int:
    """How many of the largest of the (D,) ascending ``eigenvalues`` sum to ``threshold`` of the total."""
    energy = eigenvalues.flip(0).clamp(min=0)  # rounding can leave a zero slightly negative
    shares = energy.cumsum(0) / energy.sum()
    return int((shares < threshold - ROUNDING).sum()) + 1
