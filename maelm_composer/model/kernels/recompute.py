"""Activation checkpointing: a layer keeps its inputs alone and is computed again in the backward pass."""

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from maelm_composer.model.layer import Layer


def recompute_layers(model: nn.Module) -> None:
    """Compute every layer of ``model`` twice in each step of training, to save memory; names of weights stay.

    Dropout draws the same masks again, so loss and gradients are those of a layer that keeps its activations.
    """
    for layer in model.modules():
        if isinstance(layer, Layer):
            vars(layer)['forward'] = partial(checkpoint, layer.forward, use_reentrant=False)
