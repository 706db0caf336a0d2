"""Training speed of our models against Hugging Face's RoBERTa and MPNet, and against the machine's matrix products.

    pytest -s bench/test_throughput.py [--record]     with --record: results/throughput/<device>.csv

Each contender has a process of its own. Every round trains each for a few steps in turn, so that a machine whose speed
drifts treats all alike; the figures are medians over the timed steps. A test asserts that everything trained, never how
fast.
"""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from bench.contenders import (
    DEVICE,
    TIMED_STEPS,
    Contender,
    Figures,
    Roofline,
    Shape,
    make_hugging_face,
    make_ours,
    make_recipe,
    measure_peak,
    time_steps,
)
from bench.worker import start_workers
from maelm_composer.config import AttentionBackend, Precision

SMALL = Shape(6, 256, 4, 2, length=128, batch=64, vocab=8192)
BASE_128 = Shape(12, 768, 12, 4, length=128, batch=16 if DEVICE == 'cpu' else 256, vocab=32768)
BASE_512 = Shape(12, 768, 12, 4, length=512, batch=4 if DEVICE == 'cpu' else 64, vocab=32768)
HF_EAGER, HF_COMPILED = 'Hugging Face RoBERTa, eager', 'Hugging Face RoBERTa, compiled'
HF_MEMORY_KEPT = 'Hugging Face RoBERTa, memory kept, eager'
FP32, BF16 = Precision.fp32, Precision.bf16


def list_contenders(shape: Shape, precision: Precision) -> dict[str, Callable[[], Contender]]:
    """Compiled and eager, peers and ours; at base size on a CPU ours compiled only, as memory is short."""
    roberta, mae_lm = make_recipe(shape, False), make_recipe(shape, True)
    same_model = make_recipe(shape, False, buckets=0)  # Hugging Face's RoBERTa has no relative bias
    makers: dict[str, Callable[[], Contender]] = {}
    for name, compiled in (('eager', False), ('compiled', True)):
        peer = partial(make_hugging_face, shape, precision, compiled)
        makers[f'Hugging Face RoBERTa, {name}'] = partial(peer, has_bias=False)
        makers[f'Hugging Face MPNet, {name}'] = partial(peer, has_bias=True)
        if DEVICE == 'cpu':  # how much of our lead is the allocator's
            makers[f'Hugging Face RoBERTa, memory kept, {name}'] = partial(peer, has_bias=False, keeps_memory=True)
        if compiled or shape is SMALL or DEVICE == 'cuda':
            makers[f'our RoBERTa, {name}'] = partial(make_ours, shape, roberta, precision, compiled)
            makers[f'our RoBERTa without bias, {name}'] = partial(make_ours, shape, same_model, precision, compiled)
            makers[f'our MAE-LM, {name}'] = partial(make_ours, shape, mae_lm, precision, compiled)
    if DEVICE == 'cuda':
        sdpa = partial(make_ours, shape, roberta, precision, True, AttentionBackend.sdpa)
        makers['our RoBERTa with SDPA, compiled'] = sdpa
    return makers


def measure(
    benchmark: Callable, makers: dict[str, Callable[[], Contender]], rounds: int, roofline: Roofline | None = None
) -> tuple[dict[str, Figures], dict[str, float], float]:
    """Of each contender its figures and its median seconds; FLOP/s of the matrix products in the same rounds."""
    peaks: list[float] = []
    with start_workers(makers) as workers:

        def run_round() -> None:
            if roofline is not None:
                peaks.append(roofline.measure())
            for worker in workers.values():
                worker.run(time_steps)

        benchmark.pedantic(run_round, rounds=rounds, warmup_rounds=1)
        for worker in workers.values():
            worker.run(measure_peak)
        figures = {name: worker.figures for name, worker in workers.items()}
    for name, measured in figures.items():
        assert measured.losses[-1] < measured.losses[0], f'{name} does not learn its one batch'
    median = {name: statistics.median(f.seconds[TIMED_STEPS:]) for name, f in figures.items()}
    return figures, median, statistics.median(peaks[1:]) if peaks else 0.0


def describe(
    name: str, shape: Shape, precision: Precision, figures: dict[str, Figures], median: dict[str, float]
) -> dict[str, Any]:
    """The columns of every row."""
    return {
        'contender': name,
        'precision': precision.name,
        'layers': shape.layers,
        'hidden_size': shape.size,
        'length': shape.length,
        'batch': shape.batch,
        'milliseconds_per_step': round(median[name] * 1e3, 2),
        'tokens_per_second': round(shape.tokens / median[name], 1),
        'times_hugging_face_eager': round(median[HF_EAGER] / median[name], 3),
        'peak_step_mebibytes': round(figures[name].peak_bytes / 2**20),
        'steps': len(figures[name].seconds) - TIMED_STEPS,
    }


@pytest.mark.parametrize('shape,precision', [(SMALL, FP32), (SMALL, BF16), (BASE_128, BF16), (BASE_512, BF16)], ids=str)
def test_training_throughput(benchmark: Callable, record: Callable, shape: Shape, precision: Precision) -> None:
    rounds = 4 if shape is SMALL or DEVICE == 'cuda' else 3
    makers = list_contenders(shape, precision)
    figures, median, peak = measure(benchmark, makers, rounds, Roofline(shape, precision))
    print(f'\n{precision.name}, {shape}; matrix products alone: {peak / 1e9:,.0f} GFLOP/s')
    header = ('ms/step', 'tokens/s', '× HF eager', '× HF comp.', 'GFLOP/s', 'of peak', 'MiB')
    print(f'{"":44}' + ''.join(f'{title:>11}' for title in header))
    for name, measured in figures.items():
        seconds, speed = median[name], measured.flops / median[name]
        row = describe(name, shape, precision, figures, median) | {
            'times_hugging_face_compiled': round(median[HF_COMPILED] / seconds, 3),
            'gflops_per_second': round(speed / 1e9, 1) or None,
            'share_of_matrix_product_peak': round(speed / peak, 3) or None,
        }
        record('training', row)
        benchmark.extra_info[name] = row
        flops = f'{speed / 1e9:11,.0f}{speed / peak:11.1%}' if measured.flops else f'{"":22}'
        print(
            f'{name:44}{seconds * 1e3:11,.0f}{shape.tokens / seconds:11,.0f}{median[HF_EAGER] / seconds:11.2f}'
            f'{median[HF_COMPILED] / seconds:11.2f}{flops}{measured.peak_bytes / 2**20:11,.0f}'
        )
    for kind in ('eager', 'compiled'):
        ours, baseline = f'our MAE-LM, {kind}', f'our RoBERTa, {kind}'
        if ours in median:
            flops = figures[ours].flops / figures[baseline].flops
            print(
                f'MAE-LM / RoBERTa, {kind}: {median[ours] / median[baseline]:.3f} of a step, {flops:.3f} of its FLOPs'
            )


@pytest.mark.parametrize('length', [128, 256, 512, 1024])
def test_growth_with_length(benchmark: Callable, record: Callable, length: int) -> None:
    """8,192 tokens a step, in rows of growing length."""
    compare_eager(benchmark, record, Shape(6, 256, 4, 2, length=length, batch=8192 // length, vocab=8192))


@pytest.mark.parametrize('batch', [8, 32, 128])
def test_growth_with_batch(benchmark: Callable, record: Callable, batch: int) -> None:
    compare_eager(benchmark, record, Shape(6, 256, 4, 2, length=128, batch=batch, vocab=8192))


def compare_eager(benchmark: Callable, record: Callable, shape: Shape) -> None:
    peer = partial(make_hugging_face, shape, BF16, compiled=False, has_bias=False)
    makers = {
        HF_EAGER: peer,
        HF_MEMORY_KEPT: partial(peer, keeps_memory=True),
        'our RoBERTa, eager': partial(make_ours, shape, make_recipe(shape, False), BF16, compiled=False),
        'our MAE-LM, eager': partial(make_ours, shape, make_recipe(shape, True), BF16, compiled=False),
    }
    figures, median, _ = measure(benchmark, makers, rounds=3)
    for name in makers:
        row = describe(name, shape, BF16, figures, median)
        record('growth', row)
        print(f'\n{shape}, {name}: {row["tokens_per_second"]:,.0f} tokens/s, {row["times_hugging_face_eager"]}', end='')
