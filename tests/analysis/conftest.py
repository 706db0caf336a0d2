"""A pretraining run on disk with tokenizer, shards and random weights."""

import random
from pathlib import Path

import pytest
from streaming import MDSWriter

from maelm_composer.analysis.rows import find_text
from maelm_composer.config import DecoderConfig, ModelConfig, TokenizerConfig
from maelm_composer.data.manifest import Manifest, SplitStatistics, save_manifest
from maelm_composer.data.tokenizer import save_tokenizer, train_tokenizer
from maelm_composer.model.maelm import build_model
from tests.tiny import write_run

N, V, D = 48, 320, 32
WORDS = 'the sea wind ship of night and a captain saw great white whale rose under moon to old men sing from harbour'


def write_documents(count: int) -> list[str]:
    generator = random.Random(0)
    words = WORDS.split() + [a + b for a in WORDS.split() for b in WORDS.split()]

    def write_line() -> str:
        return ' '.join(generator.choices(words, k=generator.choice([1, 3, 8])))

    return ['\n'.join(write_line() for _ in range(generator.randint(1, 9))) for _ in range(count)]


@pytest.fixture(scope='session')
def folder(tmp_path_factory) -> Path:
    """A folder with text.txt, shards/ and run/latest."""
    from transformers import AutoTokenizer

    root = tmp_path_factory.mktemp('analysis')
    documents = write_documents(200)
    (root / 'text.txt').write_text('\n\n'.join(documents))
    tokenizer = train_tokenizer(documents, TokenizerConfig(vocab_size=V))
    for place in (root / 'shards', root / 'run'):
        save_tokenizer(tokenizer, place / 'tokenizer', N)
    source = find_text([str(root / 'text.txt')], AutoTokenizer.from_pretrained(root / 'run/tokenizer'), N)
    rows = [source.model_ids[ids].astype('uint16') for ids in source.open()]
    columns = {'input_ids': f'ndarray:uint16:{N}'}
    out = str(root / 'shards/validation')
    with MDSWriter(out=out, columns=columns, compression='zstd', hashes=['sha1']) as writer:
        for ids in rows:
            writer.write({'input_ids': ids})
    statistics = SplitStatistics(documents=200, rows=len(rows), tokens=len(rows) * N, fill_rate=1.0)
    splits = {'train': statistics, 'validation': statistics}
    save_manifest(str(root / 'shards'), Manifest(V, N, {}, splits, 5.0, 't' * 64, 'c' * 64, 'r' * 64, []))

    sizes = {'num_hidden_layers': 2, 'hidden_size': D, 'num_attention_heads': 2, 'intermediate_size': 64}
    model = ModelConfig(vocab_size=V, max_seq_len=N, initializer_range=0.2, decoder=DecoderConfig(**sizes), **sizes)
    write_run(root / 'run', model, build_model(model, seed=0).state_dict(), remote=str(root / 'shards'))
    return root


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv('MAELM_CACHE', str(tmp_path / 'cache'))
