"""Multi-head attention with an additive bias.

(Meng et al., arXiv:2302.02060, preprint, Sec. 2.1), with linear layers that have biases, queries scaled by
head_dim^-0.5 and the relative bias added unscaled, as the authors' code does.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional


def build_attention_bias(query_segments: Tensor, key_segments: Tensor, relative: Tensor | None) -> Tensor:
    """(B, Q), (B, K) segment ids and an optional (B, H, Q, K) bias -> (B, 1 or H, Q, K), -inf across segments.

    Padding is a segment of its own (0), so that no row of scores is empty.
    """
    is_other = query_segments[:, None, :, None] != key_segments[:, None, None, :]
    if relative is not None:
        return relative.masked_fill(is_other, float('-inf'))
    return torch.zeros_like(is_other, dtype=torch.float32).masked_fill(is_other, float('-inf'))


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, dropout: float) -> Tensor:
    """Softmax(Q K^T / sqrt(d_h) + bias) V.

    Args:
        query: (B, H, Q, Dh)
        key: (B, H, K, Dh)
        value: (B, H, K, Dh)
        bias: (B, 1 or H, Q, K), -inf where a query must not look
        dropout: of the attention probabilities, 0 outside training

    Returns:
        (B, H, Q, Dh)
    """
    bias = bias.to(query.dtype)
    if query.device.type != 'cpu':
        return functional.scaled_dot_product_attention(query, key, value, bias, dropout)
    # On a CPU the two matrix products beat SDPA, whose bias is slow once it needs a gradient.
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2) + bias
    probabilities = scores.softmax(-1)
    if dropout:
        probabilities = functional.dropout(probabilities, dropout)
    return probabilities @ value


class Attention(nn.Module):
    """Attention whose queries and keys may come from different sequences."""

    def __init__(self, hidden_size: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)  # one product where one sequence gives all three
        self.output = nn.Linear(hidden_size, hidden_size)

    def forward(self, queries: Tensor, memory: Tensor | None, bias: Tensor) -> Tensor:
        """(B, Q, D) queries, (B, K, D) memory or None for self-attention, (B, ·, Q, K) bias -> (B, Q, D)."""
        if memory is None:
            query, key, value = self._split_heads(self.query_key_value(queries), 3)
        else:
            size = queries.shape[-1]
            weight, offset = self.query_key_value.weight, self.query_key_value.bias
            (query,) = self._split_heads(functional.linear(queries, weight[:size], offset[:size]), 1)
            key, value = self._split_heads(functional.linear(memory, weight[size:], offset[size:]), 2)
        attended = attend(query, key, value, bias, self.dropout if self.training else 0.0)
        return self.output(attended.transpose(1, 2).flatten(2))

    def _split_heads(self, projected: Tensor, parts: int) -> tuple[Tensor, ...]:
        """(B, T, parts·D) -> ``parts`` tensors (B, H, T, Dh)."""
        batch, length, _ = projected.shape
        return projected.view(batch, length, parts, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
