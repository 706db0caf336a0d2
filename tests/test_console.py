"""Progress of what takes long."""

import io
import sys

from maelm_composer import console
from maelm_composer.console import track


def test_a_file_gets_a_line_now_and_then(monkeypatch, capsys):
    assert list(track('abc', 3, 'reading', 'rows')) == ['a', 'b', 'c']
    assert capsys.readouterr().err == ''  # it took no time
    monkeypatch.setattr(console, 'SECONDS_TO_FIRST_LINE', 0)
    assert list(track('abc', 3000, 'reading', 'rows')) == ['a', 'b', 'c']
    assert capsys.readouterr().err == 'reading: 0/3,000 rows, 0 s\n'
    monkeypatch.setattr(console, 'SECONDS_BETWEEN_LINES', 0)
    list(track('abc', 3, 'reading', 'rows'))
    assert capsys.readouterr().err.splitlines()[-1] == 'reading: 2/3 rows, 0 s'


def test_a_terminal_gets_a_bar(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, 'stderr', Terminal())
    assert list(track('abc', 3, 'reading', 'rows')) == ['a', 'b', 'c']
    assert 'reading:   0%|' in sys.stderr.getvalue()
