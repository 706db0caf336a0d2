"""Figure 1: effective rank per layer, with and without [MASK]."""

from collections.abc import Callable

from maelm_composer.reporting.artefacts import ROBERTA
from maelm_composer.suite.steps import Suite


def test_figure1(make: Callable, suite: Suite) -> None:
    rows = make('figure1')
    layers = suite.load_pretraining(ROBERTA).model.num_hidden_layers + 1  # the embeddings are layer 0
    for column in ('rank_real', 'rank_with_masks', 'rank_masks'):
        assert [row['x'] for row in rows if row['column'] == column] == [str(layer) for layer in range(layers)]
    # At layer 0, all [MASK]s have the same token embedding and differ only by position.
    first = {row['column']: float(row['value']) for row in rows if row['x'] == '0'}
    assert first['rank_masks'] < first['rank_real']
