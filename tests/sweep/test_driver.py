"""The driver of a sweep, without Ray: what ends it, and what it holds on to."""

import errno
import os
import sys
from types import SimpleNamespace

import pytest

from maelm_composer import cli
from maelm_composer.sweep import run
from maelm_composer.sweep.search import SweepResult
from tests.sweep.test_report import make_record, make_result
from tests.tiny import CHECKPOINT


@pytest.mark.parametrize('failures, code', [([], 0), ([make_record('squad2', None)], 1)])
def test_the_exit_code_tells_whether_a_run_failed(monkeypatch, failures, code):
    monkeypatch.setattr(run, 'sweep', lambda config: SweepResult([make_result('rte', [0.5])], failures))
    assert run.sweep_and_print(SimpleNamespace(save_folder='here')) == code


def test_a_key_that_the_sweep_searches_is_refused_on_the_command_line(monkeypatch, capsys):
    recipe = ('yamls/finetune/glue.yaml', 'checkpoint=x', 'learning_rate=1e-3')
    monkeypatch.setattr(sys, 'argv', ['maelm', 'sweep', *recipe])
    with pytest.raises(SystemExit, match='2'):
        cli.main()
    assert 'the sweep over' in capsys.readouterr().err


@pytest.mark.parametrize(
    'name, is_of_records', [('out/rte-1.json', True), ('elsewhere/tokenizer.json', False), (None, False)]
)
def test_a_full_disk_of_the_records_alone_ends_a_sweep(tmp_path, name, is_of_records):
    error = OSError(errno.ENOSPC, 'No space left on device', name and str(tmp_path / name))
    assert run._is_of_records(error, str(tmp_path / 'out')) is is_of_records


def test_a_sweep_keeps_the_checkpoint_that_its_run_had_at_the_start(configure):
    pinned = run.pin_checkpoint(configure('rte')).checkpoint
    assert os.path.basename(pinned) == CHECKPOINT
