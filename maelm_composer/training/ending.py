"""How a run ends before its end: a signal stops it, it fails, or a rank of it is killed."""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from composer.devices import Device
from composer.utils import dist

from maelm_composer.checkpoints.find import read_record
from maelm_composer.device import LESS_MEMORY
from maelm_composer.errors import InputError, Stopped, explain
from maelm_composer.records import Pretraining, PretrainingRecord, UnfinishedPretraining
from maelm_composer.training.run_folder import RunFolder

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
FAILED = 1 << 8  # larger than every signal's number
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
LIBC = ctypes.CDLL(None)


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

    def agree(self, device: Device, has_failed: bool = False) -> int:
        """FAILED if any rank has failed, else a signal that any rank has received, else 0. Called by every rank.

        Signals reach the ranks at different batches.
        """
        own = FAILED if has_failed else self.received
        if dist.get_world_size() == 1:
            return own
        received = device.tensor_to_device(torch.tensor([own]))
        dist.all_reduce(received, reduce_operation='MAX')
        return int(received.item())

    def _note(self, number: int, frame: Any) -> None:
        """Note the signal. A second Ctrl-C ends the process at once.

        A second SIGTERM does not: a rank may get two of them, one sent to its process group and one by the launcher.
        """
        self.received = number
        if number == signal.SIGINT:
            signal.signal(number, self._previous[number])


def end_with_parent(number: int) -> None:
    """Have the kernel send this process the signal ``number`` when its parent dies: a killed one cannot send any."""
    if sys.platform == 'linux':
        LIBC.prctl(PR_SET_PDEATHSIG, int(number))


def end_with_launcher() -> None:
    """Where this process is a rank, :func:`end_with_parent` by the signal that a living launcher sends."""
    if 'LOCAL_RANK' in os.environ:
        end_with_parent(signal.SIGTERM)


@contextlib.contextmanager
def record_ending(folder: RunFolder, say: Callable[[str], None]) -> Iterator[None]:
    """Note in the record in ``folder`` how the body was stopped or failed; ``say`` prints the line about a stop.

    Called by every rank. Outside the training, where :class:`StopSignals` is not installed, Composer's handlers raise
    SystemExit.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        if isinstance(error, KeyboardInterrupt):
            error = SystemExit(128 + signal.SIGINT)
        if isinstance(error, SystemExit) and not isinstance(error, Stopped):
            if error.code not in [128 + number for number in STOP_SIGNALS]:
                raise
            error = Stopped(int(error.code) - 128, 'ended at once')
        line = error.line if isinstance(error, Stopped) else explain(error) or type(error).__name__
        with contextlib.suppress(InputError, OSError):  # as on a full disk, which the error is about
            _note_ending(folder, 'stopped' if isinstance(error, Stopped) else 'failed', line)
        if isinstance(error, Stopped):
            say(line)
            raise error from None
        # Where another rank has stopped, a collective fails on this one.
        if not isinstance(error, InputError) and _is_stopped(folder):
            raise SystemExit(128 + signal.SIGTERM) from None
        raise


def end_before_training(rank: int, speaks: bool, tell: Callable[[str], None]) -> None:
    """End this rank because ``rank``, of this machine, has ended before the run has a record that could say why."""
    if speaks:
        reason = f'if it gave no reason, it was stopped or killed, the latter for want of memory: {LESS_MEMORY}'
        line = f'rank {rank} ended before the training began; {reason}'
        print(f'error: {line}', file=sys.stderr, flush=True)
        tell(line)
        time.sleep(2)  # in which the other ranks see that this one is left to speak
        os._exit(2)
    _end_silently()


def end_after(folder: RunFolder, rank: int, speaks: bool, tell: Callable[[str], None]) -> None:
    """End this rank because ``rank``, of this machine, has ended, and say why unless that rank has said so itself."""
    record = _read_record(folder)
    if isinstance(record, PretrainingRecord):
        os._exit(0)
    if record is None or record.status == 'stopped':
        return
    if record.status == 'running' and speaks:
        aborted = ' (if NCCL did not abort it: see above)' if torch.cuda.is_available() else ''
        line = f'rank {rank} was killed, most likely because memory ran out{aborted}: {LESS_MEMORY}'
        with contextlib.suppress(InputError, OSError):
            _note_ending(folder, 'failed', line)
        print(f'error: {line}', file=sys.stderr, flush=True)
        tell(line)
        os._exit(2)
    _end_silently()


def _note_ending(folder: RunFolder, status: Literal['stopped', 'failed'], ending: str) -> None:
    """Write ``ending`` to the record. Only the first rank's word is kept: the others end because of that one."""
    record = _read_record(folder)
    if isinstance(record, UnfinishedPretraining) and record.status == 'running':
        folder.write_record(record.model_copy(update={'status': status, 'ending': ' '.join(ending.split())}))


def _is_stopped(folder: RunFolder) -> bool:
    with contextlib.suppress(InputError, OSError):
        record = _read_record(folder)
        return record is not None and record.status == 'stopped'
    return False


def _read_record(folder: RunFolder) -> Pretraining | None:
    try:
        return read_record(folder.uri)
    except InputError:  # the object store is away: the working copy's
        return read_record(str(folder.local))


def _end_silently() -> None:
    """End this rank so that the launcher prints none of its output."""
    if dist.get_local_rank() > 0:
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(2)
