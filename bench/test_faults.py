"""A campaign of faults against every job: killed, starved and lied to, each must end as if nothing had happened.

    pytest -s bench/test_faults.py --faults 1000 --seed 9 [--jobs train,rank] [--kind SIGKILL]

Rows are appended to faults/faults.csv in --results, so an interrupted campaign goes on. docs/faults.md has the results.
"""

from pathlib import Path

import pytest

from bench.faults.faults import choose_kinds
from bench.faults.jobs import JOBS
from bench.faults.table import run_campaign, summarize
from maelm_composer.errors import InputError


def test_faults(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    option = request.config.option
    jobs = option.jobs.split(',') if option.jobs else list(JOBS)
    if unknown := set(jobs) - set(JOBS):
        pytest.exit(f'--jobs {min(unknown)}: there are {", ".join(JOBS)}', returncode=pytest.ExitCode.USAGE_ERROR)
    table = Path(option.results) / 'faults' / 'faults.csv'
    try:
        kinds = choose_kinds(option.kind, option.without)
        rows = run_campaign(tmp_path_factory.mktemp('faults'), table, option.faults, option.seed, jobs, kinds)
    except InputError as error:
        pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)
    print(f'\n{summarize(rows)}')
    assert [row for row in rows if row['outcome'] == 'DEFECT'] == []
