"""The name of this machine's CPU, its instruction set for matrix products, and its cores. Imports no torch."""

import contextlib
import os
import platform
import re
from pathlib import Path

CPUINFO, CGROUP = Path('/proc/cpuinfo'), Path('/sys/fs/cgroup')
# By their names there, fastest first. CPUs of one name may differ in them, since virtual machines hide model numbers.
INSTRUCTION_SETS = ('amx_bf16', 'avx512_bf16', 'avx512f', 'avx2', 'svebf16', 'sve', 'asimd')


def name_processor(source: Path = CPUINFO) -> str:
    return _read('model name', source) or platform.processor()


def find_instruction_set(source: Path = CPUINFO) -> str:
    """The first of :data:`INSTRUCTION_SETS` that this CPU has, else its architecture."""
    flags = _read('(?:flags|Features)', source).split()
    return next((name for name in INSTRUCTION_SETS if name in flags), platform.machine())


def describe_processor() -> str:
    return f'{name_processor()} ({find_instruction_set()})'


def count_cores(cgroup: Path = CGROUP) -> int:
    """The cores of this process: those of its affinity, or fewer where a container has a smaller quota of time."""
    cores = len(os.sched_getaffinity(0))
    for names in (['cpu.max'], ['cpu/cpu.cfs_quota_us', 'cpu/cpu.cfs_period_us']):  # versions 2 and 1, microseconds
        with contextlib.suppress(OSError, ValueError):  # no such file; "max" is no quota, as -1 is
            quota, period = map(int, ' '.join((cgroup / name).read_text() for name in names).split())
            cores = min(cores, max(1, quota // period)) if quota > 0 else cores
    return cores


def _read(key: str, source: Path) -> str:
    """The first value of ``key``, a pattern; empty if there is none."""
    with contextlib.suppress(OSError):  # not Linux
        if found := re.search(rf'^{key}\s*:(.*)', source.read_text(encoding='utf-8'), re.MULTILINE):
            return found[1].strip()
    return ''
