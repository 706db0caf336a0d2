"""Every row of Table 2: training, initial loss, and FLOPs as counted by the cost model."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from maelm_composer.config import DecoderAttention, HeadBiasInit, ModelConfig, RelativePositionInit
from maelm_composer.model.cost import count_forward_flops, count_parameters
from maelm_composer.model.decoder import take_padded
from maelm_composer.model.maelm import build_model
from maelm_composer.model.relative_position import RelativePositionBias


def test_every_parameter_gets_a_gradient(variant, make_batch, gradients):
    masking, config = variant
    model, batch = build_model(config, seed=0), make_batch(config, **masking)
    found = gradients(model, batch)
    assert found.keys() == dict(model.named_parameters()).keys()
    for name, gradient in found.items():
        assert gradient.isfinite().all(), name
        assert gradient.abs().max() > 1e-7, name
    assert (found['encoder.token_embeddings.weight'].abs().sum(1) > 0).all()
    is_real = take_padded(batch.segment_ids, batch.visible_index) > 0
    reached = found['encoder.position_embeddings.weight'].abs().sum(1).nonzero()[:, 0]
    assert_close(reached, batch.position_ids[is_real].unique())


def test_states_by_layer_end_in_the_encoders_output_where_positions_have_gaps(config, make_batch):
    model, batch = build_model(config(), seed=0), make_batch(config())
    inputs = batch.input_ids, batch.position_ids, take_padded(batch.segment_ids, batch.visible_index)
    *_, last = model.encoder.layer_states(*inputs, has_gaps=True)
    assert_close(last, model.encoder(*inputs, has_gaps=True), rtol=0, atol=1e-5)
    *_, wrong = model.encoder.layer_states(*inputs)
    assert (wrong - last).abs().max() > 0.1


def test_bf16_autocast_is_close_to_fp32(variant, make_batch):
    masking, config = variant
    model, batch = build_model(config, seed=0), make_batch(config, **masking)
    exact = model(batch).loss
    with torch.autocast('cpu', torch.bfloat16):
        rounded = model(batch).loss
    rounded.backward()
    assert exact.dtype == rounded.dtype == torch.float32
    assert rounded != exact
    assert_close(rounded, exact, rtol=0.01, atol=0)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_token_table_is_one_parameter(variant):
    _, config = variant
    model = build_model(config, seed=0)
    shape = (config.vocab_size, config.hidden_size)
    assert [name for name, tensor in model.state_dict().items() if tensor.shape == shape] == [
        'encoder.token_embeddings.weight'
    ]
    assert {p.data_ptr() for p in model.parameters()} == {p.data_ptr() for p in model.state_dict().values()}


def test_initial_weights(config):
    decoder = {'hidden_size': 128, 'num_attention_heads': 4, 'intermediate_size': 256, 'relative_position_buckets': 32}
    sizes = {'hidden_size': 64, 'vocab_size': 400, 'relative_position_buckets': 32, 'num_attention_heads': 16}
    model = build_model(config(decoder=decoder, initializer_range=0.03, **sizes), seed=0)
    seen = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.LayerNorm):
            assert (module.weight == 1).all(), name
            assert (module.bias == 0).all(), name
        elif isinstance(getattr(module, 'weight', None), torch.Tensor):
            weight = module.weight
            assert abs(float(weight.detach().std()) / 0.03 - 1) < 4 / (2 * weight.numel()) ** 0.5, name
            assert abs(float(weight.mean())) < 4 * 0.03 / weight.numel() ** 0.5, name
            seen.add(type(module).__name__)
            if getattr(module, 'bias', None) is not None:
                assert (module.bias == 0).all(), name
    assert seen == {'Linear', 'Embedding', 'RelativePositionBias'}
    assert (model.head.bias == 0).all()


def test_the_initial_weights_of_published_runs_are_drawn_again(config):
    model = build_model(config(initializer_range=0.02), seed=3)
    tables = (model.encoder.token_embeddings.weight, model.decoder.layers[1].intermediate.weight)
    drawn = [float(value) for table in tables for value in table[1, :2]]
    assert drawn == pytest.approx([-0.00952062, -0.00585825, 0.03205890, 0.01090926], rel=1e-4)


def test_a_unigram_head_bias_starts_at_the_frequencies_and_changes_nothing_else(config, make_batch):
    counts = list(range(60))
    settings = config(head_bias_init=HeadBiasInit.unigram, initializer_range=1e-4)
    model = build_model(settings, seed=0, id_counts=counts)
    shares = (torch.tensor(counts) + 1.0) / (sum(counts) + 60)
    with torch.no_grad():
        guess = model(make_batch(settings)).logits.softmax(-1)
    assert_close(guess, shares.expand_as(guess), rtol=0.01, atol=0)
    plain = build_model(config(initializer_range=1e-4), seed=0).state_dict()
    changed = [name for name, weight in model.state_dict().items() if not torch.equal(weight, plain[name])]
    assert changed == ['head.bias']
    with pytest.raises(ValueError, match='needs the id_counts'):
        build_model(settings, seed=0)


def test_a_local_relative_position_bias_is_that_of_both_stacks(config):
    settings = config(
        decoder={'relative_position_buckets': 8, 'num_attention_heads': 2},
        relative_position_init=RelativePositionInit.local,
    )
    model = build_model(settings, seed=0)
    for stack, of_stack in ((model.encoder, settings), (model.decoder, settings.decoder)):
        expected = RelativePositionBias(of_stack, settings)
        expected.reset_parameters(RelativePositionInit.local, std=0.0)
        assert_close(stack.relative_position.weight, expected.weight, rtol=0, atol=0)


def test_mae_lm_and_its_baseline_start_from_one_encoder(variant, config):
    _, settings = variant
    baseline_settings = config(has_decoder=False, relative_position_buckets=settings.relative_position_buckets)
    ours, baseline = build_model(settings, seed=3).encoder, build_model(baseline_settings, seed=3).encoder
    for name, weight in baseline.state_dict().items():
        assert_close(ours.state_dict()[name], weight, rtol=0, atol=0)
    other = build_model(settings, seed=4).encoder
    assert not torch.equal(other.token_embeddings.weight, ours.token_embeddings.weight)


@pytest.mark.parametrize('init', RelativePositionInit)
def test_building_leaves_the_global_generator_alone(init, config):
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    settings = config(relative_position_init=init)
    model = build_model(settings, seed=5)
    assert_close(torch.rand(3), expected, rtol=0, atol=0)
    again = build_model(settings, seed=5)
    assert_close(dict(model.named_parameters()), dict(again.named_parameters()), rtol=0, atol=0)


def test_count_parameters(variant):
    _, config = variant
    model = build_model(config, seed=0)
    counts = {name: sum(p.numel() for p in part.parameters()) for name, part in model.named_children()}
    assert count_parameters(config) == counts


def test_count_parameters_of_base():
    assert count_parameters(ModelConfig()) == {'encoder': 110_615_424, 'decoder': 28_746_240, 'head': 624_896}
    assert 'decoder' not in count_parameters(ModelConfig(decoder=None))


def assert_flops_as_measured(config, batch):
    """FLOPs of each part, against the matrix products that torch counts."""
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        build_model(config, seed=0)(batch)
    rows, visible = batch.input_ids.shape
    planned = count_forward_flops(config, visible, batch.predicted_index.shape[1])
    measured = {part: counter.get_flop_counts().get(f'MaskedLanguageModel.{part}', {}) for part in planned}
    planned = {part: torch.tensor(float(rows * flops)) for part, flops in planned.items()}
    measured = {part: torch.tensor(float(sum(flops.values()))) for part, flops in measured.items()}
    assert_close(planned, measured, rtol=0.01, atol=0)
    assert sum(measured.values()) == counter.get_total_flops()


def test_count_forward_flops(variant, make_batch):
    masking, config = variant
    assert_flops_as_measured(config, make_batch(config, **masking))


@pytest.mark.parametrize('attention', DecoderAttention)
def test_count_forward_flops_of_a_narrow_decoder(attention, config, make_batch):
    settings = config(decoder={'attention': attention, 'hidden_size': 16})
    assert_flops_as_measured(settings, make_batch(settings))


def test_dropout_is_in_the_encoder_alone_and_only_in_training(make_batch, config):
    default = ModelConfig()
    rates = {name: getattr(default, name) for name in ('hidden_dropout_prob', 'attention_probs_dropout_prob')}
    assert set(rates.values()) == {0.1}
    settings = config(**rates)
    settings.decoder.hidden_dropout_prob = default.decoder.hidden_dropout_prob
    settings.decoder.attention_probs_dropout_prob = default.decoder.attention_probs_dropout_prob
    model, batch = build_model(settings, seed=0), make_batch(settings)
    inputs = (batch.input_ids, batch.position_ids, take_padded(batch.segment_ids, batch.visible_index))
    one, two = model.encoder(*inputs, has_gaps=True), model.encoder(*inputs, has_gaps=True)
    assert not torch.equal(one, two)
    table = model.encoder.token_embeddings.weight
    assert_close(model.decoder(one, table, batch), model.decoder(one, table, batch), rtol=0, atol=0)
    model.eval()
    assert_close(model.encoder(*inputs, has_gaps=True), model.encoder(*inputs, has_gaps=True), rtol=0, atol=0)


@pytest.mark.parametrize('rate', ['hidden_dropout_prob', 'attention_probs_dropout_prob'])
@pytest.mark.parametrize('stack', ['encoder', 'decoder'])
def test_each_dropout_rate_reaches_its_stack(rate, stack, config, make_batch):
    settings = config(**({rate: 0.5} if stack == 'encoder' else {'decoder': {rate: 0.5}}))
    model, batch = build_model(settings, seed=0), make_batch(settings)
    inputs = (batch.input_ids, batch.position_ids, take_padded(batch.segment_ids, batch.visible_index))
    encoded = [model.encoder(*inputs, has_gaps=True) for _ in range(2)]
    decoded = [model.decoder(encoded[0], model.encoder.token_embeddings.weight, batch) for _ in range(2)]
    assert torch.equal(*encoded) == (stack == 'decoder')
    assert torch.equal(*decoded) == (stack == 'encoder')


class Nothing(nn.Module):
    """A dropout that drops everything."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(hidden)


def test_dropout_is_of_every_sublayer_and_of_the_embeddings(config):
    model = build_model(config(decoder={'attention': DecoderAttention.bidirectional_cross}), seed=0)
    generator = torch.Generator().manual_seed(0)
    for norm in (module for module in model.modules() if isinstance(module, nn.LayerNorm)):
        nn.init.normal_(norm.weight, generator=generator)
    layer, bias = model.decoder.layers[0], torch.zeros(2, 1, 5, 5)
    hidden = torch.randn(2, 5, 32, generator=generator)
    layer.dropout = model.encoder.dropout = model.decoder.dropout = Nothing()
    normed = layer.output_norm(layer.cross_attention_norm(layer.self_attention_norm(hidden)))
    assert_close(layer(hidden, bias, memory=hidden, memory_bias=bias), normed, rtol=0, atol=0)
    for stack in (model.encoder, model.decoder):
        assert not stack.add_positions(hidden, torch.arange(5).expand(2, -1)).any()


@pytest.mark.parametrize('attention', [DecoderAttention.causal_cross, DecoderAttention.bidirectional])
def test_a_batch_for_another_decoder_is_refused(attention, config, make_batch):
    ours = config(decoder={'attention': attention})
    other = DecoderAttention.cross if attention.is_causal else DecoderAttention.causal_cross
    with pytest.raises(ValueError, match=f'predicts_every_token={attention.is_causal}'):
        build_model(ours, seed=0)(make_batch(config(decoder={'attention': other})))
