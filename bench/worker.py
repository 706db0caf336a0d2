"""Contenders in processes of their own, as training programs are: they share no heap, allocator or compiler."""

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch

from bench.contenders import Contender, Figures

CONTEXT = get_context('spawn')


class Worker:
    """A process with one contender, idle but while told to act; ``figures`` are those of its last act."""

    def __init__(self, name: str, make: Callable[[], Contender]) -> None:
        self._name = name
        self._pipe, other_end = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_serve, args=(other_end, make), daemon=True)
        self._process.start()
        other_end.close()
        self.figures = Figures()

    def run(self, act: Callable[[Contender], None]) -> None:
        """``act`` on the contender, there; returns when it is done, and raises RuntimeError if its process dies."""
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
    """A worker each, all building their contenders at once."""
    workers = {name: Worker(name, make) for name, make in makers.items()}
    try:
        yield workers
    finally:
        for worker in workers.values():
            worker.close()


def _serve(pipe: Connection, make: Callable[[], Contender]) -> None:
    contender = make()
    with contextlib.suppress(EOFError):  # the other end is closed: done
        while True:
            act = pipe.recv()
            act(contender)
            _give_memory_back()
            pipe.send(contender.figures)


def _give_memory_back() -> None:
    """What a step takes is for the next contender; all of them together would not fit."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    ctypes.CDLL(None).malloc_trim(0)
