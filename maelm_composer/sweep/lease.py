"""A lease on a run, beside its record: of several sweeps in one folder, only one makes the run.

A lease works between hosts that share a folder, where kernel locks often do not. The lease of a killed process ends at
once on its own host; elsewhere, or while the process is a zombie, when its file has stayed unchanged for
``LEASE_SECONDS``. A process that is suspended for longer loses its lease and may go on: the run is then made
twice, with the same record.
"""

from pathlib import Path

from filelock import SoftFileLease, Timeout

LEASE_SECONDS, HEARTBEAT_SECONDS = 120, 10  # NFS may show a change up to 60 seconds late


def open_lease(save_folder: str, key: str) -> SoftFileLease:
    """The lease on the run whose record is ``save_folder``/``key``.json, not yet held.

    Keep the object to detect an expired lease of another host: it measures how long the file stays unchanged.
    """
    path = Path(save_folder, f'.{key}.lease')
    path.parent.mkdir(parents=True, exist_ok=True)
    return SoftFileLease(path, lease_duration=LEASE_SECONDS, heartbeat_interval=HEARTBEAT_SECONDS, blocking=False)


def is_free(lease: SoftFileLease) -> bool:
    """Whether no live process holds ``lease``."""
    try:
        with lease:
            return True
    except Timeout:
        return False
