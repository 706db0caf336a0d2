"""The ranks of a run: how they share a machine, and how they fail together."""

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from composer.devices import Device, DeviceCPU, DeviceGPU
from composer.utils import dist

from maelm_composer.config import Sharding, TrainingConfig
from maelm_composer.data.storage import OutageError
from maelm_composer.errors import InputError, explain
from maelm_composer.processor import count_cores

# A rank that fails closes its connections, and then waits for loader workers that may not answer, before it ends.
SECONDS_TO_END = 60


def count_patience(training: TrainingConfig) -> float:
    """Seconds that a collective waits for the slowest rank, which may be downloading or waiting for an object store."""
    return 1800 + 60 * training.max_outage_minutes


def start_rank(training: TrainingConfig) -> Device:
    """Choose this rank's device and share of the cores, and connect the ranks if there are several.

    Raises:
        InputError: the machine has fewer GPUs than ranks.
    """
    gpus, local_ranks = torch.cuda.device_count(), dist.get_local_world_size()
    if 0 < gpus <= dist.get_local_rank():
        raise InputError(
            f'{local_ranks} ranks on this machine, which has {gpus} GPUs: start the run with composer -n {gpus}'
        )
    if local_ranks > 1 and 'OMP_NUM_THREADS' not in os.environ:
        # Composer's launcher lets every rank use every core; on a CPU that is ten times slower.
        torch.set_num_threads(max(1, count_cores() // local_ranks))
    # Composer's default is TF32, but training.precision=fp32 promises fp32.
    device = DeviceGPU(allow_tf32=False) if gpus else DeviceCPU()
    if dist.get_world_size() > 1 or training.sharding is not Sharding.ddp:
        dist.initialize_dist(device, timeout=count_patience(training))
    return device


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


class RankWatch:
    """The other ranks of this machine, which may die before this one. Built by every rank; Linux.

    When a rank has died, a collective of gloo fails without saying why, one of NCCL waits for the dead rank, and
    Composer's launcher sends SIGTERM to the ranks that are left, whose own words it prints only if they end otherwise.
    """

    def __init__(self) -> None:
        self._launcher = os.getppid()
        self._ranks: dict[int, int] = {}  # by file descriptor
        pids = dist.all_gather_object((dist.get_node_rank(), os.getpid()))
        with contextlib.suppress(AttributeError, OSError):  # not Linux, or a container that forbids the call
            for rank, (node, pid) in enumerate(pids):
                if node == dist.get_node_rank() and rank != dist.get_global_rank():
                    self._ranks[os.pidfd_open(pid)] = rank

    @contextlib.contextmanager
    def acting(self, act: Callable[[int, bool], None]) -> Iterator[None]:
        """Call ``act(rank, speaks)`` if another rank of this machine ends within the body. Called by every rank.

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
                        left = {dist.get_global_rank(), *self._ranks.values()} - set(ended)
                        act(ended[0], min(left) == dist.get_global_rank() and os.getppid() == self._launcher)
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
        try:
            yield
            dist.barrier()  # no rank ends while another one still looks
        except InputError:
            raise
        except Exception as error:
            if self._ranks:
                look(1000 * (SECONDS_TO_END if _is_lost_connection(error) else 2))
            raise
        finally:
            is_over.set()
            if self._ranks:
                signal.signal(signal.SIGTERM, previous)


def _is_lost_connection(error: Exception) -> bool:
    """Whether a collective failed because another rank closed its connections."""
    return isinstance(error, torch.distributed.DistError) or 'gloo' in str(error)
