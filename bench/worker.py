"""Contenders in separate processes, so that they share no heap, allocator settings or compiler cache."""

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch

from bench.contenders import Contender, Figures

CONTEXT = get_context('spawn')


class Worker:
    """A process with one contender that waits for calls of ``run``; ``figures`` are those after the last call."""

    def __init__(self, name: str, make: Callable[[], Contender]) -> None:
        self._name = name
        self._pipe, other_end = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_serve, args=(other_end, make), daemon=True)
        self._process.start()
        other_end.close()
        self.figures = Figures()

    def run(self, act: Callable[[Contender], None]) -> None:
        """Call ``act`` on the contender in its process, and wait. Raises RuntimeError if the process died."""
        try:
            self._pipe.send(act)
            self.figures = self._pipe.recv()
        except (EOFError, BrokenPipeError):
            self._process.join()
            raise RuntimeError(f'the process of {self._name} died with exit code {self._process.exitcode}') from None

    def close(self) -> None:
        self._pipe.close()
        self._process.join()


@contextlib.contextmanager
def start_workers(makers: dict[str, Callable[[], Contender]]) -> Iterator[dict[str, Worker]]:
    """Start a worker for each contender; all build their models at the same time."""
    workers = {name: Worker(name, make) for name, make in makers.items()}
    try:
        yield workers
    finally:
        for worker in workers.values():
            worker.close()


def _serve(pipe: Connection, make: Callable[[], Contender]) -> None:
    contender = make()
    with contextlib.suppress(EOFError):  # raised when the other end closes the pipe
        while True:
            act = pipe.recv()
            act(contender)
            _give_memory_back()
            pipe.send(contender.figures)


def _give_memory_back() -> None:
    """Return freed memory to the device and the system, since the contenders together would not fit."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    ctypes.CDLL(None).malloc_trim(0)
