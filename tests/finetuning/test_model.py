"""The heads: shapes, initial weights, losses."""

import math

import pytest
import torch
from torch.testing import assert_close

from maelm_composer.config import ModelConfig
from maelm_composer.finetuning.model import FinetuningBatch, FinetuningModel
from maelm_composer.model.encoder import Encoder
from maelm_composer.tasks.catalogue import TASKS

CONFIG = ModelConfig(
    vocab_size=50, max_seq_len=16, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
)


def build(task, seed=1, dropout=0.1):
    torch.manual_seed(0)
    return FinetuningModel(Encoder(CONFIG), 16, TASKS[task], dropout, seed).eval()


@pytest.fixture
def batch():
    is_candidate = torch.zeros(3, 8, dtype=torch.bool)
    is_candidate[:, [0, 4, 5]] = True
    segment_ids = torch.ones(3, 8, dtype=torch.long)
    segment_ids[1, 6:] = 0
    ids, positions = torch.arange(24).view(3, 8), torch.arange(8).expand(3, 8)
    return FinetuningBatch(ids, positions, segment_ids, targets=torch.zeros(3), is_candidate=is_candidate)


def test_shapes(batch):
    shapes = {task: tuple(build(task)(batch).shape) for task in ('mnli', 'rte', 'stsb', 'squad2')}
    assert shapes == {'mnli': (3, 3), 'rte': (3, 2), 'stsb': (3,), 'squad2': (3, 8, 2)}


def test_the_first_token_is_what_is_classified(batch):
    model = build('rte')
    tokens = batch.input_ids, batch.position_ids, batch.segment_ids
    first = model.encoder(*tokens)[:, 0]
    head = model.head
    assert_close(model(batch), head.output(torch.tanh(head.dense(first))), rtol=0, atol=1e-6)
    dropped, seen = build('rte', dropout=0.5).head.train(), []
    dropped.dropout.register_forward_hook(lambda module, inputs, output: seen.append((output == 0).float().mean()))
    dropped(first)
    assert [0.2 < share < 0.8 for share in seen] == [True, True]  # before and after the dense layer


def test_the_heads_weights_are_of_the_seed_alone():
    def weights(task, seed):
        torch.rand(seed)
        return build(task, seed).head.output.weight

    for task in ('rte', 'squad2'):
        assert weights(task, 3).equal(weights(task, 3))
        assert not weights(task, 3).equal(weights(task, 4))
    bound = 1 / math.sqrt(16)  # torch's default for a linear layer
    assert 0.8 * bound < weights('mnli', 3).abs().max() <= bound
    assert build('squad2').head.output.bias.tolist() == [0, 0]
    assert weights('squad2', 3).abs().max() < 0.08
    state = torch.get_rng_state()
    FinetuningModel(torch.nn.Identity(), 16, TASKS['rte'], 0.1, 5)
    assert torch.get_rng_state().equal(state)


def test_scores_of_what_cannot_be_an_answer_are_minus_infinity(batch):
    scores = build('squad2')(batch)
    assert scores.isfinite().equal(batch.is_candidate[..., None].expand(-1, -1, 2))


def test_losses():
    log = math.log
    assert build('rte').compute_loss(torch.tensor([[0.0, log(3)]]), torch.tensor([1])).item() == pytest.approx(
        -log(0.75)
    )
    numbers = torch.tensor([0.5, 0.25]), torch.tensor([1.0, 0.25])
    assert build('stsb').compute_loss(*numbers).item() == pytest.approx(0.125)
    scores = torch.full((1, 4, 2), float('-inf'))
    scores[0, 0] = 0
    scores[0, 2] = torch.tensor([log(3), 0.0])
    loss = build('squad2').compute_loss(scores, torch.tensor([[2, 0]]))
    assert loss.item() == pytest.approx((-log(0.75) - log(0.5)) / 2)
