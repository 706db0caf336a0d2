"""The name of this machine's CPU and its instruction set for matrix products. Imports no torch."""

import contextlib
import platform
import re
from pathlib import Path

CPUINFO = Path('/proc/cpuinfo')
# By their names there, fastest first. CPUs of one name may differ in them, since virtual machines hide model numbers.
INSTRUCTION_SETS = ('amx_bf16', 'avx512_bf16', 'avx512f', 'avx2', 'svebf16', 'sve', 'asimd')


def name_processor(source: Path = CPUINFO) -> str:
    return _read('model name', source) or platform.processor()


def find_instruction_set(source: Path = CPUINFO) -> str:
    """The first of :data:`INSTRUCTION_SETS` that this CPU has, else its architecture."""
    flags = _read('(?:flags|Features)', source).split()
    return next((name for name in INSTRUCTION_SETS if name in flags), platform.machine())


def _read(key: str, source: Path) -> str:
    """The first value of ``key``, a pattern; empty if there is none."""
    with contextlib.suppress(OSError):  # not Linux
        if found := re.search(rf'^{key}\s*:(.*)', source.read_text(encoding='utf-8'), re.MULTILINE):
            return found[1].strip()
    return ''
