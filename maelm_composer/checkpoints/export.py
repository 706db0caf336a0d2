"""Exporting our checkpoints as folders that Hugging Face's Auto classes load, and uploading them (docs/export.md)."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import HfApi
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from maelm_composer.checkpoints import modeling_maelm
from maelm_composer.checkpoints.card import name_auto_class, write_card
from maelm_composer.checkpoints.find import EncoderFolder, find_encoder, list_checkpoints, take_part
from maelm_composer.checkpoints.huggingface import export_encoder
from maelm_composer.checkpoints.names import WEIGHTS
from maelm_composer.checkpoints.pretrained import (
    HEAD,
    Pretrained,
    hide_bars,
    load_ours,
    read_special_tokens,
    set_to_masked_text,
)
from maelm_composer.data.tokenizer import make_template, write_tokenizer
from maelm_composer.errors import InputError
from maelm_composer.files import apply_umask, assert_local, assert_writable, raising_os_errors, writing_folder
from maelm_composer.tasks.catalogue import MAX_SIMILARITY, REGRESSION, SPAN
from maelm_composer.tasks.examples import SPECIALS_OF_PAIR

MAIN = 'main'  # the revision of a Hub repository that is loaded if none is named
# A class name is the prefix of the model type and a suffix: RobertaModel, MPNetForQuestionAnswering.
_PREFIXES = {'roberta': 'Roberta', 'mpnet': 'MPNet', 'maelm': 'Maelm'}
_ENCODER, _MASKED_LM = 'Model', 'ForMaskedLM'
_CLASSIFIER, _SPAN = 'ForSequenceClassification', 'ForQuestionAnswering'
_HEADS = {  # our module of a head -> theirs
    _ENCODER: {},
    _MASKED_LM: {'dense': 'lm_head.dense', 'norm': 'lm_head.layer_norm'},
    _CLASSIFIER: {'dense': 'classifier.dense', 'output': 'classifier.out_proj'},
    _SPAN: {'output': 'qa_outputs'},
}


def export(checkpoint: str, folder: str, all_checkpoints: bool = False) -> dict[str, Path]:
    """Write ``folder`` with config, safetensors, tokenizer and a model card. A failure leaves no partial folder.

    Args:
        checkpoint: a checkpoint of ours, as in :func:`find_encoder`. MAE-LM's decoder and head are not exported;
            plain MLM's head is.
        all_checkpoints: write a folder ``folder``/<name> for each checkpoint of the run.

    Returns:
        The exported folder of each revision of a Hub repository: the newest one is "main", and with
        ``all_checkpoints`` each checkpoint is a revision of its name, too.

    Raises:
        InputError: the checkpoint cannot be read or is not one of ours, or ``folder`` is not empty.
    """
    assert_local(folder, 'the exported folder')
    target = Path(os.path.realpath(folder))  # a link to an empty folder cannot be replaced
    if target == Path.cwd():  # which a rename would remove
        raise InputError('the exported folder is the working directory: name another folder')
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f'{folder} exists and is not empty: name another folder')
    if target.is_mount():
        raise InputError(f'{folder} is a mount point, which a finished export cannot replace: name a folder in it')
    assert_writable(target.parent)
    found = find_encoder(checkpoint)
    if found is None:
        is_there = Path(checkpoint).exists()
        raise InputError(
            f'{checkpoint!r} {"is not an encoder of ours" if is_there else "does not exist"}: '
            'name a run folder, a checkpoint or a fine-tuned model'
        )
    parts = {'': found}
    if all_checkpoints:
        if found.run is None:
            raise InputError(f'{checkpoint} is a fine-tuned model, which has no other checkpoints: name a run folder')
        parts = {Path(part.uri).name: part for part in list_checkpoints(found.run)}
        if not parts:
            raise InputError(f'{found.run} holds no whole checkpoint: restore `latest`, which names the newest one')
    with writing_folder(target) as staged:
        for name, part in parts.items():
            _write_folder(part, staged / name)
    revisions = {name or MAIN: target / name for name in parts}
    return revisions | {MAIN: list(revisions.values())[-1]}


def push(revisions: Mapping[str, Path], repo: str) -> str:
    """Upload each folder to the branch of its name, on the Hugging Face Hub or the server that ``HF_ENDPOINT`` names.

    A repository that does not exist is created as a private one, since the card's licence is yet to be filled in.

    Args:
        revisions: the result of :func:`export`.
        repo: ``user/name`` or ``organisation/name``.

    Returns:
        The address of the repository.

    Raises:
        InputError: the server cannot be reached or refuses. The exported folders and the uploaded files stay.
    """
    api, revision = HfApi(), MAIN
    try:
        address = str(api.create_repo(repo, private=True, exist_ok=True))
        for revision, folder in revisions.items():
            if revision != MAIN:
                api.create_branch(repo, branch=revision, exist_ok=True)
            api.upload_folder(repo_id=repo, folder_path=folder, revision=revision)
    except Exception as error:  # the classes differ between releases of huggingface_hub
        reason = ' '.join(str(error).split()) or type(error).__name__
        raise InputError(
            f'{revisions[revision]} is exported, but not pushed to {repo} at {api.endpoint}: {reason}. Log in with '
            f'`hf auth login` or HF_TOKEN, then upload it with `hf upload {repo} {revisions[revision]} . --revision '
            f'{revision} --private`{", and the other checkpoints likewise" if len(revisions) > 1 else ""}'
        ) from None
    return address


def _write_folder(found: EncoderFolder, folder: Path) -> None:
    pretrained, weights = load_ours(found)
    description = found.read_description() if found.run is None else {}
    model = build_stock_model(pretrained, description, take_part(weights, HEAD))
    tokenizer = pretrained.tokenizer
    if found.run is not None:  # as `maelm fill`, so that the encoders of all variants read a text alike
        set_to_masked_text(tokenizer)
    else:
        read_special_tokens(tokenizer, as_text=False)
    tokenizer.model_max_length = description.get('max_seq_len', pretrained.max_seq_len)  # rows as the model was scored
    if tokenizer.num_special_tokens_to_add(pair=True) != SPECIALS_OF_PAIR:  # BERT's has one [SEP] within a pair
        tokenizer = _set_to_our_rows(tokenizer)
    with hide_bars(), raising_os_errors(folder / WEIGHTS):
        model.save_pretrained(folder, safe_serialization=True, max_shard_size='1TB')  # one file
    write_tokenizer(tokenizer, folder)
    apply_umask(folder / WEIGHTS)
    if model.config.model_type == 'maelm':
        source = Path(modeling_maelm.__file__)
        shutil.copyfile(source, folder / source.name)
    card = write_card(found, pretrained, description, type(model).__name__)
    (folder / 'README.md').write_text(card, encoding='utf-8')


def _set_to_our_rows(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Let ``tokenizer`` build the rows of training; Transformers 5 would make BERT's own class build BERT's again."""
    cls, sep = (tokenizer.cls_token, tokenizer.cls_token_id), (tokenizer.sep_token, tokenizer.sep_token_id)
    tokenizer.backend_tokenizer.post_processor = make_template(*cls, *sep)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        model_max_length=tokenizer.model_max_length,
        model_input_names=['input_ids', 'attention_mask'],
        padding_side=tokenizer.padding_side,
        truncation_side=tokenizer.truncation_side,
        # Without this key Transformers sets the pre-tokenizer's own to False.
        add_prefix_space=getattr(tokenizer, 'add_prefix_space', False),
        **tokenizer.special_tokens_map,
    )


def build_stock_model(pretrained: Pretrained, description: Mapping[str, Any], head: Mapping[str, Tensor]) -> Any:
    """The Hugging Face model with the weights of ``pretrained``, and of ``head`` if that reads the encoder itself.

    Args:
        description: the content of finetuned.json; empty for a pretrained encoder.
        head: the weights of the checkpoint's head by name.
    """
    assert pretrained.config is not None
    tokenizer = pretrained.tokenizer
    config, weights = export_encoder(pretrained.config, pretrained.encoder.state_dict(), int(tokenizer.pad_token_id))
    config.bos_token_id, config.eos_token_id = tokenizer.cls_token_id, tokenizer.sep_token_id
    kind, is_stock = description.get('kind'), config.model_type != 'maelm'
    if description:
        suffix = _SPAN if kind == SPAN else _CLASSIFIER
        config.finetuning_task = description['task']
        if names := description['label_names']:
            config.id2label = dict(enumerate(names))
            config.label2id = {name: i for i, name in enumerate(names)}
            config.problem_type = 'single_label_classification'
        elif kind == REGRESSION:
            config.num_labels, config.problem_type = 1, 'regression'
    else:  # MAE-LM's head reads the decoder, which no class of Transformers has
        suffix = _ENCODER if pretrained.config.decoder is not None else _MASKED_LM
    model_class = getattr(transformers if is_stock else modeling_maelm, _PREFIXES[config.model_type] + suffix)
    prefix = '' if suffix == _ENCODER else f'{model_class.base_model_prefix}.'
    weights = {f'{prefix}{name}': value for name, value in weights.items()}
    for ours, theirs in _HEADS[suffix].items():
        weights |= {f'{theirs}.{part}': head[f'{ours}.{part}'] for part in ('weight', 'bias')}
    if suffix == _MASKED_LM:
        weights['lm_head.decoder.weight'] = weights[f'{prefix}embeddings.word_embeddings.weight']
        weights |= dict.fromkeys(('lm_head.bias', 'lm_head.decoder.bias'), head['bias'])
    if kind == REGRESSION:  # the head was trained on labels in [0, 1]; the export predicts the data's range
        low, high = description.get('label_range', (0, MAX_SIMILARITY))  # revisions without the key had STS-B alone
        for part, least in (('weight', 0), ('bias', low)):
            name = f'classifier.out_proj.{part}'
            weights[name] = weights[name] * (high - low) + least
    if not is_stock:
        module = Path(modeling_maelm.__file__).stem
        config.auto_map = {name_auto_class(s): f'{module}.Maelm{s}' for s in _HEADS}
        config.auto_map['AutoConfig'] = f'{module}.MaelmConfig'
        # Without this name, pipeline() of Transformers 4.51 loads no tokenizer.
        config.tokenizer_class = 'PreTrainedTokenizerFast'
    with torch.device('meta'):  # no initial weights: the checkpoint has all of them
        model = model_class(config, add_pooling_layer=False) if suffix == _ENCODER else model_class(config)
    model.load_state_dict(weights, assign=True)
    model.tie_weights()  # assigned weights are parameters of their own
    return model
