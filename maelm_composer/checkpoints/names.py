"""Names of the files in a pretraining run's folder, in one of its checkpoints and in a fine-tuned model's folder.

::

    recipe.yaml  record.json  metrics.csv  manifest.json and tokenizer/ (of the shards: data/manifest.py)
    latest                      -> the newest whole checkpoint (a link; in an object store a text object)
    samples-000000051200/       model.safetensors  metrics.csv  state.pt (or state/, one shard a rank)  and
                                progress.json: samples, batch, seconds, SHA-256 of the other files
    ranks/                      records of effective ranks (analysis/ranks.py)
    .unsent/                    checkpoints of the working copy that are not yet in the object store
    .fetched/                   a checkpoint of the object store while a run loads it
"""

RECIPE, RECORD, METRICS, LATEST = 'recipe.yaml', 'record.json', 'metrics.csv', 'latest'
CHECKPOINT_PREFIX, UNSENT, FETCHED = 'samples-', '.unsent', '.fetched'
WEIGHTS, PROGRESS, STATE, SHARDED_STATE = 'model.safetensors', 'progress.json', 'state.pt', 'state'
FINETUNED = 'finetuned.json'


def name_checkpoint(samples: int) -> str:
    """The folder of the checkpoint after ``samples`` training rows; names sort as numbers do."""
    return f'{CHECKPOINT_PREFIX}{samples:012d}'
