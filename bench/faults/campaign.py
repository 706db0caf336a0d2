"""Inflicts faults on jobs and compares what they make; table.py keeps the rows."""

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from bench.faults.command import Command, Limits, find_clock
from bench.faults.faults import Fault, Kind, Outcome
from bench.faults.jobs import INPUTS, JOBS, Bucket, Job, copy_needs, describe_results, write_inputs
from bench.faults.memory import memory_group
from maelm_composer.errors import InputError
from tests.faulty_s3 import FaultyS3

LONGEST = 400.0  # seconds of one start, on a loaded machine
MOST_STARTS = 4
UNLIMITED = Limits()
ONE_CORE = Limits(cores=frozenset({min(UNLIMITED.cores)}))
RANK_KILLED = {256 - signal.SIGKILL, 256 - signal.SIGTERM}  # of Composer's launcher
FIRST_LINE, LAST_LINE = 'parameters  ', 'log and checkpoints: '  # of a training
STOPPED = {128 + signal.SIGTERM, 128 + signal.SIGINT, -signal.SIGTERM, -signal.SIGINT, -signal.SIGKILL}


def mount(*arguments: str, program: str = 'mount') -> None:
    subprocess.run([program, *arguments], check=True, capture_output=True)


def strip_paths(said: str, work: Path) -> str:
    """What a job said, in one line, without the places where this machine has the job and its packages."""
    said = ' '.join(said.split()).replace(f'{work}/', '').replace(str(work), '.')
    return re.sub(r'(?<![\w.:/])/[^\s"\']*/(?:site-packages|lib/python[\d.]+)/', '', said)


def assert_possible(kinds: Sequence[Kind]) -> None:
    """Raise InputError if this machine lacks what one of the ``kinds`` needs."""
    for kind in kinds:
        lack = ''
        if kind.clock_back and not find_clock():
            lack = 'a C compiler and libfaketime, of the package faketime'
        if kind.is_out_of_memory:
            try:
                with memory_group():
                    pass
            except OSError as error:
                lack = f'root and a memory cgroup that it may write to ({error})'
        if lack:
            raise InputError(f'{kind.name!r} needs {lack}; --without {kind.name!r} leaves these faults out')


class Defect(Exception):
    """What a job did that it must not do."""


@dataclass
class Ending:
    code: int
    said: str
    seconds: float

    @property
    def line(self) -> str:
        """The line of an error; '' if the command was stopped or ended well.

        Raises:
            Defect: a traceback, or another exit code than a user may see.
        """
        if 'Traceback (most recent call last)' in self.said:
            raise Defect('a traceback: ' + ' | '.join(self.said.strip().splitlines()[-3:]))
        if self.code == 0 or self.code in STOPPED:
            return ''
        lines = [line for line in self.said.splitlines() if line.startswith('error: ')]
        if self.code in RANK_KILLED and not lines and (FIRST_LINE not in self.said or LAST_LINE in self.said):
            return ''  # a rank was killed before the ranks had met, or after the end of the run
        if self.code not in {2, *RANK_KILLED} or len(lines) != 1:
            raise Defect(f'exit code {self.code} and {len(lines)} lines of error: {self.said[-300:]!r}')
        return lines[0]


class Campaign:
    """A folder in which every job runs, its undisturbed results, and a server for the jobs that need one."""

    def __init__(self, folder: Path, jobs: Sequence[str]) -> None:
        self.golden, self.work, self.logs = folder / 'golden', folder / 'work', folder / 'logs'
        self.server = FaultyS3()
        self.environment = {
            'S3_ENDPOINT_URL': self.server.url,
            'AWS_ACCESS_KEY_ID': 'testing',
            'AWS_SECRET_ACCESS_KEY': 'testing',
            'AWS_DEFAULT_REGION': 'us-east-1',
            'AWS_MAX_ATTEMPTS': '1',
            'OMP_NUM_THREADS': '1',
            'RAY_worker_niceness': '0',  # Ray's workers would yield to all that a loaded machine does
            'MPLCONFIGDIR': str(folder / 'matplotlib'),
        }
        os.environ.update(self.environment)  # the bucket below and the server of forks take it from there
        self.bucket = Bucket(self.server.url)
        self.results: dict[str, dict[str, str]] = {}
        self.seconds: dict[str, float] = {}
        shutil.rmtree(folder, ignore_errors=True)
        self.logs.mkdir(parents=True)
        write_inputs(self.golden)
        for name, job in JOBS.items():
            if name in {*jobs, 'tokenizer', 'shards', 'train'}:  # whose files the others need
                self._run_undisturbed(job)

    def _run_undisturbed(self, job: Job) -> None:
        """Record results and duration; what the job makes is there for the jobs after it."""
        self.starts = 0
        self._prepare(job)
        ending = self._finish(self._start(job))
        if ending.code:
            raise RuntimeError(f'{job.name} fails undisturbed: {ending.said}')
        self.results[job.name], self.seconds[job.name] = self._collect(job), ending.seconds
        for name in {Path(glob).parts[0] for glob in job.makes} - {'s3', 'results'}:
            shutil.rmtree(self.golden / name, ignore_errors=True)
            shutil.copytree(self.work / name, self.golden / name, symlinks=True)

    def _prepare(self, job: Job) -> None:
        if self.work.is_mount():
            mount('--lazy', str(self.work), program='umount')
        shutil.rmtree(self.work, ignore_errors=True)
        copy_needs(job, self.golden, self.work)
        if job.is_remote:
            self.bucket.fill(self.golden / 'shards')

    def _start(self, job: Job, limits: Limits = UNLIMITED) -> Command:
        self.starts += 1
        log = self.logs / f'{self.starts}.txt'  # two starts may live at once
        command = Command(job, self.work, log, self.environment, limits)
        self.started = time.monotonic()
        return command

    def _finish(self, command: Command) -> Ending:
        is_over = command.wait(LONGEST)
        code = command.end()
        ending = Ending(code, command.read(), time.monotonic() - self.started)
        if not is_over:
            raise Defect(f'no end after {LONGEST:.0f} s: {ending.said[-300:]!r}')
        return ending

    def _collect(self, job: Job) -> dict[str, str]:
        if job.is_remote:
            shutil.rmtree(self.work / 's3', ignore_errors=True)
            self.bucket.copy_to(self.work / 's3')
        return describe_results(job, self.work)

    def inflict(self, fault: Fault) -> dict[str, object]:
        """Run the job with the fault, then again until it ends, and compare; returns what came of it."""
        job = JOBS[fault.job]
        self.target, self.met, self.starts, self.begun = '', True, 0, time.monotonic()
        self._prepare(job)
        try:
            told = self._run_with(job, fault)
            self._compare(job)
            outcome = Outcome.told if told else Outcome.same
            if outcome not in fault.kind.accepts:
                raise Defect(told)
        except Defect as defect:
            outcome, told = Outcome.defect, str(defect)
        lost = time.monotonic() - self.begun - self.seconds[job.name]
        return {
            'target': self.target if self.met else 'met nothing',
            'outcome': outcome.value,
            'starts': self.starts,
            'seconds_lost': f'{lost:.1f}',
            'said': strip_paths(told, self.work),
        }

    def _run_with(self, job: Job, fault: Fault) -> str:
        """Run the job to its end; returns the first line of error on the way."""
        limits = UNLIMITED
        if fault.kind.limit:
            least, most = fault.kind.amount
            amount = least + fault.choice % (most - least)
            lack: dict[str, Any] = {fault.kind.limit: amount}
            limits, self.target = replace(limits, **lack), f'{amount:,}'
        if fault.kind.disk:
            self._limit_disk(job, fault)
        for attempt in range(MOST_STARTS):
            if attempt:  # the job ended, or sent its last request, at the moment of the fault
                self._prepare(job)
                self.starts, self.begun = 0, time.monotonic()
            ending = self._disturb(job, fault, limits)
            if self.met or ending.code:
                break
        told = ending.line
        if fault.kind.disk:
            mount('-o', 'remount,rw,size=1g', str(self.work))
        if fault.kind.damage:
            if ending.code == 0:  # there is nothing left to do but to start anew
                self._prepare(job)
            path, content = self._damage(fault)
            ending = self._finish(self._start(job))
            told = ending.line
            if told:
                if not any(part in told for part in path.relative_to(self.work).parts[-2:]):
                    raise Defect(f'does not name {path.name}: {told}')
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
                path.chmod(0o644)
        yesterday = Limits(clock=find_clock()) if fault.kind.clock_back else UNLIMITED
        after = ONE_CORE if fault.kind.fewer_cores else yesterday
        while ending.code != 0:
            if self.starts == MOST_STARTS:
                raise Defect(f'does not end after {MOST_STARTS} starts: {ending.said[-300:]!r}')
            ending = self._finish(self._start(job, after))
            told = told or ending.line
        return told

    def _limit_disk(self, job: Job, fault: Fault) -> None:
        """Mount a file system over the folder that is nearly full, or that cannot be written."""
        mount('-t', 'tmpfs', '-o', 'size=1g', 'tmpfs', str(self.work))
        copy_needs(job, self.golden, self.work)
        option = 'ro'
        if fault.kind.disk == 'full':
            least, most = fault.kind.amount
            left = least + fault.choice % (most - least)
            used = shutil.disk_usage(self.work).used
            option, self.target = f'size={used + left}', f'{left:,}'
        mount('-o', f'remount,{option}', str(self.work))

    def _disturb(self, job: Job, fault: Fault, limits: Limits) -> Ending:
        """Run the job once with the fault; ``self.met`` is whether the fault met it."""
        self.met = True
        if not fault.kind.is_out_of_memory:
            ending = self._finish(self._start_and_hit(job, fault, limits))
            if fault.kind.signal == signal.SIGKILL and not fault.kind.of_child and ending.code == 0:
                self.met = False
            return ending
        with memory_group() as group:
            command = self._start_and_hit(job, fault, replace(limits, memory_group=group.folder))
            processes = command.list_processes()
            place = fault.choice % (len(processes) + 1)  # one of them, or whichever the kernel chooses
            victim = processes[place] if place < len(processes) else None
            if victim is not None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    self.target = f'{victim.name()}, {place} of {len(processes) - 1}'
            self.met = group.lack(lambda: command.is_running, victim.pid if victim else None)
            if not self.met and command.is_running:
                raise Defect('the kernel has killed no process')
            return self._finish(command)

    def _start_and_hit(self, job: Job, fault: Fault, limits: Limits) -> Command:
        """Start the command, and inflict the fault at its moment."""
        kind = fault.kind
        command = self._start(job, limits)
        while command.wait(fault.at * self.seconds[job.name]) and not (kind.limit or kind.disk):
            ending = self._finish(command)
            if ending.code:
                raise Defect(f'ends with {ending.code} undisturbed: {ending.said[-300:]!r}')
            self.seconds[job.name] = ending.seconds  # faster than measured, so its fault would meet nothing
            self._prepare(job)
            self.starts, self.begun = 0, time.monotonic()
            command = self._start(job, limits)
        if kind.is_second_start:
            self._start_second(job)
        if kind.damage:
            command.signal(signal.SIGKILL)
        self._hit(command, kind, fault.choice, fault.lasts)
        return command

    def _hit(self, command: Command, kind: Kind, choice: int, lasts: float) -> None:
        """Send the signal of ``kind``, or let the command or the server stand still."""
        if kind.signal is not None:
            command.signal(kind.signal, choice if kind.of_child else None, to_all=kind.of_all)
        if kind.pause is not None:
            stopped = command.signal(signal.SIGSTOP, choice if kind.of_child else None)
            is_over = command.wait(kind.pause)
            self.met = kind.of_child or not is_over
            for process in stopped:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()
        if kind.server is not None:
            self._take_server_away(kind.server, lasts)

    def _start_second(self, job: Job) -> None:
        started = self.started
        second = self._finish(self._start(job))
        self.started = started
        if second.code not in (0, 2):
            raise Defect(f'the second start ended with {second.code}: {second.said[-300:]!r}')
        _ = second.line

    def _take_server_away(self, how: str, seconds: float) -> None:
        self.server.times, before = None, self.server.met
        if how == 'refused':
            self.server.stop()
        else:
            self.server.fault = how
        time.sleep(seconds)
        if how == 'refused':
            self.server.start()
        self.server.fault = None
        if how != 'refused':  # those requests cannot be counted
            self.target, self.met = f'{self.server.met - before} requests', self.server.met > before

    def _damage(self, fault: Fault) -> tuple[Path, bytes]:
        """Damage one of the files that the job reads or has made; returns its path and what it held."""
        generator = random.Random(fault.choice)
        files = [path for path in sorted(self.work.rglob('*')) if self._can_be_damaged(path)]
        path = generator.choice(files)
        content = path.read_bytes()
        place, self.target = generator.randrange(len(content)), str(path.relative_to(self.work))
        if fault.kind.damage == 'remove':
            path.unlink()
        elif fault.kind.damage == 'forbid':
            path.chmod(0)
        elif fault.kind.damage == 'cut':
            path.write_bytes(content[:place])
        else:
            path.write_bytes(
                content[:place] + bytes([content[place] ^ 1 << generator.randrange(8)]) + content[place + 1 :]
            )
        return path, content

    def _can_be_damaged(self, path: Path) -> bool:
        """Whether ``path`` is a file, and neither an input that a user wrote nor a lock."""
        place = path.relative_to(self.work).parts[0]
        if path.suffix == '.yaml' or place in INPUTS or path.name == '.lock':
            return False
        return path.is_file() and not path.is_symlink() and path.stat().st_size > 0

    def _compare(self, job: Job) -> None:
        found, wanted = self._collect(job), self.results[job.name]
        for name in sorted(found.keys() | wanted.keys()):
            if '/samples-' in name and name not in wanted:
                continue  # a stop signal saves a checkpoint of its own
            if found.get(name) != wanted.get(name):
                state = 'is missing' if name not in found else 'is too much' if name not in wanted else 'differs'
                raise Defect(f'{name} {state}')
