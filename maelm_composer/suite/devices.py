"""The speed of a machine, published for GPUs and measured for a CPU, and the recorded runs on such machines."""

import os
import subprocess
from dataclasses import dataclass, replace

from maelm_composer.errors import InputError
from maelm_composer.precision import measure_speeds
from maelm_composer.provenance import collect_provenance
from maelm_composer.records import FinetuningRecord, PretrainingRecord, RankRecord
from maelm_composer.reporting.evidence import Evidence

# FLOP/s in fp32 and in dense bf16 (NVIDIA's data sheets, SXM).
PEAKS = {'a100': (19.5e12, 312e12), 'h100': (67e12, 989e12), 'h200': (67e12, 989e12)}
CPU = 'cpu'


@dataclass(frozen=True)
class Device:
    """``count`` devices of one kind. A CPU with all its cores is one device."""

    name: str  # a key of PEAKS, or cpu
    count: int
    fp32: float  # FLOP/s of one device: a GPU's peak, or a CPU's measured speed
    bf16: float

    @property
    def label(self) -> str:
        return 'this CPU' if self.name == CPU else f'{self.count} × {self.name.upper()}'


def describe_device(gpu: str | None = None, count: int | None = None) -> Device:
    """The devices of this machine, or ``count`` of the named GPU.

    Raises:
        InputError: a GPU that is not in :data:`PEAKS`, or a number of GPUs of no kind.
    """
    if gpu is None:
        found = _list_gpus()
        if not found and count is not None:
            raise InputError(f'this machine has no GPU: name the kind with --gpu, one of {", ".join(PEAKS)}')
        if not found:  # one core's speed in a feed-forward block, times the number of cores
            speeds, cores = measure_speeds(), len(os.sched_getaffinity(0))
            return Device(CPU, 1, cores * speeds.fp32, cores * speeds.bf16)
        gpu, count = found[0], count or len(found)
    name = next((name for name in PEAKS if name in gpu.lower()), None)
    if name is None:
        raise InputError(f'GPU {gpu}: its peak is not known; choose one of {", ".join(PEAKS)}')
    return Device(name, count or 1, *PEAKS[name])


def select_like(evidence: Evidence, device: Device) -> Evidence:
    """The records of runs on this kind of device; a CPU must be that of this machine."""
    here = collect_provenance(device)  # the hash of its recipe is not read

    def is_like(record: PretrainingRecord | FinetuningRecord | RankRecord) -> bool:
        cpu = record.provenance.cpu, record.provenance.cpu_count
        return device.name in record.device.lower() and (device.name != CPU or cpu == (here.cpu, here.cpu_count))

    return replace(
        evidence,
        runs={name: run for name, run in evidence.runs.items() if is_like(run)},
        finetunings=list(filter(is_like, evidence.finetunings)),
        ranks=list(filter(is_like, evidence.ranks)),
    )


def _list_gpus() -> list[str]:
    command = ['nvidia-smi', '--query-gpu=name', '--format=csv,noheader']
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split('\n')[:-1]
    except (OSError, subprocess.CalledProcessError):
        return []
    visible = os.environ.get('CUDA_VISIBLE_DEVICES')  # nvidia-smi ignores this; the GPUs are assumed to be of one kind
    return found if visible is None else found[: len(list(filter(None, visible.split(','))))]
