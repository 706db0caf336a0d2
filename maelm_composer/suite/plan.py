"""The plan of a suite: its steps, what is recorded of them, and what the rest costs. Runs nothing, imports no torch."""

import contextlib
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median

from maelm_composer.checkpoints.names import RECORD
from maelm_composer.config import FinetuningConfig, Precision, SourceKind, TaskSource
from maelm_composer.console import begin_table, open_console
from maelm_composer.data.corpora import find_files
from maelm_composer.data.manifest import MANIFEST, TOKENIZER, TOKENIZER_RECIPE
from maelm_composer.data.storage import join, read_file
from maelm_composer.errors import InputError
from maelm_composer.finetuning.identity import describe_protocol
from maelm_composer.model.cost import count_parameters
from maelm_composer.processor import count_cores
from maelm_composer.records import (
    Finetuning,
    RankRecord,
    load_folder,
    load_record,
    parse_finetuning,
    parse_pretraining,
    parse_rank,
)
from maelm_composer.reporting.artefacts import ARTEFACTS, Artefact, Model
from maelm_composer.reporting.evidence import Evidence
from maelm_composer.reporting.load import read_evidence
from maelm_composer.suite.checks import find_divergence
from maelm_composer.suite.cost import Device, count_finetuning_flops, count_rank_flops, describe_device
from maelm_composer.suite.steps import RANK_PRECISION, Kind, Step, Suite, list_saved_samples, list_steps, load_suite
from maelm_composer.sweep.search import count_runs, list_points
from maelm_composer.tasks.catalogue import Task, find_task
from maelm_composer.tasks.sources import load_task_data
from maelm_composer.training.plan import count_samples, count_training_flops, fit_ranks
from maelm_composer.training.run_record import is_run_of

SCALES = ('small', 'medium', 'base', 'base_pp', 'large_pp')  # of `maelm plan`; the demo fits everywhere
# Assumed share of a GPU's peak (pretraining: docs/scaling.md), and share of a CPU's measured speed, from the demo.
UTILIZATION = {
    Kind.pretraining: {'gpu': 0.40, 'cpu': 1.0},
    Kind.finetuning: {'gpu': 0.25, 'cpu': 0.8},
    Kind.rank: {'gpu': 0.25, 'cpu': 0.3},
}
# Per run: building the model, opening the data, first batches. Ray starts a process for every run on a GPU; its imports
# and CUDA context are assumed to take GPU_PROCESS_SECONDS, a compilation COMPILE_SECONDS, and an optimizer step of
# pretraining on a GPU, however small the model, at least STEP_SECONDS.
START_SECONDS = {Kind.pretraining: 4.0, Kind.finetuning: 1.0, Kind.rank: 2.0}
GPU_PROCESS_SECONDS, COMPILE_SECONDS, STEP_SECONDS = 10.0, 30.0, 0.005
SWEEP_SECONDS = 2.0  # per checkpoint, in addition to its runs
FIRST_SECONDS = 30.0  # once: imports, starting Ray, imports of its workers
DOCUMENTS_PER_SECOND, TOKENS_PER_DOCUMENT = 300.0, 330.0  # documentation of this machine, read twice and tokenised
BYTES_PER_SECOND, TOKENS_PER_BYTE = 0.6e6, 0.8  # per core; both of compressed text files
HUB_TOKENS = {'base': 5e9, 'base_pp': 20e9}  # tokens of the sources of yamls/data/
SHARD_BYTES_PER_TOKEN = 1.6  # compressed; 2.2 when unpacked in the cache
STATE_BYTES = 16  # per parameter of a checkpoint: the weights twice, and Adam's two moments


@dataclass(frozen=True)
class Item:
    """One step and what is left to do of it."""

    step: Step
    name: str
    done: int
    total: int
    left: Mapping[str, float]  # seconds on the whole machine: by task, and under '' what belongs to no task
    basis: str  # where the estimate comes from
    num_devices: int = 0  # busy during the step
    disk_bytes: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(self.left.values())

    @property
    def device_hours(self) -> float:
        return self.seconds * self.num_devices / 3600


def plan_suite(suite: Suite, artefacts: Sequence[Artefact], device: Device) -> list[Item]:
    """Every step that ``artefacts`` need, but those of models that have diverged.

    If no precision is chosen yet, the faster one of ``device`` is assumed.

    Raises:
        InputError: settings that cannot be read.
    """
    if suite.precision == Precision.auto:
        suite = replace(suite, precision=device.faster)
    evidence = device.select_same(read_evidence(suite.records, suite.scale))
    finetunings = load_folder(suite.finetuning_folder, parse_finetuning)
    planner = _Planner(suite, device, evidence, finetunings, load_folder(suite.rank_folder, parse_rank))
    steps = list_steps(suite, artefacts)
    models = dict.fromkeys(step.model for step in steps if step.model is not None)
    given_up = {model for model in models if find_divergence(suite, model)}
    return [planner.plan(step) for step in steps if step.model not in given_up]


def sum_seconds(items: Sequence[Item]) -> float:
    """Seconds left, including the start of Python and Ray unless nothing is left."""
    seconds = sum(item.seconds for item in items)
    return seconds + FIRST_SECONDS if seconds else 0.0


class Forecast:
    """The time that a suite has left, estimated again after every step.

    A planned time is multiplied by the ratio of measured to planned seconds, which a loaded machine raises, of the
    finished steps of the same kind; of all finished steps while there is none of that kind.
    """

    def __init__(self, items: Sequence[Item]) -> None:
        self._left = {
            (replace(item.step, tasks=()), part): seconds  # a step is found without its tasks, which are its parts
            for item in items
            for part, seconds in item.left.items()
            if seconds
        }
        self._planned: defaultdict[Kind, float] = defaultdict(float)
        self._took: defaultdict[Kind, float] = defaultdict(float)
        self._is_whole = True

    def drop(self, model: Model | None) -> None:
        """Note that what is left of ``model`` will not be made."""
        self._left = {(step, part): left for (step, part), left in self._left.items() if step.model != model}
        self._is_whole = False

    def finish(self, step: Step, took: float) -> float | None:
        """Note that ``step``, or a part of a planned step, took ``took`` seconds.

        Returns:
            The seconds that the suite has left; None if nothing was left of ``step``.
        """
        planned = sum(self._left.pop((replace(step, tasks=()), part), 0.0) for part in ('', *step.tasks))
        if not planned:
            return None
        self._planned[step.kind] += planned
        self._took[step.kind] += took
        of_all = sum(self._took.values()) / sum(self._planned.values())
        ratios = {kind: self._took[kind] / seconds for kind, seconds in self._planned.items()}
        return sum(seconds * ratios.get(left.kind, of_all) for (left, _), seconds in self._left.items())

    @property
    def is_over(self) -> bool:
        """Whether all has been made."""
        return self._is_whole and not self._left


def print_plan(suite: Suite, items: Sequence[Item], device: Device) -> None:
    right = ('hours left', 'device-hours', 'disk, GB')
    table = begin_table('step', 'recorded', right=right, last=('estimated from',))

    def add_row(name: str, share: str, seconds: float, device_hours: float, disk_bytes: float, basis: str) -> None:
        numbers = seconds / 3600, device_hours, disk_bytes / 1e9
        table.add_row(name, share, *(f'{number:,.2f}' for number in numbers), basis)

    for item in items:
        is_done = item.done >= item.total
        share = 'done' if is_done else f'{item.done} of {item.total}' if item.done else 'no'
        basis = '' if is_done else item.basis
        add_row(item.name, share, item.seconds, item.device_hours, item.disk_bytes, basis)
    table.add_section()
    totals = sum(item.device_hours for item in items), sum(item.disk_bytes for item in items)
    add_row('all', '', sum_seconds(items), *totals, f'scale {suite.scale} on {device.label}')
    open_console().print(table)


def print_budget(gpus: int, gpu: str, hours: float) -> None:
    """Print the GPU-hours of every artefact alone, and of all together, from nothing, and whether they fit the budget.

    Raises:
        InputError: a GPU whose peak is not known, or as :func:`plan_suite`.
    """
    device, budget = describe_device(gpu, gpus), gpus * hours
    table = begin_table('GPU-hours from nothing', right=SCALES)
    nothing = Path(os.devnull)
    # With their precision, so that every artefact's plan finds the recipes that an earlier one has loaded.
    suites = [replace(load_suite(s), work=nothing, results=nothing, precision=device.faster) for s in SCALES]

    def add_row(name: str, artefacts: Sequence[Artefact]) -> None:
        totals = [sum(item.device_hours for item in plan_suite(suite, artefacts, device)) for suite in suites]
        fits = ['fits' if total <= budget else '—   ' for total in totals]
        table.add_row(name, *(f'{t:,.{1 if t >= 1 else 2}f} {word}' for t, word in zip(totals, fits, strict=True)))

    for artefact in ARTEFACTS:
        add_row(artefact.label, [artefact])
    table.add_section()
    add_row('all of them', ARTEFACTS)
    open_console().print(table)
    shares = ', '.join(f'{kind.name} {UTILIZATION[kind]["gpu"]:.0%}' for kind in UTILIZATION)
    peaks = f'{device.bf16 / 1e12:,.0f} TFLOP/s a GPU in bf16, for ranks {device.fp32 / 1e12:,.0f} in fp32'
    open_console().print(
        f'{gpus} × {gpu} for {hours:g} hours: {budget:,.0f} GPU-hours. FLOPs model: {peaks}, of which {shares} are '
        'reached; GPUs scale without loss.'
    )


@dataclass(frozen=True)
class _Planner:
    suite: Suite
    device: Device
    evidence: Evidence  # of this kind of device
    finetunings: list[Finetuning]  # of all devices
    ranks: list[RankRecord]

    def plan(self, step: Step) -> Item:
        match step:
            case Step(Kind.pretraining, Model() as model):
                return self._plan_pretraining(step, model)
            case Step(Kind.finetuning, Model() as model):
                return self._plan_finetuning(step, model)
            case Step(Kind.rank, Model() as model):
                return self._plan_rank(step, model)
        try:
            return self._plan_data(step)
        except InputError as error:  # the text is not on this machine; everything else can be planned
            return Item(step, step.kind.name, 0, 1, {}, f'not known: {error}')

    def _plan_data(self, step: Step) -> Item:
        """Tokenizer and shards take CPU cores, no GPU. Downloads are not timed."""
        config, recipe = self.suite.load_corpus(), self.suite.settings.data[0]
        file = MANIFEST if step.kind is Kind.shards else f'{TOKENIZER}/{TOKENIZER_RECIPE}'
        done = int(read_file(join(config.remote, file)) is not None)
        seconds, tokens, basis = 0.0, 0.0, 'the size of the text'
        for source in config.sources:
            match source.kind:
                case SourceKind.documentation:
                    seconds += (source.max_documents or 0) / DOCUMENTS_PER_SECOND
                    tokens += (source.max_documents or 0) * TOKENS_PER_DOCUMENT
                case SourceKind.files:
                    # Finished shards are used without their text.
                    with contextlib.suppress(InputError) if done else contextlib.nullcontext():
                        size = sum(os.path.getsize(path) for path in find_files(source))
                        seconds += size / BYTES_PER_SECOND / count_cores()
                        tokens += size * TOKENS_PER_BYTE
                case SourceKind.huggingface:
                    basis = f'not timed: downloads, see {recipe}'
        disk = HUB_TOKENS.get(Path(recipe).stem, tokens) * SHARD_BYTES_PER_TOKEN * (step.kind is Kind.shards)
        return Item(step, step.kind.name, done, 1, {'': seconds / 2 * (1 - done)}, basis, disk_bytes=disk)

    def _plan_pretraining(self, step: Step, model: Model) -> Item:
        config, path = self.suite.load_pretraining(model), self.suite.run_folder(model) / RECORD
        training = config.training
        flops, steps = count_training_flops(config), count_samples(training) // training.global_train_batch_size
        count = fit_ranks(training, self.device.count)
        seconds, basis = self._estimate(step.kind, training.precision, flops, count)
        runs = [run for run in self.evidence.runs.values() if run.training_precision is training.precision]
        if speeds := [speed for run in runs if (speed := self.device.read_speed(run))]:
            seconds = flops / (median(speeds) * count)
            basis = f'measured speed, {median(speeds):.1e} FLOP/s'
        elif not self.device.is_cpu:
            seconds = max(seconds, steps * STEP_SECONDS)
        seconds += START_SECONDS[step.kind] + COMPILE_SECONDS * training.compile
        record = load_record(path, parse_pretraining) if path.exists() else None
        done = int(record is not None and record.status == 'finished' and is_run_of(record, config))
        saved, kept = len(list_saved_samples(config)), training.checkpoints_to_keep
        checkpoints = saved if kept < 0 else min(saved, kept)
        disk = checkpoints * STATE_BYTES * sum(count_parameters(config.model).values())
        name = f'pretraining {config.run_name}'
        return Item(step, name, done, 1, {'': seconds * (1 - done)}, basis, count, disk)

    def _plan_rank(self, step: Step, model: Model) -> Item:
        config = self.suite.load_pretraining(model)
        flops = count_rank_flops(config.model, self.suite.settings.rank_tokens)
        seconds, basis = self._estimate(step.kind, RANK_PRECISION, flops, 1)
        if measured := [record.seconds for record in self.evidence.ranks]:
            seconds, basis = median(measured), 'measured runs'
        seconds += START_SECONDS[step.kind]
        wanted = config.run_name, step.samples, self.suite.settings.rank_tokens, RANK_PRECISION.name
        found = [(r.checkpoint.run_name, r.checkpoint.samples, r.max_tokens, r.precision) for r in self.ranks]
        done = int(wanted in found)
        return Item(step, f'rank {config.run_name}', done, 1, {'': seconds * (1 - done)}, basis, num_devices=1)

    def _plan_finetuning(self, step: Step, model: Model) -> Item:
        pretraining = self.suite.load_pretraining(model)
        config = self.suite.load_finetuning(model, step.samples, step.tasks)
        comparable = [r for r in self.evidence.finetunings if r.protocol['precision'] == config.precision.name]
        slots = float(max(1, count_cores() // config.sweep.cpus_per_run))
        if not self.device.is_cpu and config.sweep.gpus_per_run:
            slots = float(self.device.count * int(1 / config.sweep.gpus_per_run + 1e-9))  # a run takes a share of one
        start = START_SECONDS[step.kind] + (0.0 if self.device.is_cpu else GPU_PROCESS_SECONDS)
        done, total, bases = 0, 0, set()
        left: dict[str, float] = {}
        for name in step.tasks:
            task = find_task(name, config.tasks)
            runs = count_runs(config, task)
            # A search of all points and seeds leaves more records than this one needs.
            there = min(runs, self._count_recorded(config, task, pretraining.run_name, step.samples))
            if measured := [r.training_seconds + r.evaluation_seconds for r in comparable if r.task == name]:
                seconds = runs * (mean(measured) + start) / slots
                basis = 'measured runs'
            else:
                try:
                    flops, fault = runs * count_finetuning_flops(config, pretraining.model, task), ''
                except InputError as error:  # the rows are not on this machine; everything else can be planned
                    flops, fault = 0.0, f'not known: {error}'
                seconds, basis = self._estimate(step.kind, config.precision, flops, self.device.count)
                seconds, basis = seconds + runs * start / slots, fault or basis
            left[name] = seconds * (1 - there / runs)
            done, total = done + there, total + runs
            bases.add(basis)
        left[''] = SWEEP_SECONDS if done < total else 0.0
        tasks = step.tasks[0] if len(step.tasks) == 1 else f'{len(step.tasks)} tasks'
        name = f'fine-tuning {pretraining.run_name} at {step.samples:,}, {tasks}'
        return Item(step, name, done, total, left, ', '.join(sorted(bases)), self.device.count)

    def _count_recorded(self, config: FinetuningConfig, task: Task, run_name: str, samples: int) -> int:
        """The number of recorded runs of the search, found by task, checkpoint, protocol, point and seed."""
        protocol, points = describe_protocol(replace(config, task=task.name)), list_points(config, task)
        data_hash = None
        if task.name in config.tasks and task.find_source(config.data.source) == TaskSource.files:
            with contextlib.suppress(InputError):  # the rows are not on this machine
                data_hash = load_task_data(task, config.data).hash

        def is_of_search(record: Finetuning) -> bool:
            checkpoint = record.checkpoint
            return (
                record.status == 'finished'
                and (record.task, checkpoint.run_name, checkpoint.samples) == (task.name, run_name, samples)
                and record.protocol == protocol
                and record.point in points
                and record.seed in config.sweep.seeds
                and data_hash in (None, record.data_hash)
            )

        return len({(record.point, record.seed) for record in filter(is_of_search, self.finetunings)})

    def _estimate(self, kind: Kind, precision: Precision, flops: float, count: int) -> tuple[float, str]:
        """Seconds of computation on ``count`` devices, by the FLOPs model, and its description."""
        device, speed = self.device, getattr(self.device, precision.name)
        share = UTILIZATION[kind]['cpu' if device.is_cpu else 'gpu']
        return flops / (share * speed * count), f'FLOPs model, {share:.0%} of {speed:.1e} in {precision.name}'
