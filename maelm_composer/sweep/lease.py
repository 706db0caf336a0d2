"""A lease on a run, beside its record: of several sweeps in one folder, only one makes the run.

A lease works between hosts that share a folder, where kernel locks often do not. The lease of a killed process ends at
once on its own host; elsewhere, or while the process is a zombie, when its file has stayed unchanged for
``LEASE_SECONDS``. A process that is suspended for longer loses its lease and may go on, and on NFS two processes may
take a dead one's lease at the same moment: the run is then made twice, with the same record.
"""

import contextlib
import os
import time
from pathlib import Path
from typing import Any

from filelock import SoftFileLease, Timeout

LEASE_SECONDS, HEARTBEAT_SECONDS = 120, 10  # NFS may show a change up to 60 seconds late
SECONDS_BETWEEN_LOOKS = 1.0


class RunLease(SoftFileLease):
    """A lease that can be taken from a dead process on NFS and SMB, too.

    There filelock cannot exchange two names in one step, without which it leaves a lease to its holder.
    """

    _seen: tuple[tuple[int, ...], float] | None = None  # the file's state, and when this object first saw it

    def acquire(self, *args: Any, **options: Any) -> Any:
        try:
            return super().acquire(*args, **options)
        except Timeout:
            if time.monotonic() - self.watch() < LEASE_SECONDS:
                raise
            self.break_lock()
            return super().acquire(*args, **options)

    def watch(self) -> float:
        """Since when the file is as it is, on the clock of ``time.monotonic``, as far as this object has seen."""
        try:
            found = os.stat(self.lock_file)
        except FileNotFoundError:  # released meanwhile
            return time.monotonic()
        state = found.st_ino, found.st_mtime_ns, found.st_ctime_ns
        if self._seen is None or self._seen[0] != state:
            self._seen = state, time.monotonic()
        return self._seen[1]


def open_lease(save_folder: str, key: str) -> RunLease:
    """The lease on the run whose record is ``save_folder``/``key``.json, not yet held.

    Keep the object to detect an expired lease of another host: it measures how long the file stays unchanged.
    """
    path = Path(save_folder, f'.{key}.lease')
    path.parent.mkdir(parents=True, exist_ok=True)
    return RunLease(path, lease_duration=LEASE_SECONDS, heartbeat_interval=HEARTBEAT_SECONDS, blocking=False)


def take(lease: RunLease) -> bool:
    """Acquire ``lease``, if need be after waiting for its holder to be known as dead; False if the holder lives."""
    before = None
    while True:
        with contextlib.suppress(Timeout):
            lease.acquire()
            return True
        now = lease.watch()
        if before not in (None, now):  # refreshed or released since
            return False
        before = now
        time.sleep(SECONDS_BETWEEN_LOOKS)


def is_free(lease: RunLease) -> bool:
    """Whether no live process holds ``lease``."""
    try:
        with lease:
            return True
    except Timeout:
        return False
