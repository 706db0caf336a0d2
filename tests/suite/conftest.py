"""The checkout as the working folder, a suite that has done nothing yet, and a record of a run."""

import dataclasses
import json
from pathlib import Path

import pytest

from maelm_composer.config import Precision, SuiteConfig
from maelm_composer.processor import count_cores
from maelm_composer.records import collect_provenance
from maelm_composer.suite.steps import Suite, load_suite
from tests.records import make_pretraining

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def in_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for name in ('MAELM_DATA', 'DATA_ROOT'):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def demo(tmp_path: Path) -> Suite:
    suite = load_suite('demo', tmp_path / 'work', tmp_path / 'results')
    return dataclasses.replace(suite, precision=Precision.fp32)


@pytest.fixture
def own(demo: Suite, tmp_path: Path) -> Suite:
    """``demo`` with the own task ``reviews``: three training and two development rows of 40 characters."""
    files = {'train': tmp_path / 'train.csv', 'dev': tmp_path / 'dev.csv'}
    for path, count in zip(files.values(), (3, 2), strict=True):
        path.write_text('text,label\n' + f'{"x" * 40},bad\n' * count)
    reviews = {'kind': 'classification', 'text_columns': ['text'], 'label_names': ['bad', 'good']}
    reviews['files'] = {name: str(path) for name, path in files.items()}
    recipe = write_record(tmp_path / 'own.yaml', {'tasks': {'reviews': reviews}})
    settings = write_record(tmp_path / 'settings.yaml', {'finetuning': [str(recipe)]})
    return dataclasses.replace(load_suite('demo', demo.work, demo.results, settings), precision=demo.precision)


def write_record(path: Path, record: dict) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record))
    return path


def make_run(name: str, **changes: object) -> dict:
    """The record of a run on this machine: 2e12 FLOPs in 10 seconds."""
    provenance = dataclasses.asdict(collect_provenance(SuiteConfig()))
    own = {'flops': 2 * 10**12, 'training_seconds': 10.0, 'device_hours': 10 / 3600, 'samples': 9600}
    own |= {'device': f'CPU, {count_cores()} threads', 'provenance': provenance}
    return make_pretraining(name, **own | changes)
