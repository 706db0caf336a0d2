"""Tiny models and batches of packed rows, for every variant of the paper's Table 2."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from maelm_composer.config import (
    DecoderAttention,
    DecoderConfig,
    EncoderMaskContent,
    MaskingConfig,
    ModelConfig,
    PositionIds,
)
from maelm_composer.masking.collate import Batch, MaskingCollator

N, V = 48, 60


def build_config(has_decoder: bool = True, decoder: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    """Two layers of width 32 and a decoder of two, changed by ``decoder``; dropout off unless asked for."""
    sizes = {'num_hidden_layers': 2, 'hidden_size': 32, 'num_attention_heads': 4, 'intermediate_size': 64}
    no_dropout = {'hidden_dropout_prob': 0.0, 'attention_probs_dropout_prob': 0.0}
    defaults = {'vocab_size': V, 'max_seq_len': N, 'relative_position_buckets': 16, 'initializer_range': 0.2}
    defaults |= sizes | no_dropout | {'relative_position_max_distance': 24}
    decoder_config = DecoderConfig(**(sizes | no_dropout | (decoder or {}))) if has_decoder else None
    return ModelConfig(**(defaults | changes), decoder=decoder_config)


@pytest.fixture(scope='session')
def config() -> Callable[..., ModelConfig]:
    return build_config


@pytest.fixture(scope='session')
def make_batch(build_row, collate) -> Callable[..., Batch]:
    """``make_batch(config, encoder_mask_fraction=0.5, ...)`` -> a batch of four packed rows, two of them padded."""

    def make_batch(config: ModelConfig, rows: Any = None, epoch: int = 0, **masking: Any) -> Batch:
        length, vocab_size = config.max_seq_len, config.vocab_size
        if rows is None:
            shapes = [[length], [length // 3, length // 3], [9, length - 9], [length - 5]]
            rows = [build_row(blocks, length, vocab_size, seed=i) for i, blocks in enumerate(shapes)]
        collator = MaskingCollator(MaskingConfig(**masking), vocab_size, 5, config.predicts_every_token)
        return collate(collator, rows, epoch=epoch)

    return make_batch


def sum_gradients(model: torch.nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    """Every parameter's gradient of the loss."""
    model.zero_grad()
    model(batch).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.fixture(scope='session')
def gradients() -> Callable[..., dict[str, torch.Tensor]]:
    return sum_gradients


# Table 2 of the paper: what each row changes in the masking, the model and the decoder. None: no decoder.
TABLE_2: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any] | None]] = {
    'mae_lm': ({}, {}, {}),
    'encoder_with_masks_no_decoder': ({'encoder_mask_fraction': 1.0}, {}, None),
    'encoder_with_masks': ({'encoder_mask_fraction': 1.0}, {}, {}),
    'decoder_resets_masks': ({'encoder_mask_fraction': 1.0, 'decoder_resets_masks': True}, {}, {}),
    'random_replace': (
        {'encoder_mask_fraction': 1.0, 'encoder_mask_content': EncoderMaskContent.random_token},
        {},
        {},
    ),
    'misaligned': ({'position_ids': PositionIds.consecutive}, {}, {}),
    'no_relative_position': ({}, {'relative_position_buckets': 0}, {}),
    'bidirectional_cross': ({}, {}, {'attention': DecoderAttention.bidirectional_cross}),
    'causal_cross': ({}, {}, {'attention': DecoderAttention.causal_cross}),
    'cross': ({}, {}, {'attention': DecoderAttention.cross}),
    'decoder_1_layer': ({}, {}, {'num_hidden_layers': 1}),
    'decoder_3_layers': ({}, {}, {'num_hidden_layers': 3}),
    'decoder_narrow': ({}, {}, {'hidden_size': 16, 'intermediate_size': 32}),
    'decoder_wide': ({}, {}, {'hidden_size': 48, 'intermediate_size': 96}),
}


@pytest.fixture(params=TABLE_2)
def variant(request) -> tuple[dict[str, Any], ModelConfig]:
    """One row of Table 2: its masking and its tiny model."""
    masking, model, decoder = TABLE_2[request.param]
    return masking, build_config(has_decoder=decoder is not None, decoder=decoder, **model)
