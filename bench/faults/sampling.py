"""Memory, open files, threads and shared memory of a command's processes, and how they grow with its progress."""

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from maelm_composer.statistics import MeanInterval, estimate_mean

LEAST_SAMPLES = 5  # of a start whose growth is measured
QUANTITIES = ('command_mebibytes', 'children_mebibytes', 'open_files', 'threads', 'shared_mebibytes')


@dataclass(frozen=True)
class Sample:
    """The processes of a command at one moment."""

    seconds: float  # since the first start
    start: int  # the command has been started so often
    since_start: float  # seconds
    step: int  # of a training; of a sweep, the number of finished runs
    # Resident memory. What is a process's own would also grow as it writes to pages that it shares with its parent.
    command_mebibytes: float
    children_mebibytes: float  # summed: loader workers, or the processes of Ray
    open_files: int  # of all these processes
    threads: int
    shared_mebibytes: float  # in /dev/shm, of the whole machine


def measure(pid: int) -> dict[str, float]:
    """The :data:`QUANTITIES` of the process ``pid`` and its descendants. Raises psutil.Error or OSError if one ends."""
    command = psutil.Process(pid)
    processes = [command, *command.children(recursive=True)]
    memory = [process.memory_info().rss / 2**20 for process in processes]
    shared = sum(path.stat().st_blocks * 512 for path in Path('/dev/shm').iterdir())
    values = (
        round(memory[0], 2),
        round(sum(memory[1:]), 2),
        sum(process.num_fds() for process in processes),
        sum(process.num_threads() for process in processes),
        round(shared / 2**20, 3),
    )
    return dict(zip(QUANTITIES, values, strict=True))


@contextlib.contextmanager
def sampling(sample: Callable[[], None], interval: float = 5.0) -> Iterator[None]:
    """Call ``sample`` every ``interval`` seconds while the body runs. A process or a segment may go meanwhile."""
    is_over = threading.Event()

    def keep_sampling() -> None:
        while not is_over.wait(interval):
            with contextlib.suppress(psutil.Error, OSError):
                sample()

    thread = threading.Thread(target=keep_sampling, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def measure_growth(samples: Sequence[Sample], quantity: str, settling: int) -> MeanInterval | None:
    """Growth of ``quantity`` per 1,000 steps, with the 95 % interval over starts; None: no start was long enough.

    Every start gives one least-squares slope, since the samples of one process are not independent. The last sample of
    a start is left out: its processes may be ending.

    Args:
        settling: steps after a start that are left out, and steps that must follow them: at first memory grows, until
            every part of the command has run once.
    """
    starts = defaultdict[int, list[Sample]](list)
    for sample in samples:
        starts[sample.start].append(sample)
    slopes = []
    for first, *rest in starts.values():
        found = [sample for sample in rest[:-1] if sample.step - first.step > settling]
        if len(found) >= LEAST_SAMPLES and found[-1].step - found[0].step >= settling:
            steps = [sample.step / 1000 for sample in found]
            slopes.append(float(np.polyfit(steps, [getattr(sample, quantity) for sample in found], 1)[0]))
    return estimate_mean(slopes) if slopes else None


def describe_growth(samples: Sequence[Sample], settling: int) -> str:
    """A Markdown table of :func:`measure_growth`."""
    lines = ['| | median | growth per 1,000 steps | 95 % interval |', '|---|---|---|---|']
    for quantity in QUANTITIES:
        median = float(np.median([getattr(sample, quantity) for sample in samples]))
        growth = measure_growth(samples, quantity, settling)
        shown = '| |' if growth is None else f'{growth.mean:+.3g} | |'
        if growth is not None and growth.low is not None and growth.high is not None:
            shown = f'{growth.mean:+.3g} | {growth.low:+.3g} to {growth.high:+.3g} |'
        lines.append(f'| {quantity.replace("_", " ")} | {median:,.4g} | {shown}')
    return '\n'.join(lines)
