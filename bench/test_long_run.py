"""One long run over S3 with a fault every minute or two, and the memory, files and threads of its processes.

    pytest -s bench/test_long_run.py --steps 100000 [--seed 1]     hours on two cores

The same run goes on beside it undisturbed, in local folders; both must end with the same files. Rows are
written to faults/long_run/ in --results as they come. docs/faults.md has the results.
"""

from pathlib import Path

import pytest

from bench.faults.long_run import LongRun, describe_growth


def test_long_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    option = request.config.option
    tables = Path(option.results) / 'faults' / 'long_run'
    run = LongRun(tmp_path_factory.mktemp('faults'), tables, option.steps, option.seed)
    found, wanted = run.run()
    print(f'\n{describe_growth(run.samples)}')
    assert found == wanted
