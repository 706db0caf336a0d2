"""The model card of an exported folder: how to load the model, and its recipe, text and results."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from maelm_composer.checkpoints.find import EncoderFolder, read_recipe
from maelm_composer.checkpoints.pretrained import HUB_NAME, Pretrained
from maelm_composer.config import PretrainingConfig
from maelm_composer.data.manifest import Manifest, find_manifest
from maelm_composer.data.storage import is_s3, read_file
from maelm_composer.recipe import to_plain
from maelm_composer.records import FinetuningRecord, Pretraining, PretrainingRecord, parse_finetuning

MOST_FILES = 8  # of a longer list, only the first and the last file are named
CARD = """\
---
license: unknown  # set it: it depends on the text that the model was trained on
library_name: transformers
{metadata}---

# {title}

Exported by maelm-composer, which reproduces "Representation Deficiency in Masked Language Modeling" (arXiv:2302.02060).

```python
from transformers import {auto}, AutoTokenizer

model = {auto}.from_pretrained(FOLDER{options})
tokenizer = AutoTokenizer.from_pretrained(FOLDER{trust})
```

| | |
|---|---|
{facts}

{limits}{results}{text}## Recipe

```yaml
{recipe}```
"""


WITHOUT_HEAD = """\
The decoder that predicts masked tokens is no part of this folder: `AutoModelForMaskedLM` and `pipeline('fill-mask')`
would give the encoder a random head.

"""


def name_auto_class(class_name: str) -> str:
    """The Auto class that loads a model class, or a suffix of one."""
    return 'AutoModel' + (class_name[class_name.index('For') :] if 'For' in class_name else '')


def write_card(found: EncoderFolder, pretrained: Pretrained, description: Mapping[str, Any], class_name: str) -> str:
    """The text of README.md: how to load the model, and its recipe, data and results as far as they are recorded."""
    is_stock = not class_name.startswith('Maelm')
    trust = '' if is_stock else ', trust_remote_code=True'
    task = description.get('task')
    auto = name_auto_class(class_name)
    identity, config = pretrained.identity, pretrained.config
    assert config is not None
    run = None if found.run is None else read_recipe(found)
    record, finetuned = found.read_record(), _read_finetuning(found)
    manifest = _find_manifest(found.run, run, record)
    facts = {
        'class': f'`{class_name}`, ' + ('of Transformers itself' if is_stock else '`modeling_maelm.py` in this folder'),
        'encoder': f'{config.num_hidden_layers} layers, width {config.hidden_size}, {config.max_seq_len} positions, '
        f'{config.vocab_size:,} tokens',
        'task': task,
        'row length': description.get('max_seq_len'),
        **_describe_training(finetuned),
        'pretraining run': identity.run_name,
        'pretraining rows': identity.samples,
        'recipe hash': identity.recipe_hash,
        'data hash': record.data_hash if record is not None else None,
        'weights (SHA-256 of the checkpoint)': identity.hash,
    }
    rows = [f'| {name} | {value} |' for name, value in facts.items() if value is not None]
    sources = [] if manifest is None else manifest.sources
    datasets = [source['dataset'] for source in sources if _is_on_hub(source.get('dataset') or '')]
    metadata = [f'datasets: {json.dumps(datasets)}'] if datasets else []
    origin = description.get('checkpoint', {})
    base_model = '' if origin.get('run_name') else origin.get('uri') or ''  # a run of ours is not on the Hub
    metadata += [f'base_model: {base_model}'] if _is_on_hub(base_model) else []
    metadata += ['pipeline_tag: fill-mask', 'mask_token: "[MASK]"'] if auto == 'AutoModelForMaskedLM' else []
    recipe = {'model': description.get('config')}
    if run is not None:
        recipe = to_plain(run)
        has_decoder = recipe['model']['decoder'] is not None
        metadata.append(f'tags: [{"mae-lm, " if has_decoder else ""}masked-language-modeling]')
        for private in ('run_name', 'save_folder', 'init_from', 'data'):  # local paths and buckets
            recipe.pop(private)
    return CARD.format(
        metadata=''.join(f'{line}\n' for line in metadata),
        title=(identity.run_name or Path(found.uri).name) + (f', fine-tuned on {task}' if task else ''),
        auto=auto,
        trust=trust,
        options=trust + (', add_pooling_layer=False' if auto == 'AutoModel' else ''),
        facts='\n'.join(rows),
        limits=WITHOUT_HEAD if found.run is not None and auto == 'AutoModel' else '',
        results=_describe_results(found, record, finetuned),
        text=_describe_text(manifest),
        recipe=yaml.safe_dump(recipe, sort_keys=False),
    )


def _read_finetuning(found: EncoderFolder) -> FinetuningRecord | None:
    """The record beside a fine-tuned model; None for a pretraining run or a model without its record."""
    uri = f'{found.uri}.json'
    content = read_file(uri) if found.run is None else None
    record = None if content is None else parse_finetuning(content, uri)
    return record if isinstance(record, FinetuningRecord) else None


def _describe_training(record: FinetuningRecord | None) -> dict[str, Any]:
    if record is None:
        return {}
    point, protocol = record.point, record.protocol
    source = protocol.get('declaration', {}).get('dataset', protocol.get('source'))
    source = source if source is None or _is_on_hub(source) else Path(source).name  # a local folder is private
    limit = protocol.get('max_dev_examples')
    return {
        'learning rate': f'{point.learning_rate:g}',
        'batch size': point.batch_size,
        'epochs': point.max_epochs,
        'warm-up': f'{point.warmup_proportion:g} of the steps',
        'fine-tuning seed': record.seed,
        'precision': protocol.get('precision'),
        'fine-tuning data': f'{record.train_examples:,} training examples from {source}',
        'fine-tuning data hash': record.data_hash,
        'evaluated on': None if limit is None else f'samples of {limit:,} development examples',
    }


def _describe_results(found: EncoderFolder, record: Pretraining | None, finetuned: FinetuningRecord | None) -> str:
    """The results of a run's last checkpoint or of a fine-tuned model; '' if they are not recorded."""
    results: dict[str, float] = {}
    if finetuned is not None:
        results = finetuned.metrics
    elif isinstance(record, PretrainingRecord) and record.samples == found.read_description().get('samples'):
        results = {'validation loss (nats)': record.eval_loss, 'accuracy at masked positions': record.eval_accuracy}
    rows = ''.join(f'| {name} | {value:.4f} |\n' for name, value in results.items())
    return f'## Results\n\n| metric | value |\n|---|---|\n{rows}\n' if rows else ''


def _find_manifest(folder: str | None, run: PretrainingConfig | None, record: Pretraining | None) -> Manifest | None:
    """The manifest of the run's shards: in the run's folder, or beside local shards if those are still the run's."""
    if folder is None or run is None or record is None:
        return None
    for place in [folder] if is_s3(run.data.remote) else [folder, run.data.remote]:
        manifest = find_manifest(place)
        if manifest is not None and manifest.content_hash == record.data_hash:
            return manifest
    return None


def _describe_text(manifest: Manifest | None) -> str:
    """The sources of the text, without local paths, and its size; '' if they are not known."""
    if manifest is None:
        return ''
    train = manifest.splits['train']
    sources = ''.join(f'- {_describe_source(source)}\n' for source in manifest.sources)
    return f'## Text\n\n{sources}\nFor training: {train.documents:,} documents, {train.tokens:,} tokens.\n\n'


def _is_on_hub(dataset: str) -> bool:
    """Whether ``dataset`` is a name of the Hub and no local folder, whose name is private."""
    return HUB_NAME.fullmatch(dataset) is not None and not Path(dataset).exists()


def _describe_source(source: Mapping[str, Any]) -> str:
    parts: list[str | None]
    match source['kind']:
        case 'files':
            names = [f'`{name}`' for name, _ in source['files']]
            parts = [', '.join(names) if len(names) <= MOST_FILES else f'{len(names)} files, {names[0]} to {names[-1]}']
        case 'huggingface':
            name = source['dataset']
            shown = f'[{name}](https://huggingface.co/datasets/{name})' if _is_on_hub(name) else Path(name).name
            parts = [f'data set {shown}', source['config_name'], f'split {source["split"]}']
        case _:
            parts = ['English documentation installed on the machine that made the shards']
    parts.append(f'the first {most:,} documents' if (most := source['max_documents']) else None)
    parts.append(source['note'])
    return '; '.join(part for part in parts if part)
