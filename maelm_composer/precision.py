"""``precision: auto``: bf16 where the device trains faster in bf16 than in fp32, else fp32.

Both are measured, as no list of processors says enough: with AMX or AVX-512-BF16 a CPU multiplies bf16 two to ten times
as fast as fp32, with AVX2 alone a twentieth as fast. Torch is imported by the measurement alone: planning reads choices
without it.
"""

import contextlib
import functools
import math
import os
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maelm_composer.config import Precision
from maelm_composer.errors import InputError

# Rows and width of the measured feed-forward block: the demo's order on a CPU, where emulated bf16 would take seconds
# for more; on a GPU enough to fill it.
CPU_SHAPE, GPU_SHAPE = (128, 256), (8192, 1024)
MIN_ROUNDS, MAX_SECONDS = 3, 0.2
FILE = 'precision.txt'


@dataclass(frozen=True)
class Speeds:
    """FLOP/s of the block's forward and backward pass: of a GPU, or of one CPU core."""

    fp32: float
    bf16: float  # 0: the device has no bf16
    device: str

    @property
    def faster(self) -> Precision:
        return Precision.bf16 if self.bf16 > self.fp32 else Precision.fp32

    def describe(self) -> str:
        if not self.bf16:
            return f'{self.device} has no bf16'
        return f'bf16 runs at {self.bf16 / self.fp32:.2g} times the speed of fp32'


@dataclass(frozen=True)
class Choice:
    """A precision, why it was chosen, and a line that the user should read, or ''."""

    precision: Precision
    reason: str = ''  # '' where the recipe names the precision
    notice: str = ''

    def __str__(self) -> str:
        """As it stands on the start screen and in the record."""
        return f'{self.precision.name} ({self.reason})' if self.reason else self.precision.name


@functools.cache
def measure_speeds() -> Speeds:
    """Time one block in both precisions, in turn; well under a second.

    On a CPU by the processor's time of one thread, since several threads on a busy machine wait for each other.
    """
    import torch
    from torch import nn

    from maelm_composer.device import find_device, name_device

    device, threads = find_device(), torch.get_num_threads()
    rows, size = CPU_SHAPE if device.type == 'cpu' else GPU_SHAPE
    seconds: dict[Precision, list[float]] = {Precision.fp32: [], Precision.bf16: []}
    torch.set_num_threads(1)
    try:
        # A run's generators stay as they were.
        with torch.random.fork_rng(devices=[device] if device.type == 'cuda' else []), torch.enable_grad():
            block = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size)).to(device)
            inputs = torch.randn(rows, size, device=device, requires_grad=True)
            start = time.perf_counter()
            while len(seconds[Precision.fp32]) < MIN_ROUNDS or time.perf_counter() - start < MAX_SECONDS:
                for precision, measured in seconds.items():
                    measured.append(_time_block(block, inputs, precision))
    finally:
        torch.set_num_threads(threads)
    flops = 3 * 2 * 2 * rows * size * 4 * size  # two products, forward; twice as many backward
    fp32, bf16 = (flops / min(measured) for measured in seconds.values())
    return Speeds(fp32, bf16, name_device())


def choose(asked: Precision, key: str, begun: Precision | None = None) -> Choice:
    """The precision of a run that asks for ``asked`` under the recipe's ``key``.

    Args:
        begun: in which the run, or the folder's other runs, were begun; ``auto`` goes on in it on whatever device.

    Raises:
        InputError: bf16 is asked for, or was begun in, and the device has none.
    """
    if asked is Precision.fp32:
        return Choice(asked)
    speeds = measure_speeds()
    faster = speeds.faster
    precision = asked if asked is not Precision.auto else begun or faster
    if precision is Precision.bf16 and not speeds.bf16:
        raise InputError(f'{speeds.describe()}: give {key}=fp32, and begin anew where runs were begun in bf16')
    if asked is Precision.auto and begun is not None:
        elsewhere = f', although {speeds.describe()} here' if begun is not faster else ''
        return Choice(precision, 'auto, as begun', f'{key}=auto: going on in {begun.name}, as begun{elsewhere}')
    if asked is Precision.auto:
        return Choice(precision, f'auto: {speeds.describe()}', '' if speeds.bf16 else f'{speeds.describe()}: fp32')
    slowdown = speeds.fp32 / speeds.bf16
    return Choice(
        precision,
        notice=f'bf16 takes {slowdown:.1f} times as long as fp32 here: {key}=fp32, or auto, is faster'
        if slowdown > 1
        else '',
    )


def choose_in(folder: Path, asked: Precision, key: str) -> Choice:
    """As :func:`choose`, once for all runs in ``folder``, which are there to be compared; kept in its precision.txt.

    Raises:
        InputError: as :func:`choose`, or precision.txt cannot be read.
    """
    if asked is not Precision.auto or (begun := read_choice(folder)) is not None:
        return choose(asked, key, begun if asked is Precision.auto else None)
    choice = choose(asked, key)
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f'.{FILE}.{uuid.uuid4().hex}'
    temporary.write_text(f'{choice}\n', encoding='utf-8')
    with contextlib.suppress(FileExistsError):  # a process on another machine was faster, and may have chosen otherwise
        os.link(temporary, folder / FILE)
    temporary.unlink()
    there = read_choice(folder)
    return choice if there is choice.precision else choose(asked, key, there)


def read_choice(folder: Path) -> Precision | None:
    """The first word of ``folder``'s precision.txt; None where there is none."""
    path = folder / FILE
    try:
        word = path.read_text(encoding='utf-8').split(' ')[0].strip()
    except FileNotFoundError:
        return None
    if word not in (Precision.fp32.name, Precision.bf16.name):
        raise InputError(f'{path} begins with neither fp32 nor bf16: write there which of them the runs beside it have')
    return Precision[word]


@functools.cache  # once a process, however many runs it makes
def tell(notice: str) -> None:
    """Print the line on standard error, unless it is empty."""
    if notice:
        print(notice, file=sys.stderr, flush=True)


def _time_block(block: Any, inputs: Any, precision: Precision) -> float:
    import torch

    clock = time.perf_counter if inputs.is_cuda else time.thread_time
    start = clock()
    try:
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=precision is Precision.bf16):
            outputs = block(inputs)
    except RuntimeError:  # torch's answer on a GPU without bf16
        if precision is Precision.fp32:
            raise
        return math.inf
    outputs.sum().backward()
    if inputs.is_cuda:
        torch.cuda.synchronize()
    return clock() - start
