import pytest
import torch
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from maelm_composer.config import ModelConfig, OptimizerConfig, Schedule, TrainingConfig
from maelm_composer.model.maelm import build_model
from maelm_composer.training.optimizer import build_optimizer, build_schedule

MODEL = ModelConfig(
    vocab_size=64, max_seq_len=16, num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=16,
    decoder=None,
)  # fmt: skip


def test_every_parameter_decays_in_one_group():
    model = build_model(MODEL, seed=0)
    optimizer = build_optimizer(model.parameters(), OptimizerConfig(weight_decay=0.01))
    (group,) = optimizer.param_groups
    assert group['weight_decay'] == 0.01
    assert sum(p.numel() for p in group['params']) == sum(p.numel() for p in model.parameters())


def test_steps_are_adamw_with_the_decay_scaled_by_the_learning_rate():
    parameter = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    config = OptimizerConfig(learning_rate=0.1, adam_beta1=0.8, adam_beta2=0.95, adam_eps=0.1, weight_decay=0.5)
    optimizer = build_optimizer([parameter], config)
    expected, first, second = parameter.detach().clone(), torch.zeros(2), torch.zeros(2)
    for step, gradient in enumerate(torch.tensor([[1.0, 1.0], [-2.0, 0.5], [0.25, 3.0]]), start=1):
        parameter.grad = gradient
        optimizer.step()
        first, second = 0.8 * first + 0.2 * gradient, 0.95 * second + 0.05 * gradient**2
        mean, square = first / (1 - 0.8**step), second / (1 - 0.95**step)
        expected = expected * (1 - 0.1 * 0.5) - 0.1 * mean / (square.sqrt() + 0.1)
        torch.testing.assert_close(parameter.detach(), expected)


@pytest.mark.parametrize('warmup, last', [(0, 10), (4, 10), (10, 10)])
@pytest.mark.parametrize(
    'kind, build',
    [
        ('linear', get_linear_schedule_with_warmup),
        ('cosine', get_cosine_schedule_with_warmup),
        ('constant', lambda optimizer, warmup, last: get_constant_schedule_with_warmup(optimizer, warmup)),
    ],
)
def test_the_schedule_is_that_of_transformers_at_every_step(kind, build, warmup, last):
    parameters = [torch.nn.Parameter(torch.ones(1))]
    training = TrainingConfig(global_train_batch_size=32, max_samples=32 * last)
    config = OptimizerConfig(learning_rate=3e-4, warmup_samples=32 * warmup, schedule=Schedule[kind])
    ours = build_optimizer(parameters, config)
    schedule = build_schedule(ours, config, training)
    theirs = build_optimizer(parameters, config)
    reference = build(theirs, warmup, last)
    for step in range(last + 2):
        if step < last or kind != 'cosine':  # theirs begins another wave at the end
            assert ours.param_groups[0]['lr'] == pytest.approx(theirs.param_groups[0]['lr'], rel=1e-12, abs=1e-19)
        ours.step(), theirs.step(), schedule.step(), reference.step()
