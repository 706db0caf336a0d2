"""Options of the benchmarks, and where a measured row goes."""

import csv
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from maelm_composer.records import collect_provenance, write_text

RESULTS = Path(__file__).resolve().parents[1] / 'results'


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption('--record', action='store_true', help='write measured speeds to results/throughput/')


@pytest.fixture(scope='session')
def record(request: pytest.FixtureRequest) -> Iterator[Callable[[str, dict[str, Any]], None]]:
    """``record(table, row)``; with ``--record`` the session's rows go to results/throughput/<table>-<device>.csv."""
    tables: dict[str, list[dict[str, Any]]] = {}
    yield lambda table, row: tables.setdefault(table, []).append(row)
    if not request.config.getoption('--record'):
        return
    import torch

    source = collect_provenance({})
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else source['cpu']
    machine = {
        'device': device,
        'threads': torch.get_num_threads(),
        'torch': source['packages']['torch'],
        'transformers': source['packages']['transformers'],
        'platform': platform.platform(),
        'git_revision': source['git_revision'],
    }
    slug = ''.join(c if c.isalnum() else '-' for c in device.lower()).strip('-')
    for table, rows in tables.items():
        write_table(RESULTS / 'throughput' / f'{table}-{slug}.csv', [row | machine for row in rows])


def write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    """Rows measured before under the same first columns (what, on which shape) are replaced, all others kept."""
    import io

    def key(row: dict[str, Any]) -> tuple[str, ...]:
        return tuple(str(row.get(name, '')) for name in ('contender', 'precision', 'layers', 'length', 'batch'))

    kept: list[dict[str, Any]] = []
    if path.exists():
        with path.open(newline='', encoding='utf-8') as file:
            kept = list(csv.DictReader(file))
    new = {key(row) for row in rows}
    merged = [row for row in kept if key(row) not in new] + rows
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in merged for name in row)), lineterminator='\n')
    writer.writeheader()
    writer.writerows(merged)
    write_text(path, text.getvalue())
