"""A ``maelm`` command in a process of its own, forked from a server that has imported the package.

An import takes longer than most of the jobs, and faults during an import show nothing.
"""

import atexit
import contextlib
import ctypes
import functools
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench.faults.jobs import Job

FORKS: Any = multiprocessing.get_context('forkserver')
FORKS.set_forkserver_preload(
    [
        'maelm_composer.cli',
        'maelm_composer.training.run',
        'maelm_composer.data.tokenizer',
        'maelm_composer.finetuning.run',
        'maelm_composer.analysis.ranks',
        'maelm_composer.checkpoints.export',
        'maelm_composer.reporting.report',
    ]
)
CLOCKS = ('/usr/lib/*/faketime', '/usr/lib*/faketime', '/usr/local/lib/faketime')
# libfaketime 0.9.10 lets a sleep until a moment of the real monotonic clock fail; Python's time.sleep is one.
SLEEP = """
#include <errno.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_nanosleep(clockid_t clock, int flags, const struct timespec *until, struct timespec *left) {
    return syscall(SYS_clock_nanosleep, clock, flags, until, left) ? errno : 0;
}
"""
CLONE_NEWNS = 0x20000  # <sched.h>
MS_REC_PRIVATE = 0x4000 | 0x40000  # <sys/mount.h>: mounts below do not reach other namespaces
PR_CAPBSET_DROP = 24  # <linux/prctl.h>
CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 1, 2  # <linux/capability.h>
CAPABILITY_VERSION = 0x20080522


@dataclass(frozen=True)
class Limits:
    """What a command lacks; the default is nothing."""

    file_bytes: int = resource.RLIM_INFINITY  # largest file that it may write
    open_files: int = 1024
    shared_memory: int | None = None  # bytes of a /dev/shm of its own
    cores: frozenset[int] = field(default_factory=lambda: frozenset(os.sched_getaffinity(0)))
    memory_group: Path | None = None  # cgroup that it runs in
    clock: Mapping[str, str] = field(default_factory=dict)  # what find_clock has returned


class Command:
    """A started command. Its output goes to ``log``, and all of its processes are in a group of their own."""

    def __init__(self, job: Job, folder: Path, log: Path, environment: Mapping[str, str], limits: Limits) -> None:
        self.log = log
        self._process = FORKS.Process(target=_run, args=(job, folder, log, dict(environment), limits))
        log.unlink(missing_ok=True)
        self._process.start()
        while not log.exists() and self.is_running:  # a signal before that would meet no command of ours
            time.sleep(0.001)

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    @property
    def is_running(self) -> bool:
        return bool(self._process.is_alive())

    def wait(self, seconds: float) -> bool:
        """Whether the command has ended after at most so many ``seconds``."""
        self._process.join(seconds)
        return not self.is_running

    def list_processes(self) -> list[psutil.Process]:
        """The command and all of its children, as far as they live."""
        with contextlib.suppress(psutil.NoSuchProcess):
            command = psutil.Process(self._process.pid)
            return [command, *command.children(recursive=True)]
        return []

    def signal(self, number: int, child: int | None = None, *, to_all: bool = False) -> list[psutil.Process]:
        """Send a signal to the command, to one of its children or to all; returns to which.

        A process that has ended gets none. The command is meant where it has no child.
        """
        targets = self.list_processes()
        if child is not None and len(targets) > 1:
            targets = [targets[1 + child % (len(targets) - 1)]]
        elif not to_all:
            targets = targets[:1]
        for target in targets:
            with contextlib.suppress(psutil.NoSuchProcess):
                target.send_signal(number)
        return targets

    def end(self) -> int:
        """Kill whatever is left of the command; returns its exit code, which is minus the signal that killed it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.join()
        return int(self._process.exitcode)

    def read(self) -> str:
        return self.log.read_text(errors='replace') if self.log.exists() else ''


@functools.cache
def find_clock() -> dict[str, str]:
    """The environment in which a program sees the clock of a day ago; {}: libfaketime or a C compiler is missing."""
    found = [str(path) for folder in CLOCKS for path in Path('/').glob(f'{folder[1:]}/libfaketimeMT.so*')]
    if not found or shutil.which('cc') is None:
        return {}
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    sleep = f'{folder}/sleep.so'
    compiler = ['cc', '-shared', '-fPIC', '-D_GNU_SOURCE', '-x', 'c', '-', '-o', sleep]
    subprocess.run(compiler, input=SLEEP, text=True, check=True)
    # Waiting is measured by the monotonic clock, which nobody sets, and files have the times of the real one.
    real = {'FAKETIME_DONT_FAKE_MONOTONIC': '1', 'NO_FAKE_STAT': '1'}
    return real | {'LD_PRELOAD': f'{sleep} {min(found)}', 'FAKETIME': '-1d'}


def _run(job: Job, folder: Path, log: Path, environment: dict[str, str], limits: Limits) -> None:
    os.setsid()
    if limits.memory_group is not None:
        (limits.memory_group / 'cgroup.procs').write_text('0')
    multiprocessing.set_start_method('fork', force=True)  # as in a process that nobody forked
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for standard in (1, 2):
        os.dup2(output, standard)
    os.chdir(folder)
    os.environ.update(environment)
    os.sched_setaffinity(0, limits.cores)
    if limits.shared_memory is not None:
        library = ctypes.CDLL(None, use_errno=True)
        size = f'size={limits.shared_memory}'.encode()
        failed = library.unshare(CLONE_NEWNS) or library.mount(None, b'/', None, MS_REC_PRIVATE, None)
        if failed or library.mount(b'tmpfs', b'/dev/shm', b'tmpfs', 0, size):
            raise OSError(ctypes.get_errno(), 'a /dev/shm of its own needs the rights to mount one')
    _respect_permissions()
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits.file_bytes, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits.open_files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    program = job.launcher
    if limits.clock:
        os.environ.update(limits.clock)
        program = program or (sys.executable, '-m', 'maelm_composer.cli')
    if program:
        os.execvp(program[0], [*program, *job.arguments])
    sys.argv = ['maelm', *job.arguments]
    from maelm_composer.cli import main

    main()


def _respect_permissions() -> None:
    """Give up root's right to read and write whatever it likes, for this process and those that it starts."""
    library = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable, of the lower and of the upper 32 rights
    library.capget(header, sets)
    for right in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
        library.prctl(PR_CAPBSET_DROP, right, 0, 0, 0)
        for index in range(3):
            sets[index] &= ~(1 << right)
    if library.capset(header, sets):
        raise OSError(ctypes.get_errno(), 'rights cannot be given up')
