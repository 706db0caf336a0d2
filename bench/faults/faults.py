"""What can happen to a job, and which of the three accepted outcomes each kind of fault may have."""

import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from bench.faults.jobs import INPUTS, JOBS
from maelm_composer.errors import InputError


class Outcome(StrEnum):
    same = 'same'  # the job ended with the same bytes, after as many starts as it took
    told = 'told'  # one line, exit code 2; with the cause gone, the same bytes
    defect = 'DEFECT'


@dataclass(frozen=True)
class Kind:
    """A kind of fault. A job that is told of it must end with the same bytes once its cause is gone."""

    name: str
    group: str  # processes, storage, object storage, machine
    accepts: tuple[Outcome, ...]
    signal: int | None = None
    of_child: bool = False
    of_all: bool = False
    pause: float | None = None  # seconds for which the job stands still
    damage: str | None = None  # to one file that an earlier start has made: remove, flip, cut or forbid (to read)
    fewer_cores: bool = False  # at the next start
    clock_back: bool = False  # by a day at the next start
    disk: str | None = None  # full or read-only, of the folder, until the job has said so
    limit: str | None = None  # field of command.Limits
    amount: tuple[int, int] = (0, 0)  # range of the limit
    server: str | None = None  # fault of tests/faulty_s3.py; refused: it is away
    is_second_start: bool = False
    is_out_of_memory: bool = False  # in a memory cgroup, where the kernel kills a process
    weight: float = 1.0  # how often the kind is drawn

    def fits(self, job: str) -> bool:
        """Whether this kind can happen to ``job``: damage only to files that an earlier command has made."""
        if self.server:
            return JOBS[job].is_remote
        if self.of_child or self.limit == 'shared_memory':
            return JOBS[job].has_children
        return bool(set(JOBS[job].needs) - INPUTS) or not self.damage


SAME, TOLD = (Outcome.same,), (Outcome.same, Outcome.told)
KINDS = (
    Kind('SIGKILL', 'processes', SAME, signal=signal.SIGKILL),
    Kind('SIGTERM', 'processes', SAME, signal=signal.SIGTERM),
    Kind('SIGINT', 'processes', SAME, signal=signal.SIGINT),
    Kind('SIGKILL of a child', 'processes', TOLD, signal=signal.SIGKILL, of_child=True),
    Kind('SIGKILL of all at once', 'processes', SAME, signal=signal.SIGKILL, of_all=True),
    Kind('stopped for 2 s', 'processes', SAME, pause=2.0),
    Kind('stopped for two minutes', 'processes', SAME, pause=120.0, weight=0.1),
    Kind('a child stopped for two minutes', 'processes', TOLD, pause=120.0, of_child=True, weight=0.1),
    Kind('killed by the kernel, out of memory', 'processes', TOLD, is_out_of_memory=True),
    Kind('second start', 'processes', SAME, is_second_start=True),
    Kind('file removed', 'storage', TOLD, damage='remove'),
    Kind('byte flipped', 'storage', TOLD, damage='flip'),
    Kind('file cut off', 'storage', TOLD, damage='cut'),
    Kind('file unreadable', 'storage', TOLD, damage='forbid'),
    Kind('disk full', 'storage', TOLD, disk='full', amount=(0, 300_000)),
    Kind('folder read-only', 'storage', TOLD, disk='read-only'),
    Kind('file size limited', 'storage', TOLD, limit='file_bytes', amount=(100, 200_000)),
    Kind('SIGKILL, then one core', 'machine', SAME, signal=signal.SIGKILL, fewer_cores=True),
    Kind('SIGKILL, then the clock a day back', 'machine', SAME, signal=signal.SIGKILL, clock_back=True),
    Kind('open files limited', 'machine', TOLD, limit='open_files', amount=(12, 64)),
    Kind('/dev/shm full', 'machine', TOLD, limit='shared_memory', amount=(4096, 65536)),
    *(
        Kind(name, 'object storage', accepts, server=fault)
        for name, fault, accepts in (
            ('connection refused', 'refused', TOLD),
            ('500', '500', TOLD),
            ('503 SlowDown', '503', TOLD),
            ('403', '403', TOLD),
            ('answer cut off', 'cut', TOLD),
            ('answer too short', 'short', TOLD),
            ('answer damaged', 'damaged', TOLD),
            ('answer late', 'late', TOLD),
            ('listing empty', 'unlisted', TOLD),
            ('upload lost', 'lost', TOLD),
        )
    ),
)


def choose_kinds(named: Sequence[str], without: Sequence[str]) -> list[Kind]:
    """The kinds with the names ``named``, or all of them if there are none, but for those in ``without``.

    Raises:
        InputError: there is no such kind, or none is left.
    """
    known = {kind.name for kind in KINDS}
    if unknown := sorted({*named, *without} - known):
        raise InputError(f'there is no fault {unknown[0]!r}: there are {"; ".join(sorted(known))}')
    kinds = [kind for kind in KINDS if kind.name in (named or known) and kind.name not in without]
    if not kinds:
        raise InputError('no kind of fault is left')
    return kinds


@dataclass(frozen=True)
class Fault:
    """One fault of a campaign, which its number and the campaign's seed determine."""

    number: int
    kind: Kind
    job: str
    at: float  # when, as a share of the undisturbed duration
    choice: int  # which child, which file, which byte, how much
    lasts: float  # seconds, of a fault of the server


def draw(number: int, seed: int, jobs: Sequence[str], kinds: Sequence[Kind] = KINDS) -> Fault:
    """The fault ``number`` of the campaign ``seed``: a kind, then one of the jobs that it fits, both by weight."""
    generator = random.Random(f'{seed}-{number}')
    possible = [kind for kind in kinds if any(kind.fits(job) for job in jobs)]
    (kind,) = generator.choices(possible, [kind.weight for kind in possible])
    fitting = [job for job in jobs if kind.fits(job)]
    (job,) = generator.choices(fitting, [JOBS[job].weight for job in fitting])
    return Fault(number, kind, job, generator.random(), generator.randrange(2**31), generator.uniform(0.5, 4))
