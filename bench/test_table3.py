"""Table 3: effective rank after pretraining and after fine-tuning."""

from collections.abc import Callable

from maelm_composer.reporting.artefacts import MAE_LM, ROBERTA
from maelm_composer.reporting.rows import GAP
from maelm_composer.suite.steps import Suite


def test_table3(make: Callable, suite: Suite) -> None:
    rows = make('table3')
    size = suite.load_pretraining(MAE_LM).model.hidden_size
    for label in (MAE_LM.label, ROBERTA.label):
        ranks = [float(row['value']) for row in rows if row['row'] == label]
        assert len(ranks) == 3
        assert all(1 <= rank <= size for rank in ranks)
    assert sum(row['row'] == GAP for row in rows) == 3
