"""Saving a fine-tuned model as a folder that ``maelm export`` and ``maelm rank`` read.

::

    model.safetensors   encoder.* and head.*
    finetuned.json      config (of the encoder), task, kind, text_columns, label_names, label_range, max_seq_len, span,
                        checkpoint (the pretrained encoder's identity), hashes (SHA-256 of the weights)
    tokenizer/
"""

import shutil
from dataclasses import asdict
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from maelm_composer.checkpoints.names import FINETUNED, WEIGHTS
from maelm_composer.checkpoints.pretrained import Pretrained
from maelm_composer.config import SpanConfig
from maelm_composer.data.manifest import TOKENIZER
from maelm_composer.data.tokenizer import write_tokenizer
from maelm_composer.files import hash_file, write_bytes, write_json, writing_folder
from maelm_composer.recipe import to_plain
from maelm_composer.tasks.catalogue import SPAN, Task


def save_model(
    folder: Path, weights: dict[str, Tensor], pretrained: Pretrained, task: Task, max_seq_len: int, span: SpanConfig
) -> None:
    """Write ``folder``, replacing an existing one. A failure leaves no partial folder, a kill a hidden one."""
    description = {
        'config': to_plain(pretrained.config),
        'task': task.name,
        'kind': task.kind,
        'text_columns': task.text_columns,
        'label_names': task.label_names,
        'label_range': task.label_range,
        'max_seq_len': max_seq_len,
        'span': asdict(span) if task.kind == SPAN else {},
        'checkpoint': asdict(pretrained.identity),
    }
    content = save({name: value.contiguous() for name, value in weights.items()}, {'format': 'pt'})
    with writing_folder(folder) as staged:
        write_bytes(staged / WEIGHTS, content)
        write_json(staged / FINETUNED, description | {'hashes': {WEIGHTS: hash_file(staged / WEIGHTS)}})
        write_tokenizer(pretrained.tokenizer, staged / TOKENIZER)
        shutil.rmtree(folder, ignore_errors=True)
