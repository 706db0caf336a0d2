"""Multi-head attention (Sec. 2.1 of the paper) with an additive bias.

As in the authors' code, the linear layers have biases, queries are scaled by head_dim^-0.5, and the relative bias is
added unscaled.
"""

from torch import Tensor, nn
from torch.nn import functional

from maelm_composer.config import AttentionBackend
from maelm_composer.model.kernels.attention import attend


class Attention(nn.Module):
    """Attention whose queries and keys may come from different sequences."""

    def __init__(self, hidden_size: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.backend = AttentionBackend.auto  # see MaskedLanguageModel.select_attention
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)  # one product for W_Q, W_K and W_V
        self.output = nn.Linear(hidden_size, hidden_size)

    def forward(self, queries: Tensor, memory: Tensor | None, bias: Tensor) -> Tensor:
        """(B, Q, D) ``queries`` -> (B, Q, D).

        Args:
            memory: (B, K, D) source of keys and values; None: ``queries`` (self-attention), projected in one product.
            bias: (B, 1 or H, Q, K), added to the scaled scores.
        """
        if memory is None:
            query, key, value = self._split_heads(self.query_key_value(queries), 3)
        else:
            size = queries.shape[-1]
            weight, offset = self.query_key_value.weight, self.query_key_value.bias
            (query,) = self._split_heads(functional.linear(queries, weight[:size], offset[:size]), 1)
            key, value = self._split_heads(functional.linear(memory, weight[size:], offset[size:]), 2)
        attended = attend(query, key, value, bias, self.dropout if self.training else 0.0, self.backend)
        return self.output(attended.transpose(1, 2).flatten(2))

    def _split_heads(self, projected: Tensor, parts: int) -> tuple[Tensor, ...]:
        """(B, T, parts·D) -> ``parts`` tensors (B, H, T, Dh)."""
        batch, length, _ = projected.shape
        # Views of one tensor, whose gradients autograd stacks without another copy.
        split = projected.view(batch, length, parts, self.num_heads, -1).unbind(2)
        return tuple(part.transpose(1, 2) for part in split)
