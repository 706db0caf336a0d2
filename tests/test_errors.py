"""How a command ends that cannot go on."""

import errno
import os
import signal

import pytest
import torch

from maelm_composer.errors import explain, one_line_errors


def test_ctrl_c_ends_with_its_own_exit_code_and_no_traceback(capsys):
    with pytest.raises(SystemExit, match='130'), one_line_errors():
        signal.raise_signal(signal.SIGINT)
    assert capsys.readouterr() == ('', '')


def test_an_interrupt_that_torch_has_turned_into_an_error_of_its_own_is_an_interrupt():
    def convert() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ValueError('could not determine the shape') from None

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit, match='130'), one_line_errors():
        convert()
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(ValueError, match='its own'), one_line_errors():
        raise ValueError('its own')


def test_exhausted_memory_is_one_line(capsys):
    with pytest.raises(SystemExit, match='2'), one_line_errors():
        torch.empty(1 << 50)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith('error: memory ran out; use smaller batches')
    with pytest.raises(SystemExit, match='2'), one_line_errors():
        raise torch.OutOfMemoryError('CUDA out of memory.\nTried to allocate 2 GiB.')


def test_an_error_of_the_system_names_the_file_the_reason_and_a_remedy(tmp_path, capsys):
    there = tmp_path / 'file'
    there.touch()
    with pytest.raises(SystemExit, match='2'), one_line_errors():
        there.mkdir()
    assert capsys.readouterr().err == f'error: {there}: File exists; move that file away, or choose another path\n'
    with pytest.raises(FileNotFoundError) as error:
        os.rename(tmp_path / 'a', tmp_path / 'b')
    assert explain(error.value) == f'{tmp_path}/a -> {tmp_path}/b: No such file or directory'
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert explain(full) == 'No space left on device; free space on that disk'
    assert explain(OSError('of a library')) == 'of a library'
