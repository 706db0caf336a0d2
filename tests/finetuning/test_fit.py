"""What a fine-tuning run hands to its optimizer, in which arithmetic it runs, and which weights it keeps."""

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.utils import get_total_norm
from torch.optim.optimizer import register_optimizer_step_pre_hook

from maelm_composer.config import EvaluationProtocol, Precision
from maelm_composer.finetuning.evaluation import Evaluator
from maelm_composer.finetuning.run import finetune


def test_every_step_has_the_recipe_s_rate_decay_betas_and_clipped_gradient(configure):
    seen = []

    def observe(optimizer, *_):
        (group,) = optimizer.param_groups
        norm = get_total_norm([p.grad for p in group['params'] if p.grad is not None]).item()
        seen.append((group['lr'], group['weight_decay'], group['betas'], group['eps'], norm))

    settings = {'warmup_proportion': 0.25, 'clip_norm': 0.01, 'weight_decay': 0.3, 'adam_beta2': 0.9, 'adam_eps': 1e-4}
    hook = register_optimizer_step_pre_hook(observe)
    try:
        finetune(dataclasses.replace(configure('rte'), learning_rate=3e-3, max_epochs=2, **settings))
    finally:
        hook.remove()
    rates, decays, betas, eps, norms = zip(*seen, strict=True)
    # 12 steps: up from 0 in 3, then down to 0 after the last
    assert rates == pytest.approx([3e-3 * min(step / 3, (12 - step) / 9) for step in range(12)])
    assert set(decays) == {0.3}
    assert {second for _, second in betas} == {0.9}
    assert set(eps) == {1e-4}
    assert norms == pytest.approx([0.01] * 12, rel=1e-3)


def test_bf16_is_another_arithmetic(configure):
    config = configure('rte', max_epochs=1)
    records = [finetune(dataclasses.replace(config, precision=p)) for p in (Precision.fp32, Precision.bf16)]
    assert records[0].train_loss != records[1].train_loss == pytest.approx(records[0].train_loss, rel=0.05)


def test_padding_is_that_of_the_microbatches(configure):
    config = configure('rte', max_epochs=1)
    whole, single = (
        finetune(dataclasses.replace(config, device_train_microbatch_size=size)).padded_share for size in (None, 1)
    )
    assert whole > single == 0


def test_the_saved_weights_are_those_of_the_best_evaluation(configure, monkeypatch):
    config = configure('rte', max_epochs=2, saves_model=True, evaluation=EvaluationProtocol.half_epochs)
    evaluate, seen = Evaluator._evaluate, []

    def get_worse(self, model):
        result = evaluate(self, model)
        seen.append({name: value.clone() for name, value in model.state_dict().items()})
        return dataclasses.replace(result, metrics=result.metrics | {'accuracy': 1 / len(seen)})

    monkeypatch.setattr(Evaluator, '_evaluate', get_worse)
    record = finetune(config)
    assert (record.best_step, len(seen)) == (3, 4)
    saved = load_file(Path(config.save_folder, record.key, 'model.safetensors'))
    torch.testing.assert_close(saved, seen[0], rtol=0, atol=0)
    assert not saved['head.output.weight'].equal(seen[-1]['head.output.weight'])
