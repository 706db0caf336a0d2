"""A lock on a folder, so that two processes never write the same one."""

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from maelm_composer.errors import InputError

LOCK = '.lock'
SECONDS_TO_WAIT = 1  # while :func:`is_locked` looks


@contextlib.contextmanager
def lock_folder(folder: Path, owner: str) -> Iterator[None]:
    """Lock ``folder`` for this process while the body runs. The kernel releases the lock when the process dies.

    The lock works between processes of one machine and, where the file system supports it, between machines that share
    the disk. The lock needs filelock 4: in earlier versions the loader's workers inherit the lock, and the workers
    outlive a killed process by some seconds.

    Raises:
        InputError: another process, called ``owner`` in the message, holds the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK, timeout=SECONDS_TO_WAIT)
    try:
        lock.acquire()
    except Timeout:
        raise InputError(f'another {owner} is at work in {folder}: wait, or choose another folder') from None
    except OSError as error:  # the file system has no locks
        warnings.warn(f'{folder} cannot be locked ({error}): start no other process in it', stacklevel=3)
    try:
        yield
    finally:
        lock.release()


def is_locked(folder: Path) -> bool:
    """Whether a process holds the lock of ``folder``; also True where that cannot be found out."""
    if not (folder / LOCK).exists():
        return False
    try:
        with FileLock(folder / LOCK, blocking=False):
            return False
    except OSError:  # Timeout is one, too
        return True
