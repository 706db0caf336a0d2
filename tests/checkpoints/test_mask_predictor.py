"""A checkpoint predicts the [MASK]s of texts as in training: encoder, decoder and head, for every variant."""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from maelm_composer import cli
from maelm_composer.checkpoints.mask_predictor import MaskPredictor
from maelm_composer.checkpoints.pretrained import load_pretrained
from maelm_composer.config import DecoderConfig, MaskingConfig, PretrainingConfig
from maelm_composer.data.special_tokens import NUM_LEADING_SPECIALS
from maelm_composer.errors import InputError
from maelm_composer.finetuning.run import finetune
from maelm_composer.masking.collate import build_collator
from maelm_composer.model.decoder import take_padded
from maelm_composer.model.maelm import build_model
from tests.conftest import collate_rows, pack_row
from tests.model.conftest import TABLE_2
from tests.tiny import MODEL, SIZES, N, V, write_run, write_tokenizer

MASK_ID = V - 1
TEXTS = ['the boy [MASK] a house and walks to [MASK].', '[MASK] is it', 'his dog sees a [MASK] [MASK], calm (kind)']


@pytest.fixture
def make(tmp_path):
    """``make('cross')``: the run's folder, and the model and the collator of its training."""

    def build(variant: str):
        masking, changes, decoder = TABLE_2[variant]
        masking, decoder = MaskingConfig(**masking), decoder if decoder is None else DecoderConfig(**SIZES | decoder)
        config = dataclasses.replace(MODEL, initializer_range=0.3, decoder=decoder, **changes)
        model = build_model(config, seed=1).eval()
        model.head.bias.data[[*range(NUM_LEADING_SPECIALS), MASK_ID]] = -50  # no special token is ever predicted
        folder = write_run(tmp_path / variant, config, model.state_dict(), 'nowhere', masking)
        write_tokenizer(folder / 'tokenizer')
        return str(folder), model, build_collator(PretrainingConfig(masking=masking, model=config))

    return build


@pytest.mark.parametrize('variant', TABLE_2)
@torch.no_grad()
def test_the_logits_are_those_of_training_at_the_same_masks(make, variant):
    """The rows of training have the predicted tokens at the masks: the autoregressive decoder reads them there."""
    folder, model, collator = make(variant)
    rows = [pack_row([N], N, V, 1)]  # numbered 0, as every text
    is_masked = collate_rows(dataclasses.replace(collator, predicts_every_token=False), rows).labels >= 0
    predictor = MaskPredictor.from_checkpoint(folder)
    ids = torch.tensor(np.stack(rows).astype(np.int64)).masked_fill(is_masked, MASK_ID)
    logits = predictor.compute_logits(predictor.collator.read_masks(ids.numpy()))
    assert logits.shape == (is_masked.sum(), V)

    ids[is_masked] = logits.argmax(-1)
    batch = collate_rows(collator, ids.numpy())
    expected = model(batch).logits[take_padded(is_masked, batch.predicted_index)]
    assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('variant', ['mae_lm', 'encoder_with_masks_no_decoder', 'causal_cross', 'random_replace'])
def test_a_text_is_predicted_in_a_batch_as_alone(make, variant):
    predictor = MaskPredictor.from_checkpoint(make(variant)[0])
    together = predictor.predict(TEXTS, top_k=3)
    assert together.texts.tolist() == [0, 0, 1, 2, 2]
    assert together.ids.shape == together.probabilities.shape == (5, 3)
    assert (together.probabilities.diff() <= 0).all()
    for number, text in enumerate(TEXTS):
        alone = predictor.predict([text], top_k=3)
        here = together.texts == number
        assert_close(together.probabilities[here], alone.probabilities)
        assert together.positions[here].equal(alone.positions)
        encoded = predictor.tokenizer(text)['input_ids']
        assert [encoded[position] for position in alone.positions] == [MASK_ID] * len(alone.positions)


def test_a_mask_takes_the_place_of_a_word_and_other_text_keeps_its_ids(make):
    folder, _, _ = make('encoder_with_masks_no_decoder')
    read, plain = MaskPredictor.from_checkpoint(folder).tokenizer, load_pretrained(folder).tokenizer
    for text in ('the boy, (his) dog.\n a b', ' is', '(', ''):
        assert read(text)['input_ids'] == plain(text)['input_ids']
    before, after = plain('the boy')['input_ids'], plain('the boy.')['input_ids']
    assert read('the boy [MASK].')['input_ids'] == [*before[:-1], MASK_ID, *after[-2:]]
    assert read('the boy [MASK] .')['input_ids'] != read('the boy [MASK].')['input_ids']


def test_fill_prints_the_tokens_of_every_mask(make, monkeypatch, capsys):
    folder, _, _ = make('mae_lm')
    monkeypatch.setattr(sys, 'argv', ['maelm', 'fill', folder, *TEXTS, '--top-k', '2'])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert not caught.value.code
    _, _, *lines = capsys.readouterr().out.splitlines()
    assert [line.startswith(TEXTS[number]) for line, number in zip(lines, (0, 0, 1, 2, 2), strict=True)] == [True] * 5
    predictor = MaskPredictor.from_checkpoint(folder)
    found = predictor.predict(TEXTS, 2)
    token = predictor.tokenizer.decode(found.ids[0, 1])  # with the space before it, if it has one
    assert f'{token!r} {found.probabilities[0, 1]:.3f}' in lines[0]


def test_what_cannot_be_filled_is_one_line(make, configure, tmp_path):
    predictor = MaskPredictor.from_checkpoint(make('mae_lm')[0])
    for texts, top_k, message in (
        ([], 5, 'no texts'),
        (['[MASK] is', 'the boy'], 5, "'the boy' has no [MASK]"),
        (['caf\udce9 [MASK]'], 5, 'is not UTF-8'),
        (['[MASK] [CLS]'], 5, 'has [CLS] or [PAD]'),
        ([' [MASK]' * 50], 5, f'has 52 tokens, the model takes {N}'),
        (['[MASK]'], 0, f'top_k 0: must be between 1 and {V}'),
    ):
        with pytest.raises(InputError) as error:
            predictor.predict(texts, top_k)
        assert message in str(error.value)
        assert '\n' not in str(error.value)
    config = configure('rte', saves_model=True, max_epochs=1)
    finetuned = str(Path(config.save_folder, finetune(config).key))
    for checkpoint, message in ((finetuned, 'is a fine-tuned model'), (str(tmp_path), 'is no checkpoint of ours')):
        with pytest.raises(InputError, match=message):
            MaskPredictor.from_checkpoint(checkpoint)
