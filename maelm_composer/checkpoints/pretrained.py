"""Loading a pretrained encoder and its tokenizer: from a checkpoint of ours or from Hugging Face."""

import contextlib
import dataclasses
import hashlib
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import huggingface_hub.utils.logging as hub_logging
import torch
from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
from tokenizers import AddedToken, pre_tokenizers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerFast
from transformers.utils import logging

from maelm_composer.checkpoints import huggingface
from maelm_composer.checkpoints.find import (
    HUGGING_FACE_CONFIG,
    EncoderFolder,
    find_encoder,
    read_model_config,
    read_recipe,
    read_weights,
    take_part,
)
from maelm_composer.checkpoints.modeling_maelm import MaelmConfig, MaelmModel
from maelm_composer.config import Implementation, ModelConfig
from maelm_composer.data.manifest import TOKENIZER, TOKENIZER_FILE, read_tokenizer_files
from maelm_composer.data.storage import join
from maelm_composer.errors import InputError, first_line
from maelm_composer.model.encoder import Encoder
from maelm_composer.records import EncoderIdentity

ENCODER, HEAD = 'encoder', 'head'  # the modules whose weights a checkpoint holds
Module = TypeVar('Module', bound=nn.Module)
# By default Transformers asks on a terminal whether to run a folder's code.
NO_CODE: dict[str, Any] = {'trust_remote_code': False}
HUB_NAME = re.compile(r'[\w-][\w.-]*(/[\w-][\w.-]*)?')
_DROPOUTS = {
    *('hidden_dropout_prob', 'attention_probs_dropout_prob', 'dropout', 'attention_dropout'),
    *('hidden_dropout', 'embedding_dropout', 'mlp_dropout'),
}
# Keys of a Hugging Face config that name its origin and do not change the model's output.
_ORIGIN_KEYS = {'_name_or_path', 'name_or_path', 'transformers_version', 'torch_dtype', 'dtype', 'architectures'}


@dataclass(frozen=True)
class Pretrained:
    """An encoder, its tokenizer, its sizes and its identity."""

    encoder: nn.Module  # called as model.encoder.Encoder
    hidden_size: int
    max_seq_len: int
    tokenizer: PreTrainedTokenizerFast  # takes a special token's name in a text ("[MASK]") for ordinary characters
    identity: EncoderIdentity
    config: ModelConfig | None  # None if ``encoder`` is a HuggingFaceEncoder


def load_pretrained(
    checkpoint: str, implementation: Implementation = Implementation.auto, dropout: float | None = None
) -> Pretrained:
    """Read an encoder, in evaluation mode, and its tokenizer.

    Args:
        checkpoint: a run folder or a checkpoint in it, local or s3://; a fine-tuned model's folder; or the folder or
            hub name of a Hugging Face encoder.
        implementation: the code that computes a Hugging Face encoder. auto: ours if its outputs are the same.
        dropout: replaces the checkpoint's dropout of hidden states and attention weights.

    Raises:
        InputError: the checkpoint is missing or damaged, its weights do not match its recipe or its tokenizer, or
            ``implementation`` cannot compute it.
    """
    found = find_encoder(checkpoint)
    if found is None:
        return _load_huggingface(checkpoint, implementation, dropout)
    if implementation == Implementation.huggingface:
        raise InputError(f'{checkpoint} is a checkpoint of ours: implementation huggingface needs an exported folder')
    return load_ours(found, dropout)[0]


def load_ours(checkpoint: EncoderFolder, dropout: float | None = None) -> tuple[Pretrained, dict[str, Tensor]]:
    """:func:`load_pretrained` of a checkpoint of ours; and all of its weights by name, since the file is large."""
    config = read_model_config(checkpoint)
    if dropout is not None:
        config = dataclasses.replace(config, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    tokenizer = read_tokenizer(checkpoint, config)
    weights, digest = read_weights(checkpoint)
    encoder = build(Encoder, config, take_part(weights, ENCODER), checkpoint.uri)
    identity = _identify(checkpoint.uri, digest, _read_origin(checkpoint))
    return Pretrained(encoder, config.hidden_size, config.max_seq_len, tokenizer, identity, config), weights


def read_tokenizer(checkpoint: EncoderFolder, config: ModelConfig) -> PreTrainedTokenizerFast:
    """The tokenizer of the run or of the fine-tuned model; of an older run without one, that of its shards.

    Raises:
        InputError: there is no tokenizer, its files are damaged, or it has another vocabulary than ``config``.
    """
    folder = checkpoint.tokenizer
    files = read_tokenizer_files(folder)
    if not files and checkpoint.run is not None:
        folder = join(read_recipe(checkpoint).data.remote, TOKENIZER)
        files = read_tokenizer_files(folder)
    if TOKENIZER_FILE not in files:
        origin = "the run's shards" if checkpoint.run is not None else 'the encoder that was fine-tuned'
        raise InputError(f'{checkpoint.tokenizer} is not there: copy the tokenizer of {origin} to this folder')
    with tempfile.TemporaryDirectory() as scratch:
        for name, content in files.items():
            Path(scratch, name).write_bytes(content)
        try:
            tokenizer = AutoTokenizer.from_pretrained(scratch, **NO_CODE)
        except Exception as error:  # the class with which the tokenizers library refuses a file
            raise InputError(f'{folder}: the files of the tokenizer are damaged: {error}') from None
    _assert_usable(tokenizer, folder)
    # A model fine-tuned from a Hugging Face encoder may have spare rows in its token table.
    has_spare_rows = checkpoint.run is None and len(tokenizer) < config.vocab_size
    if len(tokenizer) != config.vocab_size and not has_spare_rows:
        raise InputError(
            f"{folder} has {len(tokenizer)} tokens, the model {config.vocab_size}: the tokenizer is not the model's"
        )
    return _set_to_raw_text(tokenizer)


def _assert_usable(tokenizer: Any, where: str) -> None:
    if not tokenizer.is_fast:
        raise InputError(f'{where}: the tokenizer has no fast version')
    if None in (tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id):
        raise InputError(f'{where}: the tokenizer lacks cls_token, sep_token or pad_token')


def build(
    module: Callable[[ModelConfig], Module], config: ModelConfig, weights: Mapping[str, Tensor], checkpoint: str
) -> Module:
    """``module(config)`` with all its ``weights``, in evaluation mode. torch's global generator keeps its state.

    Args:
        module: :class:`Encoder` or :class:`MaskedLanguageModel`.
        checkpoint: the name that an error message gives the weights.

    Raises:
        InputError: a name or a shape in ``weights`` differs from the module's.
    """
    with torch.random.fork_rng(devices=[]):
        model = module(config)
    if misfit := find_misfit({name: tuple(value.shape) for name, value in weights.items()}, model):
        raise InputError(f'{checkpoint} does not match its recipe: {misfit}')
    model.load_state_dict(weights)
    return model.eval()


def find_misfit(shapes: Mapping[str, tuple[int, ...]], model: nn.Module) -> str | None:
    """How the first tensor, by name, that differs between a checkpoint's ``shapes`` and ``model`` differs."""
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    for name in sorted(shapes.keys() | expected.keys()):
        there, here = shapes.get(name, 'missing'), expected.get(name, 'missing')
        if there != here:
            return f'{name} is {there} in the checkpoint, {here} in the model'
    return None


def _load_huggingface(name: str, implementation: Implementation, dropout: float | None) -> Pretrained:
    if not Path(name).exists() and not HUB_NAME.fullmatch(name):
        raise InputError(f'{name}: there is no such checkpoint')
    if Path(name).is_dir() and not Path(name, HUGGING_FACE_CONFIG).exists():
        raise InputError(f'{name} holds neither a run, a checkpoint nor a Hugging Face model: name one of its folders')
    with (
        _one_line(f'{name}: neither a checkpoint of ours nor a Hugging Face encoder'),
        torch.random.fork_rng(devices=[]),
    ):
        settings, _ = PretrainedConfig.get_config_dict(name)
        is_maelm = settings.get('model_type') == MaelmConfig.model_type
        if not is_maelm and any(key.startswith('AutoModel') for key in settings.get('auto_map') or {}):
            # A stock class might compute something else.
            raise InputError(f'{name}: the model has code of its own, which is never run')
        config_class: Any = MaelmConfig if is_maelm else AutoConfig
        model_class: Any = MaelmModel if is_maelm else AutoModel
        theirs = config_class.from_pretrained(name, **NO_CODE)
        if theirs.is_encoder_decoder:  # its last hidden states are the decoder's
            raise InputError(f'{name} is an encoder with a decoder: name an encoder')
        architecture = {key: value for key, value in theirs.to_diff_dict().items() if key not in _ORIGIN_KEYS}
        if dropout is not None:
            _set_dropout(name, theirs, dropout)
        model, info = model_class.from_pretrained(
            name, config=theirs, output_loading_info=True, torch_dtype=torch.float32, **NO_CODE
        )
    remedy = f'save its {TOKENIZER_FILE} there, or install sentencepiece, which reads its spm.model'
    with _one_line(f'{name}: its tokenizer cannot be read as a fast one; {remedy}'):
        tokenizer = AutoTokenizer.from_pretrained(name, config=theirs, use_fast=True, **NO_CODE)
    if missing := [key for key in info['missing_keys'] if not key.startswith(huggingface.POOLER)]:
        raise InputError(
            f'{name} lacks {len(missing)} weights of its {type(model).__name__}: {missing[0]} is the first'
        )
    if not huggingface.is_text_encoder(model):
        raise InputError(f'{name}: {type(model).__name__} is no text encoder with an attention mask: name one')
    _assert_usable(tokenizer, name)
    if len(tokenizer) > theirs.vocab_size:
        raise InputError(f'{name} has {len(tokenizer)} tokens, its model only {theirs.vocab_size}')
    if huggingface.has_global_attention(model):  # which no token had in the records of earlier versions
        architecture['global_attention'] = 'first token'
    offset, obstacle = huggingface.find_position_offset(model), huggingface.explain_unsupported(theirs)
    if obstacle is None and offset not in (0, tokenizer.pad_token_id + 1):  # a token of that id would get no position
        obstacle = f'it takes id {offset - 1} for padding, its tokenizer {tokenizer.pad_token_id}'
    if implementation == Implementation.ours and obstacle is not None:
        raise InputError(f'{name} cannot be computed by our encoder: {obstacle}; set implementation to auto')
    weights = {key: value for key, value in model.state_dict().items() if not key.startswith(huggingface.POOLER)}
    config: ModelConfig | None = None
    encoder: nn.Module = huggingface.HuggingFaceEncoder(model)
    if obstacle is None and implementation != Implementation.huggingface:
        config, ours = huggingface.import_encoder(model)
        encoder = build(Encoder, config, ours, name)
    rows = max(getattr(theirs, 'max_position_embeddings', None) or 0, 0)  # XLNet's -1: no limit
    max_seq_len = int(rows or tokenizer.model_max_length) - offset
    digest = _hash_content(weights, architecture, tokenizer.backend_tokenizer.to_str())
    identity = _identify(name, digest, {}, is_ours=config is not None)
    tokenizer = _set_to_raw_text(tokenizer)
    return Pretrained(encoder, theirs.hidden_size, max_seq_len, tokenizer, identity, config)


def _identify(uri: str, digest: str, origin: Mapping[str, Any], is_ours: bool = True) -> EncoderIdentity:
    """The identity in records; ``origin`` holds the recorded facts of the pretraining, if any."""
    known = {name: origin.get(name) for name in ('run_name', 'samples', 'recipe_hash', 'training_seconds')}
    return EncoderIdentity(uri=uri, hash=digest, implementation='ours' if is_ours else 'huggingface', **known)


def _read_origin(checkpoint: EncoderFolder) -> dict[str, Any]:
    described, record = checkpoint.read_description(), checkpoint.read_record()
    if record is None:
        return described.get('checkpoint', {})
    return described | {'run_name': record.run_name, 'recipe_hash': record.provenance.recipe_hash}


def _set_dropout(name: str, config: PretrainedConfig, dropout: float) -> None:
    known = [key for key in config.to_dict() if key in _DROPOUTS]
    if not known:
        raise InputError(f'{name}: its config has none of the known dropout keys, so dropout cannot be {dropout}')
    for key in known:
        setattr(config, key, dropout)


def _set_to_raw_text(tokenizer: Any) -> PreTrainedTokenizerFast:
    """Let the tokenizer read special tokens' names as ordinary characters, and neither truncate nor pad."""
    read_special_tokens(tokenizer, as_text=True)
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def read_special_tokens(tokenizer: PreTrainedTokenizerFast, as_text: bool) -> None:
    """Let the tokenizer read "[MASK]" in a text as six characters, or else, Hugging Face's convention, as the token."""
    tokenizer.split_special_tokens = as_text
    tokenizer.backend_tokenizer.encode_special_tokens = as_text


def set_to_masked_text(tokenizer: PreTrainedTokenizerFast) -> None:
    """Let the tokenizer read special tokens' names in a text, and [MASK] as a word with the white space before it.

    A text without [MASK] keeps its ids. ByteLevel's own prefix space would also be added after each [MASK], reading
    "[MASK]." as "[MASK] ."; Metaspace's is added at the start of the text alone.
    """
    read_special_tokens(tokenizer, as_text=False)
    start = pre_tokenizers.Metaspace(replacement=' ', prepend_scheme='first', split=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [start, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    mask = AddedToken(str(tokenizer.mask_token), lstrip=True, normalized=False, special=True)
    tokenizer.add_special_tokens({'mask_token': mask})


def _hash_content(weights: Mapping[str, Tensor], architecture: dict[str, Any], tokenizer: str) -> str:
    """SHA-256 (hex) of config, tokenizer and the weights' names, shapes and fp32 values, independent of file layout."""
    digest = hashlib.sha256(json.dumps([architecture, tokenizer], sort_keys=True, default=str).encode())
    for name, value in sorted(weights.items()):
        digest.update(f'{name} {tuple(value.shape)}\n'.encode())
        digest.update(value.float().contiguous().numpy().tobytes())
    return digest.hexdigest()


@contextlib.contextmanager
def hide_bars() -> Iterator[None]:
    """Hide the bars of Transformers 5 for tensors that are read or written; a download keeps its own."""
    was_shown, downloads_were_shown = logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    logging.disable_progress_bar()  # and those of downloads
    if downloads_were_shown:
        enable_progress_bars()
    try:
        yield
    finally:
        if was_shown:
            logging.enable_progress_bar()


@contextlib.contextmanager
def _one_line(problem: str) -> Iterator[None]:
    """Turn the exceptions of Transformers into an InputError of one line, and silence its warnings of missing heads."""
    verbosity, hub_verbosity = logging.get_verbosity(), hub_logging.get_verbosity()
    logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    try:
        with hide_bars():
            yield
    except (InputError, MemoryError):
        raise
    except Exception as error:  # Transformers and the Hub raise many classes, the tokenizers library this one
        reason, *_ = first_line(error).split(', or contain one of')  # a list of all model types
        raise InputError(f'{problem}: {reason}') from None
    finally:
        logging.set_verbosity(verbosity)
        hub_logging.set_verbosity(hub_verbosity)
