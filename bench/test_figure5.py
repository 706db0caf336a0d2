"""Figure 5: the rank gap per layer, and the rank during fine-tuning."""

from collections.abc import Callable

from bench.conftest import find_value
from maelm_composer.reporting.artefacts import MAE_LM, ROBERTA, Role, tasks_of
from maelm_composer.reporting.load import read_csv
from maelm_composer.suite.steps import Suite


def test_figure5(make: Callable, suite: Suite) -> None:
    rows = make('figure5')
    (task,) = tasks_of(suite.scale, (Role.mnli,))
    table3 = read_csv(suite.results / suite.scale / 'table3.csv')
    has_one_number = all(len(space.max_epochs) < 2 for space in suite.finetuning.sweep.search.values())
    for label in (MAE_LM.label, ROBERTA.label):
        curve = [row for row in rows if (row['row'], row['column']) == (label, f'rank during {task}')]
        assert len(curve) > 1
        assert curve[0]['x'] == '0'
        if has_one_number:  # else the curve ends with the fewest epochs that a seed's search has chosen
            assert curve[-1]['value'] == find_value(table3, label, task)
