"""Files that a reader finds whole or not at all, and folders that one process at a time writes. Imports no torch."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import uuid
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from maelm_composer.errors import InputError

CHECKSUM = 'checksum'  # key of the JSON files of this package: SHA-256 of their other fields
LOCK = '.lock'
SECONDS_TO_WAIT = 1  # for a lock before giving up, since :func:`is_locked` holds it for an instant
WITHOUT_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}  # of a file system that has none


def assert_local(path: str | Path, name: str, kind: str = 'folder') -> None:
    """Raise InputError if ``path`` is an address such as s3://bucket, also if Path made it s3:/bucket."""
    if re.match(r'[a-z][a-z0-9+.-]*:/', str(path)):
        raise InputError(f'{name} {path}: must be a local or shared {kind}')


def assert_writable(folder: Path) -> None:
    """Write a file in ``folder``, or where that will be made, and remove it: an OSError before the work, not after."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    probe = there / f'.probe.{uuid.uuid4().hex}'
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder)) from None


def hash_json(value: Any) -> str:
    """SHA-256 (hex) of ``value`` as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def format_json(plain: dict[str, Any], indent: int | None = 2) -> str:
    """``plain`` as JSON with its checksum, which :func:`parse_json` compares."""
    return json.dumps(plain | {CHECKSUM: hash_json(plain)}, indent=indent) + '\n'


def write_json(path: Path, plain: dict[str, Any]) -> None:
    """Write :func:`format_json`; a reader sees the old file or the new one, never a part."""
    write_text(path, format_json(plain))


def write_text(path: Path, text: str) -> None:
    """As :func:`write_json`, for text."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """As :func:`write_json`, for bytes."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """The place of a temporary file, which the body writes and which then replaces ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The temporary name is unique: several machines may write the same file of a shared folder.
    temporary = path.with_name(f'.{path.name}.{uuid.uuid4().hex}')
    try:
        yield temporary
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and error.filename in (None, str(temporary)):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


@contextlib.contextmanager
def writing_folder(folder: Path) -> Iterator[Path]:
    """The place of a hidden folder, which the body fills and which then becomes ``folder``, empty or not there before.

    A failure leaves no partial folder, a kill a hidden one.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    staged = folder.with_name(f'.{folder.name}.{uuid.uuid4().hex}')
    try:
        yield staged
        staged.rename(folder)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def parse_json(content: str | bytes, where: str, needs: Sequence[str] = (), remedy: str = '') -> dict[str, Any]:
    """The JSON object in ``content`` without its checksum. Files of other programs and of version 0.1 have none.

    Args:
        where: name of the file, for the message.
        needs: keys that the object must have.
        remedy: what to do if it is damaged.

    Raises:
        InputError: ``content`` is not JSON, no object with these keys, or not the one that was written.
    """
    try:
        plain = json.loads(content)
        if not isinstance(plain, dict):
            raise ValueError('it is no JSON object')
        if missing := [key for key in needs if key not in plain]:
            raise ValueError(f'it lacks {", ".join(missing)}')
        checksum = plain.pop(CHECKSUM, None)
        if checksum not in (None, hash_json(plain)):
            raise ValueError('its checksum is not that of its other fields')
    except (ValueError, RecursionError) as error:
        raise InputError(f'{where} is damaged: {error}' + f'; {remedy}' * bool(remedy)) from None
    return plain


def hash_file(path: str | Path, algorithm: str = 'sha256') -> str:
    """The hash of the content, in hexadecimal."""
    with open(path, 'rb') as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


@contextlib.contextmanager
def raising_os_errors(path: Path) -> Iterator[None]:
    """Turn an error of safetensors or tokenizers about the system, as on a full disk, into an OSError on ``path``."""
    try:
        yield
    except Exception as error:  # the class that the tokenizers library raises
        number = re.search(r'\(os error (\d+)\)', str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def apply_umask(path: Path) -> None:
    """Give ``path`` the mode of a newly created file; safetensors makes files that only their owner can read."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


@contextlib.contextmanager
def lock_folder(folder: Path, owner: str) -> Iterator[None]:
    """Lock ``folder`` for this process while the body runs. The kernel releases the lock when the process dies.

    The lock works between processes of one machine and, where the file system supports it, between machines that share
    the disk. The lock needs filelock 4: in earlier versions the loader's workers inherit the lock, and the workers
    outlive a killed process by some seconds.

    Raises:
        InputError: another process, called ``owner`` in the message, holds the lock, or another user's may.
        OSError: the file of the lock cannot be opened.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK, timeout=SECONDS_TO_WAIT, fallback_to_soft=False)  # a soft lock outlives a kill
    try:
        lock.acquire()
    except Timeout:
        raise InputError(f'another {owner} is at work in {folder}: wait, or choose another folder') from None
    except PermissionError as error:
        if not (folder / LOCK).exists():
            raise OSError(error.errno, error.strerror, str(folder)) from None
        raise InputError(
            f'{folder / LOCK} is of another user, whose {owner} may be at work: make sure, then delete the file'
        ) from None
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
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
        with (folder / LOCK).open('rb') as file:  # which may be of another user, so not to be written
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except OSError:
        return True
