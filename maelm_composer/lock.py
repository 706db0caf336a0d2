"""One process at a time in a folder that it writes."""

import contextlib
import fcntl
import warnings
from collections.abc import Iterator
from pathlib import Path

from maelm_composer.errors import InputError


@contextlib.contextmanager
def hold(folder: Path, who: str) -> Iterator[None]:
    """Keep ``folder`` for this process while the body runs; the lock ends with the process, however that ends.

    Unlike ``flock``'s it is not inherited by the loader's workers, which outlive a killed process for some seconds.
    It works between processes of one machine, or of machines that share the disk; within a process it refuses nothing.

    Args:
        who: what a process at work in such a folder is called.

    Raises:
        InputError: another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / '.lock').open('w') as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise InputError(f'another {who} is at work in {folder}: wait, or choose another folder') from None
        except OSError as error:  # a file system without locks
            warnings.warn(f'{folder} cannot be locked ({error}): start nothing else in it', stacklevel=3)
        yield
