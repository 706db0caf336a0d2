"""``precision: auto``: bf16 where the device trains faster in bf16 than in fp32, else fp32.

Both speeds are measured, since they depend on the processor: a CPU with AMX or AVX-512-BF16 multiplies bf16 two to ten
times as fast as fp32, a CPU with AVX2 alone up to thirty times as slowly. Only the measurement imports torch; planning
reads earlier choices without torch.
"""

import os
import time
import timeit
import uuid
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from maelm_composer.config import Precision
from maelm_composer.errors import InputError

# Rows and width of the measured feed-forward block. The CPU's are about the demo's, since emulated bf16 takes seconds
# for larger ones; the GPU's are large enough to occupy every core.
CPU_SHAPE, GPU_SHAPE = (128, 256), (8192, 1024)
FILE = 'precision.txt'


@dataclass(frozen=True)
class Speeds:
    """FLOP/s of a feed-forward block's forward and backward pass, on a GPU or on one CPU core."""

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
    """A precision, the reason for it, and a notice to the user ('' for none)."""

    precision: Precision
    reason: str = ''  # '' if the recipe names the precision
    notice: str = ''

    def __str__(self) -> str:
        """The text of the start screen and the record."""
        return f'{self.precision.name} ({self.reason})' if self.reason else self.precision.name


@cache
def measure_speeds() -> Speeds:
    """Time a feed-forward block in both precisions, for about a second.

    On a CPU the CPU time of one thread is measured, which does not depend on the load of the machine.
    """
    import torch
    from torch import nn

    from maelm_composer.device import find_device, name_device

    device, threads = find_device(), torch.get_num_threads()
    is_cpu = device.type == 'cpu'
    rows, size = CPU_SHAPE if is_cpu else GPU_SHAPE
    flops = 3 * 2 * 2 * rows * size * 4 * size  # two matrix products forward, four backward

    def train(is_bf16: bool) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=is_bf16):
            outputs = block(inputs)
        outputs.sum().backward()
        if not is_cpu:
            torch.cuda.synchronize()

    def measure(is_bf16: bool) -> float:
        train(is_bf16)  # the first pass is slower
        timer = timeit.Timer(partial(train, is_bf16), timer=time.thread_time if is_cpu else time.perf_counter)
        number, seconds = timer.autorange()
        return flops * number / seconds

    torch.set_num_threads(1)
    try:
        # The states of the run's random generators must not change.
        with torch.random.fork_rng(devices=[] if is_cpu else [device]), torch.enable_grad():
            block = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size)).to(device)
            inputs = torch.randn(rows, size, device=device, requires_grad=True)
            fp32 = measure(is_bf16=False)
            has_bf16 = is_cpu or torch.cuda.is_bf16_supported(including_emulation=False)
            bf16 = measure(is_bf16=True) if has_bf16 else 0.0
    finally:
        torch.set_num_threads(threads)
    return Speeds(fp32, bf16, name_device())


def choose(asked: Precision, key: str, begun: Precision | None = None) -> Choice:
    """Choose the precision of a run.

    Args:
        asked: value of the recipe's ``key``.
        begun: precision in which the run, or another run of its folder, was begun; ``auto`` keeps it on any device.

    Raises:
        InputError: the precision is bf16, and the device has no bf16.
    """
    if asked == Precision.fp32:
        return Choice(asked)
    speeds = measure_speeds()
    precision = begun or speeds.faster if asked == Precision.auto else asked
    if precision == Precision.bf16 and not speeds.bf16:
        raise InputError(f'{speeds.describe()}: give {key}=fp32, in a new folder if runs were begun in bf16')
    if asked == Precision.bf16:
        slowdown = speeds.fp32 / speeds.bf16
        notice = f'bf16 takes {slowdown:.1f} times as long as fp32 here: {key}=fp32, or auto, is faster'
        return Choice(precision, notice=notice if slowdown > 1 else '')
    if begun is None:
        return Choice(precision, f'auto: {speeds.describe()}', '' if speeds.bf16 else f'{speeds.describe()}: fp32')
    elsewhere = '' if begun is speeds.faster else f', although {speeds.describe()} here'
    return Choice(precision, 'auto, as begun', f'{key}=auto: resuming in {begun.name}, as begun{elsewhere}')


def choose_in(folder: Path, asked: Precision, key: str) -> Choice:
    """Choose one precision for all runs in ``folder``, which are compared; ``auto`` keeps the choice in precision.txt.

    Raises:
        InputError: as :func:`choose`, or precision.txt is not readable.
    """
    begun = read_choice(folder) if asked == Precision.auto else None
    choice = choose(asked, key, begun)
    if asked != Precision.auto or begun is not None:
        return choice
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f'.{FILE}.{uuid.uuid4().hex}'
    try:
        temporary.write_text(f'{choice}\n', encoding='utf-8')
        try:
            os.link(temporary, folder / FILE)
        except FileExistsError:  # another machine has just made a choice
            pass
        except OSError:  # the file system has no hard links
            temporary.replace(folder / FILE)
    finally:
        temporary.unlink(missing_ok=True)
    there = read_choice(folder)
    return choice if there is choice.precision else choose(asked, key, there)


def read_choice(folder: Path) -> Precision | None:
    """The first word of ``folder``'s precision.txt; None if there is no such file.

    Raises:
        InputError: the word is no precision.
    """
    path = folder / FILE
    try:
        word = path.read_text(encoding='utf-8', errors='replace').split(' ')[0].strip()
    except FileNotFoundError:
        return None
    if word not in (Precision.fp32.name, Precision.bf16.name):
        raise InputError(f'{path} begins with neither fp32 nor bf16: write the precision of the runs beside it')
    return Precision[word]
