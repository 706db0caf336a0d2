"""A search over tasks, points and seeds as Ray tasks.

A sweep makes the runs that have no finished record, and so goes on where a killed one ended. The repeats of a task's
best point begin when that task's grid is complete.
"""

import contextlib
import dataclasses
import errno
import os
import platform
import time
import traceback
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ray
import torch

from maelm_composer.checkpoints.find import find_encoder
from maelm_composer.cluster import LostWorkerError, connect_ray, get_result
from maelm_composer.config import FinetuningConfig
from maelm_composer.console import tell
from maelm_composer.errors import InputError, first_line, telling_of_stop
from maelm_composer.files import assert_local
from maelm_composer.finetuning.identity import describe_run, find_finished, limit_length, run_key
from maelm_composer.finetuning.run import finetune, load_encoder
from maelm_composer.precision import Choice, choose_in
from maelm_composer.records import EncoderIdentity, FailedFinetuning, Finetuning, write_record
from maelm_composer.sweep.lease import SECONDS_BETWEEN_LOOKS, RunLease, is_free, open_lease, take
from maelm_composer.sweep.report import Progress, Standing, print_result
from maelm_composer.sweep.search import SweepResult, conclude, count_runs, list_tasks, plan_grid, plan_repeats, run_cost
from maelm_composer.tasks.catalogue import Task
from maelm_composer.tasks.sources import count_characters, load_task_data

STOPPED = 'stopped: the runs that ended are recorded, and the same command does the others'


@dataclass(frozen=True)
class Facts:
    """Properties of checkpoint and data that the scheduling of a task needs."""

    identity: EncoderIdentity
    max_seq_len: int  # of the encoder
    data_hash: str
    training_size: int  # characters
    evaluation_size: int


class Place(NamedTuple):
    """Where the runs of a sweep are made, on every machine."""

    folder: str  # the working directory
    mark: str | None = None  # a file that every machine of a cluster must find in ``save_folder``


@dataclass
class Job:
    key: str
    config: FinetuningConfig
    task: Task
    cost: float  # in characters that pass forward through the encoder
    lease: RunLease
    record: Finetuning | None


def sweep(config: FinetuningConfig) -> SweepResult:
    """Make every run of the search that has no finished record, and summarize the records of all runs.

    The runs use this machine's Ray, or the cluster at ``RAY_ADDRESS``, whose machines must share the working directory.
    Records are written to ``save_folder`` and remain if the sweep is interrupted.

    Raises:
        InputError: before any run, if checkpoint, data, tasks or search space cannot be used, or no machine is large
            enough for a run; also later, if the last such machine leaves. A run that fails raises nothing; its record
            is in ``failures``.
    """
    assert_local(config.save_folder, 'save_folder')
    tasks = list_tasks(config)
    for task in tasks:
        count_runs(config, task)  # raises if a task has no search space
    config = pin_checkpoint(config)
    with connect_ray():
        num_gpus = config.sweep.gpus_per_run if ray.cluster_resources().get('GPU', 0) else 0
        if config.sweep.gpus_per_run and not num_gpus and (os.environ.get('RAY_ADDRESS') or torch.cuda.device_count()):
            tell('Ray has no GPU: every run uses CPUs (sweep.gpus_per_run=0 says so without this line)')
        _count_slots(config, num_gpus)  # raises if no run fits
        if config.task is not None and config.sweep.tasks and config.task not in config.sweep.tasks:
            tell(f'sweeping over {config.task} alone, since task is set (task=null: over sweep.tasks)')
        # The checkpoint and each task's data are read once, on any machine, before the first run.
        with _mark_place(config.save_folder) as place:
            remote = ray.remote(num_cpus=1)
            of_encoder = remote(inspect_encoder).remote(config, place)
            of_tasks = {task.name: remote(inspect_task).remote(config, task, place) for task in tasks}
            encoder = get_result(of_encoder)
            facts = {name: Facts(*encoder, *get_result(reference)) for name, reference in of_tasks.items()}
            remote_choose = ray.remote(num_cpus=config.sweep.cpus_per_run, num_gpus=num_gpus)(choose_precision)
            choice = get_result(remote_choose.remote(config, place))
            tell(choice.notice)
            config = dataclasses.replace(config, precision=choice.precision)
            return _Sweep(config, tasks, facts, num_gpus, place).run()


def pin_checkpoint(config: FinetuningConfig) -> FinetuningConfig:
    """``config`` with the checkpoint to which its run folder or link leads now; a run that trains on moves the link."""
    found = find_encoder(config.checkpoint)
    return config if found is None else dataclasses.replace(config, checkpoint=found.uri)


def sweep_and_print(config: FinetuningConfig) -> int:
    """:func:`sweep` for the console; returns the exit code: 1 where a run failed."""
    with telling_of_stop(STOPPED):
        result = sweep(config)
    print_result(result)
    print(f'records: {config.save_folder}')
    return 1 if result.failures else 0


class _Sweep:
    """The state of one sweep: all jobs by task, the waiting and the running ones."""

    def __init__(
        self, config: FinetuningConfig, tasks: list[Task], facts: dict[str, Facts], num_gpus: float, place: Place
    ) -> None:
        self.config, self.tasks, self.facts, self.place = config, tasks, facts, place
        self.num_gpus = num_gpus  # of a run; kept when a machine with GPUs leaves, since the precision is theirs
        settings = config.sweep
        remote = ray.remote(num_cpus=settings.cpus_per_run, num_gpus=num_gpus, max_retries=settings.max_retries)
        self.make_run = remote(make_run)  # once: Ray sends every new remote function to every worker
        self.jobs: dict[str, list[Job]] = {task.name: [] for task in tasks}
        self.waiting: list[Job] = []
        self.running: dict[Any, Job] = {}
        self.without_repeats = list(tasks)

    def run(self) -> SweepResult:
        for task in self.tasks:
            self._add(task, plan_grid(self.config, task))
        try:
            self.progress = Progress(self._list_standings)
            with self.progress.live:
                self._plan_repeats()
                while self.waiting or self.running:
                    self._submit()
                    self._collect()
                    self._plan_repeats()
                    self.progress.live.refresh()
        finally:  # the caller may keep using this Ray
            for reference in self.running:
                with contextlib.suppress(Exception):
                    ray.cancel(reference, force=True)
        records = {name: [job.record for job in jobs if job.record] for name, jobs in self.jobs.items()}
        failures = [r for of_task in records.values() for r in of_task if isinstance(r, FailedFinetuning)]
        return SweepResult([conclude(self.config, task, records[task.name]) for task in self.tasks], failures)

    def _add(self, task: Task, configs: list[FinetuningConfig]) -> None:
        facts = self.facts[task.name]
        for config in (limit_length(config, facts.max_seq_len) for config in configs):
            cost = run_cost(config, config.max_epochs, facts.training_size, facts.evaluation_size)
            key = run_key(config, facts.identity, facts.data_hash)
            lease = open_lease(config.save_folder, key)
            job = Job(key, config, task, cost, lease, find_finished(config, key, facts.identity))
            self.jobs[task.name].append(job)
            if job.record is None:
                self.waiting.append(job)

    def _plan_repeats(self) -> None:
        for task in list(self.without_repeats):
            records = [job.record for job in self.jobs[task.name] if job.record]
            if len(records) == len(self.jobs[task.name]):
                self.without_repeats.remove(task)
                self._add(task, plan_repeats(self.config, task, records))

    def _submit(self) -> None:
        """Submit the longest runs first, and one more than fit, which tells an autoscaling cluster to grow."""
        slots = _count_slots(self.config, self.num_gpus)
        for job in sorted(self.waiting, key=lambda job: -job.cost):
            if len(self.running) > slots:
                return
            if not is_free(job.lease):  # another sweep is making the run
                continue
            self.waiting.remove(job)
            identity = self.facts[job.task.name].identity
            job.record = find_finished(job.config, job.key, identity)  # made by another sweep meanwhile
            if job.record is not None:
                self.progress.announce(job.record)
                continue
            reference = self.make_run.remote(job.config, job.key, self.facts[job.task.name], self.place)
            self.running[reference] = job

    def _collect(self) -> None:
        if not self.running:
            if self.waiting:
                self.progress.announce_wait(len(self.waiting))
                time.sleep(SECONDS_BETWEEN_LOOKS)
            return
        done, _ = ray.wait(list(self.running), num_returns=1, timeout=SECONDS_BETWEEN_LOOKS)
        for reference in done:
            job = self.running.pop(reference)
            try:
                job.record = get_result(reference)
            except LostWorkerError as error:
                job.record = record_failure(job.config, job.key, self.facts[job.task.name], str(error))
            if job.record is None:  # another sweep was faster
                self.waiting.append(job)
            else:
                self.progress.announce(job.record)

    def _list_standings(self) -> list[Standing]:
        standings = []
        for task in self.tasks:
            jobs = self.jobs[task.name]
            records = [job.record for job in jobs if job.record]
            total = count_runs(self.config, task) if task in self.without_repeats else len(jobs)
            mean_cost = sum(job.cost for job in jobs) / len(jobs)
            left = sum(job.cost for job in jobs if job.record is None) + (total - len(jobs)) * mean_cost
            running = sum(job.task is task for job in self.running.values())
            standings.append(Standing(task, total, records, running, left, sum(j.cost for j in jobs if j.record)))
        return standings


def choose_precision(config: FinetuningConfig, place: Place) -> Choice:
    """Choose the precision of all runs in ``save_folder`` on a device like theirs."""
    _enter(config, place)
    _hide_gpus_unless_given()
    return choose_in(Path(config.save_folder), config.precision, 'precision')


def inspect_encoder(config: FinetuningConfig, place: Place) -> tuple[EncoderIdentity, int]:
    """The first fields of :class:`Facts`."""
    _enter(config, place)
    pretrained = load_encoder(config)
    return pretrained.identity, pretrained.max_seq_len


def inspect_task(config: FinetuningConfig, task: Task, place: Place) -> tuple[str, int, int]:
    """The other fields of :class:`Facts`."""
    _enter(config, place)
    data = load_task_data(task, config.data)
    evaluation = [row for rows in data.evaluation.values() for row in rows]
    return data.hash, count_characters(data.train), count_characters(evaluation)


def make_run(config: FinetuningConfig, key: str, facts: Facts, place: Place) -> Finetuning | None:
    """Make one run and return its record, also of a failure; None if another sweep is making the run."""
    _enter(config, place)
    _hide_gpus_unless_given()
    # Ray calls this again after the death of a worker, which on another machine still seems to hold the lease.
    lease = open_lease(config.save_folder, key)
    if not take(lease):
        return None
    try:
        if ray.get_gpu_ids() and not torch.cuda.is_available():  # it would run on a CPU, under the same key
            raise InputError('torch cannot use the GPU that Ray has given to the run')
        record = finetune(config, config.sweep.gpus_per_run if ray.get_gpu_ids() else 1.0)
        if record.key != key:
            raise InputError('the checkpoint or the data changed while the sweep ran: start it again')
        return record
    except InputError as error:
        return record_failure(config, key, facts, str(error), f'on {platform.node()}')
    except Exception as error:
        if _is_of_records(error, config.save_folder):
            raise  # every other run would fail so, too
        reason = f'{type(error).__name__}: {first_line(error)}'
        return record_failure(config, key, facts, reason, f'on {platform.node()}\n{traceback.format_exc()}')
    finally:
        lease.release()


def _is_of_records(error: Exception, folder: str) -> bool:
    """Whether the disk of the records is full or read-only, and not one of this machine alone."""
    if not (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS) and error.filename):
        return False
    return Path(os.path.abspath(error.filename)).is_relative_to(os.path.abspath(folder))


def record_failure(
    config: FinetuningConfig, key: str, facts: Facts, reason: str, trace: str | None = None
) -> FailedFinetuning:
    """Write and return the record of a run that failed.

    A finished record stays: such a run was made again only to save its model.
    """
    run = describe_run(config, key, facts.identity, facts.data_hash)
    record = FailedFinetuning(**run, error=' '.join(reason.split()), traceback=trace)
    if find_finished(dataclasses.replace(config, saves_model=False), key, facts.identity) is None:
        write_record(Path(config.save_folder, f'{key}.json'), record)
    return record


@contextlib.contextmanager
def _mark_place(save_folder: str) -> Iterator[Place]:
    """The place of a sweep. In a cluster, ``save_folder`` holds the mark while the body runs."""
    if not os.environ.get('RAY_ADDRESS'):
        yield Place(os.getcwd())
        return
    mark = Path(save_folder, f'.sweep.{uuid.uuid4().hex}').absolute()
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()
    try:
        yield Place(os.getcwd(), str(mark))
    finally:
        mark.unlink(missing_ok=True)


def _enter(config: FinetuningConfig, place: Place) -> None:
    """Set a worker's working directory, and its number of threads to ``sweep.cpus_per_run``."""
    try:
        os.chdir(place.folder)
        if place.mark is not None:
            os.stat(place.mark)
    except OSError:
        where = place.folder if place.mark is None else f'{config.save_folder} in {place.folder}'
        raise InputError(f'{where} is not one folder for all machines: start the sweep in a shared one') from None
    threads = max(1, int(config.sweep.cpus_per_run))
    os.environ['RAYON_NUM_THREADS'] = str(threads)  # the tokenizer's
    torch.set_num_threads(threads)


def _hide_gpus_unless_given() -> None:
    if not ray.get_gpu_ids():  # our Ray leaves every GPU visible to a task that was given none
        os.environ['CUDA_VISIBLE_DEVICES'] = ''


def _fit(kind: str, there: float, least: float) -> int:
    if kind == 'GPU':  # a run takes its share of one: eight have room for eight runs of 0.6, not for thirteen
        return int(there) * int(1 / least + 1e-9)
    return int(there / least + 1e-9)


def _count_slots(config: FinetuningConfig, num_gpus: float) -> int:
    """How many runs with ``num_gpus`` each fit at a time on the machines that Ray has now.

    Raises:
        InputError: no run fits.
    """
    demand = {'CPU': config.sweep.cpus_per_run} | ({'GPU': num_gpus} if num_gpus else {})
    machines = [machine['Resources'] for machine in ray.nodes() if machine['Alive']]
    slots = sum(min(_fit(kind, there.get(kind, 0), least) for kind, least in demand.items()) for there in machines)
    if slots == 0:
        has = [', '.join(f'{there.get(kind, 0):g} {kind}' for kind in demand) for there in machines]
        of_gpus = f' and sweep.gpus_per_run {num_gpus:g}' if num_gpus else ''
        needs = f'sweep.cpus_per_run {config.sweep.cpus_per_run:g}{of_gpus}'
        raise InputError(f'{needs}: no machine of Ray has as much ({"; ".join(has)})')
    return slots
