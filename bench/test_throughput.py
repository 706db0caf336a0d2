"""Training speed of our models against Hugging Face's RoBERTa and MPNet, and against the machine's matrix products.

    pytest -s bench/test_throughput.py -k quick       under five minutes: tables to paste into an issue
    pytest -s bench/test_throughput.py [--record]     all; with --record: results/throughput/<table>-<machine>.csv

Speed is measured in fp32, and in bf16 if the device trains about as fast in it or faster. Each contender has its own
process. A round trains each contender for a few steps, so that a drift of the machine's speed affects all alike.
The figures are medians over the half of the timed steps that other processes disturbed least. No test asserts a speed.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from bench.contenders import (
    DEVICE,
    Contender,
    Roofline,
    Shape,
    make_hugging_face,
    make_ours,
    make_recipe,
    measure_peak,
    time_steps,
)
from bench.machine import find_machine, skip_if_slow
from bench.table import HF_COMPILED, HF_EAGER, HF_MEMORY_KEPT, PRODUCTS, Measured, format_table
from bench.worker import start_workers
from maelm_composer.config import Precision
from maelm_composer.precision import measure_speeds

SMALL = Shape(6, 256, 4, 2, length=128, batch=64, vocab=8192)
QUICK_SHAPE = replace(SMALL, batch=32)
BASE_128 = Shape(12, 768, 12, 4, length=128, batch=16 if DEVICE == 'cpu' else 256, vocab=32768)
BASE_512 = Shape(12, 768, 12, 4, length=512, batch=4 if DEVICE == 'cpu' else 64, vocab=32768)
FP32, BF16 = Precision.fp32, Precision.bf16
QUICK: tuple[str, ...] = (HF_EAGER, HF_MEMORY_KEPT, 'our RoBERTa, eager', 'our MAE-LM, eager')
if DEVICE == 'cuda':  # two CPU cores compile for minutes
    QUICK += HF_COMPILED, 'our RoBERTa, compiled'
Makers = dict[str, Callable[[], Contender]]


def list_contenders(shape: Shape, precision: Precision) -> Makers:
    """Hugging Face's and our models, eager and compiled. At base size on a CPU: ours not eager, no MPNet in fp32."""
    roberta, mae_lm = make_recipe(shape, False), make_recipe(shape, True)
    same_model = make_recipe(shape, False, buckets=0)  # Hugging Face's RoBERTa has no relative bias
    has_all = shape.size == SMALL.size or DEVICE == 'cuda'
    makers: Makers = {}
    for name, compiled in (('eager', False), ('compiled', True)):
        peer = partial(make_hugging_face, shape, precision, compiled)
        makers[f'Hugging Face RoBERTa, {name}'] = partial(peer, has_bias=False)
        if has_all or precision is BF16:
            makers[f'Hugging Face MPNet, {name}'] = partial(peer, has_bias=True)
        if DEVICE == 'cpu':  # shows how much of our speed is due to the allocator
            makers[f'Hugging Face RoBERTa, memory kept, {name}'] = partial(peer, has_bias=False, keeps_memory=True)
        if compiled or has_all:
            makers[f'our RoBERTa, {name}'] = partial(make_ours, shape, roberta, precision, compiled)
            makers[f'our RoBERTa without bias, {name}'] = partial(make_ours, shape, same_model, precision, compiled)
            makers[f'our MAE-LM, {name}'] = partial(make_ours, shape, mae_lm, precision, compiled)
    return makers


def measure(
    benchmark: Callable, shape: Shape, precision: Precision, makers: Makers, rounds: int, has_products: bool = True
) -> Measured:
    roofline = Roofline(shape, precision) if has_products else None
    with start_workers(makers) as workers:

        def run_round() -> None:
            if roofline is not None:
                roofline.measure()
            for worker in workers.values():
                worker.run(time_steps)

        benchmark.pedantic(run_round, rounds=rounds, warmup_rounds=1)
        for worker in workers.values():
            worker.run(measure_peak)
        figures = {name: worker.figures for name, worker in workers.items()}
    for name, found in figures.items():
        assert found.losses[-1] < found.losses[0], f'{name} does not learn its one batch'
    if roofline is not None:
        figures[PRODUCTS] = roofline.figures
    return Measured(shape, precision, figures)


@pytest.mark.parametrize(
    'shape,precision', [(SMALL, FP32), (SMALL, BF16), (BASE_128, FP32), (BASE_128, BF16), (BASE_512, BF16)], ids=str
)
def test_training_throughput(benchmark: Callable, record: Callable, shape: Shape, precision: Precision) -> None:
    skip_if_slow(precision)
    rounds = 4 if shape is SMALL or DEVICE == 'cuda' else 3
    measured = measure(benchmark, shape, precision, list_contenders(shape, precision), rounds)
    for name in measured.figures:
        row = measured.describe(name)
        record('training', row)
        benchmark.extra_info[name] = row
    print('', find_machine().describe(), format_table(measured), *measured.compare_models(), sep='\n')


@pytest.mark.parametrize('precision', [FP32, BF16], ids=str)
def test_quick(benchmark: Callable, precision: Precision) -> None:
    """A short table, under five minutes: half the batch of SMALL and one round. Nothing is recorded."""
    skip_if_slow(precision)
    makers = list_contenders(QUICK_SHAPE, precision)
    makers = {name: makers[name] for name in QUICK if name in makers}
    measured = measure(benchmark, QUICK_SHAPE, precision, makers, rounds=1)
    print('', find_machine().describe(), format_table(measured), sep='\n')


@pytest.mark.parametrize('length', [128, 256, 512, 1024])
def test_growth_with_length(benchmark: Callable, record: Callable, length: int) -> None:
    """8,192 tokens per step, in rows of several lengths."""
    compare_eager(benchmark, record, Shape(6, 256, 4, 2, length=length, batch=8192 // length, vocab=8192))


@pytest.mark.parametrize('batch', [8, 32, 128])
def test_growth_with_batch(benchmark: Callable, record: Callable, batch: int) -> None:
    compare_eager(benchmark, record, Shape(6, 256, 4, 2, length=128, batch=batch, vocab=8192))


def compare_eager(benchmark: Callable, record: Callable, shape: Shape) -> None:
    """Compare eager models in the precision in which the device trains faster."""
    precision = measure_speeds().faster
    peer = partial(make_hugging_face, shape, precision, compiled=False, has_bias=False)
    makers = {
        HF_EAGER: peer,
        HF_MEMORY_KEPT: partial(peer, keeps_memory=True),
        'our RoBERTa, eager': partial(make_ours, shape, make_recipe(shape, False), precision, compiled=False),
        'our MAE-LM, eager': partial(make_ours, shape, make_recipe(shape, True), precision, compiled=False),
    }
    measured = measure(benchmark, shape, precision, makers, rounds=3, has_products=False)
    for name in makers:
        record('growth', measured.describe(name))
    print('', format_table(measured), sep='\n')
