"""MAE-LM and plain MLM: encoder -> decoder -> head -> loss (Meng et al., arXiv:2302.02060, Sec. 2.1 and 3).

Plain MLM, the RoBERTa baseline, is ``decoder: null``. ``reference.py`` is the same model in plain torch,
for reading.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from maelm_composer.config import AttentionBackend, HeadBiasInit, ModelConfig
from maelm_composer.masking.collate import IGNORED_LABEL, Batch
from maelm_composer.model.attention import Attention
from maelm_composer.model.decoder import Decoder, take_padded
from maelm_composer.model.encoder import Encoder
from maelm_composer.model.relative_position import RelativePositionBias


class MaskedLMHead(nn.Module):
    """Dense -> GELU -> LN -> product with the encoder's token table + bias, the logits over the vocabulary (Eq. 1).

    PAPER-SILENT: all but the product, as in RoBERTa's and the authors' code. If the decoder is not as wide as the
    encoder, a projection to D precedes the product; Sec. 4.3, "Decoder Size", names only the projection of the input.
    """

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
        """Set the bias to log((count + 1) / (total + V)) of (V,) counts, the log frequencies in the training text.

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


class MaskedLMOutput(NamedTuple):
    """The output for one batch; ``loss`` alone has a gradient."""

    loss: Tensor  # scalar, nats: mean over the predicted tokens of the batch, fp32
    # (B, M, V), detached: torch.compile would allocate a gradient of zeros this large. Under autocast they are bf16, so
    # that two tokens may have equal logits, of which argmax takes the one with the lower id.
    logits: Tensor
    labels: Tensor  # (B, M); -100 in an unused slot


class MaskedLanguageModel(nn.Module):
    """Encoder, decoder (or none) and head; the token table is one parameter, used by all three.

    The constructor leaves torch's initial weights; :func:`build_model` draws the method's. A model without a decoder
    takes batches of ``MaskingConfig(encoder_mask_fraction=1.0)`` alone.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.encoder = Encoder(config, has_tied_head=True)
        self.decoder = Decoder(config) if config.decoder is not None else None
        self.head = MaskedLMHead(config)
        self.predicts_every_token = config.predicts_every_token

    def forward(self, batch: Batch) -> MaskedLMOutput:
        """Loss and predictions at ``batch.predicted_index``.

        Raises:
            ValueError: the batch predicts every position and the decoder is not causal, or the reverse.
        """
        if (batch.predicted_index.shape == batch.labels.shape) != self.predicts_every_token:
            raise ValueError(
                f'build MaskingCollator with predicts_every_token={self.predicts_every_token}, as this decoder needs'
            )
        token_table = self.encoder.token_embeddings.weight
        segment_ids = take_padded(batch.segment_ids, batch.visible_index)
        if self.decoder is None:
            # The encoder sees the whole row, so a position is also its slot. An unused slot has no label.
            predicted = batch.predicted_index.clamp(max=batch.labels.shape[1] - 1)
            hidden = self.encoder(batch.input_ids, batch.position_ids, segment_ids, predicted)
        else:
            encoded = self.encoder(batch.input_ids, batch.position_ids, segment_ids, has_gaps=True)
            hidden = self.decoder(encoded, token_table, batch)
        logits = self.head(hidden, token_table)
        labels = take_padded(batch.labels, batch.predicted_index, IGNORED_LABEL)
        in_fp32 = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = functional.cross_entropy(in_fp32.flatten(0, 1), labels.flatten())
        return MaskedLMOutput(loss, logits.detach(), labels)

    def select_attention(self, backend: AttentionBackend) -> None:
        """Set the attention kernel of every layer; a new model has ``auto``."""
        for module in self.modules():
            if isinstance(module, Attention):
                module.backend = AttentionBackend(backend)


def build_model(config: ModelConfig, seed: int, id_counts: Sequence[int] | None = None) -> MaskedLanguageModel:
    """A model with initial weights N(0, initializer_range), biases 0, LayerNorm 1 and 0, as in the authors' code.

    Args:
        seed: of the initial weights. The encoder is drawn first, so that MAE-LM and its baseline start from the same
            encoder; torch's generators are left as they were.
        id_counts: (V,) occurrences of every id in the training text, for ``head_bias_init: unigram``.

    Raises:
        ValueError: ``head_bias_init: unigram`` without ``id_counts``.
    """
    with torch.random.fork_rng(devices=[]):
        model = MaskedLanguageModel(config)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would set the GPUs', too
        for module in model.modules():
            match module:
                case nn.Linear() | nn.Embedding():
                    nn.init.normal_(module.weight, std=config.initializer_range)
                    if isinstance(module, nn.Linear) and module.bias is not None:
                        nn.init.zeros_(module.bias)
                case RelativePositionBias():
                    module.reset_parameters(config.relative_position_init, config.initializer_range)
        if config.head_bias_init == HeadBiasInit.unigram:
            if id_counts is None:
                raise ValueError('model.head_bias_init unigram needs the id_counts of the training text')
            model.head.set_unigram_bias(id_counts)
    return model
