"""What would run, what is there already, and what it costs: nothing is run. No torch."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from maelm_composer.config import SourceKind
from maelm_composer.data.corpora import find_files
from maelm_composer.data.storage import join, read_file
from maelm_composer.errors import InputError
from maelm_composer.reporting.artefacts import ARTEFACTS, Artefact
from maelm_composer.suite.cost import Cost, cost_finetuning, cost_pretraining, cost_rank, cost_shards
from maelm_composer.suite.devices import CPU, Device, Measured, find_device, read_measured
from maelm_composer.suite.steps import Kind, Step, Suite, list_checkpoints, list_steps, load_suite

WIDTH_OF_A_FILE = 160  # characters; a terminal has its own
SCALES = ('small', 'base', 'base_pp', 'large_pp')  # of a budget; the demo fits everywhere
# Share of the peak that is reached: of a GPU's bf16 an assumption, for pretraining that of docs/scaling.md; of a CPU's
# fp32, which bf16 can exceed, as measured with the demo.
UTILIZATION = {
    Kind.pretraining: {'gpu': 0.40, CPU: 1.0},
    Kind.finetuning: {'gpu': 0.25, CPU: 0.8},
    Kind.rank: {'gpu': 0.25, CPU: 0.3},
}
START_SECONDS = {Kind.pretraining: 4.0, Kind.finetuning: 1.0, Kind.rank: 2.0}  # of a run: model, data, first batches
SWEEP_SECONDS = 2.0  # of a checkpoint's sweep, beside its runs
FIRST_SECONDS = 30.0  # imports, Ray's start, its workers' imports
DOCUMENTS_PER_SECOND = 300.0  # of the machine's own documentation: read twice, tokenised
BYTES_PER_SECOND = 0.6e6  # of compressed text files, for a core
HUB_TOKENS = {'base': 5e9, 'base_pp': 20e9}  # yamls/data/: what their sources come to


@dataclass(frozen=True)
class Item:
    """One step with what is left of it."""

    step: Step
    name: str
    done: int
    total: int
    seconds: float  # that are left, on the whole machine
    device_hours: float
    disk_bytes: float
    basis: str  # what the estimate rests on


def plan_suite(suite: Suite, artefacts: Sequence[Artefact], device: Device | None = None) -> list[Item]:
    """Every step that ``artefacts`` rest on. ``device``: None is this machine's.

    Raises:
        InputError: settings that cannot be read, a GPU whose peak is not known.
    """
    device = device or find_device()
    measured = read_measured(suite.records, device)
    recorded = _read_finetunings(suite)
    return [_plan_step(suite, step, device, measured, recorded) for step in list_steps(suite, artefacts)]


def sum_seconds(items: Sequence[Item]) -> float:
    """Seconds that are left, with the start of the machinery where anything is."""
    seconds = sum(item.seconds for item in items)
    return seconds + FIRST_SECONDS if seconds else 0.0


def describe_accuracy(estimated: float, took: float) -> str:
    return f'estimated {estimated:,.0f} s, took {took:,.0f} s: {took / estimated:.2f} times the estimate'


def print_plan(suite: Suite, items: Sequence[Item], device: Device | None = None) -> None:
    device = device or find_device()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ('step', 'recorded', 'hours left', 'device-hours', 'disk, GB', 'estimated from'):
        table.add_column(name, justify='right' if name in ('hours left', 'device-hours', 'disk, GB') else 'left')
    for item in items:
        share = 'done' if item.done >= item.total else f'{item.done} of {item.total}' if item.done else 'no'
        numbers = [f'{item.seconds / 3600:,.2f}', f'{item.device_hours:,.2f}', f'{item.disk_bytes / 1e9:,.2f}']
        table.add_row(item.name, share, *numbers, item.basis)
    table.add_section()
    hours, device_hours, disk = (
        f'{total:,.2f}'
        for total in (
            sum_seconds(items) / 3600,
            sum(item.device_hours for item in items),
            sum(item.disk_bytes for item in items) / 1e9,
        )
    )
    table.add_row('all', '', hours, device_hours, disk, f'scale {suite.scale} on {device.label}')
    _console().print(table)


def print_budget(gpus: int, gpu: str, hours: float, scales: Sequence[str] = SCALES) -> None:
    """What of the paper fits into ``gpus`` × ``hours``: every artefact alone, from nothing, and all together.

    Raises:
        InputError: as :func:`plan_suite`.
    """
    device = find_device(gpu, gpus)
    budget = gpus * hours
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column('GPU-hours from nothing')
    for scale in scales:
        table.add_column(scale, justify='right')
    suites = [replace(load_suite(scale), work=Path(os.devnull), results=Path(os.devnull)) for scale in scales]
    rows = [(artefact.title.split(':')[0], [artefact]) for artefact in ARTEFACTS]
    for name, artefacts in [*rows, ('all of them', list(ARTEFACTS))]:
        if name == 'all of them':
            table.add_section()
        cells = []
        for suite in suites:
            total = sum(item.device_hours for item in plan_suite(suite, artefacts, device))
            cells.append(f'{total:,.{1 if total >= 1 else 2}f} {"fits" if total <= budget else "—   "}')
        table.add_row(name, *cells)
    _console().print(table)
    shares = ', '.join(f'{kind.name} {UTILIZATION[kind]["gpu"]:.0%}' for kind in UTILIZATION)
    _console().print(
        f'{gpus} × {gpu} for {hours:g} hours: {budget:,.0f} GPU-hours. FLOPs model: {device.peak_flops / 1e12:,.0f} '
        f'TFLOP/s a GPU, of which {shares} are reached; GPUs scale without loss.'
    )


def _plan_step(
    suite: Suite, step: Step, device: Device, measured: Measured, recorded: dict[tuple[str, int, str], int]
) -> Item:
    if step.model is None:
        try:
            return _plan_data(suite, step, device)
        except InputError as error:  # text that is not on this machine: all else can be planned
            return Item(step, step.kind.name, 0, 1, 0.0, 0.0, 0.0, f'not known: {error}')
    name, config = step.model.run_name(suite.scale), suite.load_pretraining(step.model)
    match step.kind:
        case Kind.pretraining:
            cost = cost_pretraining(config, len(list_checkpoints(config)))
            is_done = _read_status(suite.run_folder(step.model) / 'record.json') == 'finished'
            seconds, basis = _estimate(cost, step.kind, device)
            if measured.training_flops is not None:
                seconds = START_SECONDS[step.kind] + cost.flops / (measured.training_flops * device.count)
                basis = f'measured speed, {measured.training_flops:.1e} FLOP/s'
            return _make(step, f'pretraining {name}', is_done, 1, seconds, device, cost.disk_bytes, basis)
        case Kind.finetuning:
            return _plan_finetuning(suite, step, device, measured, recorded)
        case _:
            cost = cost_rank(config.model, suite.settings.rank_tokens)
            seconds, basis = _estimate(cost, step.kind, device)
            if measured.rank_seconds is not None:
                seconds, basis = START_SECONDS[step.kind] + measured.rank_seconds, 'measured runs'
            done = any(_names(path, name, step.samples) for path in suite.rank_folder.glob('*.json'))
            return _make(step, f'rank {name}', done, 1, seconds, device, 0.0, basis)


def _plan_finetuning(
    suite: Suite, step: Step, device: Device, measured: Measured, recorded: dict[tuple[str, int, str], int]
) -> Item:
    assert step.model is not None
    name = step.model.run_name(suite.scale)
    config = suite.load_finetuning(step.model, 0, ())  # neither checkpoint nor tasks count here: loaded once a model
    model = suite.load_pretraining(step.model).model
    slots = float(os.cpu_count() or 1)
    if device.name != CPU:
        slots = device.count / (config.sweep.gpus_per_run or 1)
    done = total = 0
    seconds, bases = 0.0, set()
    for task in step.tasks:
        cost = cost_finetuning(config, model, task)
        there = min(recorded.get((name, step.samples, task), 0), cost.runs)
        modelled, basis = _estimate(cost, step.kind, device)
        if task in measured.task_seconds:
            modelled = cost.runs * (measured.task_seconds[task] + START_SECONDS[step.kind]) / slots
            basis = 'measured runs'
        seconds += modelled * (1 - there / cost.runs)
        done, total = done + there, total + cost.runs
        bases.add(basis)
    tasks = step.tasks[0] if len(step.tasks) == 1 else f'{len(step.tasks)} tasks'
    title = f'fine-tuning {name} at {step.samples:,}, {tasks}'
    seconds += SWEEP_SECONDS if done < total else 0.0
    return _make(step, title, done, total, seconds, device, 0.0, ', '.join(sorted(bases)), is_left=True)


def _plan_data(suite: Suite, step: Step, device: Device) -> Item:
    """Documents cost cores and no GPU; what must be downloaded is not timed."""
    config = suite.load_corpus()
    file = 'manifest.json' if step.kind is Kind.shards else 'tokenizer/recipe.json'
    is_done = read_file(join(config.remote, file)) is not None
    seconds, basis = 0.0, 'the size of the text'
    for source in config.sources:
        match source.kind:
            case SourceKind.documentation:
                seconds += (source.max_documents or 0) / DOCUMENTS_PER_SECOND
            case SourceKind.files:
                size = sum(os.path.getsize(path) for path in find_files(source))
                seconds += size / BYTES_PER_SECOND / (os.cpu_count() or 1)
            case SourceKind.huggingface:
                basis = f'not timed: downloads, see {suite.settings.data[0]}'
    disk = 0.0
    if step.kind is Kind.shards:
        tokens = HUB_TOKENS.get(Path(suite.settings.data[0]).stem, seconds * 0.1e6)
        disk = cost_shards(config, tokens).disk_bytes
    return replace(_make(step, step.kind.name, is_done, 1, seconds / 2, device, disk, basis), device_hours=0.0)


def _estimate(cost: Cost, kind: Kind, device: Device) -> tuple[float, str]:
    """Seconds on the whole machine by the FLOPs model, and its words."""
    share = UTILIZATION[kind][CPU if device.name == CPU else 'gpu']
    starts = START_SECONDS[kind] * cost.runs
    if kind is Kind.finetuning:
        starts /= os.cpu_count() or 1 if device.name == CPU else device.count
    seconds = starts + cost.flops / (share * device.peak_flops * device.count)
    return seconds, f'FLOPs model, {share:.0%} of {device.peak_flops:.1e}'


def _make(
    step: Step,
    name: str,
    done: int,
    total: int,
    seconds: float,
    device: Device,
    disk: float,
    basis: str,
    is_left: bool = False,
) -> Item:
    left = seconds if is_left else seconds * (1 - int(done) / total)
    return Item(step, name, int(done), total, left, left * device.count / 3600, disk, basis if done < total else '')


def _read_finetunings(suite: Suite) -> dict[tuple[str, int, str], int]:
    """How many finished records there are by run, checkpoint and task."""
    counts: dict[tuple[str, int, str], int] = {}
    for path in suite.finetuning_folder.glob('*.json'):
        record = _read(path)
        if record.get('status') == 'finished':
            where = record['checkpoint']['run_name'], record['checkpoint']['samples'], record['task']
            counts[where] = counts.get(where, 0) + 1
    return counts


def _names(path: Path, run_name: str, samples: int) -> bool:
    checkpoint = _read(path).get('checkpoint', {})
    return (checkpoint.get('run_name'), checkpoint.get('samples')) == (run_name, samples)


def _read_status(path: Path) -> str | None:
    return _read(path).get('status') if path.exists() else None


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding='utf-8'))
    return found


def _console() -> Console:
    return Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH_OF_A_FILE)
