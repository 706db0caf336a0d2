"""The checkout as the working folder, a suite that has done nothing yet, and a record of a run."""

import dataclasses
import json
import os
from pathlib import Path

import pytest

from maelm_composer.config import Precision
from maelm_composer.records import collect_provenance
from maelm_composer.suite.steps import Suite, load_suite

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


def write_record(path: Path, record: dict) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record))
    return path


def make_run(name: str, **changes: object) -> dict:
    return {
        'run_name': name,
        'status': 'finished',
        'identity': {'seed': 17, 'training.precision': 'fp32'},
        'flops': 2e12,
        'device_hours': 10 / 3600,
        'samples': 9600,
        'provenance': collect_provenance({}) | {'cpu_count': os.cpu_count()},
        **changes,
    }
