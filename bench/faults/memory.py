"""A memory cgroup for a command, in which the kernel runs out of memory. Linux, as root; cgroup v1 or v2."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOM = 16 << 20  # bytes that are left when memory becomes scarce
LONGEST = 60.0  # seconds in which the kernel must have killed a process
KILLS = 'oom_kill '
LIKELY = 500  # /proc/<pid>/oom_score_adj of the command's processes, so that the one that takes memory is never killed
# Joins the group and takes memory until the kernel has killed a process.
TAKER = f"""
import sys
from pathlib import Path
folder, events = map(Path, sys.argv[1:])
(folder / 'cgroup.procs').write_text('0')
taken = []
while '{KILLS}0' in events.read_text():
    taken.append(b'x' * (1 << 20))
"""


@dataclass(frozen=True)
class MemoryGroup:
    """A memory cgroup. Every process in it belongs to one command of the campaign, or is the one that takes memory."""

    folder: Path
    is_v2: bool

    def lack(self, is_running: Callable[[], bool], victim: int | None = None) -> bool:
        """Leave no memory until the kernel has killed a process of the group; whether it has.

        Args:
            is_running: whether the command still runs; if not, there is nothing to kill.
            victim: pid of the process that the kernel is to choose; None: its own choice.
        """
        for process in self.list_processes():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                score = Path(f'/proc/{process.pid}/oom_score_adj')
                own = int(score.read_text())
                score.write_text(str(max(own, LIKELY) if victim is None else 1000 if process.pid == victim else LIKELY))
        used = int((self.folder / ('memory.current' if self.is_v2 else 'memory.usage_in_bytes')).read_text())
        self._limit(str(used + ROOM))
        events = self.folder / ('memory.events' if self.is_v2 else 'memory.oom_control')
        taker = subprocess.Popen([sys.executable, '-I', '-S', '-c', TAKER, str(self.folder), str(events)])
        try:
            end = time.monotonic() + LONGEST
            while taker.poll() is None and is_running() and time.monotonic() < end:
                time.sleep(0.05)
            return f'{KILLS}0' not in events.read_text()
        finally:
            taker.kill()
            taker.wait()
            self._limit('max' if self.is_v2 else '-1')

    def _limit(self, most: str) -> None:
        (self.folder / ('memory.max' if self.is_v2 else 'memory.limit_in_bytes')).write_text(most)

    def list_processes(self) -> list[psutil.Process]:
        """The processes of the group that have not ended."""
        found = []
        for pid in (self.folder / 'cgroup.procs').read_text().split():
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(int(pid)))
        return found


@contextlib.contextmanager
def memory_group() -> Iterator[MemoryGroup]:
    """A new group without swap; its processes are killed and it is removed at the end.

    Raises:
        OSError: there is no memory cgroup here in which this process may make one.
    """
    parent, is_v2 = find_parent(Path('/proc/mounts').read_text(), Path('/proc/self/cgroup').read_text())
    group = MemoryGroup(parent / f'maelm-faults-{os.getpid()}', is_v2)
    group.folder.mkdir()
    try:
        swap, value = ('memory.swap.max', '0') if is_v2 else ('memory.swappiness', '0')
        with contextlib.suppress(FileNotFoundError):  # a kernel without swap
            (group.folder / swap).write_text(value)
        yield group
    finally:
        while processes := group.list_processes():
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(0.05)
        group.folder.rmdir()


def find_parent(mounts: str, own: str) -> tuple[Path, bool]:
    """The cgroup in which this process may make one that limits memory, and whether it is of version 2.

    Args:
        mounts: content of /proc/mounts.
        own: content of /proc/self/cgroup.

    Raises:
        OSError: there is none.
    """
    paths = {
        name: path for line in own.splitlines() for names, path in [line.split(':', 2)[1:]] for name in names.split(',')
    }
    for _, place, kind, options, *_ in map(str.split, mounts.splitlines()):
        root = Path(place)
        if kind == 'cgroup' and 'memory' in options.split(','):
            inner = root / paths['memory'].strip('/')
            return (inner if inner.exists() else root), False  # a container may see its own group as the root
        if kind == 'cgroup2' and 'memory' in (root / 'cgroup.controllers').read_text().split():
            inner = root / paths[''].strip('/')
            # Version 2 limits no group beside processes that are in its parent, except in the root.
            parent = inner.parent if inner != root and inner.exists() else root
            if 'memory' not in (parent / 'cgroup.subtree_control').read_text().split():
                (parent / 'cgroup.subtree_control').write_text('+memory')
            return parent, True
    raise OSError('no memory cgroup is mounted here')
