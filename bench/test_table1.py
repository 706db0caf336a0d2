"""Table 1: both models on every task."""

from collections.abc import Callable

from maelm_composer.reporting.artefacts import MAE_LM, ROBERTA, Role, average_of, columns_of
from maelm_composer.reporting.rows import GAP
from maelm_composer.suite.steps import Suite


def test_table1(make: Callable, suite: Suite) -> None:
    rows = make('table1')
    columns = {column.name for role in (Role.glue, Role.squad) for column in columns_of(suite.scale, role)}
    for label in (MAE_LM.label, ROBERTA.label, GAP):
        assert {row['column'] for row in rows if row['row'] == label} == columns | {average_of(suite.scale).name}
