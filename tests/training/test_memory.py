"""Settings that must not change results are obeyed: the results would not tell if they were ignored."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from maelm_composer.masking.collate import Batch
from maelm_composer.model.layer import Layer
from maelm_composer.training.adapter import PretrainingModel
from maelm_composer.training.run import pretrain

SHORT = ('training.max_samples=32', 'optimizer.warmup_samples=16')  # two batches of 16 rows


@pytest.fixture
def note_calls(monkeypatch):
    """``note_calls(kind, method, describe)``: a list of what ``describe`` says of each call in training."""

    def begin(kind: type, method: str, describe: Callable) -> list:
        compute, noted = getattr(kind, method), []

        def compute_and_note(module, *arguments):
            if module.training:
                noted.append(describe(*arguments))
            return compute(module, *arguments)

        monkeypatch.setattr(kind, method, compute_and_note)
        return noted

    return begin


@pytest.mark.parametrize('option, times', [('false', 1), ('true', 2)])
def test_activation_checkpointing_computes_every_layer_twice(recipe, note_calls, option, times):
    calls = note_calls(Layer, 'compute', lambda hidden, *_: len(hidden))
    pretrain(recipe(*SHORT, f'training.activation_checkpointing={option}'))
    assert calls == [16] * 2 * 2 * times  # two batches, and a layer each of encoder and decoder


@pytest.mark.parametrize('kernel, calls', [('dense', 0), ('sdpa', 2 * 2)])  # two batches, two layers
def test_attention_is_computed_by_the_kernel_of_the_recipe(recipe, monkeypatch, kernel, calls):
    attend, in_training = functional.scaled_dot_product_attention, []

    def note(*inputs):
        in_training.append(torch.is_grad_enabled())
        return attend(*inputs)

    monkeypatch.setattr(functional, 'scaled_dot_product_attention', note)
    pretrain(recipe(*SHORT, f'training.attention={kernel}'))
    assert sum(in_training) == calls


@pytest.mark.parametrize('size, passes', [('null', [16]), ('5', [5, 5, 5, 1])])
def test_a_forward_pass_holds_a_microbatch(recipe, note_calls, size, passes):
    rows = note_calls(PretrainingModel, 'forward', lambda batch: len(Batch(*batch).input_ids))
    pretrain(recipe(*SHORT, f'training.device_train_microbatch_size={size}'))
    assert rows == 2 * passes
