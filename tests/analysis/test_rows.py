"""The encoder's inputs with and without [MASK], and the positions that are measured."""

import hashlib
import json

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from maelm_composer.analysis import rows as module
from maelm_composer.analysis.rows import (
    CHARACTERS_PER_PACK,
    RowSource,
    View,
    find_shards,
    find_text,
    iterate_views,
    split_blocks,
)
from maelm_composer.checkpoints.pretrained import Pretrained, load_pretrained
from maelm_composer.config import DataConfig, MaskingConfig
from maelm_composer.data.special_tokens import CLS_ID, PAD_ID, SEP_ID
from maelm_composer.errors import InputError
from maelm_composer.files import hash_file, hash_json
from maelm_composer.masking.collate import MaskingCollator


@pytest.fixture(scope='module')
def pretrained(folder) -> Pretrained:
    return load_pretrained(str(folder / 'run'))


@pytest.fixture
def source(folder, pretrained) -> RowSource:
    return find_shards(DataConfig(remote=str(folder / 'shards')), pretrained.tokenizer, pretrained.max_seq_len)


def views_of(source: RowSource, max_tokens: int = 10**9, is_packed: bool = True, seed: int = 17) -> list[View]:
    rules = {'max_tokens': max_tokens, 'mlm_probability': 0.15, 'seed': seed, 'is_packed': is_packed}
    return list(iterate_views(source, **rules))


@pytest.mark.parametrize('tokens', [480, 16_384])
def test_a_view_is_the_rows_without_and_with_their_masks(source, pretrained, monkeypatch, tokens):
    monkeypatch.setattr(module, 'TOKENS_PER_BATCH', tokens)
    mask_id = pretrained.tokenizer.mask_token_id
    rows = torch.stack([torch.from_numpy(row.astype('int64')) for row in source.open()])
    views = views_of(source)
    plain, masked, is_real, is_masked = (
        torch.cat([getattr(view, name) for view in views])
        for name in ('plain_ids', 'masked_ids', 'is_real', 'is_masked')
    )
    assert torch.equal(plain, rows)
    assert not (plain == mask_id).any()
    assert torch.equal(masked, torch.where(is_masked, mask_id, rows))
    assert (is_masked.sum(1) == round(0.15 * rows.shape[1])).all()
    samples = [{'input_ids': row, 'row': number, 'epoch': 0} for number, row in enumerate(source.open())]
    drawn = MaskingCollator(MaskingConfig(encoder_mask_fraction=1.0), source.vocab_size, 17)(samples)
    assert torch.equal(is_masked, drawn.labels >= 0)
    assert not (is_masked & ~is_real).any()
    assert torch.equal(is_real, (rows != CLS_ID) & (rows != SEP_ID) & (rows != PAD_ID))


@pytest.mark.parametrize('max_tokens', [1, 100, 1000])
def test_whole_rows_until_there_are_enough_tokens(source, max_tokens):
    is_real = torch.cat([view.is_real for view in views_of(source, max_tokens)])
    assert is_real.sum() >= max_tokens
    assert is_real[:-1].sum() < max_tokens


def test_text_gives_the_ids_and_masks_of_shards_of_the_same_rows(folder, source, pretrained):
    text = find_text([str(folder / 'text.txt')], pretrained.tokenizer, pretrained.max_seq_len)
    ours, theirs = views_of(text)[0], views_of(source)[0]
    assert torch.equal(ours.plain_ids, theirs.plain_ids)
    assert torch.equal(ours.masked_ids, theirs.masked_ids)


def test_text_in_another_column_has_the_same_rows_and_another_hash(folder, source, pretrained, tmp_path):
    documents = (folder / 'text.txt').read_text().split('\n\n')
    path = tmp_path / 'text.jsonl'
    for column in ('text', 'body'):
        path.write_text('\n'.join(json.dumps({column: document}) for document in documents))
        text = find_text([str(path)], pretrained.tokenizer, 48, column)
        assert torch.equal(views_of(text)[0].plain_ids, views_of(source)[0].plain_ids)
        pieces = hashlib.sha256(pretrained.tokenizer.backend_tokenizer.to_str().encode()).hexdigest()
        former = hash_json([48, CHARACTERS_PER_PACK, pieces, [hash_file(path)]])
        assert (text.identity['hash'] == former) == (column == 'text')


def test_text_that_is_read_otherwise_has_another_hash(pretrained, tmp_path):
    hashes = set()
    for name in ('text.txt', 'text.jsonl', 'text.txt.jsonl'):  # the same bytes
        path = tmp_path / name
        path.write_text(json.dumps({'text': 'a line'}))
        hashes.add(find_text([str(path)], pretrained.tokenizer, 48).identity['hash'])
    assert len(hashes) == 2


def test_special_ids_in_other_places_are_mapped(folder):
    """A tokenizer with BERT's order of ids: [PAD] 0, [UNK], [CLS], [SEP], [MASK], words."""
    words = sorted(set((folder / 'text.txt').read_text().split()))
    specials = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]']
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate([*specials, *words[3:]])}, unk_token='[UNK]'))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(zip(['pad_token', 'unk_token', 'cls_token', 'sep_token', 'mask_token'], specials, strict=True))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    source = find_text([str(folder / 'text.txt')], tokenizer, 48)
    text = ' '.join((folder / 'text.txt').read_text().split())
    for view in views_of(source):
        pad, unknown, cls, sep, mask = range(5)
        assert torch.equal(~view.is_real, torch.isin(view.plain_ids, torch.tensor([pad, cls, sep])))
        assert (view.plain_ids[view.is_real] == unknown).any()  # a word without a piece is a token all the same
        assert torch.equal(view.masked_ids == mask, view.is_masked)
        assert (view.plain_ids[:, 0] == cls).all()
        lines = [row[1 : int((row == sep).nonzero()[0])].tolist() for row in view.plain_ids]
        known = [' '.join(words[3:][i - 5] for i in line) for line in lines if unknown not in line]
        assert len(known) > len(lines) / 2
        assert all(line in text for line in known)
        for piece in split_blocks(view, pad):
            assert (piece.plain_ids[:, 0] == cls).all()


def test_a_tokenizer_without_mask_is_refused(folder):
    backend = Tokenizer(models.WordLevel({'the': 0, 'x': 1}, unk_token='x'))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, cls_token='x', pad_token='x', sep_token='x')
    with pytest.raises(InputError, match='mask_token'):
        find_text([str(folder / 'text.txt')], tokenizer, 48)


def test_a_block_alone_has_the_states_that_it_has_in_its_row(source, pretrained):
    packed = views_of(source, 2000)[0]
    assert packed.segment_ids.max() > 1
    split = views_of(source, 2000, is_packed=False)
    assert all((view.segment_ids <= 1).all() for view in split)
    assert sum(int((view.segment_ids == 1).sum()) for view in split) == int((packed.segment_ids > 0).sum())
    for ids, which in (('plain_ids', 'is_real'), ('masked_ids', 'is_masked')):
        states = []
        for views in ([packed], split):
            with torch.inference_mode():
                given = [(getattr(v, ids), v.position_ids, v.segment_ids) for v in views]
                found = [pretrained.encoder(*g)[getattr(v, which)] for g, v in zip(given, views, strict=True)]
            rows = torch.cat(found)
            states.append(rows[rows[:, 0].argsort()])
        torch.testing.assert_close(*states)


def test_padding_is_no_token(source):
    view = views_of(source, 2000)[0]
    for piece in split_blocks(view, PAD_ID):
        is_padding = piece.segment_ids == 0
        assert (piece.plain_ids[is_padding] == PAD_ID).all()
        assert not piece.is_real[is_padding].any()
