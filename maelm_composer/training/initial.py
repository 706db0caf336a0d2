"""Initial weights of a run that another model gives (``init_from``)."""

import dataclasses
import json
from typing import Any

from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from maelm_composer.checkpoints.find import find_encoder, take_part
from maelm_composer.checkpoints.pretrained import ENCODER, find_misfit, load_ours, load_pretrained, set_to_masked_text
from maelm_composer.config import DecoderConfig, Implementation, ModelConfig, PretrainingConfig
from maelm_composer.data.manifest import TOKENIZER, TOKENIZER_FILE, read_tokenizer_files
from maelm_composer.data.special_tokens import SPECIAL_TOKENS
from maelm_composer.data.storage import join
from maelm_composer.errors import InputError
from maelm_composer.model.maelm import MaskedLanguageModel
from maelm_composer.records import EncoderIdentity

# Settings in which a model may differ from the model whose weights it takes.
_FREE = {
    'hidden_dropout_prob',
    'attention_probs_dropout_prob',
    'initializer_range',
    'head_bias_init',
    'relative_position_init',
    'decoder',
}
_RELATIVE = {'relative_position_max_distance', 'relative_position_function'}  # of both stacks, if one has buckets


def load_initial_weights(model: MaskedLanguageModel, config: PretrainingConfig) -> tuple[EncoderIdentity, str]:
    """Replace weights of ``model`` by those of ``config.init_from``.

    The encoder is always replaced; the decoder if its settings are equal but for dropout; the head if its shapes are.
    Of an exported folder, whose encoder may be of another class, only the encoder is used.

    Returns:
        The identity of ``init_from``, and a line about the parts that were taken and those that keep their values.

    Raises:
        InputError: ``init_from`` cannot be read, or has another encoder or tokenizer than the recipe and its shards.
    """
    assert config.init_from is not None
    found = find_encoder(config.init_from)
    weights: dict[str, Tensor] = {}
    if found is None:
        source = load_pretrained(config.init_from, Implementation.ours)
    else:
        source, weights = load_ours(found)
    assert source.config is not None
    _assert_same_tokenizer(config, source.tokenizer.backend_tokenizer)  # the reason for another vocab_size, too
    if (name := _find_difference(config.model, source.config)) is not None:
        here, there = (getattr(stack, name) for stack in (config.model, source.config))
        raise InputError(f'model.{name} is {here}, but init_from {config.init_from} has {there}')
    if found is None or found.run is None:  # the head of a fine-tuned model is that of its task
        weights = {f'{ENCODER}.{name}': value for name, value in source.encoder.state_dict().items()}
    ours, theirs = config.model.decoder, source.config.decoder
    is_same_decoder = ours is not None and theirs is not None and _find_difference(ours, theirs) is None
    taken, fresh = [], []
    for part, module in model.named_children():
        own = take_part(weights, part)
        shapes = {name: tuple(value.shape) for name, value in own.items()}
        if find_misfit(shapes, module) is None and (part != 'decoder' or is_same_decoder):
            module.load_state_dict(own)
            taken.append(part)
        else:
            fresh.append(part)
    return source.identity, ', '.join(taken) + (f'; fresh: {", ".join(fresh)}' if fresh else '')


def describe_start(identity: EncoderIdentity) -> str:
    """``identity`` for the start screen: address, rows trained on, hash of the weights."""
    samples = '' if identity.samples is None else f'{identity.samples:,} samples, '
    return f'{identity.uri}, {samples}hash {identity.hash[:12]}'


def _find_difference(ours: ModelConfig | DecoderConfig, theirs: Any) -> str | None:
    """The first setting, if any, in which two stacks differ such that one cannot use the other's weights."""
    stacks = (ours, getattr(ours, 'decoder', None))
    free = _FREE | (set() if any(stack and stack.relative_position_buckets for stack in stacks) else _RELATIVE)
    names = (field.name for field in dataclasses.fields(ours) if field.name not in free)
    return next((name for name in names if getattr(ours, name) != getattr(theirs, name)), None)


def _assert_same_tokenizer(config: PretrainingConfig, theirs: Tokenizer) -> None:
    folder = join(config.data.remote, TOKENIZER)
    content = read_tokenizer_files(folder).get(TOKENIZER_FILE)
    if content is None:
        raise InputError(f'{join(folder, TOKENIZER_FILE)} is missing: restore the file, which init_from needs')
    ours = Tokenizer.from_buffer(content)
    exported = PreTrainedTokenizerFast(tokenizer_object=ours, mask_token=SPECIAL_TOKENS[-1])  # a copy
    set_to_masked_text(exported)  # as in the exported folder of a pretraining run
    states = [json.loads(tokenizer.to_str()) for tokenizer in (ours, exported.backend_tokenizer)]
    their_state = json.loads(theirs.to_str())
    for part in ('model', 'normalizer', 'pre_tokenizer'):  # vocabulary, case, words
        if their_state[part] not in [state[part] for state in states]:
            is_ours = [theirs.token_to_id(token) for token in SPECIAL_TOKENS[:4]] == [0, 1, 2, 3]
            copy = f"copy that model's tokenizer to {join('REMOTE', TOKENIZER)} and run `maelm shards`"
            remedy = copy if is_ours else '`maelm tokenizer` makes none like that'
            raise InputError(
                f'init_from {config.init_from} was trained with another tokenizer than the shards in '
                f'{config.data.remote} (its {part.replace("_", "-")} differs): {remedy}'
            )
