"""Loss and every gradient of the fast model against ``reference.py``, in fp64."""

import pytest
import torch
from torch.testing import assert_close

from maelm_composer.config import DecoderAttention, RelativePositionFunction
from maelm_composer.model.maelm import build_model
from maelm_composer.model.reference import ReferenceModel

DELTAS = (0.0, 0.25, 0.5, 0.75, 1.0)
AUTHORS = {'masks_special_tokens': True, 'rounds_at_random': True}  # yamls/authors.yaml


def randomize(model):
    """Every parameter, biases and norms too, so that no term of the loss vanishes."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) / 5)
    return model


def assert_equal_to_reference(config, batch):
    fast = randomize(build_model(config, seed=0).double())
    reference = ReferenceModel(config).double()
    reference.load_state_dict(fast.state_dict())
    loss, expected = fast(batch).loss, reference(batch)
    assert loss.dtype == torch.float64
    assert_close(loss, expected, rtol=1e-12, atol=0)
    loss.backward()
    expected.backward()
    theirs = dict(reference.named_parameters())
    for name, parameter in fast.named_parameters():
        assert not parameter.grad.is_sparse, name
        scale = theirs[name].grad.abs().max()
        assert scale > 0, name
        assert_close(parameter.grad / scale, theirs[name].grad / scale, rtol=0, atol=1e-10, msg=f'{name}: {scale}')


def test_each_row_of_table_2(variant, make_batch):
    masking, config = variant
    assert_equal_to_reference(config, make_batch(config, **masking))


@pytest.mark.parametrize('attention', DecoderAttention)
@pytest.mark.parametrize('delta', DELTAS)
def test_each_decoder_at_each_delta(attention, delta, config, make_batch):
    """With a relative bias in the decoder, resets and the authors' masks, whose unused slots must not count."""
    settings = config(decoder={'attention': attention, 'relative_position_buckets': 8, 'hidden_size': 16})
    batch = make_batch(settings, encoder_mask_fraction=delta, decoder_resets_masks=delta == 0.75, **AUTHORS)
    assert_equal_to_reference(settings, batch)


@pytest.mark.parametrize('has_decoder', [True, False])
def test_authors_settings(has_decoder, config, make_batch):
    settings = config(has_decoder, relative_position_function=RelativePositionFunction.authors)
    batch = make_batch(settings, encoder_mask_fraction=0.0 if has_decoder else 1.0, **AUTHORS)
    assert_equal_to_reference(settings, batch)
