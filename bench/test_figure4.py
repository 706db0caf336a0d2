"""Figure 4: scores against δ."""

from collections.abc import Callable

from bench.conftest import find_value
from maelm_composer.reporting.artefacts import DELTAS, ENCODER_WITH_MASK, MAE_LM, average_of
from maelm_composer.reporting.load import read_csv
from maelm_composer.suite.steps import Suite


def test_figure4(make: Callable, suite: Suite) -> None:
    rows, average = make('figure4'), average_of(suite.scale).name
    points = [row for row in rows if row['column'] == average and row['x']]
    assert [float(row['x']) for row in points] == [delta for delta, _ in DELTAS]
    table2 = read_csv(suite.results / suite.scale / 'table2.csv')
    assert points[0]['value'] == find_value(table2, MAE_LM.label, average)
    assert points[-1]['value'] == find_value(table2, ENCODER_WITH_MASK.label, average)
