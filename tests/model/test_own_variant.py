"""docs/variants.md: its change applies to the package as it is, and passes the tests that it names."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_documented_variant_applies_and_equals_its_reference(tmp_path):
    for name in ('maelm_composer', 'tests', 'yamls'):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns('__pycache__'))
    shutil.copy(ROOT / 'pyproject.toml', tmp_path)
    subprocess.run(['git', 'apply', str(ROOT / 'docs/rotary.diff')], cwd=tmp_path, check=True)
    command = [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', 'tests/model/test_reference.py']
    environment = os.environ | {'PYTHONPATH': str(tmp_path)}
    done = subprocess.run([*command, '-k', 'rotary'], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert '2 passed' in done.stdout
    changed = (tmp_path / 'maelm_composer/config.py').read_text()
    assert changed != (ROOT / 'maelm_composer/config.py').read_text()
