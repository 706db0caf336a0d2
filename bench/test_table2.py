"""Table 2: the ablations."""

from collections.abc import Callable

from bench.conftest import find_value
from maelm_composer.reporting.artefacts import ABLATIONS, MAE_LM, average_of
from maelm_composer.reporting.load import read_csv
from maelm_composer.suite.steps import Suite


def test_table2(make: Callable, suite: Suite) -> None:
    rows, average = make('table2'), average_of(suite.scale).name
    assert [row['row'] for row in rows[: len(ABLATIONS)]] == [model.label for model in ABLATIONS]
    table1 = read_csv(suite.results / suite.scale / 'table1.csv')
    assert find_value(rows, MAE_LM.label, average) == find_value(table1, MAE_LM.label, average)
