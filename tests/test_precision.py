"""``precision: auto`` with the measurement replaced, on both outcomes, wherever a precision is chosen."""

import errno
import os
from pathlib import Path

import pytest
import torch

from maelm_composer import precision
from maelm_composer.config import Precision
from maelm_composer.errors import InputError
from maelm_composer.precision import Choice, Speeds, choose, choose_in, measure_speeds, read_choice

AMX, AVX2 = Speeds(fp32=1e11, bf16=9e11, device='CPU, 2 threads'), Speeds(fp32=1e11, bf16=5e9, device='CPU, 2 threads')
OLD_GPU = Speeds(fp32=1e13, bf16=0.0, device='Tesla V100')
FP32, BF16, AUTO = Precision.fp32, Precision.bf16, Precision.auto


@pytest.fixture
def on(monkeypatch):
    """``on(AVX2)``: what the measurement finds."""
    return lambda speeds: monkeypatch.setattr(precision, 'measure_speeds', lambda: speeds)


def test_auto_takes_the_faster(on):
    on(AMX)
    assert choose(AUTO, 'precision') == Choice(BF16, 'auto: bf16 runs at 9 times the speed of fp32')
    on(AVX2)
    assert str(choose(AUTO, 'precision')) == 'fp32 (auto: bf16 runs at 0.05 times the speed of fp32)'
    assert choose(AUTO, 'precision').notice == ''


def test_what_the_recipe_names_is_taken_and_slow_bf16_is_said(on):
    for speeds in (AMX, AVX2, OLD_GPU):
        on(speeds)
        assert choose(FP32, 'precision') == Choice(FP32)
    on(AMX)
    assert choose(BF16, 'precision') == Choice(BF16)
    on(AVX2)
    assert choose(BF16, 'training.precision') == Choice(
        BF16, notice='bf16 takes 20.0 times as long as fp32 here: training.precision=fp32, or auto, is faster'
    )


@pytest.mark.parametrize('speeds', [AMX, AVX2])
@pytest.mark.parametrize('begun', [FP32, BF16])
def test_auto_goes_on_as_begun_on_whatever_device_and_says_so(on, speeds, begun):
    on(speeds)
    choice = choose(AUTO, 'training.precision', begun)
    assert choice.precision is begun
    assert choice.notice.startswith(f'training.precision=auto: resuming in {begun.name}, as begun')
    assert ('although bf16 runs' in choice.notice) == (speeds.faster is not begun)


def test_a_gpu_without_bf16_runs_in_fp32_or_refuses(on):
    on(OLD_GPU)
    choice = choose(AUTO, 'precision')
    assert (choice.precision, choice.notice) == (FP32, 'Tesla V100 has no bf16: fp32')
    for asked, begun in ((BF16, None), (AUTO, BF16)):
        with pytest.raises(InputError, match='Tesla V100 has no bf16: give precision=fp32'):
            choose(asked, 'precision', begun)


def test_a_folder_keeps_its_choice(on, tmp_path):
    folder = tmp_path / 'not there yet'
    on(AVX2)
    assert choose_in(folder, BF16, 'precision').precision is BF16
    assert read_choice(folder) is None  # a precision that a recipe names is no choice
    assert choose_in(folder, AUTO, 'precision').notice == ''
    assert [path.name for path in folder.iterdir()] == ['precision.txt']
    on(AMX)
    assert choose_in(folder, AUTO, 'precision').precision is FP32
    for content in (b'', b'fp3\xb2'):
        (folder / 'precision.txt').write_bytes(content)
        with pytest.raises(InputError, match=r'precision\.txt begins with neither fp32 nor bf16'):
            choose_in(folder, AUTO, 'precision')


def test_of_two_processes_that_choose_at_once_the_second_takes_what_the_first_chose(on, tmp_path, monkeypatch):
    on(AMX)
    read = iter([None, FP32])  # not there at first; then another machine's choice is
    (tmp_path / 'precision.txt').write_text('fp32\n')
    monkeypatch.setattr(precision, 'read_choice', lambda folder: next(read))
    assert choose_in(tmp_path, AUTO, 'precision').precision is FP32
    assert (tmp_path / 'precision.txt').read_text() == 'fp32\n'
    assert len(list(tmp_path.iterdir())) == 1


def test_a_choice_is_kept_on_a_file_system_without_hard_links(on, tmp_path, monkeypatch):
    on(AMX)

    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(source))

    monkeypatch.setattr(precision.os, 'link', refuse)
    assert choose_in(tmp_path, AUTO, 'precision').precision is BF16
    assert read_choice(tmp_path) is BF16
    assert len(list(tmp_path.iterdir())) == 1


def test_the_measurement_leaves_no_trace():
    measure_speeds.cache_clear()
    torch.set_num_threads(2)
    state = torch.get_rng_state()
    speeds = measure_speeds()
    assert speeds.fp32 > 0
    assert speeds.bf16 > 0
    assert torch.get_num_threads() == 2
    torch.testing.assert_close(torch.get_rng_state(), state, rtol=0, atol=0)
