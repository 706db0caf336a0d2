"""Who is working on a run: a small file beside its record, so that two sweeps at once do nothing twice.

A claim of a dead process must block nobody. On its own host a process is looked up; elsewhere, on storage that hosts
share, a claim counts while it is touched. The worst that a misjudgement does is a run made twice, to the same record.
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

BEAT_SECONDS = 10
STALE_SECONDS = 120  # without a beat; hosts' clocks may differ by less


@contextlib.contextmanager
def claim(path: Path) -> Iterator[bool]:
    """Hold the file ``path`` while the body runs; yields False where a live process holds it."""
    if not _take(path):
        yield False
        return
    ended = threading.Event()
    beat = threading.Thread(target=_beat, args=(path, ended), daemon=True)
    beat.start()
    try:
        yield True
    finally:
        ended.set()
        beat.join()
        if _read_holder(path) == _describe_self():  # not taken over by another host, for which we seemed dead
            path.unlink(missing_ok=True)


def is_claimed(path: Path) -> bool:
    """Whether a process that is alive, as far as can be known, holds ``path``."""
    try:
        age = time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return False
    if age > STALE_SECONDS:
        return False
    holder = _read_holder(path)
    if holder is None or holder['host'] != socket.gethostname():
        return True
    return _read_start(holder['pid']) == holder['started']


def _take(path: Path) -> bool:
    """Create ``path``, in place of what a dead process left; False where a live process has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(2):
        try:
            file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            if is_claimed(path):
                return False
            path.unlink(missing_ok=True)
            continue
        with os.fdopen(file, 'w', encoding='utf-8') as stream:
            json.dump(_describe_self(), stream)
        return True
    return False


def _beat(path: Path, ended: threading.Event) -> None:
    while not ended.wait(BEAT_SECONDS):
        with contextlib.suppress(FileNotFoundError):
            os.utime(path)


def _describe_self() -> dict[str, object]:
    return {'host': socket.gethostname(), 'pid': os.getpid(), 'started': _read_start(os.getpid())}


def _read_holder(path: Path) -> dict[str, object] | None:
    """Who holds ``path``; None where nobody does, or is just about to say so."""
    try:
        holder: dict[str, object] = json.loads(path.read_text(encoding='utf-8'))
    except (FileNotFoundError, ValueError):
        return None
    return holder


def _read_start(pid: object) -> str | None:
    """When a live process began, in the kernel's ticks, as its number may be used again; None: there is none.

    Where there is no /proc it is None for every process, so that a claim counts until it is stale.
    """
    try:
        fields = Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()
    except OSError:
        return None
    return None if fields[0] in 'ZX' else fields[19]  # a zombie is dead
