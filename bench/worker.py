"""Contenders in separate processes, so that they share no heap, allocator settings or compiler cache."""

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

import torch

from bench.contenders import Contender, Figures

contender: Contender  # of this process, a worker


class Worker:
    """A process with one contender; ``figures`` are those after the last call of ``run``."""

    def __init__(self, name: str, make: Callable[[], Contender]) -> None:
        self._name = name
        self._pool = ProcessPoolExecutor(1, get_context('spawn'), _begin, (make,))
        self._pool.submit(int)  # starts the process, which builds its model meanwhile
        self.figures = Figures()

    def run(self, act: Callable[[Contender], None]) -> None:
        """Call ``act`` on the contender in its process, and wait. Raises RuntimeError if the process died."""
        try:
            self.figures = self._pool.submit(_act, act).result()
        except BrokenProcessPool:
            raise RuntimeError(f'the process of {self._name} died') from None

    def close(self) -> None:
        self._pool.shutdown()


@contextlib.contextmanager
def start_workers(makers: dict[str, Callable[[], Contender]]) -> Iterator[dict[str, Worker]]:
    """Start a worker for each contender; all build their models at the same time."""
    workers = {name: Worker(name, make) for name, make in makers.items()}
    try:
        yield workers
    finally:
        for worker in workers.values():
            worker.close()


def _begin(make: Callable[[], Contender]) -> None:
    global contender
    contender = make()


def _act(act: Callable[[Contender], None]) -> Figures:
    act(contender)
    _give_memory_back()
    return contender.figures


def _give_memory_back() -> None:
    """Return freed memory to the device and the system, since the contenders together would not fit."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    ctypes.CDLL(None).malloc_trim(0)
