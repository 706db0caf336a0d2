"""Absent influences: of hidden tokens, other blocks, later tokens, reset positions and unused slots."""

import itertools
from functools import partial

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from maelm_composer.config import DecoderAttention, EncoderMaskContent, MaskingConfig, PositionIds
from maelm_composer.masking.collate import MaskingCollator
from maelm_composer.model.decoder import fill_masks, take_padded
from maelm_composer.model.maelm import build_model

TOLERANCE = {'rtol': 1e-5, 'atol': 1e-5}
DELTAS = (0.0, 0.5, 1.0)
# Without a decoder the encoder sees every [MASK].
VARIANTS = [*itertools.product(DecoderAttention, DELTAS), (None, 1.0)]
PREDICTS_AT_ONCE = [variant for variant in VARIANTS if variant[0] is not DecoderAttention.causal_cross]
assert_bitwise = partial(assert_close, rtol=0, atol=0)


def encode(model, batch):
    segments = take_padded(batch.segment_ids, batch.visible_index)
    return model.encoder(batch.input_ids, batch.position_ids, segments, has_gaps=True)


def change_masked_ids(rows, batch, vocab_size):
    """Replace every masked token of ``batch`` by another piece."""
    rows, labels = np.stack(rows).astype(np.int64), batch.labels.numpy()
    changed = np.where(labels >= 0, 4 + (rows - 4 + 7) % (vocab_size - 5), rows)
    assert ((changed != rows) == (labels >= 0)).all()
    return list(changed.astype(np.uint16))


@pytest.mark.parametrize('attention, delta', PREDICTS_AT_ONCE)
@pytest.mark.parametrize('content', EncoderMaskContent)
@pytest.mark.parametrize('resets', [False, True])
def test_no_leak(attention, delta, content, resets, config, make_batch, build_row):
    """Other tokens under the same masks change the labels and nothing else, bitwise: not the encoder, not the logits.

    That holds at every δ and for random replacement too, whose tokens are drawn without looking at the row.
    """
    settings = config(has_decoder=attention is not None, decoder={'attention': attention})
    model = build_model(settings, seed=0)
    rows = [build_row(blocks, 48, settings.vocab_size, seed=len(blocks)) for blocks in ([48], [20, 23])]
    masking = {'encoder_mask_fraction': delta, 'encoder_mask_content': content, 'decoder_resets_masks': resets}
    make = partial(make_batch, settings, **masking)
    before = make(rows)
    after = make(change_masked_ids(rows, before, settings.vocab_size))
    assert not torch.equal(before.labels, after.labels)
    assert_bitwise(encode(model, before), encode(model, after))
    assert_bitwise(model(before).logits, model(after).logits)
    assert model(before).loss != model(after).loss


@pytest.mark.parametrize('delta', [0.0, 0.5])
def test_causal_decoder_sees_only_earlier_labels_and_the_encoder(delta, config, make_batch, build_row):
    """Changing one hidden token changes logits after it, by teacher forcing, and none at it or before it."""
    settings = config(decoder={'attention': DecoderAttention.causal_cross, 'relative_position_buckets': 8})
    model, row = build_model(settings, seed=0), build_row([22, 26], 48, settings.vocab_size)
    before = make_batch(settings, [row], encoder_mask_fraction=delta)
    hidden = sorted(set(range(48)) - set(before.visible_index[0].tolist()))
    assert len(hidden) > 2
    for position in hidden:
        other = row.copy()
        other[position] = 4 + (row[position] - 3) % (settings.vocab_size - 5)
        after = make_batch(settings, [other], encoder_mask_fraction=delta)
        assert_bitwise(encode(model, before), encode(model, after))
        one, two = model(before).logits[0], model(after).logits[0]
        assert_bitwise(one[: position + 1], two[: position + 1])
        end = 22 if position < 22 else 48
        if position + 1 < end:
            assert (one[position + 1 : end] != two[position + 1 : end]).any(-1).all()
        if end == 22:
            assert_bitwise(one[22:], two[22:])  # the next block has not heard of it


def view(settings, ids, is_masked, is_fed, masked_per_row, **masking):
    """The batch of one row whose masks are given, not drawn."""
    is_causal = settings.decoder is not None and settings.decoder.attention is DecoderAttention.causal_cross
    knobs = MaskingConfig(mlm_probability=masked_per_row / ids.size, **masking)
    collator = MaskingCollator(knobs, settings.vocab_size, 0, is_causal)
    ids = ids.astype(np.int64)[None]
    fed_ids = np.where(is_fed, settings.vocab_size - 1, ids)
    return collator._split(ids, fed_ids, is_masked[None], is_fed[None])


@pytest.mark.parametrize('attention, delta', VARIANTS)
@pytest.mark.parametrize('position_ids', PositionIds)
def test_a_packed_block_is_computed_as_if_alone(attention, delta, position_ids, config, build_row):
    """A block with given masks: alone with padding, or between two other masked blocks."""
    settings = config(
        has_decoder=attention is not None, decoder={'attention': attention, 'relative_position_buckets': 8}
    )
    model = build_model(settings, seed=0)
    packed, start, length = build_row([15, 20, 13], 48, settings.vocab_size), 15, 20
    alone = np.full(48, 1, np.uint16)
    alone[:length] = packed[start : start + length]
    in_block, elsewhere = np.array([1, 4, 5, 9, 13, 18]), np.array([2, 3, 37, 46])

    def flag(*positions):
        flags = np.zeros(48, bool)
        flags[np.concatenate(positions)] = True
        return flags

    fed_in_block, fed_elsewhere = in_block[::2][: round(delta * 6)], elsewhere[: round(delta * 4)]
    if delta == 1:
        fed_in_block = in_block
    masking = {'encoder_mask_fraction': delta, 'position_ids': position_ids}
    one = view(settings, alone, flag(in_block), flag(fed_in_block), 6, **masking)
    two = view(
        settings,
        packed,
        flag(in_block + start, elsewhere),
        flag(fed_in_block + start, fed_elsewhere),
        10,
        **masking,
    )

    def logits_in_block(batch, offset):
        index = batch.predicted_index[0]
        is_here = (index >= offset) & (index < offset + length) & (model(batch).labels[0] >= 0)
        return index[is_here] - offset, model(batch).logits[0][is_here]

    where, logits = logits_in_block(one, 0)
    where_packed, logits_packed = logits_in_block(two, start)
    assert len(where) == (19 if attention is DecoderAttention.causal_cross else 6)
    assert_bitwise(where_packed, where)
    assert_close(logits_packed, logits, **TOLERANCE)


@pytest.mark.parametrize('resets', [False, True])
def test_a_reset_position_does_not_see_what_the_encoder_made_of_it(resets, config, make_batch):
    settings = config()
    model, batch = build_model(settings, seed=0), make_batch(config(), encoder_mask_fraction=1.0)
    batch = batch._replace(resets=(batch.labels >= 0) & resets)
    encoded = encode(model, batch)
    noise = torch.randn(encoded.shape, generator=torch.Generator().manual_seed(0))
    disturbed = encoded + noise * (batch.labels >= 0)[..., None]
    outputs = [model.decoder(hidden, model.encoder.token_embeddings.weight, batch) for hidden in (encoded, disturbed)]
    if resets:
        assert_bitwise(*outputs)
    else:
        assert (outputs[0] != outputs[1]).any(-1).all()


def test_fill_masks_is_a_loop_over_slots():
    generator = torch.Generator().manual_seed(0)
    encoded, mask = torch.randn(2, 4, 3, generator=generator), torch.randn(3, generator=generator)
    visible_index = torch.tensor([[0, 2, 3, 5], [1, 4, 6, 6]])  # 6 is N: two unused slots
    resets = torch.zeros(2, 6, dtype=torch.bool)
    resets[0, 3] = resets[1, 1] = True
    expected = mask.expand(2, 6, 3).clone()
    for b, slot in ((0, 0), (0, 1), (0, 3), (1, 1)):
        expected[b, visible_index[b, slot]] = encoded[b, slot]
    assert_bitwise(fill_masks(encoded, mask, visible_index, resets), expected)
    inputs = encoded.double().requires_grad_(), mask.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda *given: fill_masks(*given, visible_index, resets), inputs)


@pytest.mark.parametrize('attention, delta', PREDICTS_AT_ONCE)
def test_unused_slots_change_nothing(attention, delta, config, make_batch, build_row, gradients):
    """With random rounding, a row may have an unused slot, which changes neither loss nor gradients."""
    settings = config(has_decoder=attention is not None, decoder={'attention': attention})
    model, row = build_model(settings, seed=0), build_row([20, 28], 48, settings.vocab_size)
    left_over = {}
    for epoch in range(12):
        batch = make_batch(settings, [row], epoch, encoder_mask_fraction=delta, rounds_at_random=True)
        for slots in ('predicted_index', 'visible_index'):
            if getattr(batch, slots)[0, -1] == 48:
                left_over[slots] = batch
    assert left_over.keys() == ({'predicted_index'} if delta == 1 else {'predicted_index', 'visible_index'})
    for slots, batch in left_over.items():
        names = ['predicted_index'] if slots == 'predicted_index' else ['input_ids', 'position_ids', 'visible_index']
        trimmed = batch._replace(**{name: getattr(batch, name)[:, :-1] for name in names})
        whole, part = model(batch), model(trimmed)
        width = part.logits.shape[1]
        assert_close(whole.logits[:, :width], part.logits, **TOLERANCE)
        assert (whole.labels[:, width:] == -100).all()
        assert_close(whole.loss, part.loss, **TOLERANCE)
        assert_close(gradients(model, batch), gradients(model, trimmed), **TOLERANCE)


def test_a_block_without_any_visible_token_is_finite(config):
    """If special tokens may be masked, a short block can lose all its tokens: no keys to attend to, but no NaN."""
    settings = config(decoder={'attention': DecoderAttention.cross})
    model = build_model(settings, seed=0)
    ids = np.array([0, 7, 2, 0, *range(5, 48), 2])
    batch = view(settings, ids, np.arange(48) < 3, np.zeros(48, bool), 3, masks_special_tokens=True)
    loss = model(batch).loss
    loss.backward()
    assert loss.isfinite()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
