"""Conversion between our encoder and Hugging Face's, and a wrapper with our interface for all other encoders.

Without relative positions, our encoder is RoBERTa; with T5's 32 buckets up to distance 128, MPNet; with any other
buckets, the classes of modeling_maelm.py. BERT is RoBERTa without its position offset. The outputs are equal up to the
order of sums.
"""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MPNetConfig, PretrainedConfig, PreTrainedModel, RobertaConfig

from maelm_composer.checkpoints.modeling_maelm import MaelmConfig
from maelm_composer.config import ModelConfig, RelativePositionFunction
from maelm_composer.errors import InputError
from maelm_composer.model.layer import take_positions

# Constants in MPNet's code; the number of buckets in its config only sets the size of the bias table.
MPNET_BUCKETS, MPNET_MAX_DISTANCE, MPNET_PAD_ID = 32, 128, 1
POOLER = 'pooler.'  # prefix of weights that our encoder does not have

# Our parameter of a layer -> Hugging Face's; our fused matrix is the concatenation of three of theirs.
_BERT_LAYER = {
    'intermediate': ['intermediate.dense'],
    'output': ['output.dense'],
    'output_norm': ['output.LayerNorm'],
    'self_attention.query_key_value': ['attention.self.query', 'attention.self.key', 'attention.self.value'],
    'self_attention.output': ['attention.output.dense'],
    'self_attention_norm': ['attention.output.LayerNorm'],
}
_MPNET_LAYER = _BERT_LAYER | {
    'self_attention.query_key_value': ['attention.attn.q', 'attention.attn.k', 'attention.attn.v'],
    'self_attention.output': ['attention.attn.o'],
    'self_attention_norm': ['attention.LayerNorm'],
}
# Keys with the same name in our config and in all of theirs.
_SHARED = (
    *('vocab_size', 'hidden_size', 'num_hidden_layers', 'num_attention_heads', 'intermediate_size'),
    *('hidden_dropout_prob', 'attention_probs_dropout_prob', 'layer_norm_eps', 'initializer_range'),
)
_POSITIONS = 'embeddings.position_embeddings.weight'
_TOKEN_TYPES = 'embeddings.token_type_embeddings.weight'
_RELATIVE = 'encoder.relative_attention_bias.weight'


def explain_unsupported(config: PretrainedConfig) -> str | None:
    """Why our encoder cannot compute this model, or None if it can."""
    kind = config.model_type
    if kind not in ('bert', 'roberta', 'mpnet', 'maelm'):
        return f'it is a {kind} model, neither bert, roberta, mpnet nor maelm'
    needed: dict[str, Any] = {'hidden_act': 'gelu'}
    if kind in ('bert', 'roberta'):
        needed |= {'position_embedding_type': 'absolute', 'is_decoder': False, 'add_cross_attention': False}
    if kind == 'mpnet':
        needed |= {'relative_attention_num_buckets': MPNET_BUCKETS}
    for name, value in needed.items():
        if getattr(config, name, value) != value:
            return f'its {name} is {getattr(config, name)}, not {value}'
    return None


def import_encoder(theirs: PreTrainedModel) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Convert a Hugging Face base model, whose weights' names have no prefix, to our config and state dict.

    :func:`explain_unsupported` must have found that our encoder can compute this model.
    """
    config, weights, offset = theirs.config, theirs.state_dict(), find_position_offset(theirs)
    is_mpnet = isinstance(config, MPNetConfig)
    model = ModelConfig(
        **{name: getattr(config, name) for name in _SHARED},
        max_seq_len=config.max_position_embeddings - offset,
        relative_position_buckets=config.relative_attention_num_buckets if is_mpnet else 0,
        decoder=None,
    )
    if isinstance(config, MaelmConfig):
        model.relative_position_max_distance = config.relative_attention_max_distance
        model.relative_position_function = RelativePositionFunction[config.relative_attention_function]
    positions = weights[_POSITIONS][offset:]
    if not is_mpnet:
        positions = positions + weights[_TOKEN_TYPES][0]  # every token is of the first segment and gets this row
    ours = {'position_embeddings.weight': positions.clone()}
    if is_mpnet:
        ours['relative_position.weight'] = weights[_RELATIVE]
    for name, sources in _pairs(model.num_hidden_layers, is_mpnet):
        parts = [weights[part] for part in sources]
        ours[name] = torch.cat(parts) if len(parts) > 1 else parts[0]
    return model, ours


def export_encoder(
    config: ModelConfig, weights: Mapping[str, Tensor], pad_id: int
) -> tuple[PretrainedConfig, dict[str, Tensor]]:
    """Convert the config and the state dict of our encoder to those of a Hugging Face base model.

    Args:
        pad_id: the tokenizer's id of [PAD]; Hugging Face numbers positions from ``pad_id`` + 1.

    Raises:
        InputError: the encoder has relative positions and [PAD] is not id 1, a constant in MPNet's code.
    """
    has_relative = config.relative_position_buckets > 0
    if has_relative and pad_id != MPNET_PAD_ID:
        raise InputError(f'[PAD] has id {pad_id}: an encoder with relative positions can be exported with id 1 only')
    settings = {name: getattr(config, name) for name in _SHARED}
    settings |= {'max_position_embeddings': config.max_seq_len + pad_id + 1, 'pad_token_id': pad_id}
    buckets, distance = config.relative_position_buckets, config.relative_position_max_distance
    function = config.relative_position_function
    exported: PretrainedConfig
    if not has_relative:
        exported = RobertaConfig(type_vocab_size=2, **settings)  # BERT's tokenizer names a second segment
    elif (buckets, distance, function) == (MPNET_BUCKETS, MPNET_MAX_DISTANCE, RelativePositionFunction.t5):
        exported = MPNetConfig(**settings)
    else:
        exported = MaelmConfig(
            relative_attention_num_buckets=buckets,
            relative_attention_max_distance=distance,
            relative_attention_function=function.name,
            **settings,
        )
    positions = weights['position_embeddings.weight']
    theirs = {_POSITIONS: torch.cat([positions.new_zeros(pad_id + 1, config.hidden_size), positions])}
    if has_relative:
        theirs[_RELATIVE] = weights['relative_position.weight']
    else:
        theirs[_TOKEN_TYPES] = positions.new_zeros(2, config.hidden_size)
    for name, parts in _pairs(config.num_hidden_layers, has_relative):
        theirs |= dict(zip(parts, weights[name].chunk(len(parts)), strict=True))
    return exported, {name: value.clone() for name, value in theirs.items()}


def find_position_offset(model: nn.Module) -> int:
    """The row of a Hugging Face model's position table that a sequence's first token gets.

    The table of RoBERTa and its relatives has a row for padding; the first token gets the row after it.
    """
    tables = (module for name, module in model.named_modules() if name.endswith('position_embeddings'))
    padding = getattr(next(tables, None), 'padding_idx', None)
    return 0 if padding is None else int(padding) + 1


def is_text_encoder(model: PreTrainedModel) -> bool:
    """Whether :class:`HuggingFaceEncoder` can call ``model``: FNet takes no mask, CLIP's two parts have two widths."""
    is_sized = hasattr(model.config, 'vocab_size') and hasattr(model.config, 'hidden_size')
    return is_sized and 'attention_mask' in inspect.signature(model.forward).parameters


def has_global_attention(model: nn.Module) -> bool:
    """Whether ``model`` is a Longformer, whose tokens attend to their neighbours and to chosen tokens alone."""
    return 'global_attention_mask' in inspect.signature(model.forward).parameters


def _pairs(num_layers: int, is_mpnet: bool) -> Iterator[tuple[str, list[str]]]:
    """Our name of each parameter but the position tables, and Hugging Face's names of its parts in order (rows)."""
    yield 'token_embeddings.weight', ['embeddings.word_embeddings.weight']
    for kind in ('weight', 'bias'):
        yield f'embedding_norm.{kind}', [f'embeddings.LayerNorm.{kind}']
        for i in range(num_layers):
            for ours, theirs in (_MPNET_LAYER if is_mpnet else _BERT_LAYER).items():
                yield f'layers.{i}.{ours}.{kind}', [f'encoder.layer.{i}.{part}.{kind}' for part in theirs]


class HuggingFaceEncoder(nn.Module):
    """A Hugging Face base model, called as ``model.encoder.Encoder``; a row is one sequence."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.has_global_attention = has_global_attention(model)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, segment_ids: Tensor, predicted_index: Tensor | None = None
    ) -> Tensor:
        """(B, S) as in ``Encoder.forward`` -> (B, S, D), or (B, M, D) with ``predicted_index`` (B, M).

        Raises:
            InputError: packed sequences or positions with gaps.
        """
        hidden = self._run(input_ids, position_ids, segment_ids).last_hidden_state
        return hidden if predicted_index is None else take_positions(hidden, predicted_index)

    def layer_states(self, input_ids: Tensor, position_ids: Tensor, segment_ids: Tensor) -> Iterator[Tensor]:
        """(B, S) inputs -> the output of the embeddings and then of each layer, (B, S, D) each."""
        outputs = self._run(input_ids, position_ids, segment_ids, output_hidden_states=True)
        yield from outputs.hidden_states[:-1]
        yield outputs.last_hidden_state  # of ModernBERT, hidden_states[-1] is before the final norm

    def _run(self, input_ids: Tensor, position_ids: Tensor, segment_ids: Tensor, **options: Any) -> Any:
        """The model's outputs. The model numbers positions itself and attends across a whole row."""
        is_real = segment_ids != 0
        in_order = torch.arange(position_ids.shape[1], device=position_ids.device)
        # On a GPU the test would wait for all kernels of the forward pass before; our batches always pass it.
        if is_real.is_cpu and (is_real & ((segment_ids != 1) | (position_ids != in_order))).any():
            raise InputError('a Hugging Face encoder reads one whole sequence per row: no packing, no omitted tokens')
        if self.has_global_attention:  # as Longformer's own classifier; without it no token sees a whole long row
            options['global_attention_mask'] = (in_order == 0).long().expand_as(input_ids)
        return self.model(input_ids=input_ids, attention_mask=is_real.long(), **options)
