"""One long pretraining over S3 with a fault every minute or two, whose processes are sampled until it ends.

It must end as the undisturbed run, and its memory, open files, threads and shared memory must not grow with its steps.
"""

import contextlib
import csv
import random
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np
import psutil

from bench.faults.campaign import UNLIMITED, Campaign, Defect, strip_paths
from bench.faults.command import Command
from bench.faults.faults import KINDS
from bench.faults.jobs import JOBS, PRETRAINING, Job, copy_needs, describe_results
from maelm_composer.checkpoints.names import METRICS, name_checkpoint
from maelm_composer.config import CorpusConfig
from maelm_composer.provenance import collect_provenance
from maelm_composer.statistics import MeanInterval, estimate_mean

BATCH = PRETRAINING['training']['global_train_batch_size']
PAUSE = (60.0, 120.0)  # seconds from one fault to the next
SETTLING = 1000  # steps after a start in which memory grows until every part has run once, validation as the last
FAULTS = [kind for kind in KINDS if (kind.signal or kind.pause or kind.server) and not kind.fewer_cores]
LEAST_SAMPLES, LEAST_STEPS = 5, 1000  # of a start whose growth is measured
QUANTITIES = ('trainer_mebibytes', 'workers_mebibytes', 'open_files', 'threads', 'shared_mebibytes')


@dataclass(frozen=True)
class Sample:
    """The processes of the run at one moment."""

    seconds: float  # since the first start
    start: int  # the run has been started so often
    since_start: float  # seconds
    step: int
    # Resident memory. What is a process's own would also grow as it writes to pages that it shares with its parent.
    trainer_mebibytes: float
    workers_mebibytes: float  # summed
    open_files: int  # of all these processes
    threads: int
    shared_mebibytes: float  # in /dev/shm, of the whole machine


@dataclass(frozen=True)
class Event:
    """The beginning of the run, a fault, or the end of a start."""

    seconds: float
    start: int
    step: int
    what: str
    exit_code: str = ''  # of the start that ended; empty: the run went on
    said: str = ''


def make_job(steps: int, *, is_remote: bool) -> Job:
    """The campaign's training, over S3 or in local folders, with so many ``steps``."""
    job, folder = (JOBS['train on s3'], 's3/model') if is_remote else (JOBS['train'], 'runs/model')
    settings = {
        'training.max_samples': steps * BATCH,
        'training.checkpoint_interval_samples': 500 * BATCH,
        'training.eval_interval_samples': 1000 * BATCH,
        'training.checkpoints_to_keep': 2,
    }
    made = (METRICS, f'{name_checkpoint(steps * BATCH)}/model.safetensors')
    return replace(
        job,
        arguments=(*job.arguments, *(f'{key}={value}' for key, value in settings.items())),
        makes=tuple(f'{folder}/{name}' for name in made),
    )


class LongRun(Campaign):
    """The disturbed run over S3, an undisturbed one beside it in local folders, and the tables of the disturbed run.

    samples.csv has its samples, events.csv the faults and the ends of its starts.
    """

    def __init__(self, folder: Path, tables: Path, steps: int, seed: int) -> None:
        super().__init__(folder, ())
        self.job, self.generator = make_job(steps, is_remote=True), random.Random(seed)
        self.undisturbed = make_job(steps, is_remote=False)
        self.samples: list[Sample] = []
        shutil.rmtree(tables, ignore_errors=True)
        tables.mkdir(parents=True)
        self.sample_table, self.event_table = tables / 'samples.csv', tables / 'events.csv'

    def run(self, pause: tuple[float, float] = PAUSE) -> tuple[dict[str, str], dict[str, str]]:
        """Run both to their end; returns names and hashes of the files of the disturbed run and of the other.

        Args:
            pause: least and most seconds from one fault to the next.

        Raises:
            Defect: a start ended otherwise than it may.
        """
        beside = self.golden.parent / 'undisturbed'
        copy_needs(self.undisturbed, self.golden, beside)
        other = Command(self.undisturbed, beside, self.logs / 'undisturbed.txt', self.environment, UNLIMITED)
        self._prepare(self.job)
        self.starts, self.begun = 0, time.monotonic()
        self.command = self._start(self.job)
        self._note('begin', said=f'git {collect_provenance(CorpusConfig()).git_revision}')
        try:
            with self._sampling():
                while not self._is_over(self.generator.uniform(*pause)):
                    pass
            other.wait(24 * 3600)
        finally:
            self.command.end()
            code = other.end()
        if code:
            raise Defect(f'the undisturbed run fails: {other.read()}')
        return _drop_folders(self._collect(self.job)), _drop_folders(describe_results(self.undisturbed, beside))

    def _is_over(self, pause: float) -> bool:
        """Wait, inflict a fault, and start the run again if it has ended; whether it has ended well."""
        if not self.command.wait(pause):
            self._disturb_once()
        if self.command.is_running:
            return False
        ending = self._finish(self.command)
        self._note('end', str(ending.code), strip_paths(ending.line, self.work))
        if ending.code:
            self.command = self._start(self.job)
        return ending.code == 0

    def _disturb_once(self) -> None:
        kind, lasts = self.generator.choice(FAULTS), self.generator.uniform(5, 30)
        self._note(f'{kind.name} for {lasts:.0f} s' if kind.server else kind.name)
        self._hit(self.command, kind, self.generator.randrange(100), lasts)
        time.sleep(1)  # in which a run that is told of it ends

    def _note(self, what: str, exit_code: str = '', said: str = '') -> None:
        seconds = round(time.monotonic() - self.begun, 1)
        event = Event(seconds, self.starts, self._read_step(), what, exit_code, said)
        _append(self.event_table, event)
        print(*vars(event).values(), sep='  ', flush=True)

    def _read_step(self) -> int:
        log = self.work / 'runs' / 'model' / METRICS
        return max(0, log.read_bytes().count(b'\n') - 1) if log.exists() else 0

    @contextlib.contextmanager
    def _sampling(self, interval: float = 5.0) -> Iterator[None]:
        is_over = threading.Event()

        def sample() -> None:
            while not is_over.wait(interval):
                try:
                    self.samples.append(self._measure())
                except (psutil.Error, OSError):  # a process or a segment has just gone
                    continue
                _append(self.sample_table, self.samples[-1])

        thread = threading.Thread(target=sample, daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def _measure(self) -> Sample:
        trainer, now = psutil.Process(self.command.pid), time.monotonic()
        processes = [trainer, *trainer.children(recursive=True)]
        memory = [process.memory_info().rss / 2**20 for process in processes]
        shared = sum(path.stat().st_blocks * 512 for path in Path('/dev/shm').iterdir())
        return Sample(
            seconds=round(now - self.begun, 1),
            start=self.starts,
            since_start=round(now - self.started, 1),
            step=self._read_step(),
            trainer_mebibytes=round(memory[0], 2),
            workers_mebibytes=round(sum(memory[1:]), 2),
            open_files=sum(process.num_fds() for process in processes),
            threads=sum(process.num_threads() for process in processes),
            shared_mebibytes=round(shared / 2**20, 3),
        )


def measure_growth(samples: Sequence[Sample], quantity: str) -> MeanInterval | None:
    """Growth of ``quantity`` per 1,000 steps, with the 95 % interval over starts; None: no start was long enough.

    Every start gives one least-squares slope, since the samples of one process are not independent. The last sample of
    a start is left out: its processes may be ending.
    """
    starts = defaultdict[int, list[Sample]](list)
    for sample in samples:
        starts[sample.start].append(sample)
    slopes = []
    for first, *rest in starts.values():
        found = [sample for sample in rest[:-1] if sample.step - first.step > SETTLING]
        if len(found) >= LEAST_SAMPLES and found[-1].step - found[0].step >= LEAST_STEPS:
            steps = [sample.step / 1000 for sample in found]
            slopes.append(float(np.polyfit(steps, [getattr(sample, quantity) for sample in found], 1)[0]))
    return estimate_mean(slopes) if slopes else None


def describe_growth(samples: Sequence[Sample]) -> str:
    """A Markdown table of :func:`measure_growth`."""
    lines = ['| | median | growth per 1,000 steps | 95 % interval |', '|---|---|---|---|']
    for quantity in QUANTITIES:
        median = float(np.median([getattr(sample, quantity) for sample in samples]))
        growth = measure_growth(samples, quantity)
        shown = '| |' if growth is None else f'{growth.mean:+.3g} | |'
        if growth is not None and growth.low is not None and growth.high is not None:
            shown = f'{growth.mean:+.3g} | {growth.low:+.3g} to {growth.high:+.3g} |'
        lines.append(f'| {quantity.replace("_", " ")} | {median:,.4g} | {shown}')
    return '\n'.join(lines)


def _drop_folders(files: dict[str, str]) -> dict[str, str]:
    return {Path(name).name: value for name, value in files.items()}


def _append(path: Path, row: Sample | Event) -> None:
    with path.open('a', newline='', encoding='utf-8') as file:
        writer = csv.DictWriter(file, [field.name for field in fields(row)], lineterminator='\n')
        if file.tell() == 0:
            writer.writeheader()
        writer.writerow(asdict(row))
