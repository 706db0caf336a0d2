"""The measured machine: its device, the precisions worth measuring, and the load by other processes."""

import os
import platform
import time
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
import torch

from maelm_composer.config import CorpusConfig, Precision
from maelm_composer.precision import measure_speeds
from maelm_composer.processor import find_instruction_set, name_processor
from maelm_composer.records import Provenance, collect_provenance

# Variables that restrict a CPU to older instruction sets. Rows measured with one set describe no real machine.
LIMITS = ('ATEN_CPU_CAPABILITY', 'ONEDNN_MAX_CPU_ISA', 'DNNL_MAX_CPU_ISA', 'MKL_ENABLE_INSTRUCTIONS')
# bf16 is measured if it has at least this share of fp32's speed, since the comparison of both may err by a tenth.
WORTHWHILE = 0.9


@dataclass(frozen=True)
class Machine:
    device: str  # name of the GPU or the CPU
    instruction_set: str  # of the CPU (maelm_composer/processor.py); '' on a GPU
    threads: int
    limits: dict[str, str]  # the variables of LIMITS that are set
    provenance: Provenance

    @property
    def slug(self) -> str:
        """The part of file names that identifies a kind of machine."""
        name = f'{self.device} {self.instruction_set}'.strip().lower()
        return ''.join(c if c.isalnum() else '-' for c in name)

    def list_columns(self) -> dict[str, Any]:
        """Columns of every recorded row."""
        return {
            'device': self.device,
            'instruction_set': self.instruction_set,
            'threads': self.threads,
            **{name: self.provenance.packages[name] for name in ('torch', 'transformers')},
            'platform': platform.platform(),
            'git_revision': self.provenance.git_revision,
        }

    def describe(self) -> str:
        """Markdown: a heading and the conditions of the measurement."""
        kind = f', {self.threads} cores, {self.instruction_set}' if self.instruction_set else ''
        limited = ''.join(f', limited by {name}={value}' for name, value in self.limits.items())
        speeds, packages, revision = measure_speeds(), self.provenance.packages, self.provenance.git_revision
        return (
            f'### {self.device}{kind}{limited}\n\n'
            f'torch {packages["torch"]}, transformers {packages["transformers"]}, maelm-composer '
            f'{self.provenance.maelm_composer}{f" at {revision[:10]}" if revision else ""}. A feed-forward block '
            f'trains at {speeds.fp32 / 1e9:,.0f} GFLOP/s in fp32{" on one core" if kind else ""}; '
            f'{speeds.describe()}.\n'
        )


def find_machine() -> Machine:
    provenance = collect_provenance(CorpusConfig())  # the hash of its recipe is not read
    limits = {name: os.environ[name] for name in LIMITS if name in os.environ}
    threads = torch.get_num_threads()
    if torch.cuda.is_available():
        return Machine(torch.cuda.get_device_name(), '', threads, limits, provenance)
    return Machine(name_processor(), find_instruction_set(), threads, limits, provenance)


def skip_if_slow(precision: Precision) -> None:
    """Skip the test if ``precision`` is bf16 and the device emulates it: a row would take an hour."""
    speeds = measure_speeds()
    if precision == Precision.bf16 and speeds.bf16 < WORTHWHILE * speeds.fp32:
        pytest.skip(f'bf16 left out: {speeds.describe()}')


class OtherProcesses:
    """Measures the share of this process's cores that other processes use, from construction to ``share()``."""

    def __init__(self) -> None:
        self._cores = os.sched_getaffinity(0)
        self._start = self._read()

    def share(self) -> float:
        (clock, busy, own), (clock_before, busy_before, own_before) = self._read(), self._start
        others = (busy - busy_before) - (own - own_before)
        return max(0.0, others / (len(self._cores) * (clock - clock_before)))

    def _read(self) -> tuple[float, float, float]:
        """Seconds: the clock, the busy time of the cores, the CPU time of this process."""
        times = [core for number, core in enumerate(psutil.cpu_times(percpu=True)) if number in self._cores]
        # user, nice, system, idle, iowait, irq, softirq, steal; guests' time is in the first two.
        busy = sum(sum(core[:8]) - core.idle - core.iowait for core in times)
        return time.perf_counter(), busy, time.process_time()
