"""Exporting our checkpoints as folders that Hugging Face's Auto classes load (docs/export.md)."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from torch import Tensor
from transformers import PretrainedConfig

from maelm_composer.checkpoints import modeling_maelm
from maelm_composer.checkpoints.find import EncoderFolder, find_encoder, read_recipe, read_weights
from maelm_composer.checkpoints.huggingface import export_encoder
from maelm_composer.checkpoints.names import FINETUNED, PROGRESS, WEIGHTS
from maelm_composer.checkpoints.pretrained import Pretrained, load_pretrained
from maelm_composer.data.storage import read_file
from maelm_composer.data.tokenizer import write_tokenizer
from maelm_composer.errors import InputError
from maelm_composer.files import apply_umask
from maelm_composer.recipe import to_plain
from maelm_composer.records import FinetuningRecord, Pretraining, PretrainingRecord, parse_finetuning
from maelm_composer.tasks.catalogue import MAX_SIMILARITY, REGRESSION, SPAN

# A class name is the prefix of the model type and a suffix: RobertaModel, MPNetForQuestionAnswering.
_PREFIXES = {'roberta': 'Roberta', 'mpnet': 'MPNet', 'maelm': 'Maelm'}
_ENCODER, _CLASSIFIER, _SPAN = 'Model', 'ForSequenceClassification', 'ForQuestionAnswering'
_FIRST_TOKEN_HEAD = {'dense': 'classifier.dense', 'output': 'classifier.out_proj'}
_SPAN_HEAD = {'output': 'qa_outputs'}


def export(checkpoint: str, folder: str) -> None:
    """Write ``folder`` with config, safetensors, tokenizer and a model card. A failure leaves no partial folder.

    Args:
        checkpoint: a checkpoint of ours, as in :func:`load_pretrained`; its decoder and its language-modelling head
            are not exported.

    Raises:
        InputError: the checkpoint cannot be read or is not one of ours, or ``folder`` is not empty.
    """
    target = Path(os.path.abspath(folder))
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f'{folder} exists and is not empty: name another folder')
    found = find_encoder(checkpoint)
    if found is None:
        raise InputError(
            f'{checkpoint} is not an encoder of ours: name a run folder, a checkpoint or a fine-tuned model'
        )
    pretrained = load_pretrained(checkpoint)
    description = found.read_json(FINETUNED) if found.run is None else {}
    head = read_weights(found, 'head.')[0] if description else {}
    model = build_stock_model(pretrained, description, head)
    tokenizer = pretrained.tokenizer
    tokenizer.split_special_tokens = False  # Hugging Face's convention: "[MASK]" in a text is the mask token
    tokenizer.backend_tokenizer.encode_special_tokens = False

    target.parent.mkdir(parents=True, exist_ok=True)
    staged = target.with_name(f'.{target.name}.{os.getpid()}')
    try:
        model.save_pretrained(staged, safe_serialization=True)
        write_tokenizer(tokenizer, staged)
        apply_umask(staged / WEIGHTS)
        if model.config.model_type == 'maelm':
            source = Path(modeling_maelm.__file__)
            shutil.copyfile(source, staged / source.name)
        card = write_card(found, pretrained, description, type(model).__name__)
        (staged / 'README.md').write_text(card, encoding='utf-8')
        staged.rename(target)  # also replaces an empty folder
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def build_stock_model(pretrained: Pretrained, description: Mapping[str, Any], head: Mapping[str, Tensor]) -> Any:
    """The Hugging Face model with the weights of ``pretrained``, and of ``head`` if the model is fine-tuned.

    Args:
        description: the content of finetuned.json; empty for a pretrained encoder.
        head: the weights of the task's head by name; empty for a pretrained encoder.
    """
    assert pretrained.config is not None
    tokenizer = pretrained.tokenizer
    config, weights = export_encoder(pretrained.config, pretrained.encoder.state_dict(), int(tokenizer.pad_token_id))
    config.bos_token_id, config.eos_token_id = tokenizer.cls_token_id, tokenizer.sep_token_id
    kind, is_stock = description.get('kind'), config.model_type != 'maelm'
    suffix = _SPAN if kind == SPAN else _CLASSIFIER if description else _ENCODER
    model_class = getattr(transformers if is_stock else modeling_maelm, _PREFIXES[config.model_type] + suffix)
    if description:
        _describe_labels(config, description)
        weights = {f'{model_class.base_model_prefix}.{name}': value for name, value in weights.items()}
        for ours, theirs in (_SPAN_HEAD if kind == SPAN else _FIRST_TOKEN_HEAD).items():
            weights |= {f'{theirs}.{part}': head[f'{ours}.{part}'] for part in ('weight', 'bias')}
        if kind == REGRESSION:  # the head was trained on labels in [0, 1]; the export predicts the data's 0 to 5
            for part in ('weight', 'bias'):
                weights[f'classifier.out_proj.{part}'] = weights[f'classifier.out_proj.{part}'] * MAX_SIMILARITY
    if not is_stock:
        module = Path(modeling_maelm.__file__).stem
        config.auto_map = {_name_auto(s): f'{module}.Maelm{s}' for s in (_ENCODER, _CLASSIFIER, _SPAN)}
        config.auto_map['AutoConfig'] = f'{module}.MaelmConfig'
    with torch.device('meta'):  # no initial weights: the checkpoint has all of them
        model = model_class(config) if description else model_class(config, add_pooling_layer=False)
    model.load_state_dict(weights, assign=True)
    return model


def _name_auto(class_name: str) -> str:
    """The Auto class that loads a model class, or a suffix of one."""
    return 'AutoModel' + (class_name[class_name.index('For') :] if 'For' in class_name else '')


def _describe_labels(config: PretrainedConfig, description: Mapping[str, Any]) -> None:
    config.finetuning_task = description['task']
    if names := description['label_names']:
        config.id2label = dict(enumerate(names))
        config.label2id = {name: i for i, name in enumerate(names)}
        config.problem_type = 'single_label_classification'
    elif description['kind'] == REGRESSION:
        config.num_labels = 1
        config.problem_type = 'regression'


def write_card(found: EncoderFolder, pretrained: Pretrained, description: Mapping[str, Any], class_name: str) -> str:
    """The text of README.md: how to load the model, and its recipe, data and results as far as they are recorded."""
    is_stock = not class_name.startswith('Maelm')
    task = description.get('task')
    auto = _name_auto(class_name)
    trust = '' if is_stock else ', trust_remote_code=True'
    identity, config = pretrained.identity, pretrained.config
    assert config is not None
    record = found.read_record()
    facts = {
        'class': f'`{class_name}`, ' + ('of Transformers itself' if is_stock else '`modeling_maelm.py` in this folder'),
        'encoder': f'{config.num_hidden_layers} layers, width {config.hidden_size}, {config.max_seq_len} positions, '
        f'{config.vocab_size:,} tokens',
        'task': task,
        'pretraining run': identity.run_name,
        'pretraining rows': identity.samples,
        'recipe hash': identity.recipe_hash,
        'data hash': record.data_hash if record is not None else None,
        'weights (SHA-256 of the checkpoint)': identity.hash,
    }
    lines = [
        '---',
        'license: unknown  # set it: it depends on the text that the model was trained on',
        'library_name: transformers',
        'tags: [mae-lm, masked-language-modeling]',
        '---',
        '',
        f'# {identity.run_name or Path(found.uri).name}' + (f', fine-tuned on {task}' if task else ''),
        '',
        'Exported by maelm-composer, which reproduces "Representation Deficiency in Masked Language Modeling" '
        '(arXiv:2302.02060).',
        '',
        '```python',
        f'from transformers import {auto}, AutoTokenizer',
        '',
        f'model = {auto}.from_pretrained(FOLDER{trust + (", add_pooling_layer=False" if task is None else "")})',
        'tokenizer = AutoTokenizer.from_pretrained(FOLDER)',
        '```',
        '',
        '| | |',
        '|---|---|',
        *(f'| {name} | {value} |' for name, value in facts.items() if value is not None),
        '',
        *_describe_results(found, record),
    ]
    recipe = {'model': description.get('config')}
    if found.run is not None:
        recipe = to_plain(read_recipe(found))
        for private in ('run_name', 'save_folder', 'init_from', 'data'):  # local paths and buckets
            recipe.pop(private)
    return '\n'.join([*lines, '## Recipe', '', '```yaml', yaml.safe_dump(recipe, sort_keys=False).rstrip(), '```', ''])


def _describe_results(found: EncoderFolder, record: Pretraining | None) -> list[str]:
    """Lines with the results of a run's last checkpoint or of a fine-tuned model; none if there is no such record."""
    results: dict[str, float] = {}
    if found.run is None:
        uri = f'{found.uri}.json'
        finetuned = None if (content := read_file(uri)) is None else parse_finetuning(content, uri)
        results = finetuned.metrics if isinstance(finetuned, FinetuningRecord) else {}
    elif isinstance(record, PretrainingRecord) and record.samples == found.read_json(PROGRESS).get('samples'):
        results = {'validation loss (nats)': record.eval_loss, 'accuracy at masked positions': record.eval_accuracy}
    if not results:
        return []
    rows = [f'| {name} | {value:.4f} |' for name, value in results.items()]
    return ['## Results', '', '| metric | value |', '|---|---|', *rows, '']
