"""How a command ends that cannot go on."""

import signal

import pytest

from maelm_composer.errors import one_line_errors


def test_ctrl_c_ends_with_its_own_exit_code_and_no_traceback(capsys):
    with pytest.raises(SystemExit, match='130'), one_line_errors():
        signal.raise_signal(signal.SIGINT)
    assert capsys.readouterr() == ('', '')
