"""Waiting for an object store that does not answer."""

import contextlib
import time
from pathlib import Path

from filelock import FileLock, Timeout

from maelm_composer.data.storage import OutageError, read_file

LONGEST_PAUSE = 60.0  # seconds between two tries


class Outage:
    """Counts how long an object store has not answered, and says when to try again: after 1, 2, 4, ... 60 seconds."""

    def __init__(self, limit_minutes: float) -> None:
        self.limit = limit_minutes * 60
        self.since: float | None = None  # seconds of the monotonic clock; None: the last try succeeded
        self.pause = self.next_try = 0.0

    def note(self) -> bool:
        """Note a failed try; returns whether this is the first one of an outage."""
        now, is_first = time.monotonic(), self.since is None
        self.since = now if self.since is None else self.since
        self.pause = 1.0 if is_first else min(2 * self.pause, LONGEST_PAUSE)
        self.next_try = min(now + self.pause, self.since + self.limit)  # a last try when the limit is over
        return is_first

    @property
    def is_due(self) -> bool:
        """Whether it is time to try again."""
        return time.monotonic() >= self.next_try

    @property
    def is_over_limit(self) -> bool:
        return self.seconds >= self.limit

    @property
    def seconds(self) -> float:
        """How long the store has not answered."""
        return 0.0 if self.since is None else time.monotonic() - self.since


def read_through_outage(url: str, limit_minutes: float, lock: Path) -> bytes | None:
    """As :func:`storage.read_file`, but try again for ``limit_minutes`` while the object store does not answer.

    Of several processes that wait, the one that locks the file ``lock`` prints a line at the begin and at the end.

    Raises:
        OutageError: the limit is over.
    """
    outage, speaker = Outage(limit_minutes), FileLock(lock, blocking=False)
    try:
        while True:
            try:
                content = read_file(url)
            except OutageError as error:
                is_first = outage.note()
                if outage.is_over_limit:
                    raise
                if is_first:
                    with contextlib.suppress(Timeout):
                        speaker.acquire()
                        print(f'{error}: trying again for {limit_minutes:g} minutes', flush=True)
            else:
                if speaker.is_locked:
                    print(f'{url} answers after {outage.seconds:.0f} s', flush=True)
                return content
            while not outage.is_due:
                time.sleep(0.5)
    finally:
        speaker.release()
