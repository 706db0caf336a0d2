"""The attention module and the bias that keeps the blocks of a packed row apart."""

import pytest
import torch
from torch.testing import assert_close

from maelm_composer.model.attention import Attention
from maelm_composer.model.maelm import build_model
from maelm_composer.model.stack import build_attention_bias

TOLERANCE = {'rtol': 1e-5, 'atol': 1e-5}


def test_self_attention_is_attention_to_itself_as_memory():
    """The fused projection and the split one are the same function of the same weights."""
    torch.manual_seed(0)
    attention, hidden, bias = Attention(16, 4, dropout=0.0), torch.randn(2, 6, 16), torch.randn(2, 4, 6, 6)
    assert_close(attention(hidden, None, bias), attention(hidden, hidden, bias), **TOLERANCE)


def test_attention_bias_keeps_blocks_apart():
    queries, keys = torch.tensor([[1, 2, 0]]), torch.tensor([[1, 1, 2, 0]])
    is_allowed = torch.tensor([[True, True, False, False], [False, False, True, False], [False, False, False, True]])
    for relative in (None, torch.randn(1, 2, 3, 4)):
        bias = build_attention_bias(queries, keys, relative)
        assert torch.equal(bias.isfinite(), is_allowed.expand_as(bias))
        expected = torch.zeros_like(bias) if relative is None else relative
        assert_close(bias[bias.isfinite()], expected[bias.isfinite()], rtol=0, atol=0)


@pytest.mark.parametrize('predicts', [False, True])
def test_bias_of_packed_rows_without_gaps_is_that_of_their_positions(config, make_batch, predicts):
    """In blocks, between blocks and in padding."""
    roberta = config(has_decoder=False)
    batch = make_batch(roberta, encoder_mask_fraction=1.0)
    stack = build_model(roberta, seed=1).encoder
    chosen = batch.predicted_index.clamp(max=batch.labels.shape[1] - 1) if predicts else None
    cotangent, biases, gradients = None, [], []
    for has_gaps in (True, False):
        bias = stack.build_bias(batch.position_ids, batch.segment_ids, chosen, has_gaps)
        cotangent = torch.randn_like(bias) if cotangent is None else cotangent
        gradients += torch.autograd.grad(bias, stack.relative_position.weight, cotangent)
        biases.append(bias)
    assert_close(*biases, rtol=0, atol=0)
    assert_close(*gradients, rtol=1e-4, atol=1e-4)


def test_dropout_of_probabilities_only_in_training():
    torch.manual_seed(0)
    attention, hidden, bias = Attention(16, 4, dropout=0.5), torch.randn(1, 6, 16), torch.zeros(1, 1, 6, 6)
    assert not torch.equal(attention(hidden, None, bias), attention(hidden, None, bias))
    attention.eval()
    assert torch.equal(attention(hidden, None, bias), attention(hidden, None, bias))
