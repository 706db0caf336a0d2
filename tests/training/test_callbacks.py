"""The log of a run, as a resumed run takes it over from its checkpoint, its report, and loggers that are not there."""

import math
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from composer.loggers import FileLogger

from maelm_composer.errors import InputError
from maelm_composer.training import callbacks
from maelm_composer.training.callbacks import COLUMNS, GradientClipping, MetricsLog, ProgressLines, TrainingClock
from maelm_composer.training.loggers import explaining
from maelm_composer.training.run import pretrain

ROWS = 20_000


def write_log(path: Path) -> list[str]:
    """A log with a validation every 1,000 rows, whose last line a kill has cut off; returns its complete lines."""
    lines = [','.join(COLUMNS)]
    for batch in range(1, ROWS + 1):
        evaluation = f'{10 / batch},7.5,0.25' if batch % 1000 == 0 else ',,'
        lines.append(f'{16 * batch},{batch},6.123456789,0.001953125,1.25,123456,{batch / 8:.3f},{evaluation}')
    path.write_text('\n'.join([*lines, f'{16 * ROWS + 16},{ROWS + 1}']))
    return lines


def test_a_resumed_log_is_copied_row_by_row(tmp_path):
    lines = write_log(tmp_path / 'earlier.csv')
    log = MetricsLog(tmp_path / 'metrics.csv', TrainingClock(512, 0, 0), GradientClipping(1))
    tracemalloc.start()
    log.begin(tmp_path / 'earlier.csv', samples=16 * 15_500)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (tmp_path / 'metrics.csv').read_text().splitlines() == lines[: 1 + 15_500]
    assert log.last_eval == {'eval_loss': 10 / 15_000, 'eval_perplexity': 7.5, 'eval_accuracy': 0.25}
    assert peak < 2**20 < (tmp_path / 'earlier.csv').stat().st_size
    log.begin(tmp_path / 'earlier.csv', samples=16 * ROWS + 32)
    assert (tmp_path / 'metrics.csv').read_text().splitlines() == lines


def test_a_new_log_has_no_rows(tmp_path):
    log = MetricsLog(tmp_path / 'metrics.csv', TrainingClock(512, 0, 0), GradientClipping(1))
    log.begin(None, samples=0)
    assert (tmp_path / 'metrics.csv').read_text() == ','.join(COLUMNS) + '\n'
    assert log.last_eval == {}


@pytest.mark.parametrize('loss, norm, named', [(5.0, math.inf, 'gradient norm is inf'), (math.nan, 1.0, 'loss is nan')])
def test_a_batch_that_would_make_its_weights_nan_is_never_saved(loss, norm, named):
    clipping, at = GradientClipping(1.0), SimpleNamespace(value=3)
    clipping.norm = torch.tensor(norm)
    state = SimpleNamespace(timestamp=SimpleNamespace(batch=at, sample=at), total_loss_dict={'loss/train/total': loss})
    with pytest.raises(InputError, match=f'diverged: {named} at batch 3'):
        clipping.batch_end(state, SimpleNamespace())


@pytest.mark.parametrize('has_bar', [True, False])
def test_the_expected_hours_are_told_once_after_ten_timed_batches_and_without_a_bar_progress(monkeypatch, has_bar):
    """3 s a batch on four ranks; the first three batches, which are not timed, take a minute each."""
    now, said, logger = [0.0], [], SimpleNamespace(log_metrics=lambda _: None)
    monkeypatch.setattr(callbacks, 'time', SimpleNamespace(perf_counter=lambda: now[0], monotonic=lambda: now[0]))
    monkeypatch.setattr(callbacks.dist, 'get_world_size', lambda: 4)
    clock = TrainingClock(tokens_per_batch=16 * 32, seconds=0, device_seconds=0)
    log = MetricsLog(Path('metrics.csv'), clock, GradientClipping(1))
    report = ProgressLines(said.append, clock, log, compiles=False, has_bar=has_bar)
    report.fit_start(SimpleNamespace(), logger)
    for batch in range(1, 34):
        at = {name: SimpleNamespace(value=n) for name, n in (('batch', batch), ('sample', 16 * batch))}
        state = SimpleNamespace(timestamp=SimpleNamespace(**at), max_duration=SimpleNamespace(value=16 * (13 + 1800)))
        state.total_loss_dict = {'loss/train/total': 7 - batch / 100}
        clock.before_dataloader(state, logger)
        now[0] += 60 if batch <= 3 else 3
        clock.batch_end(state, logger)
        report.batch_end(state, logger)
        report.batch_checkpoint(state, logger)
    first, *lines = said
    assert first == 'measured 171 tokens/s: 28,800 samples left take 1.50 hours, 6.00 device-hours'
    line = '528 of 29,008 samples: training loss 6.6700, 171 tokens/s, 1 h 29 min left'  # a minute later
    assert lines == ([] if has_bar else [line])


def test_a_logger_that_is_not_installed_is_one_line(recipe, monkeypatch):
    monkeypatch.setitem(sys.modules, 'wandb', None)
    with pytest.raises(InputError, match=r"pip install 'wandb.*', or .* -c constraints.txt -e '\.\[wandb\]'"):
        pretrain(recipe('training.loggers=[wandb]'))


def test_a_logger_that_cannot_start_is_one_line():
    logger = explaining(FileLogger(), 'file')
    state = SimpleNamespace()  # without the name of the run
    with pytest.raises(InputError, match=r'^training.loggers: file cannot start: .*; mend that, leave file out, or'):
        logger.init(state, SimpleNamespace())


def test_a_validation_leaves_no_logits_in_memory(tmp_path):
    state = SimpleNamespace(eval_metric_values={'MaskedLoss': torch.tensor(5.0)}, outputs=torch.ones(2, 3, 4))
    log = MetricsLog(tmp_path / 'metrics.csv', SimpleNamespace(), SimpleNamespace())
    log.eval_end(state, SimpleNamespace())
    assert (log.last_eval, state.outputs) == ({'eval_loss': 5.0}, [])
