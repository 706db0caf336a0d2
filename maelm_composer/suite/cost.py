"""The FLOPs of fine-tuning and of rank measurements, and the machines that do the work. Imports no torch.

A machine's speed is published for GPUs and measured for a CPU.
"""

import os
import re
import subprocess
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile

import psutil

from maelm_composer.config import FinetuningConfig, ModelConfig, Precision, TaskDataConfig, TaskSource
from maelm_composer.errors import InputError
from maelm_composer.model.cost import count_forward_flops
from maelm_composer.precision import measure_speeds
from maelm_composer.processor import count_cores, describe_processor
from maelm_composer.records import FinetuningRecord, PretrainingRecord, RankRecord
from maelm_composer.reporting.evidence import Evidence
from maelm_composer.sweep.search import list_points, run_cost
from maelm_composer.tasks.catalogue import Task
from maelm_composer.tasks.sources import count_characters, count_rows, load_task_data

# Training rows, rows of all dev sets (official counts), and mean tokens per row with a vocabulary of 8,192.
TASK_SIZES = {
    'mnli': (392_702, 19_647, 40),
    'qqp': (363_846, 40_430, 31),
    'qnli': (104_743, 5_463, 54),
    'sst2': (67_349, 872, 14),
    'cola': (8_551, 1_043, 12),
    'rte': (2_490, 277, 75),
    'mrpc': (3_668, 408, 58),
    'stsb': (5_749, 1_500, 34),
    'squad2': (130_319, 11_873, 180),
    'demo_sentence': (600, 200, 18),
    'demo_pair': (600, 200, 20),
    'demo_regression': (600, 200, 28),
    'demo_span': (600, 200, 55),
}
CHARACTERS_PER_TOKEN = 4.0  # of these tasks, with that vocabulary
# FLOP/s in fp32 and in dense bf16 (NVIDIA's data sheets), of SXM where no name says otherwise. The first name counts
# that the GPU's contains.
PEAKS = {
    'a100': (19.5e12, 312e12),
    'h100 pcie': (51e12, 756e12),
    'h100 nvl': (60e12, 835e12),
    'h100': (67e12, 989e12),
    'h200': (67e12, 989e12),
}


def count_finetuning_flops(config: FinetuningConfig, model: ModelConfig, task: Task) -> float:
    """FLOPs of a run of the search of ``task``. The best point's epochs are not known: the grid's mean is assumed.

    Raises:
        InputError: the rows of an own task are not on this machine.
    """
    rows, dev_rows, length = _measure(task, config.data)
    rows = min(rows, config.data.limit(task.name) or rows)
    dev_rows = min(dev_rows, len(task.eval_splits) * (config.data.max_dev_examples or dev_rows))
    points = list_points(config, task)
    epochs = sum(point.max_epochs for point in points) / len(points)
    passes = run_cost(config, epochs, rows, dev_rows)
    if config.measures_rank:
        passes += (epochs + 1) * dev_rows / len(task.eval_splits)  # of the first split alone
    return passes * _count_encoder_flops(model, min(length, config.max_seq_len, model.max_seq_len))


def _measure(task: Task, config: TaskDataConfig) -> tuple[int, int, int]:
    """As :data:`TASK_SIZES`, with the rows of the files that are there; of an own task, all from its files.

    Raises InputError where an own task's rows cannot be read.
    """
    if not task.is_own:
        rows, dev_rows, length = TASK_SIZES[task.name]
        if config.source == TaskSource.files:
            with suppress(InputError):  # files that are still to come have the official counts
                rows, dev_rows = count_rows(task, config)
        return rows, dev_rows, length
    if task.dataset is not None:
        raise InputError(f'a plan does not load the rows of {task.dataset}')
    data = load_task_data(task, config)
    dev = [row for rows in data.evaluation.values() for row in rows]
    both = [*data.train, *dev]
    return len(data.train), len(dev), round(count_characters(both) / len(both) / CHARACTERS_PER_TOKEN)


def count_rank_flops(model: ModelConfig, tokens: int) -> float:
    """FLOPs of the passes over ``tokens`` without and with [MASK], and of three Gram matrices for every layer."""
    forward = 2 * _count_encoder_flops(model, model.max_seq_len) / model.max_seq_len
    gram = 2 * 2 * model.hidden_size**2 * (model.num_hidden_layers + 1)
    return tokens * (forward + gram)


def _count_encoder_flops(model: ModelConfig, length: int) -> float:
    """FLOPs of the encoder's forward pass over one sequence."""
    alone = replace(model, decoder=None, max_seq_len=length)
    return float(count_forward_flops(alone, length, length)['encoder'])


@dataclass(frozen=True)
class Device:
    """``count`` devices of one kind. A CPU with all its cores is one device."""

    name: str  # a key of PEAKS, or cpu
    count: int
    fp32: float  # FLOP/s of one device: a GPU's peak, or a CPU's measured speed
    bf16: float

    @property
    def is_cpu(self) -> bool:
        return self.name == 'cpu'

    @property
    def faster(self) -> Precision:
        return Precision.bf16 if self.bf16 > self.fp32 else Precision.fp32

    @property
    def label(self) -> str:
        return 'this CPU' if self.is_cpu else f'{self.count} × {self.name.upper()}'

    def read_speed(self, run: PretrainingRecord) -> float | None:
        """FLOP/s of one device in ``run``; None if unknown, of several kinds, or not of all cores of this CPU."""
        seconds = run.training_seconds if self.is_cpu else 3600 * run.device_hours
        if not (run.flops and seconds) or len({(each.device, each.world_size) for each in run.processes}) > 1:
            return None
        if self.is_cpu:
            cores = count_cores()
            physical = min(cores, psutil.cpu_count(logical=False) or cores)  # torch takes one thread for each of these
            if run.device not in {f'CPU, {number // run.world_size} threads' for number in (physical, cores)}:
                return None
        return run.flops / seconds

    def select_same(self, evidence: Evidence) -> Evidence:
        """The records of runs on this kind of device; a CPU must be that of this machine."""
        here = describe_processor(), os.cpu_count()

        def is_same(record: PretrainingRecord | FinetuningRecord | RankRecord) -> bool:
            cpu = record.provenance.cpu, record.provenance.cpu_count
            if self.is_cpu:
                return self.name in record.device.lower() and cpu == here
            return _find_kind(record.device) == self.name

        return replace(
            evidence,
            runs={name: run for name, run in evidence.runs.items() if is_same(run)},
            finetunings=list(filter(is_same, evidence.finetunings)),
            ranks=list(filter(is_same, evidence.ranks)),
        )


def describe_device(gpu: str | None = None, count: int | None = None) -> Device:
    """The devices of this machine, or ``count`` of the named GPU.

    Raises:
        InputError: a GPU that is not in :data:`PEAKS`, or ``count`` without ``gpu`` on a machine that has no GPU.
    """
    if gpu is None:
        found = _list_gpus()
        if not found and count is not None:
            raise InputError(f'this machine has no GPU: name the kind with --gpu, one of {", ".join(PEAKS)}')
        if not found:  # one core's speed in a feed-forward block, times the number of cores
            speeds, cores = measure_speeds(), count_cores()
            return Device('cpu', 1, cores * speeds.fp32, cores * speeds.bf16)
        gpu, count = found[0], count or len(found)
    name = _find_kind(gpu)
    if name is None:
        raise InputError(f'GPU {gpu}: its peak is not known; choose one of {", ".join(PEAKS)}')
    return Device(name, count or 1, *PEAKS[name])


def _find_kind(gpu: str) -> str | None:
    """The key of :data:`PEAKS` for the name that a GPU gives itself."""
    return next((name for name in PEAKS if re.search(rf'{name}(?!\d)', gpu.lower())), None)  # an A1000 is no A100


def _list_gpus() -> list[str]:
    command = ['nvidia-smi', '--query-gpu=name', '--format=csv,noheader']
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split('\n')[:-1]
    except (OSError, subprocess.CalledProcessError):
        return []
    visible = os.environ.get('CUDA_VISIBLE_DEVICES')  # nvidia-smi ignores this; the GPUs are assumed to be of one kind
    if visible is None:
        return found
    ids = takewhile(lambda entry: entry and not entry.startswith('-'), visible.split(','))  # CUDA stops at -1, too
    return found[: len(list(ids))]
