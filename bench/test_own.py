"""Own tasks: both models on every task that the recipe of fine-tuning declares."""

from collections.abc import Callable

from maelm_composer.reporting.artefacts import MAE_LM, ROBERTA
from maelm_composer.reporting.rows import CONSTANT, GAP
from maelm_composer.suite.steps import Suite


def test_own(make: Callable, suite: Suite) -> None:
    rows = make('own')
    for label in (MAE_LM.label, ROBERTA.label, CONSTANT, GAP):
        assert {row['column'].split()[0] for row in rows if row['row'] == label} >= set(suite.own_tasks)
