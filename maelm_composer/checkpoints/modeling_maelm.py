"""MPNet with configurable buckets of relative positions, for base++, large++ and the authors' bucket function.

In Transformers' MPNet, 32 buckets up to distance 128 are constants. ``maelm export`` copies this file into an exported
folder, from which Transformers loads it (``trust_remote_code=True``): it may import only torch and transformers.
"""

import math
from typing import Any

import torch
from torch import Tensor
from transformers import MPNetConfig
from transformers.models.mpnet import modeling_mpnet


class MaelmConfig(MPNetConfig):
    """MPNet's config; ``relative_attention_function`` is 't5' or 'authors', see :func:`bucket_distances`."""

    model_type = 'maelm'

    def __init__(
        self, relative_attention_max_distance: int = 128, relative_attention_function: str = 't5', **others: Any
    ) -> None:
        super().__init__(**others)
        self.relative_attention_max_distance = relative_attention_max_distance
        self.relative_attention_function = relative_attention_function


def bucket_distances(distance: Tensor, buckets: int, max_distance: int, function: str) -> Tensor:
    """Distances (key - query) -> bucket ids of the same shape.

    Each short distance has a bucket of its own; beyond, the width of a bucket grows with the distance (T5, Raffel et
    al., 2020). ``authors`` is the function of the MAE-LM authors' code.
    """
    half = buckets // 2
    exact = half // 2
    size = distance.abs()
    ratio = torch.log(size.clamp(min=exact).double() / exact)
    # 1e-9 is more than the rounding error of a whole number, which must stay as it is.
    if function == 't5':
        far = exact + (ratio / math.log(max_distance / exact) * (half - exact) + 1e-9).floor().long()
        return torch.where(size < exact, size, far.clamp(max=half - 1)) + half * (distance > 0)
    if function == 'authors':  # rounds up instead of down, and reaches the last bucket at a shorter distance
        far = exact + (ratio / math.log((max_distance - 1) / exact) * (half - 1 - exact) - 1e-9).ceil().long()
        return half - 1 + torch.where(size < exact, size, far.clamp(max=half - 1)) * distance.sign()
    raise ValueError(f'relative_attention_function {function!r} is neither t5 nor authors')


class MaelmEncoder(modeling_mpnet.MPNetEncoder):
    """MPNet's layers with the relative position bias that ``config`` describes."""

    def __init__(self, config: MaelmConfig) -> None:
        super().__init__(config)
        if not hasattr(modeling_mpnet.MPNetEncoder, 'compute_position_bias'):
            raise RuntimeError('MPNetEncoder has no compute_position_bias in this release of transformers; use 4.57')

    def compute_position_bias(self, x: Tensor, position_ids: Tensor | None = None, num_buckets: int = 0) -> Tensor:
        """(B, S, D) hidden states -> (B, heads, S, S) bias. The last two arguments are MPNet's and unused."""
        length, config = x.shape[1], self.config
        bucket_of_distance = bucket_distances(
            torch.arange(1 - length, length, device='cpu'),  # other devices round otherwise, or lack float64
            config.relative_attention_num_buckets,
            config.relative_attention_max_distance,
            config.relative_attention_function,
        )
        by_distance = self.relative_attention_bias(bucket_of_distance.to(x.device))  # (2S - 1, heads)
        positions = torch.arange(length, device=x.device)
        distance = positions[None, :] - positions[:, None] + (length - 1)
        return by_distance[distance].permute(2, 0, 1).expand(x.shape[0], -1, -1, -1)


class MaelmModel(modeling_mpnet.MPNetModel):
    config_class = MaelmConfig

    def __init__(self, config: MaelmConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config, add_pooling_layer)
        self.encoder = MaelmEncoder(config)
        self.post_init()


class _WithMaelmModel(modeling_mpnet.MPNetPreTrainedModel):
    """A head of MPNet's, which comes next among the bases, on our encoder."""

    config_class = MaelmConfig

    def __init__(self, config: MaelmConfig) -> None:
        super().__init__(config)
        self.mpnet: Any = MaelmModel(config, add_pooling_layer=False)
        self.post_init()


class MaelmForMaskedLM(_WithMaelmModel, modeling_mpnet.MPNetForMaskedLM): ...


class MaelmForSequenceClassification(_WithMaelmModel, modeling_mpnet.MPNetForSequenceClassification): ...


class MaelmForQuestionAnswering(_WithMaelmModel, modeling_mpnet.MPNetForQuestionAnswering): ...
