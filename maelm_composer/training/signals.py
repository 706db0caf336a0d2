"""SIGTERM and SIGINT in a training run: the trainer finishes its batch and saves; loader workers ignore them."""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from typing import Any

import torch
from composer.devices import Device
from composer.utils import dist

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


class Stopped(SystemExit):
    """Ends a process whose run was stopped by a signal: exit code 128 + its number."""

    def __init__(self, number: int, how: str) -> None:
        super().__init__(128 + number)
        self.line = f'{signal.Signals(number).name}: {how}; the same command resumes the run'


class StopSignals:
    """Notes a stop signal while it is installed, so that the batch being computed is not lost."""

    def __init__(self) -> None:
        self.received = 0
        self._previous: dict[int, Any] = {}

    def install(self) -> None:
        for number in STOP_SIGNALS:
            self._previous[number] = signal.signal(number, self._note)

    def restore(self) -> None:
        """Put back the handlers from before :meth:`install`."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def agree(self, device: Device) -> int:
        """A signal that any rank has received, else 0. Signals reach the ranks at different batches. For every rank."""
        if dist.get_world_size() == 1:
            return self.received
        received = device.tensor_to_device(torch.tensor([self.received]))
        dist.all_reduce(received, reduce_operation='MAX')
        return int(received.item())

    def _note(self, number: int, frame: Any) -> None:
        """Note the signal. A second Ctrl-C ends the process at once.

        A second SIGTERM does not: a rank may get two of them, one sent to its process group and one by the launcher.
        """
        self.received = number
        if number == signal.SIGINT:
            signal.signal(number, self._previous[number])


def end_with_launcher() -> None:
    """Have the kernel send this rank a SIGTERM when its launcher dies, since a killed launcher cannot send one."""
    if 'LOCAL_RANK' in os.environ and sys.platform == 'linux':
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))


def follow_trainer(worker: int) -> None:
    """Have a loader worker end with its trainer alone: stop signals for the whole group must not lose a batch.

    A worker whose trainer was killed prints no traceback.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    threading.Thread(target=_end_with_trainer, daemon=True).start()
    sys.excepthook = _report_unless_trainer_died


def _end_with_trainer() -> None:
    trainer = multiprocessing.parent_process()  # not the parent of the process: that may be a forkserver
    assert trainer is not None
    while signal.sigwaitinfo(STOP_SIGNALS).si_pid != trainer.pid:
        pass
    os._exit(0)


def _report_unless_trainer_died(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """As sys.excepthook, but silent about a connection that broke because the trainer was killed."""
    trainer = multiprocessing.parent_process()
    assert trainer is not None
    if isinstance(error, ConnectionError):
        trainer.join(1)
        if not trainer.is_alive():
            return
    sys.__excepthook__(kind, error, trace)
