"""Which tokens attend to which, and the relative position bias between them, as one bias for all layers of a stack."""

import torch
from torch import Tensor

from maelm_composer.config import AttentionBackend
from maelm_composer.model.kernels.attention import Bias, store
from maelm_composer.model.kernels.flex import build_flex_bias
from maelm_composer.model.layer import take_rows
from maelm_composer.model.relative_position import RelativePositionBias


def build_attention_bias(query_segments: Tensor, key_segments: Tensor, relative: Tensor | None) -> Tensor:
    """(B, Q), (B, K) segment ids and an optional (B, H, Q, K) bias -> (B, 1 or H, Q, K), -inf across segments.

    Padding is a segment of its own (0), so that every query has a key. Under autocast the bias has autocast's type.
    """
    is_other = query_segments[:, None, :, None] != key_segments[:, None, None, :]
    bias = torch.zeros_like(is_other, dtype=torch.float32) if relative is None else relative
    device = bias.device.type
    if torch.is_autocast_enabled(device):
        bias = bias.to(torch.get_autocast_dtype(device))
    return store(bias.masked_fill(is_other, float('-inf')))


def build_self_attention_bias(
    relative_position: RelativePositionBias | None,
    position_ids: Tensor,
    segment_ids: Tensor,
    predicted_index: Tensor | None = None,
    backend: AttentionBackend = AttentionBackend.dense,
) -> Bias:
    """(B, T) positions and segment ids -> (B, 1 or H, T, T), or (B, 1 or H, M, T) with ``predicted_index`` (B, M)."""
    positions, segments = position_ids, segment_ids
    if predicted_index is not None:
        positions, segments = take_rows(position_ids, predicted_index), take_rows(segment_ids, predicted_index)
    if backend is AttentionBackend.flex:
        entry = None if relative_position is None else relative_position.entry(positions, position_ids)
        return build_flex_bias(segments, segment_ids, entry)
    relative = None if relative_position is None else relative_position(positions, position_ids)
    return build_attention_bias(segments, segment_ids, relative)
