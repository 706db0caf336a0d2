"""Whole records as JSON holds them, of which a test changes what it is about."""

from maelm_composer.records import CONTENT_HASH

PROVENANCE = {
    'maelm_composer': '0.0.test',
    'git_revision': 'abc123',
    'python': '3.11.9',
    'packages': {'torch': '2.7.0', 'numpy': '2.1.3'},
    'platform': 'Linux',
    'cpu': 'Test <CPU>',
    'cpu_count': 2,
    'recipe_hash': 'r' * 64,
}


def make_running(run_name: str) -> dict:
    return {
        'status': 'running',
        'run_name': run_name,
        'provenance': PROVENANCE | {'recipe_hash': f'recipe-of-{run_name}'},
        'identity': {'seed': 17, CONTENT_HASH: 'pretraining-data', 'training.precision': 'fp32'},
        'world_size': 1,
        'device': 'CPU, 2 threads',
        'attention': {'encoder': 'sdpa'},
        'tokenizer_hash': 'tokenizer',
        'flops': 4_000_000_000_000_000,
    }


def make_failed(run_name: str, seed: int, ending: str) -> dict:
    record = make_running(run_name)
    return record | {'status': 'failed', 'ending': ending, 'identity': record['identity'] | {'seed': seed}}


def make_pretraining(run_name: str, **changes: object) -> dict:
    return make_running(run_name) | {
        'status': 'finished',
        'samples': 400,
        'batches': 25,
        'tokens': 400 * 64,
        'training_seconds': 7200.0,
        'device_hours': 2.0,
        'tokens_per_second': 3.6,
        'eval_loss': 3.0,
        'eval_perplexity': 20.1,
        'eval_accuracy': 0.4,
        **changes,
    }


def make_identity(run_name: str, samples: int, **changes: object) -> dict:
    return {
        'uri': f'/a/machine/{run_name}/samples-{samples}',
        'hash': f'weights-{run_name}-{samples}',
        'run_name': run_name,
        'samples': samples,
        'recipe_hash': f'recipe-of-{run_name}',
        'training_seconds': 7200.0,
        'implementation': 'ours',
        **changes,
    }


def make_finetuning(task: str, run_name: str = 'run', samples: int = 400, seed: int = 1, **changes: object) -> dict:
    """Of a failed run where ``changes`` name an error."""
    record = {
        'kind': 'finetuning',
        'key': f'{task}-{run_name}-{samples}-{seed}',
        'status': 'failed' if 'error' in changes else 'finished',
        'error': None,
        'task': task,
        'seed': seed,
        'point': {'learning_rate': 3e-5, 'batch_size': 32, 'max_epochs': 3, 'warmup_proportion': 0.06},
        'protocol': {'source': 'demo' if task.startswith('demo') else 'files', 'max_train_examples': None},
        'checkpoint': make_identity(run_name, samples),
        'data_hash': f'data-of-{task}',
        'provenance': PROVENANCE,
    }
    if 'error' in changes:
        return record | changes
    return {
        **record,
        'metrics': {},
        'score': 0.5,
        'baseline': 0.4,
        'evaluations': [{'step': 9, 'score': 0.5}],
        'best_step': 9,
        'effective_rank': None,
        'rank_curve': [],
        'steps': 9,
        'train_loss': 0.3,
        'train_examples': 96,
        'answers_not_in_context': 0,
        'padded_share': 0.01,
        'examples_per_second': 50.0,
        'training_seconds': 10.0,
        'evaluation_seconds': 1.0,
        'device_hours': 0.01,
        'device': 'CPU, 2 threads',
        **changes,
    }


def make_rank(run_name: str, samples: int = 400, **changes: object) -> dict:
    return {
        'kind': 'rank',
        'key': f'rank-{run_name}',
        'checkpoint': make_identity(run_name, samples),
        'data': {'kind': 'shards', 'remote': '/a/machine/data', 'split': 'validation', 'hash': 'validation-rows'},
        'tokens': 1000,
        'mask_tokens': 150,
        'max_tokens': 1000,
        'mlm_probability': 0.15,
        'threshold': 0.9,
        'centered': False,
        'precision': 'fp32',
        'seed': 17,
        'layers': [make_layer(0)],
        'hidden_size': 64,
        'device': 'CPU, 2 threads',
        'seconds': 3.0,
        'provenance': PROVENANCE | {'recipe_hash': 'rank-options'},
        **changes,
    }


def make_layer(layer: int, lead: int = 0) -> dict:
    return {
        'layer': layer,
        'rank_real': 50 + lead - 2 * layer,
        'rank_with_masks': 60 + lead - layer,
        'rank_real_with_masks': 58 + lead,
        'rank_masks': 5 + 10 * layer,
        'mask_outside_share': 0.1 + 0.1 * layer,
        'real_outside_share': 0.09,
        'principal_angles_degrees': [1.0, 10.0, 30.0, 50.0, 89.0],
        'rank_one_residual': 0.9 - 0.1 * layer,
    }
