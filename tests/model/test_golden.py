"""Equal to Hugging Face's RoBERTa, to 1e-5 in fp32: nothing is downloaded, random weights are copied in the test."""

import pytest
import torch
import transformers
from torch.testing import assert_close
from transformers import RobertaConfig, RobertaForMaskedLM, RobertaModel

from maelm_composer.config import DecoderAttention
from maelm_composer.model.decoder import fill_masks, take_padded
from maelm_composer.model.layer import take_positions
from maelm_composer.model.maelm import build_model

TOLERANCE = {'rtol': 1e-5, 'atol': 1e-5}
FIRST_POSITION = 2  # RoBERTa keeps rows 0 and 1 of the position table for padding


def copy_(target, source):
    assert target.shape == source.shape
    with torch.no_grad():
        target.copy_(source)


def copy_modules(*pairs):
    for theirs, ours in pairs:
        copy_(theirs.weight, ours.weight)
        copy_(theirs.bias, ours.bias)


def copy_attention(attention, norm, *, query, key, value, output, output_norm):
    """Our ``attention`` and the ``norm`` after it into Hugging Face's parts, named differently from class to class."""
    fused = attention.query_key_value
    for part, weight, bias in zip((query, key, value), fused.weight.chunk(3), fused.bias.chunk(3), strict=True):
        copy_(part.weight, weight)
        copy_(part.bias, bias)
    copy_modules((output, attention.output), (output_norm, norm))


def copy_feed_forward(target, layer):
    copy_modules(
        (target.intermediate.dense, layer.intermediate),
        (target.output.dense, layer.output),
        (target.output.LayerNorm, layer.output_norm),
    )


def copy_roberta_layer(target, layer):
    pairs = [(target.attention, layer.self_attention, layer.self_attention_norm)]
    if layer.has_cross_attention:
        pairs.append((target.crossattention, layer.cross_attention, layer.cross_attention_norm))
    for theirs, attention, norm in pairs:
        inner, outer = theirs.self, theirs.output
        copy_attention(
            attention,
            norm,
            query=inner.query,
            key=inner.key,
            value=inner.value,
            output=outer.dense,
            output_norm=outer.LayerNorm,
        )
    copy_feed_forward(target, layer)


def copy_embeddings(target, encoder):
    copy_(target.word_embeddings.weight, encoder.token_embeddings.weight)
    copy_(target.position_embeddings.weight[FIRST_POSITION:], encoder.position_embeddings.weight)
    copy_modules((target.LayerNorm, encoder.embedding_norm))


def randomize_everything(model):
    """Biases and norms too, so that one left out in a copy or a forward pass shows."""
    generator = torch.Generator().manual_seed(0)  # one for all, so that no two parameters are equal
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) / 20)
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
        copy_roberta_layer(target, layer)
    copy_modules((theirs.lm_head.dense, model.head.dense), (theirs.lm_head.layer_norm, model.head.norm))
    copy_(theirs.lm_head.bias, model.head.bias)
    assert theirs.lm_head.decoder.weight is theirs.roberta.embeddings.word_embeddings.weight
    return theirs.eval()


def build_roberta_decoder(decoder, config):
    """RoBERTa fed embeddings instead of ids: it adds positions and the norm, as our decoder does."""
    has_cross = decoder.has_cross_attention
    settings = shared_settings(config) | {'is_decoder': has_cross, 'add_cross_attention': has_cross}
    theirs = RobertaModel(
        RobertaConfig(type_vocab_size=1, attn_implementation='eager', **settings), add_pooling_layer=False
    )
    copy_(theirs.embeddings.position_embeddings.weight[FIRST_POSITION:], decoder.position_embeddings.weight)
    copy_modules((theirs.embeddings.LayerNorm, decoder.embedding_norm))
    torch.nn.init.zeros_(theirs.embeddings.token_type_embeddings.weight)
    for target, layer in zip(theirs.encoder.layer, decoder.layers, strict=True):
        copy_roberta_layer(target, layer)
    return theirs.eval()


def inputs_of(batch):
    """(B, N) what a plain masked language model of another make reads: its ids, attention mask and labels."""
    return {
        'input_ids': batch.input_ids,
        'attention_mask': (batch.segment_ids > 0).long(),
        'labels': batch.labels,
    }


def mask_of(is_allowed):
    """(B, Q, K) which pairs attend -> as RoBERTa reads them; Transformers 5 wants what is added to the scores."""
    if transformers.__version__ < '5':
        return is_allowed.long()
    return torch.zeros(is_allowed.shape).masked_fill(~is_allowed, torch.finfo(torch.float32).min)[:, None]


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
    output, expected = ours(batch), theirs(**inputs_of(batch))
    logits = expected.logits.gather(1, batch.predicted_index[..., None].expand(-1, -1, config.vocab_size))
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
    logits, index = ours(batch).logits[0], batch.predicted_index[0]
    start = 0
    for length in lengths:
        block = slice(start, start + length)
        expected = theirs(batch.input_ids[:, block]).logits[0]
        is_here = (index >= start) & (index < start + length)
        assert is_here.any()
        assert_close(logits[is_here], expected[index[is_here] - start], **TOLERANCE)
        start += length


@pytest.mark.parametrize(
    'attention', [DecoderAttention.bidirectional, DecoderAttention.bidirectional_cross, DecoderAttention.causal_cross]
)
def test_decoder_is_roberta_on_the_filled_row(attention, config, make_batch, build_row):
    """Packed rows and padding included. Cross-attention alone has no counterpart there."""
    settings = config(decoder={'attention': attention})
    model = randomize_everything(build_model(settings, seed=3))
    rows = [build_row(blocks, 48, settings.vocab_size, seed=i) for i, blocks in enumerate([[48], [20, 17], [12, 36]])]
    batch = make_batch(settings, rows, encoder_mask_fraction=0.5)
    segments, table = batch.segment_ids, model.encoder.token_embeddings.weight
    memory_segments = take_padded(segments, batch.visible_index)
    encoded = model.encoder(batch.input_ids, batch.position_ids, memory_segments, has_gaps=True)
    is_allowed = segments[:, :, None] == segments[:, None, :]
    if attention is DecoderAttention.causal_cross:
        is_allowed = is_allowed.tril()
        ids = torch.tensor([[0, *row[:-1].tolist()] for row in rows])
        filled = table[ids.masked_fill(batch.original_position_ids == 0, 0)]
    else:
        filled = fill_masks(encoded, table[-1], batch.visible_index, batch.resets)
    expected = build_roberta_decoder(model.decoder, settings)(
        inputs_embeds=filled,
        attention_mask=mask_of(is_allowed),
        position_ids=batch.original_position_ids + FIRST_POSITION,
        encoder_hidden_states=None if attention is DecoderAttention.bidirectional else encoded,
        encoder_attention_mask=mask_of(segments[:, :, None] == memory_segments[:, None, :]),
        use_cache=False,
    ).last_hidden_state
    is_predicted = batch.labels.gather(1, batch.predicted_index) >= 0
    actual = model.decoder(encoded, table, batch)
    assert_close(actual[is_predicted], take_positions(expected, batch.predicted_index)[is_predicted], **TOLERANCE)
