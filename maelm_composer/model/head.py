"""The masked-language-model head: dense -> GELU -> LN -> product with the encoder's token table + bias (Eq. 1)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from maelm_composer.config import ModelConfig


class MaskedLMHead(nn.Module):
    """Logits over the vocabulary; PAPER-SILENT: the dense transform, as RoBERTa's and the authors' code."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size = config.hidden_size if config.decoder is None else config.decoder.hidden_size
        self.dense = nn.Linear(size, size)
        self.activation = nn.GELU()
        self.norm = nn.LayerNorm(size, eps=config.layer_norm_eps)
        self.output_projection = nn.Linear(size, config.hidden_size, bias=False) if size != config.hidden_size else None
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    @torch.no_grad()
    def set_unigram_bias(self, id_counts: Sequence[int]) -> None:
        """Set the bias to log((count + 1) / (total + V)), the frequency of each token in the training text.

        With a zero bias the first steps push the output of every layer towards a constant that predicts these
        frequencies, and a small model keeps that output for millions of tokens (docs/deviations.md).
        """
        counts = torch.tensor(id_counts, dtype=torch.float64) + 1
        self.bias.copy_((counts / counts.sum()).log())

    def forward(self, hidden: Tensor, token_table: Tensor) -> Tensor:
        """(B, M, D_dec) at the positions to predict and the (V, D) token table -> (B, M, V) logits."""
        hidden = self.norm(self.activation(self.dense(hidden)))
        if self.output_projection is not None:
            hidden = self.output_projection(hidden)
        return functional.linear(hidden, token_table, self.bias)
