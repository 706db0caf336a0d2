"""The ranks of a run: how they share a machine, and how they fail together."""

import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from composer.devices import Device, DeviceCPU, DeviceGPU
from composer.utils import dist

from maelm_composer.config import Sharding, TrainingConfig
from maelm_composer.data.storage import OutageError
from maelm_composer.errors import InputError, Stopped, explain
from maelm_composer.processor import count_cores

# A rank that fails closes its connections, and then waits for loader workers that may not answer, before it ends.
SECONDS_TO_END = 60
Act = Callable[[int, bool, Callable[[str], None]], None]  # :meth:`RankWatch.acting`
T = TypeVar('T')
FAILURE, SECONDS_BETWEEN_LOOKS, SECONDS_TO_END_BY_ITSELF = 'maelm/failure', 2, 5


def start_rank(training: TrainingConfig) -> Device:
    """Choose this rank's device and share of the cores, and connect the ranks if there are several.

    Raises:
        InputError: the machine has fewer GPUs than ranks or too old a driver, or the ranks do not know each other.
    """
    if 'GROUP_RANK' in os.environ:  # torchrun's name of what Composer asks for as NODE_RANK
        os.environ.setdefault('NODE_RANK', os.environ['GROUP_RANK'])
    is_one_of_several = int(os.environ.get('SLURM_STEP_NUM_TASKS', 1)) > 1 and 'RANK' not in os.environ
    if is_one_of_several and not sys.stdin.isatty():  # a terminal of srun --pty is one process
        raise InputError(
            'srun has started several processes that do not know each other: start one a node, and in it composer -n '
            'GPUS --world_size ... --node_rank $SLURM_NODEID --master_addr ... --master_port ...; for a run of this '
            'process alone, unset SLURM_STEP_NUM_TASKS'
        )
    gpus, local_ranks = torch.cuda.device_count(), dist.get_local_world_size()
    if gpus and not torch.cuda.is_available():
        raise InputError(
            'this machine has GPUs that CUDA cannot use, as with an old driver: see nvidia-smi, or hide them '
            "(CUDA_VISIBLE_DEVICES='')"
        )
    if 0 < gpus <= dist.get_local_rank():
        raise InputError(
            f'{local_ranks} ranks on this machine, which has {gpus} GPUs: start the run with composer -n {gpus}'
        )
    if 'OMP_NUM_THREADS' not in os.environ:
        # Composer's launcher lets every rank use every core, and torch knows no container's quota; on a CPU either is
        # many times slower.
        torch.set_num_threads(min(torch.get_num_threads(), max(1, count_cores() // local_ranks)))
    # Composer's default is TF32, but training.precision=fp32 promises fp32.
    device = DeviceGPU(allow_tf32=False) if gpus else DeviceCPU()
    if dist.get_world_size() > 1 or training.sharding != Sharding.ddp:
        # A collective waits for the slowest rank, which may be downloading or waiting for an object store.
        dist.initialize_dist(device, timeout=1800 + 60 * training.max_outage_minutes)
    return device


def take_from_first_rank(value: T) -> T:
    """The first rank's ``value``. Called by every rank."""
    return dist.all_gather_object(value)[0]


@contextlib.contextmanager
def raise_on_all_ranks() -> Iterator[None]:
    """Raise an InputError or OSError of any rank's body as InputError on every rank. Called by every rank.

    The launcher ends only the ranks of the failed rank's node; the other nodes would wait for the failed rank.

    Raises:
        OutageError: every rank that failed did so because an object store did not answer.
    """
    failure = None
    try:
        yield
    except (InputError, OSError) as error:
        failure = isinstance(error, OutageError), explain(error)
    failures = [found for found in dist.all_gather_object(failure) if found is not None]
    if failures:
        is_outage, reason = min(failures)
        raise (OutageError if is_outage else InputError)(reason)


class FailureBoard:
    """Where a rank that fails leaves its line for the other nodes, whose collectives of NCCL would wait for that rank.

    The board is the store through which torch's ranks have met. On one node it stays empty.
    """

    def __init__(self) -> None:
        self.is_needed = dist.get_world_size() > dist.get_local_world_size()
        self._store: Any = torch.distributed.distributed_c10d._get_default_store() if self.is_needed else None

    def tell(self, line: str) -> None:
        if not self.is_needed:
            return
        with contextlib.suppress(torch.distributed.DistError):  # rank 0, which keeps the store, has ended
            self._store.compare_set(FAILURE, '', f'{dist.get_node_rank()} {line}')  # the first line stays

    def read(self) -> str | None:
        """What ended a rank of another node; None if no such rank has failed."""
        if not self.is_needed:
            return None
        node, line = '0', 'its first rank has ended'
        with contextlib.suppress(torch.distributed.DistError):
            if not self._store.check([FAILURE]):
                return None
            node, _, line = self._store.get(FAILURE).decode().partition(' ')
        return None if int(node) == dist.get_node_rank() else f'node {node} ended: {line}'

    def watch(self, is_over: threading.Event) -> None:
        """End this rank, in one line, some seconds after a rank of another node has failed, unless it is over then."""
        while not is_over.wait(SECONDS_BETWEEN_LOOKS):
            # A collective of gloo fails in these seconds, upon which the rank ends by itself.
            if (line := self.read()) is not None and not is_over.wait(SECONDS_TO_END_BY_ITSELF):
                print(f'error: {line}', file=sys.stderr, flush=True)
                os._exit(2)


class RankWatch:
    """The other ranks, which may end before this one. Built by every rank. Those of this machine are watched on Linux.

    When a rank has died, a collective of gloo fails without saying why, one of NCCL waits for the dead rank, and
    Composer's launcher sends SIGTERM to the ranks that are left, whose own words it prints only if they end otherwise.
    """

    def __init__(self) -> None:
        self._launcher = os.getppid()
        self._board = FailureBoard()
        self._ranks: dict[int, int] = {}  # by file descriptor
        pids = dist.all_gather_object((dist.get_node_rank(), os.getpid()))
        with contextlib.suppress(AttributeError, OSError):  # not Linux, or a container that forbids the call
            for rank, (node, pid) in enumerate(pids):
                if node == dist.get_node_rank() and rank != dist.get_global_rank():
                    self._ranks[os.pidfd_open(pid)] = rank

    @contextlib.contextmanager
    def acting(self, act: Act) -> Iterator[None]:
        """Call ``act(rank, speaks, tell)`` if another rank of this machine ends within the body. Called by every rank.

        Of several nodes, the ranks of a node end in one line if a rank of another node fails within the body, or if
        that node's ``act`` calls ``tell`` with its line.

        A thread calls ``act`` while the body waits, the handler of SIGTERM when the launcher has been faster, and the
        body's own thread when the body fails. ``speaks`` is True on the lowest rank that is left, unless the launcher
        has ended too.
        """
        is_over, has_acted, one_at_a_time = threading.Event(), threading.Event(), threading.RLock()

        def look(milliseconds: float) -> bool:
            poll = select.poll()  # one for each thread
            for file in self._ranks:
                poll.register(file, select.POLLIN)
            ended = [self._ranks[file] for file, _ in poll.poll(milliseconds)]
            if ended:
                with one_at_a_time:
                    if not (is_over.is_set() or has_acted.is_set()):
                        has_acted.set()
                        if self._board.read() is not None:
                            os._exit(2)  # the other rank of this node has printed the line
                        left = {dist.get_global_rank(), *self._ranks.values()} - set(ended)
                        speaks = min(left) == dist.get_global_rank() and os.getppid() == self._launcher
                        act(ended[0], speaks, self._board.tell)
            return bool(ended)

        def keep_looking() -> None:
            while not (is_over.is_set() or look(200)):
                pass

        def end_unless_a_rank_has(number: int, frame: Any) -> None:
            if not look(0):
                signal.signal(number, previous)
                os.kill(os.getpid(), number)

        previous = signal.getsignal(signal.SIGTERM)
        if self._ranks:
            threading.Thread(target=keep_looking, daemon=True).start()
            signal.signal(signal.SIGTERM, end_unless_a_rank_has)
        if self._board.is_needed and dist.get_local_rank() == 0:
            threading.Thread(target=self._board.watch, args=(is_over,), daemon=True).start()
        try:
            yield
            dist.barrier()  # no rank ends while another one still looks
        except SystemExit as stop:
            if not isinstance(stop, Stopped):  # on which all ranks have agreed
                self._board.tell('a signal stopped it')
            raise
        except Exception as error:
            if (line := self._board.read()) is not None and not isinstance(error, InputError):
                raise InputError(line) from None
            self._board.tell(explain(error) or type(error).__name__)
            if self._ranks and not isinstance(error, InputError):
                look(1000 * (SECONDS_TO_END if _is_lost_rank(error) else 2))
            raise
        finally:
            is_over.set()
            if self._ranks:
                signal.signal(signal.SIGTERM, previous)


def _is_lost_rank(error: Exception) -> bool:
    """Whether a collective failed because another rank closed its connections."""
    return isinstance(error, torch.distributed.DistError) or 'gloo' in str(error)
