"""The attention module and the bias that keeps the blocks of a packed row apart."""

import pytest
import torch
from torch.testing import assert_close

from maelm_composer.model.attention import Attention
from maelm_composer.model.maelm import build_model
from maelm_composer.model.stack import build_attention_bias


def test_attention_bias_keeps_blocks_apart():
    queries, keys = torch.tensor([[1, 2, 0]]), torch.tensor([[1, 1, 2, 0]])
    is_allowed = torch.tensor([[True, True, False, False], [False, False, True, False], [False, False, False, True]])
    for relative in (None, torch.randn(1, 2, 3, 4)):
        bias = build_attention_bias(queries, keys, relative)
        assert torch.equal(bias.isfinite(), is_allowed.expand_as(bias))
        expected = torch.zeros_like(bias) if relative is None else relative
        assert_close(bias[bias.isfinite()], expected[bias.isfinite()], rtol=0, atol=0)


def test_bias_of_packed_rows_without_gaps_is_that_of_their_positions(config, make_batch):
    """In blocks, between blocks and in padding."""
    roberta = config(has_decoder=False)
    batch = make_batch(roberta, encoder_mask_fraction=1.0)
    stack = build_model(roberta, seed=1).encoder
    cotangent, biases, gradients = None, [], []
    for has_gaps in (True, False):
        bias = stack.build_bias(batch.position_ids, batch.segment_ids, has_gaps=has_gaps)
        cotangent = torch.randn_like(bias) if cotangent is None else cotangent
        gradients += torch.autograd.grad(bias, stack.relative_position.weight, cotangent)
        biases.append(bias)
    assert_close(*biases, rtol=0, atol=0)
    assert_close(*gradients, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('predicts', [False, True])
@pytest.mark.parametrize('compiles', [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_threads_give_the_bias_the_same_gradient_each_time(config, predicts, compiles):
    settings = config(has_decoder=False, hidden_size=96, num_attention_heads=3, max_seq_len=128)
    stack = build_model(settings, seed=1).encoder  # heads and threads do not match
    generator = torch.Generator().manual_seed(0)
    positions, segments = torch.arange(128).expand(32, -1), torch.ones(32, 128, dtype=torch.int64)
    chosen = torch.randint(128, (32, 20), generator=generator) if predicts else None
    cotangent = torch.randn(32, 3, 20 if predicts else 128, 128, generator=generator)

    def add_up():
        return (stack.build_bias(positions, segments, chosen, has_gaps=False) * cotangent).sum()

    add_up = torch.compile(add_up) if compiles else add_up
    threads, gradients = torch.get_num_threads(), set()
    torch.set_num_threads(2)
    try:
        for _ in range(200 if compiles else 20):
            (gradient,) = torch.autograd.grad(add_up(), stack.relative_position.weight)
            gradients.add(gradient.numpy().tobytes())
    finally:
        torch.set_num_threads(threads)
    assert len(gradients) == 1


def test_dropout_of_probabilities_only_in_training():
    torch.manual_seed(0)
    attention, hidden, bias = Attention(16, 4, dropout=0.5), torch.randn(1, 6, 16), torch.zeros(1, 1, 6, 6)
    assert not torch.equal(attention(hidden, None, bias), attention(hidden, None, bias))
    attention.eval()
    assert torch.equal(attention(hidden, None, bias), attention(hidden, None, bias))
