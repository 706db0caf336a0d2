"""The batch: inputs of encoder and decoder, labels, and equal masks for all variants."""

import pickle
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from maelm_composer.config import (
    DecoderAttention,
    DecoderConfig,
    EncoderMaskContent,
    MaskingConfig,
    ModelConfig,
    PositionIds,
    PretrainingConfig,
)
from maelm_composer.masking.collate import Batch, MaskingCollator, build_collator
from maelm_composer.masking.draw import count_visible, draw_masked_positions

V = 60
MASK_ID = V - 1
DELTAS = (0.0, 0.25, 0.5, 0.75, 1.0)


def build(seed=0, predicts_every_token=False, **masking):
    return MaskingCollator(MaskingConfig(**masking), V, seed, predicts_every_token)


@st.composite
def block_lengths(draw):
    """N and the blocks of a few rows, each at least two thirds full, so that enough tokens can be masked."""
    length = draw(st.integers(40, 90))
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        count = draw(st.integers(1, 4))
        first = draw(st.lists(st.integers(5, length // 4), min_size=count - 1, max_size=count - 1))
        filled = draw(st.integers(2 * length // 3, length))
        rows.append([*first, max(filled - sum(first), 5)] if sum(first) + 5 <= filled else [filled])
    return length, rows


maskings = st.fixed_dictionaries(
    {
        'mlm_probability': st.sampled_from([0.1, 0.15, 0.3]),
        'encoder_mask_fraction': st.sampled_from([*DELTAS, 0.1, 0.9]),
        'encoder_mask_content': st.sampled_from(EncoderMaskContent),
        'decoder_resets_masks': st.booleans(),
        'position_ids': st.sampled_from(PositionIds),
        'masks_special_tokens': st.booleans(),
        'rounds_at_random': st.booleans(),
    }
)


@pytest.fixture(scope='session')
def build_rows(build_row):
    def build_rows(shape):
        length, rows = shape
        return np.stack([build_row(blocks, length, V, seed=i) for i, blocks in enumerate(rows)])

    return build_rows


def masked_sets(batch):
    """For each row: the masked positions, and those among them that are in the encoder's input."""
    length = batch.labels.shape[1]
    masked = [set(row.tolist()) - {length} for row in batch.predicted_index]
    return masked, [m & set(row.tolist()) for m, row in zip(masked, batch.visible_index, strict=True)]


@given(shape=block_lengths(), masking=maskings)
def test_masks_cover_no_padding_and_no_special_unless_asked(shape, masking, build_rows, collate):
    ids = build_rows(shape)
    is_masked = collate(build(**masking), ids).labels.numpy() >= 0
    expected = masking['mlm_probability'] * shape[0]
    counts = set(is_masked.sum(1).tolist())
    assert counts <= ({np.floor(expected), np.ceil(expected)} if masking['rounds_at_random'] else {round(expected)})
    assert not is_masked[ids == 1].any()
    if not masking['masks_special_tokens']:
        assert not is_masked[(ids == 0) | (ids == 2)].any()


def test_special_tokens_are_masked_as_often_as_others_when_asked(build_row, collate):
    rows = [build_row([20, 20], 40, V)] * 2000
    is_masked = collate(build(masks_special_tokens=True), rows).labels.numpy() >= 0
    is_special = rows[0] <= 2
    assert abs(is_masked[:, is_special].mean() - 0.15) < 0.01
    assert abs(is_masked[:, ~is_special].mean() - 0.15) < 0.01


@given(shape=block_lengths(), masking=maskings)
def test_visible_tokens_positions_and_labels_rebuild_the_row(shape, masking, build_rows, collate):
    ids, length = build_rows(shape), shape[0]
    collator = build(**masking)
    batch = Batch(*(tensor.numpy() for tensor in collate(collator, ids)))
    masked, fed = masked_sets(collate(collator, ids))
    assert batch.visible_index.shape == batch.input_ids.shape == batch.position_ids.shape
    assert batch.visible_index.shape[1] == count_visible(collator.masking, length)
    for r, row in enumerate(ids):
        index = batch.visible_index[r]
        used = index[index < length]
        assert (index[len(used) :] == length).all()  # what is left over points past the row, never into it
        assert (batch.input_ids[r, len(used) :] == 1).all()
        assert (np.diff(used) > 0).all()
        assert set(used.tolist()) == set(range(length)) - masked[r] | fed[r]
        rebuilt = np.full(length, -1)
        rebuilt[used] = batch.input_ids[r, : len(used)]
        is_predicted = batch.labels[r] >= 0
        assert set(np.flatnonzero(is_predicted).tolist()) == masked[r]
        rebuilt[is_predicted] = batch.labels[r][is_predicted]
        np.testing.assert_array_equal(rebuilt, row)
        assert (batch.labels[r][~is_predicted] == -100).all()
        slots = batch.predicted_index[r]
        assert (np.diff(slots[slots < length]) > 0).all()
        assert len(fed[r]) == np.rint(masking['encoder_mask_fraction'] * len(masked[r]))
        is_reset = np.isin(np.arange(length), list(fed[r])) & masking['decoder_resets_masks']
        np.testing.assert_array_equal(batch.resets[r], is_reset)
        content = batch.input_ids[r, : len(used)][np.isin(used, list(fed[r]))]
        if masking['encoder_mask_content'] is EncoderMaskContent.mask_token:
            assert (content == MASK_ID).all()
        else:
            assert ((content >= 4) & (content < MASK_ID)).all()


@given(shape=block_lengths(), masking=maskings)
def test_segments_and_positions(shape, masking, build_rows, collate):
    ids, (length, rows) = build_rows(shape), shape
    batch = Batch(*(tensor.numpy() for tensor in collate(build(**masking), ids)))
    for r, blocks in enumerate(rows):
        padding = length - sum(blocks)
        segments = np.repeat([*range(1, len(blocks) + 1), 0], [*blocks, padding])
        np.testing.assert_array_equal(batch.segment_ids[r], segments)
        positions = np.concatenate([np.arange(block) for block in blocks])
        np.testing.assert_array_equal(batch.original_position_ids[r][: sum(blocks)], positions)
        assert (batch.original_position_ids[r] < length).all()
        index = batch.visible_index[r]
        used = index[index < sum(blocks)]
        seen = batch.position_ids[r, : len(used)]
        if masking['position_ids'] is PositionIds.aligned:
            np.testing.assert_array_equal(seen, positions[used])
        else:
            per_block = [np.arange((segments[used] == s).sum()) for s in range(1, len(blocks) + 1)]
            np.testing.assert_array_equal(seen, np.concatenate(per_block))


@pytest.mark.parametrize('rounds_at_random', [False, True])
@pytest.mark.parametrize('masks_special_tokens', [False, True])
@pytest.mark.parametrize('epoch', [0, 3])
def test_every_variant_masks_the_same_positions_and_fed_sets_are_nested(
    rounds_at_random, masks_special_tokens, epoch, build_row, collate
):
    rows = [build_row([30, 33], 64, V, seed=i) for i in range(40)]
    chance = {'rounds_at_random': rounds_at_random, 'masks_special_tokens': masks_special_tokens}
    run = partial(collate, rows=rows, first_row=7, epoch=epoch)
    first, previous = None, [set()] * 40
    for delta in DELTAS:
        masked, fed = masked_sets(run(build(encoder_mask_fraction=delta, **chance)))
        first = first or masked
        assert masked == first
        assert all(before <= now for before, now in zip(previous, fed, strict=True))
        assert [len(f) for f in fed] == [np.rint(delta * len(m)) for m in masked]
        previous = fed
    assert previous == first  # plain MLM: the encoder sees every [MASK]
    for other in ({'position_ids': PositionIds.consecutive}, {'encoder_mask_content': EncoderMaskContent.random_token}):
        assert masked_sets(run(build(encoder_mask_fraction=1.0, **other, **chance)))[0] == first


@given(masking=maskings, order=st.permutations(range(6)), size=st.integers(1, 6), causal=st.booleans())
def test_a_row_does_not_depend_on_its_batch(masking, order, size, causal, build_row):
    samples = [
        {'input_ids': build_row([20, 25], 48, V, seed=i), 'row': 100 + i, 'epoch': i % 2} for i in range(len(order))
    ]
    collator = build(predicts_every_token=causal, **masking)
    whole, part = collator(samples), collator([samples[i] for i in order[:size]])
    for name, tensor in whole._asdict().items():
        assert torch.equal(getattr(part, name), tensor[list(order[:size])]), name


@given(masking=maskings, epoch=st.integers(0, 2**31))
def test_shapes_and_types_are_the_same_for_every_batch_of_a_recipe(masking, epoch, build_row, collate):
    collator, seen = build(**masking), []
    for blocks in ([60], [20, 9, 31], [25, 25]):
        batch = collate(collator, [build_row(blocks, 60, V)], epoch=epoch)
        seen.append([(tensor.shape, tensor.dtype) for tensor in batch])
    assert seen[0] == seen[1] == seen[2]


def test_visible_length_is_what_the_masks_leave(build_row, collate):
    row = build_row([512], 512, V)
    for delta, visible in ((0.0, 512 - 77), (0.5, 512 - 77 + 38), (1.0, 512)):
        batch = collate(build(encoder_mask_fraction=delta), [row])
        assert batch.input_ids.shape == (1, visible)
        assert batch.predicted_index.shape == (1, 77)


def test_random_content_is_an_ordinary_token_of_its_own_stream(build_row, collate):
    rows = [build_row([60], 60, V, seed=i) for i in range(800)]
    collator = build(encoder_mask_fraction=1.0, encoder_mask_content=EncoderMaskContent.random_token)
    batch = collate(collator, rows)
    content = batch.input_ids.gather(1, batch.predicted_index)
    labels = batch.labels.gather(1, batch.predicted_index)
    counts = np.bincount(content.flatten().numpy(), minlength=V)
    assert counts[:4].tolist() == [0] * 4
    assert counts[MASK_ID] == 0
    pieces = counts[4:MASK_ID]
    assert pieces.min() > 0.6 * pieces.mean()
    assert pieces.max() < 1.4 * pieces.mean()
    # Drawn without looking at the token: equal to it once in (number of pieces) times.
    assert abs((content == labels).double().mean() - 1 / len(pieces)) < 0.006
    other_epoch = collate(collator, rows, epoch=1)
    assert not torch.equal(other_epoch.input_ids, batch.input_ids)
    published = [[18, 5, 53, 56, 25], [13, 16, 32, 55, 57], [57, 47, 25, 25, 47]]
    assert content[[0, 1, -1], :5].tolist() == published  # another draw would make a resumed run another one


@pytest.mark.parametrize('delta, fed', [(0.25, [2, 1, 0]), (0.5, [3, 2, 0])])
def test_of_given_masks_the_encoder_reads_the_share_that_comes_first(delta, fed, build_row):
    ids, masked = np.stack([build_row([40], 40, V)] * 3), ([3, 9, 10, 20, 33, 35], [5, 7, 30], [])
    for row, positions in zip(ids, masked, strict=True):
        row[positions] = MASK_ID
    batch = build(encoder_mask_fraction=delta).read_masks(ids.astype(np.int64))
    found, read = masked_sets(batch)
    assert [sorted(row) for row in found] == list(masked)
    assert [sorted(row) for row in read] == [row[:count] for row, count in zip(masked, fed, strict=True)]


@pytest.mark.parametrize('delta', [0.25, 0.5])
def test_of_drawn_masks_the_encoder_reads_the_share_drawn_first(delta, build_row, collate):
    row, epochs, rows = build_row([64], 64, V), np.array([2]), np.array([7])
    drawn, _ = draw_masked_positions((row > 2)[None], MaskingConfig(), 0, epochs, rows)
    _, read = masked_sets(collate(build(encoder_mask_fraction=delta), [row], first_row=7, epoch=2))
    assert read == [{*drawn[0, : round(delta * 10)].tolist()}]


def test_the_autoregressive_decoder_predicts_all_but_block_starts_and_padding(build_row, collate):
    row = build_row([12, 20], 40, V)
    batch = collate(build(predicts_every_token=True), [row])
    expected = torch.from_numpy(row.astype(np.int64))
    expected[(expected == 0) | (expected == 1)] = -100
    torch.testing.assert_close(batch.labels[0], expected, rtol=0, atol=0)
    assert batch.predicted_index[0].tolist() == list(range(40))
    plain = collate(build(), [row])
    for name in ('input_ids', 'visible_index', 'position_ids'):
        assert torch.equal(
            getattr(batch, name), getattr(plain, name)
        )  # the encoder's side is that of every other variant


def test_a_loader_worker_gets_the_same_collator(build_row, collate):
    collator = build(seed=9, encoder_mask_fraction=0.5)
    copy = pickle.loads(pickle.dumps(collator))
    assert copy == collator
    row = build_row([40], 40, V)
    assert torch.equal(collate(copy, [row]).input_ids, collate(collator, [row]).input_ids)


@pytest.mark.parametrize('attention', DecoderAttention)
def test_the_recipe_decides_what_is_predicted_and_the_seed(attention):
    model = ModelConfig(vocab_size=V, decoder=DecoderConfig(attention=attention))
    collator = build_collator(PretrainingConfig(run_name='a', save_folder='b', seed=23, model=model))
    assert collator.predicts_every_token == (attention is DecoderAttention.causal_cross)
    assert (collator.seed, collator.vocab_size) == (23, V)
    plain = PretrainingConfig(run_name='a', save_folder='b', model=ModelConfig(decoder=None))
    assert not build_collator(plain).predicts_every_token


def test_more_masks_than_slots_are_an_error_and_lose_no_token(monkeypatch, build_row, collate):
    monkeypatch.setattr('maelm_composer.masking.collate.count_masked', lambda masking, length: (1, 1))
    with pytest.raises(ValueError, match=r'a row has \d+ positions for 1 slots'):
        collate(build(), [build_row([48], 48, V)])
