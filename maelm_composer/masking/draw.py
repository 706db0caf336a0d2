"""Drawing the masked positions of a row, as a pure function of (seed, epoch, row).

There is no random state. MAE-LM, RoBERTa and every δ therefore mask the same positions of the same rows (a paired
comparison), with any number of ranks and loader workers, and after a restart.
"""

import numpy as np
from numpy.typing import NDArray

from maelm_composer.config import MaskingConfig
from maelm_composer.errors import InputError

# Independent streams of random bits for one row.
MASK_STREAM, COUNT_STREAM, TOKEN_STREAM = 0, 1, 2

_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def _mix(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finalizer, variant 13 (Steele, Lea & Flood, OOPSLA 2014; Stafford 2011): uint64 -> uint64."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def draw_bits(
    seed: int, epochs: NDArray[np.int64], rows: NDArray[np.int64], length: int, stream: int
) -> NDArray[np.uint64]:
    """(B,) epochs and (B,) rows -> (B, ``length``) independent uniform 64-bit integers."""
    with np.errstate(over='ignore'):
        state = _mix(np.full(rows.shape, seed, np.uint64) + _GOLDEN_GAMMA * np.uint64(stream + 1))
        state = _mix(state + _GOLDEN_GAMMA * epochs.astype(np.uint64))
        state = _mix(state + _GOLDEN_GAMMA * rows.astype(np.uint64))
        return _mix(state[:, None] + _GOLDEN_GAMMA * np.arange(1, length + 1, dtype=np.uint64))


def count_masked(masking: MaskingConfig, length: int) -> tuple[int, int]:
    """Least and greatest number of masked positions in a row of ``length`` tokens; equal unless rounding is random."""
    expected = masking.mlm_probability * length
    if masking.rounds_at_random:
        return int(np.floor(expected)), int(np.ceil(expected))
    return round(expected), round(expected)


def count_visible(masking: MaskingConfig, length: int) -> int:
    """S for rows of N = ``length`` tokens: all unmasked positions and the share δ of the masked ones (Sec. 4.3).

    A row with the fewest masks has the longest encoder input, so S is its length; other rows have unused slots.
    """
    fewest, _ = count_masked(masking, length)
    return length - fewest + round(masking.encoder_mask_fraction * fewest)


def draw_masked_positions(
    is_maskable: NDArray[np.bool_],
    masking: MaskingConfig,
    seed: int,
    epochs: NDArray[np.int64],
    rows: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw positions without replacement (Sec. 2.1 and App. C of the paper: 15 % random masks, no 80/10/10).

    A row gets round(p·N) masks or, with ``rounds_at_random`` as in the authors' code, floor(p·N + U[0, 1)).

    Args:
        is_maskable: (B, N) positions that may be drawn.
        epochs: (B,) epoch of each row.
        rows: (B,) number of each row in the data set.

    Returns:
        (B, M) positions in the order of the draw; a smaller δ or probability uses a prefix of them.
        (B,) how many of them are masked.

    Raises:
        InputError: a row has fewer maskable positions than masks.
    """
    length = is_maskable.shape[1]
    _, most = count_masked(masking, length)
    counts = np.full(len(rows), most, np.int64)
    if masking.rounds_at_random:
        # 64-bit integers next to 2**64 give U = 1.0 in double precision: one mask too many where p·N is whole.
        uniform = draw_bits(seed, epochs, rows, 1, COUNT_STREAM)[:, 0] / 2.0**64
        counts = np.floor(masking.mlm_probability * length + uniform).astype(np.int64).clip(max=most)
    too_few = np.flatnonzero(is_maskable.sum(axis=1) < counts)
    if len(too_few):
        row = too_few[0]
        raise InputError(
            f'masking.mlm_probability {masking.mlm_probability} asks for {counts[row]} masked tokens, but row '
            f'{rows[row]} has only {is_maskable[row].sum()} that may be masked; lower it'
        )
    keys = draw_bits(seed, epochs, rows, length, MASK_STREAM)
    keys[~is_maskable] = np.iinfo(np.uint64).max
    return np.argsort(keys, axis=1, kind='stable')[:, :most], counts
