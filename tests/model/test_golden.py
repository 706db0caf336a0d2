"""Equal to Hugging Face's models, to 1e-5 in fp32: nothing is downloaded, weights are random and copied in the test."""

import pytest
import torch
from torch.testing import assert_close
from transformers import MPNetConfig, MPNetModel, RobertaConfig, RobertaForMaskedLM

from maelm_composer.model.maelm import build_model

TOLERANCE = {'rtol': 1e-5, 'atol': 1e-5}
FIRST_POSITION = 2  # RoBERTa and MPNet keep rows 0 and 1 of the position table for padding
LENGTH = 300  # beyond the farthest bucket of distances, which starts at 91


def copy_(target, source):
    assert target.shape == source.shape
    with torch.no_grad():
        target.copy_(source)


def copy_layer(target, layer, *, query, key, value, attention_output, attention_norm):
    """Weights of our ``layer`` into a Hugging Face layer, whose attention is named differently from class to class."""
    fused = layer.self_attention.query_key_value
    for part, weight, bias in zip((query, key, value), fused.weight.chunk(3), fused.bias.chunk(3), strict=True):
        copy_(part.weight, weight)
        copy_(part.bias, bias)
    for theirs, ours in (
        (attention_output, layer.self_attention.output),
        (attention_norm, layer.self_attention_norm),
        (target.intermediate.dense, layer.intermediate),
        (target.output.dense, layer.output),
        (target.output.LayerNorm, layer.output_norm),
    ):
        copy_(theirs.weight, ours.weight)
        copy_(theirs.bias, ours.bias)


def copy_embeddings(target, encoder):
    copy_(target.word_embeddings.weight, encoder.token_embeddings.weight)
    copy_(target.position_embeddings.weight[FIRST_POSITION:], encoder.position_embeddings.weight)
    copy_(target.LayerNorm.weight, encoder.embedding_norm.weight)
    copy_(target.LayerNorm.bias, encoder.embedding_norm.bias)


def randomize_everything(model):
    """Biases and norms too, so that one left out in a copy or a forward pass shows."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())) / 20
            )
    return model.eval()


def shared_settings(config):
    return {
        'vocab_size': config.vocab_size,
        'hidden_size': config.hidden_size,
        'num_hidden_layers': config.num_hidden_layers,
        'num_attention_heads': config.num_attention_heads,
        'intermediate_size': config.intermediate_size,
        'max_position_embeddings': config.max_seq_len + FIRST_POSITION,
        'layer_norm_eps': config.layer_norm_eps,
        'pad_token_id': 1,
        'hidden_dropout_prob': 0.0,
        'attention_probs_dropout_prob': 0.0,
    }


def build_roberta(model, config):
    theirs = RobertaForMaskedLM(
        RobertaConfig(type_vocab_size=1, attn_implementation='eager', **shared_settings(config))
    )
    copy_embeddings(theirs.roberta.embeddings, model.encoder)
    torch.nn.init.zeros_(theirs.roberta.embeddings.token_type_embeddings.weight)
    for target, layer in zip(theirs.roberta.encoder.layer, model.encoder.layers, strict=True):
        attention, output = target.attention.self, target.attention.output
        copy_layer(
            target,
            layer,
            query=attention.query,
            key=attention.key,
            value=attention.value,
            attention_output=output.dense,
            attention_norm=output.LayerNorm,
        )
    for theirs_part, ours in ((theirs.lm_head.dense, model.head.dense), (theirs.lm_head.layer_norm, model.head.norm)):
        copy_(theirs_part.weight, ours.weight)
        copy_(theirs_part.bias, ours.bias)
    copy_(theirs.lm_head.bias, model.head.bias)
    assert theirs.lm_head.decoder.weight is theirs.roberta.embeddings.word_embeddings.weight
    return theirs.eval()


def build_mpnet(encoder, config):
    settings = shared_settings(config)
    theirs = MPNetModel(MPNetConfig(relative_attention_num_buckets=32, **settings), add_pooling_layer=False)
    copy_embeddings(theirs.embeddings, encoder)
    copy_(theirs.encoder.relative_attention_bias.weight, encoder.relative_position.weight)
    for target, layer in zip(theirs.encoder.layer, encoder.layers, strict=True):
        attention = target.attention.attn
        copy_layer(
            target,
            layer,
            query=attention.q,
            key=attention.k,
            value=attention.v,
            attention_output=attention.o,
            attention_norm=target.attention.LayerNorm,
        )
    return theirs.eval()


def fill_from_batch(batch):
    """(B, N) what a plain masked language model of another make reads: its ids, attention mask and labels."""
    return {
        'input_ids': batch['input_ids'],
        'attention_mask': (batch['segment_ids'] > 0).long(),
        'labels': batch['labels'],
    }


def assert_same_gradient_norm(ours, theirs, exclude=None):
    """Of all parameters together; ``exclude`` is a parameter that only they have."""
    norms = [
        torch.stack([p.grad.norm() for p in model.parameters() if p is not exclude]).norm() for model in (ours, theirs)
    ]
    assert_close(*norms, **TOLERANCE)


@pytest.fixture
def plain(config):
    """Plain MLM without relative positions, in our words and in RoBERTa's."""
    settings = config(has_decoder=False, relative_position_buckets=0)
    model = randomize_everything(build_model(settings, seed=1))
    return settings, model, build_roberta(model, settings)


def test_plain_mlm_is_roberta(plain, make_batch, build_row):
    """Logits, loss and gradients, with padding."""
    config, ours, theirs = plain
    rows = [build_row([n], config.max_seq_len, config.vocab_size, seed=n) for n in (48, 40, 33)]
    batch = make_batch(config, rows, encoder_mask_fraction=1.0)
    output, expected = ours(batch), theirs(**fill_from_batch(batch))
    logits = expected.logits.gather(1, batch['masked_index'][..., None].expand(-1, -1, config.vocab_size))
    assert_close(output.logits, logits, **TOLERANCE)
    assert_close(output.loss, expected.loss, **TOLERANCE)
    output.loss.backward()
    expected.loss.backward()
    embeddings = theirs.roberta.embeddings
    assert_same_gradient_norm(ours, theirs, exclude=embeddings.token_type_embeddings.weight)
    assert_close(ours.encoder.token_embeddings.weight.grad, embeddings.word_embeddings.weight.grad, **TOLERANCE)
    gradient = embeddings.position_embeddings.weight.grad[FIRST_POSITION:]
    assert_close(ours.encoder.position_embeddings.weight.grad, gradient, **TOLERANCE)


def test_a_packed_row_is_roberta_on_each_block_alone(plain, make_batch, build_row):
    config, ours, theirs = plain
    lengths = (19, 8, 16)
    row = build_row(lengths, config.max_seq_len, config.vocab_size)
    batch = make_batch(config, [row], encoder_mask_fraction=1.0)
    logits, index = ours(batch).logits[0], batch['masked_index'][0]
    start = 0
    for length in lengths:
        block = slice(start, start + length)
        expected = theirs(batch['input_ids'][:, block]).logits[0]
        is_here = (index >= start) & (index < start + length)
        assert is_here.any()
        assert_close(logits[is_here], expected[index[is_here] - start], **TOLERANCE)
        start += length


def test_encoder_with_t5_buckets_is_mpnet(config, make_batch, build_row):
    """Hidden states of every real token, in rows with padding, at distances that reach the last bucket."""
    settings = config(max_seq_len=LENGTH, relative_position_buckets=32, relative_position_max_distance=128)
    encoder = randomize_everything(build_model(settings, seed=2)).encoder
    rows = [build_row([n], LENGTH, settings.vocab_size, seed=n) for n in (LENGTH, 251, 140)]
    batch = make_batch(settings, rows, encoder_mask_fraction=1.0, mlm_probability=0.05)
    hidden = encoder(batch['input_ids'], batch['position_ids'], batch['segment_ids'])
    inputs = fill_from_batch(batch)
    expected = build_mpnet(encoder, settings)(inputs['input_ids'], inputs['attention_mask']).last_hidden_state
    is_real = batch['segment_ids'] > 0
    assert_close(hidden[is_real], expected[is_real], **TOLERANCE)
