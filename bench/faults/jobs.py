"""The jobs of the campaign: real ``maelm`` commands on real text, so small that each takes a second or two."""

import contextlib
import hashlib
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import yaml

from maelm_composer.training.run_record import read_metrics
from tests.tiny import make_rows, write_rows

ROOT = Path(__file__).resolve().parents[2]
BUCKET = 'faults'
INPUTS = {'corpus', 'tasks', 'results'}  # folders that no command of ours has made
MODEL = {'num_hidden_layers': 1, 'hidden_size': 32, 'num_attention_heads': 2, 'intermediate_size': 64}
CORPUS = {
    'remote': 'shards',
    'max_seq_len': 32,
    'validation_fraction': 0.2,
    'documents_per_task': 40,
    'sources': [{'kind': 'files', 'paths': ['corpus/*.txt']}],
    'tokenizer': {'vocab_size': 512},
}
PRETRAINING = {
    'run_name': 'model',
    'data': {'remote': 'shards', 'local': 'cache', 'num_workers': 1},
    'model': MODEL | {'vocab_size': 512, 'max_seq_len': 32, 'hidden_dropout_prob': 0.1, 'decoder': MODEL},
    'optimizer': {'learning_rate': 2e-3, 'warmup_samples': 64},
    'training': {
        'max_samples': 1280,
        'global_train_batch_size': 16,
        'precision': 'fp32',
        'compile': False,
        'eval_interval_samples': 320,
        'eval_rows': 32,
        'checkpoint_interval_samples': 320,
    },
}
FINETUNING = {
    'checkpoint': 'runs/model',
    'task': 'rte',
    'precision': 'fp32',
    'learning_rate': 3e-3,
    'batch_size': 16,
    'max_epochs': 2,
    'save_folder': 'finetuned',
    'saves_model': True,
    'data': {'source': 'files', 'folder': 'tasks'},
}

SWEEP = {key: value for key, value in FINETUNING.items() if key not in ('task', 'saves_model')} | {
    'save_folder': 'swept',
    'sweep': {'tasks': ['rte'], 'seeds': [1, 2], 'search': {'glue_small': {'learning_rate': [3e-3, 1e-3]}}},
}


# Keys of yamls/suite/, after those of the demo: two models, a fine-tuning and a rank record of each.
SUITE = {
    'data': ['corpus.yaml'],
    'pretraining': [
        'pretraining.yaml',
        'training.max_samples=320',
        'training.eval_interval_samples=160',
        'training.checkpoint_interval_samples=160',
        'data.num_workers=0',
    ],
    'finetuning': [
        'precision=fp32',
        'data.max_train_examples=32',
        'sweep.seeds=[1]',
        'sweep.search.glue_small={learning_rate: [1e-3], batch_size: [16], max_epochs: [1], warmup_proportion: [0.06]}',
    ],
    'rank_tokens': 500,
}


@dataclass(frozen=True)
class Job:
    """A command and the files that it makes, which are the same whatever happens to it."""

    name: str
    arguments: tuple[str, ...]
    needs: tuple[str, ...]  # files and folders that are there before
    makes: tuple[str, ...]  # globs of the files that are compared
    is_remote: bool = False  # reads from and writes to a bucket
    launcher: tuple[str, ...] = ()  # program that starts the command; (): a fork of this package
    has_children: bool = False  # loader workers, ranks or processes of Ray, which share memory
    weight: float = 1.0  # how often the job is drawn; a start of several processes takes ten times as long


TRAIN, SHARDS = ('train', 'pretraining.yaml'), ('shards', 'corpus.yaml', '--workers', '1')
SHARDS_MADE = ('shards/*.json', 'shards/parts/**/*', 'shards/train/**/*', 'shards/validation/**/*')
RUN = ('metrics.csv', 'record.json', 'recipe.yaml', 'manifest.json', 'tokenizer/*', 'samples-*/model.safetensors')
JOBS = {
    job.name: job
    for job in (
        Job('tokenizer', ('tokenizer', 'corpus.yaml'), ('corpus',), ('shards/tokenizer/*',)),
        Job('shards', SHARDS, ('corpus', 'shards/tokenizer'), SHARDS_MADE, has_children=True, weight=0.2),
        Job('train', TRAIN, ('shards',), tuple(f'runs/model/{name}' for name in RUN), has_children=True),
        Job(
            'train on s3',
            (*TRAIN, f'data.remote=s3://{BUCKET}/shards', f'save_folder=s3://{BUCKET}/model'),
            ('shards',),
            tuple(f's3/model/{name}' for name in RUN),
            is_remote=True,
            has_children=True,
        ),
        Job(
            'train on two ranks',
            ('pretraining.yaml', 'training.max_samples=640'),
            ('shards',),
            tuple(f'runs/model/{name}' for name in RUN),
            launcher=(str(Path(sys.executable).with_name('composer')), '-n', '2', '-m', 'maelm_composer.train'),
            has_children=True,
            weight=0.2,
        ),
        Job('finetune', ('train', 'finetuning.yaml'), ('runs', 'tasks'), ('finetuned/**/*',)),
        Job(
            'sweep',
            ('sweep', 'sweep.yaml'),
            ('runs', 'tasks'),
            ('swept/*.json', 'swept/*.csv'),
            has_children=True,
            weight=0.2,
        ),
        Job('rank', ('rank', 'runs/model', '--max-tokens', '4000'), ('runs', 'shards'), ('runs/model/ranks/*.json',)),
        Job('export', ('export', 'runs/model', 'exported', '--all-checkpoints'), ('runs',), ('exported/**/*',)),
        Job(
            'suite',
            ('suite', '--scale', 'demo', '--artefacts', 'figure5', '--settings', 'suite.yaml'),
            ('corpus', 'shards'),
            ('results/demo/figure5.csv', 'results/demo/records/**/*'),
            has_children=True,
            weight=0.2,
        ),
        Job('report', ('report', '--scale', 'ladder', '--results', 'results'), ('results',), ('results/ladder/*.*',)),
    )
}


def write_inputs(folder: Path) -> None:
    """Write the recipes, the documentation of this project as text, the rows of a task, and published records."""
    (folder / 'corpus').mkdir(parents=True)
    for path in (ROOT / 'docs').glob('*.md'):
        (folder / 'corpus' / f'{path.stem}.txt').write_text(path.read_text())
    recipes = {'corpus': CORPUS, 'pretraining': PRETRAINING, 'finetuning': FINETUNING, 'sweep': SWEEP, 'suite': SUITE}
    for name, recipe in recipes.items():
        (folder / f'{name}.yaml').write_text(yaml.safe_dump(recipe))
    for split, count, seed in (('train', 96, 0), ('dev', 48, 1)):
        write_rows(folder / 'tasks' / 'glue' / 'rte' / f'{split}.parquet', make_rows('rte', count, seed))
    for part in ('paper', 'ladder/records'):
        shutil.copytree(ROOT / 'results' / part, folder / 'results' / part)


def copy_needs(job: Job, source: Path, target: Path) -> None:
    """Copy what ``job`` needs, and the recipes, but nothing that ``job`` itself makes."""
    target.mkdir(parents=True, exist_ok=True)
    for path in (*source.glob('*.yaml'), *(source / name for name in job.needs)):
        place = target / path.relative_to(source)
        if path.is_dir():
            shutil.copytree(path, place, symlinks=True)
        else:
            shutil.copy2(path, place)
    for path in _list_made(job, target):
        path.unlink()


def _list_made(job: Job, folder: Path) -> list[Path]:
    return sorted({path for glob in job.makes for path in folder.glob(glob) if path.is_file()})


def describe_results(job: Job, folder: Path) -> dict[str, str]:
    """Names and hashes of the files that ``job`` has made, without what may differ, such as times."""
    found = [path for path in _list_made(job, folder) if not path.name.startswith('.')]
    return {str(path.relative_to(folder)): hashlib.sha256(_read_untimed(path)).hexdigest() for path in found}


def _read_untimed(path: Path) -> bytes:
    with contextlib.suppress(ValueError):  # damaged: it differs from the undisturbed one in any case
        if path.suffix == '.csv':
            return json.dumps(_drop_times(list(read_metrics(path)))).encode()
        if path.suffix == '.json':
            return json.dumps(_drop_times(json.loads(path.read_text()))).encode()
    return path.read_bytes()


def _drop_times(value: Any) -> Any:
    if isinstance(value, list):
        return [_drop_times(item) for item in value]
    if not isinstance(value, dict):
        return value
    # The source may be edited while a campaign runs. A checksum covers the times too.
    timed = ('seconds', 'hours', 'per_second', 'git_revision', 'checksum')
    return {key: _drop_times(item) for key, item in value.items() if not str(key).endswith(timed)}


class Bucket:
    """The bucket of the remote jobs, filled from a folder and copied to one."""

    def __init__(self, url: str) -> None:
        self.client = boto3.client('s3', endpoint_url=url)
        self.client.create_bucket(Bucket=BUCKET)

    def fill(self, folder: Path) -> None:
        """Replace all objects by the files of ``folder``."""
        for key in self._list_keys():
            self.client.delete_object(Bucket=BUCKET, Key=key)
        for path in sorted(folder.rglob('*')):
            if path.is_file():
                self.client.upload_file(str(path), BUCKET, str(path.relative_to(folder.parent)))

    def copy_to(self, folder: Path) -> None:
        """Write all objects as files."""
        for key in self._list_keys():
            (folder / key).parent.mkdir(parents=True, exist_ok=True)
            self.client.download_file(BUCKET, key, str(folder / key))

    def _list_keys(self) -> Iterator[str]:
        for page in self.client.get_paginator('list_objects_v2').paginate(Bucket=BUCKET):
            yield from [item['Key'] for item in page.get('Contents', [])]
