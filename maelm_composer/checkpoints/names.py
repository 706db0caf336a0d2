"""Names of the files in a pretraining run's folder, in one of its checkpoints and in a fine-tuned model's folder.

::

    recipe.yaml  record.json  metrics.csv  manifest.json (of the shards)  tokenizer/
    latest                      -> the newest whole checkpoint (a link; in an object store a text object)
    samples-000051200/          model.safetensors  metrics.csv  state.pt (or state/, one shard a rank)  and
                                progress.json: samples, batch, seconds, SHA-256 of the other files
    .unsent/                    checkpoints of the working copy that are not yet in the object store
"""

from maelm_composer.data.manifest import FILE_NAME
from maelm_composer.data.manifest import TOKENIZER as TOKENIZER
from maelm_composer.data.manifest import TOKENIZER_FILE as TOKENIZER_FILE

RECIPE, RECORD, METRICS, LATEST = 'recipe.yaml', 'record.json', 'metrics.csv', 'latest'
MANIFEST = FILE_NAME  # of the run's shards
CHECKPOINT_PREFIX, UNSENT = 'samples-', '.unsent'
WEIGHTS, PROGRESS, STATE, SHARDED_STATE = 'model.safetensors', 'progress.json', 'state.pt', 'state'
FINETUNED, HUGGING_FACE_CONFIG = 'finetuned.json', 'config.json'


def name_checkpoint(samples: int) -> str:
    """The folder of the checkpoint after ``samples`` training rows; names sort as numbers do."""
    return f'{CHECKPOINT_PREFIX}{samples:012d}'
