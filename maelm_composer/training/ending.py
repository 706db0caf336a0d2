"""How a run ends before its end: it is stopped, it fails, or a rank of it is killed."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator

from composer.utils import dist

from maelm_composer.device import LESS_MEMORY
from maelm_composer.errors import InputError
from maelm_composer.records import PretrainingRecord
from maelm_composer.training.run_folder import RunFolder
from maelm_composer.training.run_record import end_record, read_record
from maelm_composer.training.signals import Stopped


@contextlib.contextmanager
def record_ending(folder: RunFolder, say: Callable[[str], None]) -> Iterator[None]:
    """Note in the record in ``folder`` how the body was stopped or failed; ``say`` prints the line about a stop.

    Called by every rank.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt, Stopped) as error:
        if isinstance(error, KeyboardInterrupt):
            error = Stopped(signal.SIGINT, 'ended at once')
        line = error.line if isinstance(error, Stopped) else str(error) or type(error).__name__
        with contextlib.suppress(InputError, OSError):  # as on a full disk, which the error is about
            end_record(folder, 'stopped' if isinstance(error, Stopped) else 'failed', line)
        if isinstance(error, Stopped):
            say(line)
            raise error from None
        raise


def end_before_training(rank: int, speaks: bool) -> None:
    """End this rank because ``rank``, of this machine, has ended before the run has a record that could say why."""
    if speaks:
        reason = f'if it gave no reason, it was killed, most likely because memory ran out: {LESS_MEMORY}'
        print(f'error: rank {rank} ended before the training began; {reason}', file=sys.stderr, flush=True)
        time.sleep(2)  # in which the other ranks see that this one is left to speak
        os._exit(2)
    _end_silently()


def end_after(folder: RunFolder, rank: int, speaks: bool) -> None:
    """End this rank because ``rank``, of this machine, has ended, and say why unless that rank has said so itself."""
    record = read_record(folder)
    if isinstance(record, PretrainingRecord):
        os._exit(0)
    if record is None or record.status == 'stopped':
        return
    if record.status == 'running' and speaks:
        line = f'rank {rank} was killed, most likely because memory ran out: {LESS_MEMORY}'
        end_record(folder, 'failed', line)
        print(f'error: {line}', file=sys.stderr, flush=True)
        os._exit(2)
    _end_silently()


def _end_silently() -> None:
    """End this rank so that the launcher prints none of its output."""
    if dist.get_local_rank() > 0:
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(2)
