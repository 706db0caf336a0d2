"""The attention written out for CPUs against torch's own; the last layer's shortcut against computing everything."""

import pytest
import torch
from torch.nn import functional
from torch.testing import assert_close

from maelm_composer.config import AttentionBackend, DecoderAttention, DecoderConfig
from maelm_composer.model.attention import Attention, attend, build_attention_bias
from maelm_composer.model.decoder import take_padded
from maelm_composer.model.encoder import build_stack_bias
from maelm_composer.model.layer import Layer, take_rows
from maelm_composer.model.maelm import build_model

DENSE = AttentionBackend.dense
TOLERANCE = {'rtol': 1e-5, 'atol': 1e-5}


@pytest.mark.parametrize('bias_heads', [1, 3])
def test_attend_is_scaled_dot_product_attention(bias_heads):
    """Output and every gradient, the bias's too, with keys that a query must not look at."""
    generator = torch.Generator().manual_seed(0)
    shapes = {'query': (2, 3, 5, 8), 'key': (2, 3, 7, 8), 'value': (2, 3, 7, 8), 'bias': (2, bias_heads, 5, 7)}
    ours = {name: torch.randn(shape, generator=generator).requires_grad_() for name, shape in shapes.items()}
    theirs = {name: tensor.detach().clone().requires_grad_() for name, tensor in ours.items()}
    is_forbidden = torch.rand(2, 1, 5, 7, generator=generator) < 0.3
    is_forbidden[..., 0] = False
    actual = attend(
        ours['query'], ours['key'], ours['value'], ours['bias'].masked_fill(is_forbidden, float('-inf')), 0.0, DENSE
    )
    expected = functional.scaled_dot_product_attention(
        theirs['query'], theirs['key'], theirs['value'], theirs['bias'].masked_fill(is_forbidden, float('-inf'))
    )
    assert_close(actual, expected, **TOLERANCE)
    cotangent = torch.randn(actual.shape, generator=generator)
    actual.backward(cotangent)
    expected.backward(cotangent)
    for name in shapes:
        assert_close(ours[name].grad, theirs[name].grad, **TOLERANCE)
        assert ours[name].grad.abs().sum() > 0


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


def assert_same_gradients(module, actual, expected):
    """Gradients of a random weighting of both outputs, for every parameter of ``module``."""
    cotangent = torch.randn(actual.shape, generator=torch.Generator().manual_seed(3))
    parameters = dict(module.named_parameters())
    ours, theirs = (
        torch.autograd.grad((output * cotangent).sum(), list(parameters.values()), allow_unused=True)
        for output in (actual, expected)
    )
    for name, one, other in zip(parameters, ours, theirs, strict=True):
        assert one is not None, name
        assert_close(one, other, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f'{name}: {text}')


def test_wanted_rows_of_a_layer_are_those_of_the_whole():
    torch.manual_seed(0)
    layer = Layer(DecoderConfig(1, 16, 4, 32), layer_norm_eps=1e-5, has_cross_attention=True)
    hidden, memory, index = torch.randn(2, 6, 16), torch.randn(2, 5, 16), torch.tensor([[1, 4], [5, 0]])
    bias, memory_bias = torch.randn(2, 4, 6, 6), torch.randn(2, 1, 6, 5)
    whole = take_rows(layer(hidden, bias, memory=memory, memory_bias=memory_bias), index)
    rows = torch.arange(2)[:, None]
    few_bias, few_memory_bias = (b.transpose(1, 2)[rows, index].transpose(1, 2) for b in (bias, memory_bias))
    few = layer(hidden, few_bias, query_index=index, memory=memory, memory_bias=few_memory_bias)
    assert_close(few, whole, **TOLERANCE)
    assert_same_gradients(layer, few, whole)


def test_wanted_rows_of_the_encoder_are_those_of_the_whole(config, make_batch):
    settings = config(has_decoder=False)
    encoder, batch = build_model(settings, seed=0).encoder, make_batch(settings, encoder_mask_fraction=1.0)
    inputs = (batch['input_ids'], batch['position_ids'], take_padded(batch['segment_ids'], batch['visible_index']))
    few = encoder(*inputs, query_index=batch['masked_index'])
    whole = take_rows(encoder(*inputs), batch['masked_index'])
    assert_close(few, whole, **TOLERANCE)
    assert_same_gradients(encoder, few, whole)


@pytest.mark.parametrize('attention', DecoderAttention)
@pytest.mark.parametrize('buckets', [0, 8])
def test_wanted_rows_of_the_decoder_are_those_of_the_whole(attention, buckets, config, make_batch):
    """Asking for a few positions gives what asking for every position, and then choosing, gives."""
    settings = config(decoder={'attention': attention, 'relative_position_buckets': buckets})
    model, batch = build_model(settings, seed=0), make_batch(settings, encoder_mask_fraction=0.5)
    wanted = torch.tensor([[3, 20, 47], [0, 15, 31], [8, 9, 10], [1, 41, 42]])
    inputs = (batch['input_ids'], batch['position_ids'], take_padded(batch['segment_ids'], batch['visible_index']))
    encoded, table = model.encoder(*inputs).detach(), model.encoder.token_embeddings
    everything = torch.arange(settings.max_seq_len).expand(4, -1)
    few = model.decoder(encoded, table, batch | {'masked_index': wanted})
    whole = take_rows(model.decoder(encoded, table, batch | {'masked_index': everything}), wanted)
    assert few.shape == (4, 3, settings.decoder.hidden_size)
    assert_close(few, whole, **TOLERANCE)
    assert_same_gradients(model.decoder, few, whole)


def test_one_bias_serves_every_layer_and_the_wanted_rows(config):
    encoder = build_model(config(), seed=0).encoder
    positions, segments = torch.arange(6)[None], torch.tensor([[1, 1, 1, 2, 2, 0]])
    whole = build_stack_bias(encoder.relative_position, positions, segments)
    few = build_stack_bias(encoder.relative_position, positions, segments, torch.tensor([[4, 1]]))
    assert_close(few, whole[:, :, [4, 1]], rtol=0, atol=0)
