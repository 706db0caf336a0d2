"""The rank during fine-tuning: its tokens, and that measuring it does not change the run."""

from pathlib import Path

import numpy as np
import pytest
import torch

from maelm_composer.checkpoints.pretrained import load_pretrained
from maelm_composer.errors import InputError
from maelm_composer.finetuning import fit
from maelm_composer.finetuning.evaluation import Evaluator
from maelm_composer.finetuning.fit import collate, measure_last_layer
from maelm_composer.finetuning.identity import limit_length
from maelm_composer.finetuning.model import FinetuningModel
from maelm_composer.finetuning.run import finetune
from maelm_composer.tasks.catalogue import find_task
from maelm_composer.tasks.examples import Inputs
from maelm_composer.tasks.sources import load_task_data


@pytest.mark.parametrize('name', ['mnli', 'squad2'])
def test_a_curve_has_a_point_before_the_first_epoch_and_after_each(name, configure):
    plain, watched = (
        finetune(configure(name, max_epochs=2, dropout=0.1, measures_rank=measures)) for measures in (False, True)
    )
    assert (plain.effective_rank, plain.rank_curve) == (None, [])
    assert [point.epoch for point in watched.rank_curve] == [0, 1, 2]
    assert watched.effective_rank == watched.rank_curve[-1].effective_rank
    assert all(1 <= point.effective_rank <= 32 for point in watched.rank_curve)
    assert watched.protocol['measures_rank']
    assert plain.key != watched.key
    for key in ('metrics', 'evaluations', 'steps'):
        assert getattr(plain, key) == getattr(watched, key)
    predictions = [Path(configure(name).save_folder, f'{r.key}.predictions.jsonl') for r in (plain, watched)]
    assert predictions[0].read_text() == predictions[1].read_text()


def test_the_first_point_is_the_checkpoints_own(configure, monkeypatch):
    config, task = configure('rte', max_epochs=1, measures_rank=True), find_task('rte')
    record = finetune(config)
    pretrained = load_pretrained(config.checkpoint)
    data = load_task_data(task, config.data)
    inputs = Evaluator(task, data.evaluation, limit_length(config, 48), pretrained.tokenizer).inputs['dev']
    rows = []
    for ids in inputs.input_ids:  # one by one: no padding
        ids = torch.from_numpy(ids).long()[None]
        with torch.inference_mode():
            states = pretrained.encoder(ids, torch.arange(ids.shape[1])[None], torch.ones_like(ids))
        rows.append(states[ids > 2])  # [CLS] 0, [PAD] 1, [SEP] 2
    squares = torch.linalg.svdvals(torch.cat(rows).double()).square()
    wanted = int((squares.cumsum(0) / squares.sum() < 0.9).sum()) + 1
    assert record.rank_curve[0].effective_rank == wanted
    model = FinetuningModel(pretrained.encoder, pretrained.hidden_size, task, 0.1, seed=1).train()
    assert measure_last_layer(model.encoder, inputs, (0, 1, 2), pad_id=1, batch_size=7) == wanted

    total = sum(inputs.lengths)
    monkeypatch.setattr(fit, 'MAX_RANK_TOKENS', total // 2 + 1)  # every second row
    seen = []
    monkeypatch.setattr(fit, 'collate', lambda i, rows, pad_id: seen.extend(rows) or collate(i, rows, pad_id))
    measure_last_layer(model.encoder, inputs, (0, 1, 2), pad_id=1, batch_size=64)
    assert sorted(seen) == list(range(0, len(inputs), 2))

    with pytest.raises(InputError, match='0 rows'):
        measure_last_layer(model.encoder, Inputs([np.array([0, 2])], np.zeros(1)), (0, 1, 2), pad_id=1, batch_size=64)
