"""Hugging Face's classes and ours have equal outputs, to 1e-5 in fp32, with padding. Nothing is downloaded."""

import pytest
import torch
from torch.testing import assert_close
from transformers import (
    AutoModel,
    BertConfig,
    BertModel,
    DistilBertConfig,
    LongformerConfig,
    LongformerModel,
    ModernBertConfig,
    MPNetConfig,
    MPNetModel,
    RobertaConfig,
    RobertaModel,
    RobertaPreLayerNormConfig,
)

from maelm_composer.checkpoints import modeling_maelm
from maelm_composer.checkpoints.huggingface import (
    HuggingFaceEncoder,
    explain_unsupported,
    export_encoder,
    import_encoder,
)
from maelm_composer.config import RelativePositionFunction
from maelm_composer.errors import InputError
from maelm_composer.model.encoder import Encoder
from maelm_composer.model.relative_position import bucket_distances
from tests.model.conftest import config

__all__ = ['config']  # a fixture

TOLERANCE = {'rtol': 1e-5, 'atol': 1e-5}
LENGTH = 300  # beyond MPNet's farthest bucket
SIZES = {
    'vocab_size': 60,
    'hidden_size': 32,
    'num_hidden_layers': 2,
    'num_attention_heads': 4,
    'intermediate_size': 64,
    'layer_norm_eps': 1e-3,  # large enough that a wrong one shows
}
BASES = {
    'roberta': (RobertaModel, RobertaConfig(type_vocab_size=2, max_position_embeddings=LENGTH + 2, **SIZES)),
    'mpnet': (MPNetModel, MPNetConfig(max_position_embeddings=LENGTH + 2, **SIZES)),
    'bert': (BertModel, BertConfig(max_position_embeddings=LENGTH, **SIZES)),
}


def randomize(model):
    """Draw all weights at random, biases, norms and unused rows included, so that an omitted one is detected."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return model.eval()


def build_inputs(pad_id):
    """(3, LENGTH) ids, positions and segments; the last two rows end in padding."""
    ids = torch.randint(4, SIZES['vocab_size'], (3, LENGTH), generator=torch.Generator().manual_seed(1))
    segments = torch.ones_like(ids)
    for row, length in ((1, LENGTH - 13), (2, 7)):
        ids[row, length:], segments[row, length:] = pad_id, 0
    return ids, torch.arange(LENGTH).expand(3, -1), segments


@torch.no_grad()
def assert_same_states(model, encoder, pad_id):
    """The hidden states of every layer at the real tokens."""
    ids, positions, segments = build_inputs(pad_id)
    theirs = model(input_ids=ids, attention_mask=segments, output_hidden_states=True).hidden_states
    ours = list(encoder.layer_states(ids, positions, segments))
    assert len(ours) == len(theirs) == SIZES['num_hidden_layers'] + 1
    for a, b in zip(ours, theirs, strict=True):
        assert_close(a[segments > 0], b[segments > 0], **TOLERANCE)


def load(config, weights):
    encoder = Encoder(config)
    encoder.load_state_dict(weights)
    return encoder.eval()


@pytest.fixture(params=BASES)
def theirs(request):
    model_class, config = BASES[request.param]
    return randomize(model_class(config, add_pooling_layer=False))


def test_an_imported_encoder_computes_the_same(theirs):
    config, weights = import_encoder(theirs)
    assert config.max_seq_len == LENGTH
    assert_same_states(theirs, load(config, weights), theirs.config.pad_token_id)


def test_there_and_back_is_the_same_model(theirs):
    pad_id = theirs.config.pad_token_id
    config, weights = import_encoder(theirs)
    exported, back = export_encoder(config, weights, pad_id)
    model_class = MPNetModel if exported.model_type == 'mpnet' else RobertaModel  # BERT comes back as RoBERTa
    assert exported.model_type == {'bert': 'roberta'}.get(theirs.config.model_type, theirs.config.model_type)
    again = model_class(exported, add_pooling_layer=False)
    again.load_state_dict(back)
    assert_same_states(again.eval(), load(config, weights), pad_id)
    ids, _, segments = build_inputs(pad_id)
    with torch.no_grad():
        states = [model(input_ids=ids, attention_mask=segments).last_hidden_state for model in (theirs, again)]
    assert_close(states[0][segments > 0], states[1][segments > 0], **TOLERANCE)


@pytest.mark.parametrize('function', RelativePositionFunction)
@pytest.mark.parametrize('buckets, max_distance', [(32, 128), (64, 128), (128, 256), (64, 256), (144, 64)])
def test_the_exported_file_has_our_bucket_functions(function, buckets, max_distance):
    distances = torch.arange(-600, 601)
    expected = bucket_distances(distances, buckets, max_distance, function)
    assert modeling_maelm.bucket_distances(distances, buckets, max_distance, function.name).equal(expected)


@pytest.mark.parametrize(
    'config, obstacle',
    [
        (DistilBertConfig(), 'distilbert'),
        (RobertaConfig(hidden_act='gelu_new'), 'hidden_act is gelu_new'),
        (RobertaConfig(position_embedding_type='relative_key'), 'position_embedding_type is relative_key'),
        (BertConfig(is_decoder=True), 'is_decoder is True'),
        (MPNetConfig(relative_attention_num_buckets=64), 'relative_attention_num_buckets is 64, not 32'),
    ],
)
def test_what_our_encoder_cannot_compute_is_named(config, obstacle):
    assert obstacle in explain_unsupported(config)


def test_relative_positions_need_the_padding_id_that_mpnet_holds(config):
    settings = config()
    with pytest.raises(InputError, match=r'\[PAD\] has id 0'):
        export_encoder(settings, Encoder(settings).state_dict(), pad_id=0)


class TestWrapped:
    """A Hugging Face model with our encoder's interface."""

    @pytest.fixture
    def pair(self, theirs):
        config, weights = import_encoder(theirs)
        return HuggingFaceEncoder(theirs), load(config, weights), build_inputs(theirs.config.pad_token_id)

    @torch.no_grad()
    def test_it_answers_as_our_encoder(self, pair):
        wrapped, ours, inputs = pair
        is_real, chosen = inputs[2] > 0, torch.tensor([[0, 5], [2, 4], [6, 0]])
        assert_close(wrapped(*inputs)[is_real], ours(*inputs)[is_real], **TOLERANCE)
        assert_close(wrapped(*inputs, predicted_index=chosen), ours(*inputs, predicted_index=chosen), **TOLERANCE)
        for a, b in zip(wrapped.layer_states(*inputs), ours.layer_states(*inputs), strict=True):
            assert_close(a[is_real], b[is_real], **TOLERANCE)

    @pytest.mark.parametrize('changed', ['packed', 'gap'])
    def test_it_refuses_what_it_would_compute_wrongly(self, pair, changed):
        wrapped, _, (ids, positions, segments) = pair
        positions, segments = positions.clone(), segments.clone()
        if changed == 'packed':
            segments[0, 20:] = 2
        else:
            positions[0, 20:] += 1
        with pytest.raises(InputError, match='one whole sequence per row'):
            wrapped(ids, positions, segments)

    @pytest.mark.parametrize(
        'config',
        [
            RobertaPreLayerNormConfig(max_position_embeddings=LENGTH + 2, **SIZES),
            ModernBertConfig(pad_token_id=1, reference_compile=False, **SIZES),
        ],
        ids=['roberta-prelayernorm', 'modernbert'],
    )
    @torch.no_grad()
    def test_the_last_layer_includes_the_final_norm(self, config):
        wrapped, inputs = HuggingFaceEncoder(randomize(AutoModel.from_config(config))), build_inputs(pad_id=1)
        states = list(wrapped.layer_states(*inputs))
        assert len(states) == SIZES['num_hidden_layers'] + 1
        assert_close(states[-1], wrapped(*inputs), rtol=0, atol=0)

    @torch.no_grad()
    def test_the_first_token_alone_of_a_longformer_attends_to_the_whole_row(self):
        config = LongformerConfig(attention_window=8, max_position_embeddings=LENGTH + 2, **SIZES)
        wrapped = HuggingFaceEncoder(randomize(LongformerModel(config, add_pooling_layer=False)))
        ids, *where = build_inputs(pad_id=1)
        other = ids.clone()
        other[0, -1] = ids[0, -1] % 50 + 5
        # In the first layer, only the first token sees the last one from afar.
        first, second = (list(wrapped.layer_states(given, *where))[1][0] for given in (ids, other))
        assert (first != second).any(1).nonzero().flatten().tolist() == [0, *range(LENGTH - 5, LENGTH)]
