"""Training speed of our models against Hugging Face's RobertaForMaskedLM: same shape, batch, precision and optimizer.

    pytest -s bench/test_throughput.py

Every round trains each contender for one step in turn, so that a machine whose speed drifts treats all alike; the
figures are medians over the rounds. Dropout is off and 15 % of the tokens are masked. Nothing here needs Composer.
A test asserts that everything trained, never how fast.
"""

import statistics
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import RobertaConfig, RobertaForMaskedLM

from maelm_composer.config import DecoderConfig, ModelConfig, PretrainingConfig
from maelm_composer.data.special_tokens import CLS_ID, NUM_LEADING_SPECIALS, PAD_ID, SEP_ID
from maelm_composer.masking.collate import build_collator
from maelm_composer.model.maelm import build_model

BATCH, LENGTH, VOCAB, LAYERS, SIZE, HEADS, DECODER_LAYERS = 64, 128, 8192, 6, 256, 4, 2
ROUNDS, WARMUP_ROUNDS = 11, 3
DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
BASELINE = 'Hugging Face RoBERTa, eager'

Step = Callable[[], torch.Tensor]


def make_recipe(decoder: bool, decoder_buckets: int = 0) -> PretrainingConfig:
    model = ModelConfig(VOCAB, LENGTH, LAYERS, SIZE, HEADS, 4 * SIZE, 0.0, 0.0)
    model.decoder = None
    if decoder:
        model.decoder = DecoderConfig(DECODER_LAYERS, SIZE, HEADS, 4 * SIZE, relative_position_buckets=decoder_buckets)
    recipe = PretrainingConfig(run_name='bench', save_folder='nowhere', model=model)
    recipe.masking.encoder_mask_fraction = 0.0 if decoder else 1.0
    return recipe


def make_batch(recipe: PretrainingConfig) -> dict[str, torch.Tensor]:
    """Full rows of one block each, as a peer without packing would see them."""
    ids = np.random.default_rng(0).integers(NUM_LEADING_SPECIALS, VOCAB - 1, (BATCH, LENGTH))
    ids[:, 0], ids[:, -1] = CLS_ID, SEP_ID
    samples = [{'input_ids': row, 'row': number, 'epoch': 0} for number, row in enumerate(ids)]
    return {name: tensor.to(DEVICE) for name, tensor in build_collator(recipe)(samples).items()}


def make_step(model: torch.nn.Module, compute_loss: Callable[[], torch.Tensor], is_bf16: bool) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> torch.Tensor:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=is_bf16):
            loss = compute_loss()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def make_ours(recipe: PretrainingConfig, is_bf16: bool, compiled: bool = False) -> Step:
    model, batch = build_model(recipe.model, seed=0).to(DEVICE), make_batch(recipe)
    if compiled:
        model.compile()
    return make_step(model, lambda: model(batch).loss, is_bf16)


def make_hugging_face(is_bf16: bool) -> Step:
    batch = make_batch(make_recipe(decoder=False))
    config = RobertaConfig(
        vocab_size=VOCAB,
        hidden_size=SIZE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * SIZE,
        max_position_embeddings=LENGTH + 2,
        type_vocab_size=1,
        pad_token_id=PAD_ID,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = RobertaForMaskedLM(config).to(DEVICE)
    inputs = {
        'input_ids': batch['input_ids'],
        'attention_mask': torch.ones_like(batch['input_ids']),
        'labels': batch['labels'],
    }
    return make_step(model, lambda: model(**inputs).loss, is_bf16)


@pytest.mark.parametrize('precision', ['fp32', 'bf16'])
def test_training_throughput(benchmark: Callable, precision: str) -> None:
    is_bf16 = precision == 'bf16'
    roberta, mae_lm, biased = make_recipe(False), make_recipe(True), make_recipe(True, decoder_buckets=32)
    contenders = {
        BASELINE: make_hugging_face(is_bf16),
        'our RoBERTa, eager': make_ours(roberta, is_bf16),
        'our MAE-LM, eager': make_ours(mae_lm, is_bf16),
        'our MAE-LM with a decoder bias, eager': make_ours(biased, is_bf16),
        'our RoBERTa, compiled': make_ours(roberta, is_bf16, compiled=True),
        'our MAE-LM, compiled': make_ours(mae_lm, is_bf16, compiled=True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    losses: dict[str, list[float]] = {name: [] for name in contenders}

    def run_round() -> None:
        for name, step in contenders.items():
            start = time.perf_counter()
            losses[name].append(step().item())  # .item() waits for the device
            seconds[name].append(time.perf_counter() - start)

    benchmark.pedantic(run_round, rounds=ROUNDS, warmup_rounds=WARMUP_ROUNDS)
    median = {name: statistics.median(values[WARMUP_ROUNDS:]) for name, values in seconds.items()}
    print(
        f'\n{precision}, {LAYERS} × {SIZE}, length {LENGTH}, batch {BATCH}, {DEVICE}, {torch.get_num_threads()} threads'
    )
    print(f'{"":38} {"ms/step":>8} {"tokens/s":>9} {"× HF":>6} {"step / our RoBERTa":>19}')
    for name, value in median.items():
        ours = median['our RoBERTa, ' + name.rsplit(', ', 1)[1]]
        speed, gain, ratio = BATCH * LENGTH / value, median[BASELINE] / value, value / ours
        benchmark.extra_info[name] = {'tokens_per_second': speed, 'times_hugging_face': gain}
        print(f'{name:38} {value * 1e3:8.0f} {speed:9,.0f} {gain:6.2f} {ratio:19.3f}')
    for name, values in losses.items():
        assert values[-1] < values[0], f'{name} does not learn its one batch'
