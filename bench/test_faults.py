"""A campaign of faults against every job: killed, starved and lied to, each must end as if nothing had happened.

    pytest -s bench/test_faults.py --faults 1000 [--seed 1] [--jobs train,rank]

Rows are appended to faults/faults.csv in --results, so an interrupted campaign goes on. docs/faults.md has the results.
"""

from pathlib import Path

import pytest

from bench.faults.campaign import run_campaign, summarize
from bench.faults.jobs import JOBS


def test_faults(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    option = request.config.option
    jobs = option.jobs.split(',') if option.jobs else list(JOBS)
    if unknown := set(jobs) - set(JOBS):
        raise pytest.UsageError(f'--jobs {min(unknown)}: there are {", ".join(JOBS)}')
    table = Path(option.results) / 'faults' / 'faults.csv'
    rows = run_campaign(tmp_path_factory.mktemp('faults'), table, option.faults, option.seed, jobs)
    print(f'\n{summarize(rows)}')
    assert [row for row in rows if row['outcome'] == 'DEFECT'] == []
