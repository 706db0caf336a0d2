"""Training steps to time: our models and Hugging Face's with the same shape, batch, precision and optimizer.

Dropout is 0, and 15 % of the tokens are masked. Composer is not used.
"""

import ctypes
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import MPNetConfig, MPNetForMaskedLM, RobertaConfig, RobertaForMaskedLM

from bench.machine import OtherProcesses
from maelm_composer.config import DecoderConfig, ModelConfig, Precision, PretrainingConfig
from maelm_composer.data.special_tokens import CLS_ID, NUM_LEADING_SPECIALS, PAD_ID, SEP_ID
from maelm_composer.device import keep_freed_memory
from maelm_composer.masking.collate import Batch, build_collator
from maelm_composer.model.maelm import build_model
from maelm_composer.training.plan import count_row_flops

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
# Untimed steps before the timed ones, in which the process allocates again the memory that it returned while idle. They
# stop after SETTLING_SECONDS.
SETTLING_STEPS, SETTLING_SECONDS, TIMED_STEPS = 3, 2.0, 2
Step = Callable[[], Tensor]


@dataclass(frozen=True)
class Shape:
    layers: int
    size: int
    heads: int
    decoder_layers: int
    length: int
    batch: int
    vocab: int

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    def __str__(self) -> str:
        return f'{self.layers}x{self.size} length {self.length} batch {self.batch}'


@dataclass
class Figures:
    flops: float = 0.0  # of a step by our cost model; 0 for Hugging Face's models, which it does not describe
    seconds: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)  # share of the cores that other processes used, per timed step
    losses: list[float] = field(default_factory=list)
    peak_bytes: int = 0  # greatest additional memory during one step: activations and temporaries

    def list_quiet_steps(self) -> list[tuple[float, float]]:
        """(others' share, seconds) of the least disturbed half of the timed steps, without the first round."""
        steps = list(zip(self.others[TIMED_STEPS:], self.seconds[TIMED_STEPS:], strict=True))
        most = sorted(share for share, _ in steps)[(len(steps) - 1) // 2]
        return [step for step in steps if step[0] <= most]  # more than half of them where shares are equal

    @property
    def step(self) -> float:
        """Seconds: the median of :meth:`list_quiet_steps`."""
        return statistics.median(seconds for _, seconds in self.list_quiet_steps())


@dataclass
class Contender:
    """A model in training; ``step`` makes one step on a fixed batch and returns the loss."""

    step: Step
    figures: Figures = field(default_factory=Figures)


def make_recipe(shape: Shape, decoder: bool, buckets: int = 32) -> PretrainingConfig:
    model = ModelConfig(shape.vocab, shape.length, shape.layers, shape.size, shape.heads, 4 * shape.size, 0.0, 0.0)
    model.relative_position_buckets = buckets
    model.decoder = None
    if decoder:
        model.decoder = DecoderConfig(
            shape.decoder_layers, shape.size, shape.heads, 4 * shape.size, relative_position_buckets=0
        )
    recipe = PretrainingConfig(run_name='bench', save_folder='nowhere', model=model)
    recipe.masking.encoder_mask_fraction = 0.0 if decoder else 1.0
    return recipe


def make_batch(recipe: PretrainingConfig, batch: int) -> Batch:
    """A batch of full rows, one block each, which Hugging Face's models can also read."""
    length, vocab = recipe.model.max_seq_len, recipe.model.vocab_size
    ids = np.random.default_rng(0).integers(NUM_LEADING_SPECIALS, vocab - 1, (batch, length))
    ids[:, 0], ids[:, -1] = CLS_ID, SEP_ID
    samples = [{'input_ids': row, 'row': number, 'epoch': 0} for number, row in enumerate(ids)]
    return build_collator(recipe)(samples).to(DEVICE)


def make_step(model: nn.Module, compute_loss: Step, precision: Precision) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)  # no warm-up: 12 layers diverge at more

    def step() -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=precision == Precision.bf16):
            loss = compute_loss()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def make_ours(shape: Shape, recipe: PretrainingConfig, precision: Precision, compiled: bool) -> Contender:
    """Our model as a contender. Sets the process's allocator to keep freed memory, as our training does."""
    keep_freed_memory()
    model, batch = build_model(recipe.model, seed=0).to(DEVICE), make_batch(recipe, shape.batch)
    if compiled:
        model.compile(fullgraph=True, dynamic=False)
    flops = shape.batch * count_row_flops(recipe)
    return Contender(make_step(model, lambda: model(batch).loss, precision), Figures(flops))


def make_hugging_face(
    shape: Shape, precision: Precision, compiled: bool, has_bias: bool, keeps_memory: bool = False
) -> Contender:
    """RobertaForMaskedLM or, with a relative bias, MPNetForMaskedLM, the only stock class that has one.

    Args:
        keeps_memory: whether the process's allocator keeps freed memory as in our training, or is the default.
    """
    if keeps_memory:
        keep_freed_memory()
    batch = make_batch(make_recipe(shape, decoder=False), shape.batch)
    common = {
        'vocab_size': shape.vocab,
        'hidden_size': shape.size,
        'num_hidden_layers': shape.layers,
        'num_attention_heads': shape.heads,
        'intermediate_size': 4 * shape.size,
        'max_position_embeddings': shape.length + 2,
        'pad_token_id': PAD_ID,
        'hidden_dropout_prob': 0.0,
        'attention_probs_dropout_prob': 0.0,
    }
    model: nn.Module
    if has_bias:
        model = MPNetForMaskedLM(MPNetConfig(**common, relative_attention_num_buckets=32))
    else:
        model = RobertaForMaskedLM(RobertaConfig(**common, type_vocab_size=1))
    model.to(DEVICE)
    inputs = {'input_ids': batch.input_ids, 'attention_mask': torch.ones_like(batch.input_ids), 'labels': batch.labels}
    if compiled:
        model.compile(dynamic=False)
    return Contender(make_step(model, lambda: model(**inputs).loss, precision))


def time_steps(contender: Contender) -> None:
    figures = contender.figures
    begin = time.perf_counter()
    for _ in range(SETTLING_STEPS):
        figures.losses.append(contender.step().item())
        if time.perf_counter() - begin > SETTLING_SECONDS:
            break
    for _ in range(TIMED_STEPS):
        others, start = OtherProcesses(), time.perf_counter()
        figures.losses.append(contender.step().item())  # .item() waits for the device
        figures.seconds.append(time.perf_counter() - start)
        figures.others.append(others.share())


def measure_peak(contender: Contender) -> None:
    """Measure ``peak_bytes`` of one step; on a CPU by the kernel's high-water mark, which a process can reset."""
    if DEVICE == 'cuda':
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        contender.step().item()
        contender.figures.peak_bytes = torch.cuda.max_memory_allocated() - before
        return
    ctypes.CDLL(None).malloc_trim(0)  # return freed memory to the system, since a step would reuse it unmeasured
    Path('/proc/self/clear_refs').write_text('5')
    before = _read_status('VmRSS')
    contender.step().item()
    contender.figures.peak_bytes = _read_status('VmHWM') - before


def _read_status(key: str) -> int:
    lines = Path('/proc/self/status').read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f'{key}:'))


class Roofline:
    """Times only the matrix products of a forward and backward pass of our RoBERTa, in linear layers and attention.

    torch.matmul computes them in the same shapes and precision. On a CPU their time is a lower bound for any
    implementation; on a GPU it contains the launch of each product, which a model's step hides.
    """

    def __init__(self, shape: Shape, precision: Precision) -> None:
        keep_freed_memory()
        dtype = torch.bfloat16 if precision == Precision.bf16 else torch.float32
        random = partial(torch.randn, dtype=dtype, device=DEVICE)
        rows, size, masked = shape.tokens, shape.size, shape.batch * round(0.15 * shape.length)
        whole = [(rows, size, 3 * size), (rows, size, size), (rows, size, 4 * size), (rows, 4 * size, size)]
        last = [(rows, size, 2 * size), (masked, size, size), (masked, size, size)]
        last += [(masked, size, 4 * size), (masked, 4 * size, size)]
        head = [(masked, size, size), (masked, size, shape.vocab)]
        self.products: list[tuple[Tensor, Tensor, int]] = []  # operands, how often
        for triples, times in ((whole, shape.layers - 1), (last, 1), (head, 1)):
            for m, k, n in triples:
                for a, b in (((m, k), (k, n)), ((m, n), (n, k)), ((k, m), (m, n))):  # forward, input's, weight's
                    self.products.append((random(a), random(b), times))
        pairs, head_size, n = shape.batch * shape.heads, size // shape.heads, shape.length
        for a, b in (((pairs, n, head_size), (pairs, head_size, n)), ((pairs, n, n), (pairs, n, head_size))):
            self.products.append((random(a), random(b), 3 * (shape.layers - 1)))
        # The last layer's attention is not among the products; its time is extrapolated at their mean speed.
        own = sum(times * 2 * a.numel() * b.shape[-1] for a, b, times in self.products)
        self.figures = Figures(shape.batch * count_row_flops(make_recipe(shape, decoder=False)))
        self.scale = self.figures.flops / own

    def measure(self) -> None:
        """Time a few passes over all products; each product's time is multiplied by its occurrences in a step."""
        for _ in range(TIMED_STEPS):
            others, seconds = OtherProcesses(), 0.0
            for a, b, times in self.products:
                start = time.perf_counter()
                torch.matmul(a, b)
                if DEVICE == 'cuda':
                    torch.cuda.synchronize()
                seconds += times * (time.perf_counter() - start)
            self.figures.seconds.append(self.scale * seconds)
            self.figures.others.append(others.share())
