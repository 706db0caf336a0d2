"""One long command with a fault every minute or two, whose processes are sampled until it ends.

It must end as the undisturbed one. The growth of its memory, open files, threads and shared memory is printed.
"""

import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench.faults.campaign import UNLIMITED, Campaign, Defect, strip_paths
from bench.faults.command import Command
from bench.faults.faults import KINDS
from bench.faults.jobs import JOBS, PRETRAINING, Job, copy_needs, describe_results
from bench.faults.sampling import Sample, measure, sampling
from bench.faults.table import append_row
from maelm_composer.checkpoints.names import METRICS, name_checkpoint
from maelm_composer.config import CorpusConfig
from maelm_composer.errors import InputError
from maelm_composer.records import collect_provenance

BATCH = PRETRAINING['training']['global_train_batch_size']


@dataclass(frozen=True)
class Event:
    """The beginning of the command, a fault, or the end of a start."""

    seconds: float
    start: int
    step: int
    what: str
    exit_code: str = ''  # of the start that ended; empty: the command went on
    said: str = ''


@dataclass(frozen=True)
class Long:
    """A long version of one of the campaign's jobs."""

    make: Callable[[int, bool], Job]  # with so many steps; whether it is the disturbed one
    count_steps: Callable[[Path], int]  # done so far, in the folder of the job
    settling: int  # steps after a start in which memory grows until every part has run once
    pause: tuple[float, float]  # least and most seconds from one fault to the next


def _make_training(steps: int, is_disturbed: bool) -> Job:
    """The disturbed training reads from and writes to S3, the undisturbed one local folders."""
    job, folder = (JOBS['train on s3'], 's3/model') if is_disturbed else (JOBS['train'], 'runs/model')
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


def _count_training_steps(folder: Path) -> int:
    log = folder / 'runs' / 'model' / METRICS
    return max(0, log.read_bytes().count(b'\n') - 1) if log.exists() else 0


def _make_sweep(runs: int, is_disturbed: bool) -> Job:
    job, seeds = JOBS['sweep'], ','.join(map(str, range(1, runs + 1)))
    point = '{learning_rate: [3e-3], batch_size: [16], max_epochs: [1]}'
    return replace(job, arguments=(*job.arguments, f'sweep.seeds=[{seeds}]', f'sweep.search.glue_small={point}'))


def _count_runs(folder: Path) -> int:
    return len(list(folder.glob('swept/rte-*.json')))


LONG = {
    'train on s3': Long(_make_training, _count_training_steps, settling=1000, pause=(60, 120)),
    'sweep': Long(_make_sweep, _count_runs, settling=200, pause=(90, 180)),
}


class LongRun(Campaign):
    """The disturbed command, an undisturbed one beside it, and the tables of the disturbed one.

    samples.csv has its samples, events.csv the faults and the ends of its starts.
    """

    def __init__(self, folder: Path, tables: Path, name: str, steps: int, seed: int) -> None:
        """``name`` is a key of :data:`LONG`."""
        super().__init__(folder, ())
        self.long, self.generator = LONG[name], random.Random(seed)
        self.job, self.undisturbed = (self.long.make(steps, is_disturbed) for is_disturbed in (True, False))
        self.faults = [
            kind
            for kind in KINDS
            if (kind.signal or kind.pause or kind.server)
            and kind.fits(name)
            and not (kind.fewer_cores or kind.clock_back)
        ]
        self.samples: list[Sample] = []
        self.sample_table, self.event_table = tables / 'samples.csv', tables / 'events.csv'
        if self.event_table.exists():
            raise InputError(f'{tables} has the tables of a long run: remove them, or name another folder (--results)')
        tables.mkdir(parents=True, exist_ok=True)

    def run(self) -> tuple[dict[str, str], dict[str, str]]:
        """Run both to their end; returns names and hashes of the files of the disturbed one and of the other.

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
            with sampling(self._sample):
                while not self._is_over(self.generator.uniform(*self.long.pause)):
                    pass
            other.wait(24 * 3600)
        finally:
            self.command.end()
            code = other.end()
        if code:
            raise Defect(f'the undisturbed command fails: {other.read()}')
        return _drop_folders(self._collect(self.job)), _drop_folders(describe_results(self.undisturbed, beside))

    def _is_over(self, pause: float) -> bool:
        """Wait, inflict a fault, and start the command again if it has ended; whether it has ended well."""
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
        (kind,) = self.generator.choices(self.faults, [kind.weight for kind in self.faults])
        lasts = self.generator.uniform(5, 30)
        self._note(f'{kind.name} for {lasts:.0f} s' if kind.server else kind.name)
        self._hit(self.command, kind, self.generator.randrange(100), lasts)
        time.sleep(1)  # in which a command that is told of it ends

    def _note(self, what: str, exit_code: str = '', said: str = '') -> None:
        seconds = round(time.monotonic() - self.begun, 1)
        event = Event(seconds, self.starts, self.long.count_steps(self.work), what, exit_code, said)
        append_row(self.event_table, asdict(event))
        print(*vars(event).values(), sep='  ', flush=True)

    def _sample(self) -> None:
        found, now = measure(self.command.pid), time.monotonic()
        seconds, since_start = round(now - self.begun, 1), round(now - self.started, 1)
        self.samples.append(Sample(seconds, self.starts, since_start, self.long.count_steps(self.work), **found))
        append_row(self.sample_table, asdict(self.samples[-1]))


def _drop_folders(files: dict[str, str]) -> dict[str, str]:
    return {Path(name).name: value for name, value in files.items()}
