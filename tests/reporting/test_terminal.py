"""Tables in a terminal."""

import re

import pytest

from maelm_composer.reporting.report import print_tables
from maelm_composer.reporting.rows import Row

ROWS = {
    'table2': [
        Row('demo', 'table2', 'MAE-LM', 'demo_avg', 'percent', value=61.25, verdict='not comparable'),
        Row('demo', 'table2', 'enc. w. [MASK]', 'demo_avg', 'percent', value=60.0, verdict='not comparable'),
        Row('demo', 'table2', 'enc. w. [MASK] − MAE-LM', 'demo_avg', 'points', value=-1.25, low=-2.0, high=-0.5,
            paper=-1.0, verdict='holds: 2 seeds'),
        Row('demo', 'table2', 'cross-attention', 'demo_avg', 'percent', note='no finished pretraining run'),
    ],
    'own': [Row('demo', 'own', 'a constant answer', 'reviews f1', 'percent', value=40.0)],
    'figure1': [
        Row('demo', 'figure1', 'RoBERTa', 'rank_real', 'rank', value=30.0, x=1, x_unit='layer'),
        Row('demo', 'figure1', 'RoBERTa − MAE-LM', 'rank_real', 'rank', value=2.0, x=3e13, x_unit='FLOPs',
            verdict='fails: 3'),
        Row('demo', 'figure1', 'growth of the rank', 'RoBERTa', 'rank', value=2.0, verdict='undecided: 1', note='no 9'),
    ],
}  # fmt: skip


@pytest.fixture
def text(capsys):
    print_tables('demo', ROWS)
    return capsys.readouterr().out


def find_cells(text, start):
    (line,) = [line for line in text.splitlines() if line.strip().startswith(start)]
    return re.split(r'\s{2,}', line.strip())


def test_tables_are_whole_and_figures_show_their_claims(text):
    assert find_cells(text, 'MAE-LM  ') == ['MAE-LM', '61.2']
    assert find_cells(text, 'enc. w. [MASK]  ') == ['enc. w. [MASK]', '60.0']
    claim = find_cells(text, 'enc. w. [MASK] −')
    assert claim == ['enc. w. [MASK] − MAE-LM', 'demo AVG (not GLUE)', '−1.0', '−1.2', '−2.0 to −0.5', 'holds']
    assert find_cells(text, 'a constant') == ['a constant answer', '40.0']
    assert find_cells(text, 'RoBERTa −')[1].endswith(' at 3e13 FLOPs')
    assert not re.search(r'\b30\b', text)  # no claim, but a number of a figure
    assert find_cells(text, 'growth of')[-1] == 'undecided'
    assert 'table2: 1 of 4 numbers are missing' in text
    assert 'figure1: 1 of 3 numbers lack seeds; the page says which' in text
    assert text.strip().endswith("Scale demo: not comparable with the paper's absolute numbers.")
