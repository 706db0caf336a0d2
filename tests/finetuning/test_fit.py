"""What a fine-tuning run hands to its optimizer, in which arithmetic it runs, and which weights it keeps."""

import copy
import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.utils import get_total_norm
from torch.optim.optimizer import register_optimizer_step_pre_hook

from maelm_composer.config import EvaluationProtocol, Precision
from maelm_composer.errors import InputError
from maelm_composer.finetuning import fit, run
from maelm_composer.finetuning.evaluation import Evaluator
from maelm_composer.finetuning.model import FinetuningModel
from maelm_composer.finetuning.run import finetune
from maelm_composer.tasks.catalogue import TASKS
from tests.tiny import SIZES


def test_every_step_has_the_recipe_s_rate_decay_betas_and_clipped_gradient(configure):
    seen = []

    def observe(optimizer, *_):
        (group,) = optimizer.param_groups
        norm = get_total_norm([p.grad for p in group['params'] if p.grad is not None]).item()
        seen.append((group['lr'], group['weight_decay'], group['betas'], group['eps'], norm))

    settings = {'warmup_proportion': 0.25, 'clip_norm': 0.01, 'weight_decay': 0.3, 'adam_eps': 1e-4}
    settings |= {'adam_beta1': 0.8, 'adam_beta2': 0.9}
    hook = register_optimizer_step_pre_hook(observe)
    try:
        finetune(dataclasses.replace(configure('rte'), learning_rate=3e-3, max_epochs=2, **settings))
    finally:
        hook.remove()
    rates, decays, betas, eps, norms = zip(*seen, strict=True)
    # 12 steps: up from 0 in 3, then down to 0 after the last
    assert rates == pytest.approx([3e-3 * min(step / 3, (12 - step) / 9) for step in range(12)])
    assert set(decays) == {0.3}
    assert set(betas) == {(0.8, 0.9)}
    assert set(eps) == {1e-4}
    assert norms == pytest.approx([0.01] * 12, rel=1e-3)


@pytest.mark.parametrize('proportion, top', [(0.06, 1), (0.2, 2)])  # 0.72 and 2.4 of twelve steps
def test_the_steps_of_the_warm_up_are_rounded(configure, proportion, top):
    rates = []
    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]['lr']))
    try:
        finetune(configure('rte', max_epochs=2, warmup_proportion=proportion))
    finally:
        hook.remove()
    assert rates.index(max(rates)) == top


def test_a_run_that_diverges_ends_before_the_next_look_at_its_losses(configure, monkeypatch):
    monkeypatch.setattr(fit, 'STEPS_BETWEEN_CHECKS', 2)
    with pytest.raises(InputError, match=r'step [1-4]\b'):
        finetune(configure('rte', max_epochs=2, learning_rate=1e30, warmup_proportion=0))


def test_the_seed_decides_the_order_of_every_epoch_and_the_dropout(configure, monkeypatch):
    collate, seen, seeds = fit.collate, [], set()

    def observe(inputs, rows, pad_id):
        seen.append((inputs, rows.tolist()))
        seeds.add(torch.initial_seed())
        return collate(inputs, rows, pad_id)

    monkeypatch.setattr(fit, 'collate', observe)
    finetune(configure('rte', seed=2, max_epochs=2))
    inputs, _ = seen[0]
    expected = [rows.tolist() for epoch in (0, 1) for rows in fit.order_by_length(inputs.lengths, 16, 2, epoch)]
    assert [rows for which, rows in seen if which is inputs] == expected
    assert seeds == {2}


def test_the_head_has_the_recipe_s_dropout_and_weights_of_its_seed(configure, monkeypatch):
    heads = []

    def observe(model, *arguments):
        heads.append(copy.deepcopy(model.head).cpu())
        return fit.fit(model, *arguments)

    monkeypatch.setattr(run, 'fit', observe)
    finetune(configure('rte', seed=2, max_epochs=1, dropout=0.3))
    (head,) = heads
    assert head.dropout.p == 0.3
    expected = FinetuningModel(torch.nn.Identity(), SIZES['hidden_size'], TASKS['rte'], dropout=0.3, seed=2).head
    torch.testing.assert_close(dict(head.state_dict()), dict(expected.state_dict()), rtol=0, atol=0)


def test_bf16_is_another_arithmetic(configure):
    config = configure('rte', max_epochs=1)
    records = [finetune(dataclasses.replace(config, precision=p)) for p in (Precision.fp32, Precision.bf16)]
    assert records[0].train_loss != records[1].train_loss == pytest.approx(records[0].train_loss, rel=0.05)


@pytest.mark.parametrize('task', ['rte', 'squad2'])
def test_scores_are_computed_in_fp32_under_autocast(task):
    model = FinetuningModel(torch.nn.Identity(), 64, TASKS[task], dropout=0.0, seed=2).eval()
    hidden = torch.randn(2, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.autocast('cpu', torch.bfloat16):
        scores = model.head(hidden) if task == 'rte' else model.head(hidden[None], torch.ones(1, 2).bool())
    assert scores.dtype == torch.float32
    assert not scores.equal(scores.bfloat16().float())


def test_padding_is_that_of_the_microbatches(configure):
    config = configure('rte', max_epochs=1)
    whole, single = (
        finetune(dataclasses.replace(config, device_train_microbatch_size=size)).padded_share for size in (None, 1)
    )
    assert whole > single == 0


@pytest.mark.parametrize('scores, best', [((0.8, 0.7, 0.6, 0.5), 0), ((0.5, 0.8, 0.8, 0.7), 1)])
def test_the_saved_weights_are_those_of_the_best_evaluation_and_the_first_of_equals(
    configure, monkeypatch, scores, best
):
    config = configure('rte', max_epochs=2, saves_model=True, evaluation=EvaluationProtocol.half_epochs)
    evaluate, seen = Evaluator._evaluate, []

    def give_score(self, model):
        result = evaluate(self, model)
        seen.append({name: value.clone() for name, value in model.state_dict().items()})
        return dataclasses.replace(result, metrics=result.metrics | {'accuracy': scores[len(seen) - 1]})

    monkeypatch.setattr(Evaluator, '_evaluate', give_score)
    record = finetune(config)
    assert (record.best_step, len(seen)) == (3 * (best + 1), 4)
    saved = load_file(Path(config.save_folder, record.key, 'model.safetensors'))
    torch.testing.assert_close(saved, seen[best], rtol=0, atol=0)
    assert not saved['head.output.weight'].equal(seen[-1]['head.output.weight'])
