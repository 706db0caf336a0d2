"""Shared memory that ended runs left behind."""

import contextlib
import os
import re
import tempfile
from pathlib import Path


def find_dead_segments(memory: Path = Path('/dev/shm')) -> list[Path]:
    """This user's shared memory and lock files of StreamingDataset that belong to no live process.

    StreamingDataset numbers its datasets: 000000_locals and so on. A number is dead when no process has any of its
    segments mapped; its lock files are dead, too.
    """
    if not memory.is_dir():  # not Linux
        return []
    mapped = ''
    for maps in Path('/proc').glob('[0-9]*/maps'):
        with contextlib.suppress(OSError):  # the process ended, or is another user's
            mapped += maps.read_text(errors='replace')
    live = set(re.findall(rf'{re.escape(str(memory))}/(\d{{6}})_', mapped))
    candidates = [*memory.glob('[0-9]*_*'), *Path(tempfile.gettempdir()).glob('[0-9]*_filelock')]
    return sorted(
        path
        for path in candidates
        if (match := re.fullmatch(r'(\d{6})_[a-z_]+', path.name))
        and match[1] not in live
        and path.stat().st_uid == os.getuid()
    )
