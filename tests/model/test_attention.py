"""The attention module and the bias that keeps the blocks of a packed row apart."""

import torch
from torch.testing import assert_close

from maelm_composer.model.attention import Attention
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


def test_dropout_of_probabilities_only_in_training():
    torch.manual_seed(0)
    attention, hidden, bias = Attention(16, 4, dropout=0.5), torch.randn(1, 6, 16), torch.zeros(1, 1, 6, 6)
    assert not torch.equal(attention(hidden, None, bias), attention(hidden, None, bias))
    attention.eval()
    assert torch.equal(attention(hidden, None, bias), attention(hidden, None, bias))
