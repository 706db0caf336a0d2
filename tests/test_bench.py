"""What the options of bench/ refuse and leave alone, and how bench/gpu.sh spends a call; without a benchmark."""

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / 'bench/gpu.sh'
# In one process, as most of the time goes into imports.
TWO_CALLS = """
import sys
import pytest
options = ['-q', '-p', 'no:cacheprovider']
assert pytest.main([*options, '--collect-only', 'tests/masking', 'tests/test_faults.py', 'bench']) == 0
sys.exit(pytest.main([*options, 'bench/test_ladder.py']))
"""
# In place of an interpreter with torch: slow to start, without tests to run. The plan is what is in the archive.
SLOW_PYTHON = """#!/bin/bash
case "$*" in
  -c*) sleep 2 && echo '2.7, a GPU' ;;
  *--plan*) tar -tf "$OUT/results.tar.gz" ;;
  *) exit 1 ;;
esac
"""


def test_the_tests_of_other_folders_stay_selected_and_an_artefact_that_the_scale_lacks_is_named():
    done = subprocess.run([sys.executable, '-c', TWO_CALLS], cwd=ROOT, capture_output=True, text=True, check=False)
    files = {line.partition('::')[0] for line in done.stdout.splitlines()}
    assert {'tests/masking/test_draw.py', 'tests/test_faults.py', 'bench/test_table1.py'} <= files, done.stdout
    assert not files & {'bench/test_faults.py', 'bench/test_throughput.py'}  # these take minutes
    assert done.returncode == 4
    assert "\nERROR: scale demo has no artefact 'ladder': there are table1, " in f'\n{done.stderr}'


def test_the_gpu_script_names_the_files_of_all_tests_marked_gpu():
    marked = [path for path in ROOT.glob('tests/**/*.py') if re.search(r'\bmark\.gpu\b', path.read_text())]
    named = re.findall(r'tests/[\w/]+\.py', SCRIPT.read_text())
    assert sorted(named) == sorted(str(path.relative_to(ROOT)) for path in marked)


def test_a_call_ends_in_time_and_is_packed_before_its_plan(tmp_path):
    python = tmp_path / 'python'
    python.write_text(SLOW_PYTHON)
    python.chmod(0o755)
    for folder in ('glue', 'squad_v2', 'corpus'):
        (tmp_path / folder).mkdir()
    (tmp_path / 'corpus/text.parquet').touch()
    own = {'PYTHON': python, 'MAELM_DATA': tmp_path, 'DATA_ROOT': tmp_path, 'DEVICE': 'cuda', 'PART_SECONDS': 100}
    own |= {name: tmp_path / name.lower() for name in ('WORK', 'RESULTS', 'OUT')}
    environment = os.environ | {name: str(value) for name, value in own.items()}
    done = subprocess.run([SCRIPT, 'suite'], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, '')
    (seconds,) = re.findall(r'suite: begun, at most (\d+) s', done.stdout)
    assert int(seconds) <= 98
    assert 'suite: FAILED with exit code 1' in done.stdout
    assert 'gpu/suite.log' in done.stdout.splitlines()
    with tarfile.open(tmp_path / 'out/results.tar.gz') as packed:
        assert 'gpu/suite.log' in packed.getnames()
