"""One long command with a fault every minute or two, and the memory, files and threads of its processes.

    pytest -s bench/test_long_run.py --steps 100000 [--seed 1]         a training over S3: hours on two cores
    pytest -s bench/test_long_run.py --jobs sweep --steps 1000         a sweep of 1,000 fine-tunings

The same command goes on beside it undisturbed, in local folders; both must end with the same files. Rows are
written to faults/long_run/ or faults/long_sweep/ in --results as they come. docs/faults.md has the results.
"""

from pathlib import Path

import pytest

from bench.faults.long_run import LONG, LongRun
from bench.faults.sampling import describe_growth


def test_long_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    option = request.config.option
    name = option.jobs or 'train on s3'
    if name not in LONG:
        pytest.exit(f'--jobs {name}: of the long run there are {", ".join(LONG)}', pytest.ExitCode.USAGE_ERROR)
    tables = Path(option.results) / 'faults' / ('long_sweep' if name == 'sweep' else 'long_run')
    run = LongRun(tmp_path_factory.mktemp('faults'), tables, name, option.steps, option.seed)
    found, wanted = run.run()
    print(f'\n{describe_growth(run.samples, run.long.settling)}')
    assert found == wanted
