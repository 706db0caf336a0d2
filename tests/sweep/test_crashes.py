"""A sweep over real tasks, killed five times at random.

MAELM_DATA names a folder that holds glue/<task>/*.parquet; MAELM_CHECKPOINT may name a pretrained model.
"""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from .test_run import count_finished, find_workers, outcomes, start  # noqa: F401

FOLDER = os.environ.get('MAELM_DATA')
RUNS = 4 * (2 * 2 * 2 + 4)
RECIPE = """
checkpoint: {checkpoint}
max_seq_len: 64
precision: fp32
data: {{source: files, folder: {folder}, max_train_examples: 64}}
sweep:
  tasks: [rte, cola, mrpc, stsb]
  search:
    glue_small:
      {{learning_rate: [1e-3, 3e-3], batch_size: [16, 32], max_epochs: [1, 2], warmup_proportion: [0.06]}}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch, checkpoint):
    monkeypatch.chdir(tmp_path)
    Path('recipe.yaml').write_text(
        RECIPE.format(checkpoint=os.environ.get('MAELM_CHECKPOINT', checkpoint), folder=FOLDER)
    )


@pytest.mark.slow
@pytest.mark.skipif(FOLDER is None, reason='MAELM_DATA does not name a folder of real data')
def test_killed_five_times_at_random_it_ends_with_the_same_records(folder, start, wait_for):  # noqa: F811
    begin = time.monotonic()
    driver = start('save_folder=whole')
    out, _ = driver.communicate(timeout=500)
    assert driver.returncode == 0, out
    assert count_finished('whole') == RUNS
    whole_seconds = time.monotonic() - begin

    generator = random.Random(os.getpid())  # another one each time
    victims = ['driver', 'worker', generator.choice(['driver', 'worker']), 'driver', 'worker']
    generator.shuffle(victims)
    moments = sorted(generator.sample(range(1, RUNS - 4), len(victims)))
    begin, driver, kills = time.monotonic(), None, []
    for victim, moment in zip(victims, moments, strict=True):
        driver = driver or start('save_folder=killed')
        at_work: list[int] = []

        def is_reached(moment: int = moment, found: list[int] = at_work, own: int = driver.pid) -> bool:
            found[:] = set(find_workers('killed')) - {own}  # the driver holds a lease for an instant
            return count_finished('killed') >= moment and bool(found)

        wait_for(is_reached, every=0.02)
        kills.append((victim, count_finished('killed')))
        if victim == 'driver':
            os.kill(driver.pid, signal.SIGKILL)
            driver.wait()
            driver = None
        else:
            os.kill(generator.choice(at_work), signal.SIGKILL)
    driver = driver or start('save_folder=killed')
    out, _ = driver.communicate(timeout=500)
    assert driver.returncode == 0, out
    print(f'\n{RUNS} runs in {whole_seconds:.0f} s; killed {kills}: in {time.monotonic() - begin:.0f} s')
    assert outcomes('killed') == outcomes('whole')
    assert not list(Path('killed').glob('.*.lease'))
