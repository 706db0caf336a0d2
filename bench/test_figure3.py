"""Figure 3: accuracy of intermediate checkpoints, and the time to reach the baseline's accuracy."""

from collections.abc import Callable

from maelm_composer.reporting.artefacts import MAE_LM, ROBERTA, Role, columns_of
from maelm_composer.suite.steps import Suite, list_saved_samples


def test_figure3(make: Callable, suite: Suite) -> None:
    rows = make('figure3')
    column = columns_of(suite.scale, Role.mnli)[0].name
    checkpoints = list_saved_samples(suite.load_pretraining(MAE_LM))
    for name in (column, 'hours', 'flops'):
        points = [row for row in rows if (row['row'], row['column']) == (MAE_LM.label, name)]
        assert [int(row['x']) for row in points] == checkpoints
    costs = [float(row['value']) for row in rows if (row['row'], row['column']) == (MAE_LM.label, 'hours')]
    assert costs == sorted(costs)
    assert costs[0] > 0
    assert str(checkpoints[-1]) in [row['x'] for row in rows if (row['row'], row['column']) == (ROBERTA.label, column)]
