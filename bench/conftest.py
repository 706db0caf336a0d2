"""Options and fixtures of the benchmarks, and the writing of measured speeds."""

import contextlib
import csv
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from maelm_composer.config import CorpusConfig
from maelm_composer.errors import InputError, explain
from maelm_composer.files import write_text
from maelm_composer.records import collect_provenance
from maelm_composer.reporting.artefacts import ARTEFACTS, LADDER, OWN, Artefact
from maelm_composer.reporting.load import read_csv
from maelm_composer.reporting.rows import lacks_seeds
from maelm_composer.suite.steps import Suite, choose_artefacts, load_suite

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / 'results'
MADE = pytest.StashKey[bool]()  # set when an artefact was made
ARTEFACT_FILES = {f'test_{artefact.name}.py' for artefact in (*ARTEFACTS, OWN, LADDER)}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption('--record', action='store_true', help='write measured speeds to throughput/ in the results')
    parser.addoption('--scale', default='demo', help='a file of yamls/suite without its suffix, as ladder or base')
    home = os.path.expanduser  # a shell leaves the ~ of --work=~/runs
    parser.addoption(
        '--settings', type=home, help="file with keys of yamls/suite/, over the scale's (docs/benchmark.md)"
    )
    parser.addoption('--work', type=home, help='folder of runs and checkpoints; default: runs/suite/SCALE')
    parser.addoption('--faults', type=int, default=20, help='number of faults of test_faults.py')
    parser.addoption('--seed', type=int, default=1, help='of the faults')
    parser.addoption('--steps', type=int, default=20_000, help='of test_long_run.py')
    parser.addoption('--jobs', default='', help='jobs that faults are inflicted on; default: all')
    parser.addoption('--kind', action='append', default=[], help='kind of fault, as in docs/faults.md; default: all')
    parser.addoption('--without', action='append', default=[], help='kind of fault that is left out')
    parser.addoption('--results', type=home, default=str(RESULTS), help='folder of records, tables and figures')


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line('markers', 'throughput: measures speed for minutes; selected by file name or marker only')


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect artefacts that the suite lacks, speed tests unless named or ``-m throughput``, and others unless named.

    test_quick repeats a part of the other tests, so only ``-k quick`` or its own name selects it. pytest hands over the
    tests of other folders, too: they stay, and naming tests/test_faults.py does not name bench/test_faults.py.
    """
    named = {(config.invocation_params.dir / argument.split('::')[0]).resolve() for argument in config.args}
    with _in_checkout():
        suite = load_suite(*_read_options(config))
        made = {f'test_{found.name}.py' for found in suite.artefacts}
        asked = [path for path in named if path.name in ARTEFACT_FILES]
        if asked and not any(path.name in made for path in asked):
            choose_artefacts(suite, asked[0].stem.removeprefix('test_'))  # says which there are
    left_out = []
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        if item.path.name in ARTEFACT_FILES:
            left_out += [item] if item.path.name not in made else []
        else:
            is_speed = item.path.name not in ('test_faults.py', 'test_long_run.py', 'test_intervals.py')
            if is_speed:
                item.add_marker('throughput')
            is_quick = item.name.startswith('test_quick') and 'quick' not in f'{config.option.keyword} {config.args}'
            is_asked_for = 'throughput' in config.option.markexpr and is_speed
            if is_quick or (item.path.resolve() not in named and not is_asked_for):
                left_out.append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def list_artefacts(suite: Suite, session: pytest.Session) -> list[Artefact]:
    """The artefacts of the collected tests: test_table1.py makes table1."""
    files = {item.path.name for item in session.items}
    return [artefact for artefact in suite.artefacts if f'test_{artefact.name}.py' in files]


@pytest.fixture(scope='session')
def started(request: pytest.FixtureRequest) -> Iterator[tuple[Suite, Callable]]:
    """The suite of the collected tests and a function that shows the time left, both from ``start_suite``."""
    capture, terminal = map(request.config.pluginmanager.getplugin, ('capturemanager', 'terminalreporter'))

    def show(line: str) -> None:
        with capture.global_and_fixture_disabled():
            terminal.write_line(line)

    with _in_checkout(is_fixture=True):
        from maelm_composer.reporting.report import report
        from maelm_composer.suite.run import STOPPED, start_suite

        with contextlib.ExitStack() as stack:
            suite = load_suite(*_read_options(request.config))
            starting = start_suite(suite, list_artefacts(suite, request.session), show)
            try:
                found = stack.enter_context(starting)
            except SystemExit as stop:
                pytest.exit(STOPPED, returncode=int(stop.code or 0))
            yield found
            if MADE in request.session.stash:
                report(found[0].scale, found[0].results)


@pytest.fixture(scope='session')
def suite(started: tuple[Suite, Callable]) -> Suite:
    """The suite of the chosen scale, with Ray running."""
    return started[0]


@pytest.fixture
def make(
    started: tuple[Suite, Callable], benchmark: Callable, request: pytest.FixtureRequest
) -> Callable[[str], list[dict[str, str]]]:
    """``make('table1')`` makes the missing runs and returns the rows of table1.csv, checked by `assert_complete`."""

    def run(name: str) -> list[dict[str, str]]:
        from maelm_composer.suite.run import STOPPED, run_suite

        suite, note = started
        try:
            benchmark.pedantic(run_suite, args=(suite, choose_artefacts(suite, name), note), rounds=1)
        except SystemExit as stop:  # by a signal; finished records and saved checkpoints remain
            pytest.exit(STOPPED, returncode=int(stop.code or 0))
        except (InputError, OSError) as error:
            pytest.fail(explain(error), pytrace=False)
        rows = read_csv(suite.records.parent / f'{name}.csv')
        request.session.stash[MADE] = True
        assert_complete(rows)
        return rows

    return run


def assert_complete(rows: list[dict[str, str]]) -> None:
    """Assert that no number and no provenance is missing."""
    assert rows
    assert [row['note'] for row in rows if not row['value'] or lacks_seeds(row['note'])] == []
    needed = ['run_keys', 'recipe_hash', 'data_hash', 'tokenizer_hash', 'seeds', 'versions', 'hardware', 'source']
    needed += ['git_revision'] if collect_provenance(CorpusConfig()).git_revision else []
    for name in needed:
        assert all(row[name] for row in rows), f'{name} is missing'
    assert all(float(row['training_seconds']) > 0 for row in rows)


def find_value(rows: list[dict[str, str]], row: str, column: str) -> str:
    """The text of the only number of ``row`` and ``column`` in the file."""
    (found,) = [line['value'] for line in rows if (line['row'], line['column']) == (row, column)]
    return found


def _read_options(config: pytest.Config) -> tuple[str, str | None, str, str | None]:
    return tuple(config.getoption(name) for name in ('--scale', '--work', '--results', '--settings'))


@contextlib.contextmanager
def _in_checkout(is_fixture: bool = False) -> Iterator[None]:
    """Work in the checkout, to which the paths of recipes and data are relative; bad input is a usage error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        try:
            yield
        except (InputError, OSError) as error:
            if is_fixture:  # there pytest prints a traceback of a UsageError
                pytest.exit(explain(error), pytest.ExitCode.USAGE_ERROR)
            raise pytest.UsageError(explain(error)) from None


@pytest.fixture(scope='session')
def record(request: pytest.FixtureRequest) -> Iterator[Callable[[str, dict[str, Any]], None]]:
    """``record(table, row)``. With ``--record``, all rows are written to <results>/throughput/<table>-<machine>.csv."""
    from bench.machine import find_machine

    machine, records = find_machine(), request.config.getoption('--record')
    if records and machine.limits:
        pytest.exit(f'--record: unset {" and ".join(machine.limits)}, which slow this machine down', returncode=4)
    tables: dict[str, list[dict[str, Any]]] = {}
    yield lambda table, row: tables.setdefault(table, []).append(row | machine.list_columns())
    if records:
        folder = Path(request.config.getoption('--results'), 'throughput')
        for table, rows in tables.items():
            write_table(folder / f'{table}-{machine.slug}.csv', rows)


def write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    """Merge ``rows`` into the table at ``path``, replacing rows of the same contender, precision, shape and threads."""
    names = ('contender', 'precision', 'layers', 'hidden_size', 'length', 'batch', 'threads')

    def key(row: dict[str, Any]) -> tuple[str, ...]:
        return tuple(str(row.get(name, '')) for name in names)

    new = {key(row) for row in rows}
    merged = [row for row in (read_csv(path) if path.exists() else []) if key(row) not in new] + rows
    write_text(path, format_csv(merged))


def format_csv(rows: list[dict[str, Any]]) -> str:
    """``rows`` with a header that has every key; a key that a row lacks is an empty cell."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator='\n')
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
