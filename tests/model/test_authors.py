"""Logits, loss and every gradient against the authors' released model, in fp64, with the knobs of yamls/authors.yaml.

    git clone https://github.com/yumeng5/MAE-LM
    pytest -m authors --authors=MAE-LM

Their files are executed as they are, without a build. Only the ``__init__`` files of their packages, which import all
of fairseq and its compiled extensions, are left out.
"""

import argparse
import importlib
import sys
import types
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from torch.testing import assert_close

from maelm_composer.config import RelativePositionFunction
from maelm_composer.data.special_tokens import PAD_ID
from maelm_composer.model.maelm import build_model

BUCKETS = 16
AUTHORS = {'masks_special_tokens': True, 'rounds_at_random': True}
PACKAGES = ('', '.modules', '.models', '.models.ae', '.data', '.dataclass', '.logging')
EXPORTS = {  # names that their packages' __init__ files import, and from where
    'modules': {
        'layer_norm': ['LayerNorm'],
        'layer_drop': ['LayerDropModuleList'],
        'fairseq_dropout': ['FairseqDropout'],
        'gelu': ['gelu', 'gelu_accurate'],
        'multihead_attention': ['MultiheadAttention'],
        'positional_embedding': ['PositionalEmbedding'],
        'transformer_sentence_encoder_layer': ['TransformerSentenceEncoderLayer'],
        'transformer_sentence_decoder_layer': ['TransformerSentenceDecoderLayer'],
        'transformer_sentence_encoder': ['TransformerSentenceEncoder'],
        'transformer_sentence_decoder': ['TransformerSentenceDecoder'],
    },
    'data': {'dictionary': ['Dictionary']},
    'models': {'fairseq_encoder': ['FairseqEncoder'], 'fairseq_decoder': ['FairseqDecoder']},
}
EXPORTS['models']['fairseq_model'] = ['FairseqEncoderModel']
UNUSED = {  # modules that need the build, and the names that are imported from them but not computed with
    'dataclass.utils': {'convert_namespace_to_omegaconf': None, 'gen_parser_from_dataclass': None},
    'models.transformer': {'DEFAULT_MIN_PARAMS_TO_WRAP': 0, 'TransformerEncoder': None},
}
# Their names -> ours, replaced in this order
RENAMED = {
    'encoder_to_decoder': 'decoder.input_projection',
    'gen_decoder.sentence_encoder': 'decoder',
    'encoder.sentence_encoder': 'encoder',
    'gen_decoder.lm_head': 'head',
    'embed_tokens': 'token_embeddings',
    'embed_positions': 'position_embeddings',
    'emb_layer_norm': 'embedding_norm',
    'relative_attention_bias': 'relative_position',
    'self_attn_layer_norm': 'self_attention_norm',
    'self_attn.out_proj': 'self_attention.output',
    'final_layer_norm': 'output_norm',
    'fc1': 'intermediate',
    'fc2': 'output',
    'head.layer_norm': 'head.norm',
    'embed_linear': 'output_projection',
}


def keep(*_, **__):
    """In place of fairseq's registries, which are used as decorators."""
    return lambda registered: registered


@pytest.fixture(scope='module')
def authors(pytestconfig):
    """Their modules ``models.ae.model`` and ``data.dictionary``, out of a clone."""
    clone = pytestconfig.getoption('authors')
    if clone is None:
        pytest.skip("needs --authors=FOLDER, a clone of the authors' repository")
    root = Path(clone, 'fairseq')
    if not root.is_dir():
        pytest.fail(f'--authors={clone} is not a clone of yumeng5/MAE-LM: it has no folder fairseq')

    def add(name, **attributes):
        module = sys.modules[f'fairseq{name}'] = types.ModuleType(f'fairseq{name}')
        module.__dict__.update(attributes)
        return module

    for name in PACKAGES:
        add(name, __path__=[str(root.joinpath(*name.split('.')))])
    for name, attributes in UNUSED.items():
        add(f'.{name}', **attributes)
    models = sys.modules['fairseq.models']
    models.register_model = models.register_model_architecture = keep
    importlib.import_module('fairseq.utils')  # first, as it and their attention import each other
    for package, files in EXPORTS.items():
        for file, names in files.items():
            module = importlib.import_module(f'fairseq.{package}.{file}')
            sys.modules[f'fairseq.{package}'].__dict__.update({name: getattr(module, name) for name in names})
    yield importlib.import_module('fairseq.models.ae.model'), importlib.import_module('fairseq.data.dictionary')
    for name in [name for name in sys.modules if name.split('.')[0] == 'fairseq']:
        del sys.modules[name]


def build_theirs(authors, config):
    model, dictionary = authors
    words = dictionary.Dictionary()
    while len(words) < config.vocab_size:
        words.add_symbol(f'word{len(words)}')
    parser = argparse.ArgumentParser()
    model.AutoEncodingModel.add_args(parser.add_argument_group(argument_default=argparse.SUPPRESS))
    args = parser.parse_args([])
    decoder, task = config.decoder, types.SimpleNamespace(source_dictionary=words, mask_idx=config.vocab_size - 1)
    args.__dict__.update(
        encoder_layers=config.num_hidden_layers,
        encoder_embed_dim=config.hidden_size,
        encoder_ffn_embed_dim=config.intermediate_size,
        encoder_attention_heads=config.num_attention_heads,
        gen_decoder_layers=decoder.num_hidden_layers,
        decoder_embed_dim=decoder.hidden_size,
        decoder_ffn_embed_dim=decoder.intermediate_size,
        decoder_attention_heads=decoder.num_attention_heads,
        max_positions=config.max_seq_len,
        rel_pos=1,
        rel_pos_bins=BUCKETS,
        max_rel_pos=config.relative_position_max_distance,
        dropout=0.0,
        attention_dropout=0.0,
        criterion='masked_lm',
        no_return_mask=True,
        decoder_only_mask=False,
        decoder_mask_prob=0.0,
        detect_mask=False,
        mask_subsets=1,
    )
    return model.AutoEncodingModel.build_model(args, task).double()


def take_ours(tensors, name):
    """Our tensor for one of their parameters; their W_Q, W_K and W_V are thirds of our one projection."""
    for theirs, ours in RENAMED.items():
        name = name.replace(theirs, ours)
    for part, letter in enumerate('qkv'):
        if f'self_attn.{letter}_proj' in name:
            return tensors[name.replace(f'self_attn.{letter}_proj', 'self_attention.query_key_value')].chunk(3)[part]
    return tensors[name]


@pytest.mark.authors
@pytest.mark.parametrize('size', [32, 16])
def test_mae_lm_is_the_authors(authors, size, config, make_batch, build_row):
    settings = config(
        decoder={'hidden_size': size},
        relative_position_function=RelativePositionFunction.authors,
        relative_position_buckets=BUCKETS,
    )
    rows = [build_row([length], settings.max_seq_len, settings.vocab_size, seed=length) for length in (48, 40, 33)]
    batch = make_batch(settings, rows, **AUTHORS)
    ours, theirs = build_model(settings, seed=0).double(), build_theirs(authors, settings)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 5)
        for name, parameter in theirs.named_parameters():
            parameter.copy_(take_ours(ours.state_dict(), name))
    assert sum(p.numel() for p in theirs.parameters()) == sum(p.numel() for p in ours.parameters())

    is_masked = batch.labels >= 0
    logits, _ = theirs(
        batch.input_ids, masked_tokens=is_masked, padding_mask=batch.segment_ids == 0, position_index=batch.position_ids
    )
    logits = logits.view(-1, settings.vocab_size)
    loss, output = functional.cross_entropy(logits, batch.labels[is_masked]), ours(batch)
    assert (batch.input_ids == PAD_ID).any()
    assert_close(output.logits[output.labels >= 0], logits, rtol=1e-11, atol=1e-11)
    assert_close(output.loss, loss, rtol=1e-12, atol=0)
    loss.backward()
    output.loss.backward()
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    for name, parameter in theirs.named_parameters():
        scale = parameter.grad.abs().max() + 1e-9  # a key's bias shifts all scores of a query: its gradient is rounding
        assert_close(
            take_ours(gradients, name) / scale, parameter.grad / scale, rtol=0, atol=1e-5 * (scale < 1e-8) + 1e-10
        )
