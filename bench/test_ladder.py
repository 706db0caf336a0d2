"""The ladder: both models at several budgets of pretraining compute."""

from collections.abc import Callable

from maelm_composer.reporting.artefacts import RUNGS_OF
from maelm_composer.suite.steps import Suite


def test_ladder(make: Callable, suite: Suite) -> None:
    rows, rungs = make('ladder'), RUNGS_OF[suite.scale]
    for column in ('eval_loss', 'rank_real', 'rank_with_masks', 'rank_masks', 'departure', 'quick_avg'):
        for model in ('MAE-LM', 'RoBERTa'):
            found = [float(row['x']) for row in rows if (row['row'], row['column']) == (model, column)]
            assert found == [rung.flops for rung in rungs]
