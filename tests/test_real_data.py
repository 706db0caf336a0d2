"""On real text: MAELM_DATA names a folder that holds corpus/*.parquet with a column `text`."""

import os
from pathlib import Path

import pytest

from maelm_composer.config import CorpusConfig, SourceConfig, SourceKind, TokenizerConfig
from maelm_composer.data.shards import build_shards
from maelm_composer.data.tokenizer import build_tokenizer

FOLDER = os.environ.get('MAELM_DATA')
pytestmark = pytest.mark.skipif(FOLDER is None, reason='MAELM_DATA does not name a folder of real text')


@pytest.mark.parametrize('max_seq_len', [128, pytest.param(512, marks=pytest.mark.slow)])
def test_real_text_fills_the_rows(tmp_path: Path, max_seq_len: int) -> None:
    assert FOLDER is not None
    source = SourceConfig(kind=SourceKind.files, paths=[f'{FOLDER}/corpus/*.parquet'], max_documents=400)
    config = CorpusConfig(
        remote=str(tmp_path / 'shards'),
        max_seq_len=max_seq_len,
        validation_fraction=0.05,
        documents_per_task=200,
        sources=[source],
        tokenizer=TokenizerConfig(vocab_size=8192, max_training_bytes=2_000_000),
    )
    build_tokenizer(config)
    manifest, _ = build_shards(config, num_workers=2)
    train = manifest.splits['train']
    assert train.fill_rate >= 0.98
    assert train.dropped_tokens < 0.01 * train.tokens
    assert 6.0 < manifest.unigram_entropy < 8.0  # English at this vocabulary
