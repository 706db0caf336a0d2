"""The ranks of a run: how they share a machine, and how they fail together."""

import contextlib
import os
import select
import threading
from collections.abc import Callable, Iterator

import torch
from composer.devices import Device, DeviceCPU, DeviceGPU
from composer.utils import dist

from maelm_composer.config import Sharding, TrainingConfig
from maelm_composer.data.storage import OutageError
from maelm_composer.errors import InputError

# A rank closes its connections, and then waits for loader workers that may not answer, before it ends.
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
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_ranks))
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
        failure = isinstance(error, OutageError), str(error)
    failures = [found for found in dist.all_gather_object(failure) if found is not None]
    if failures:
        is_outage, reason = min(failures)
        raise (OutageError if is_outage else InputError)(reason)


@contextlib.contextmanager
def watch_ranks(act: Callable[[int], None]) -> Iterator[None]:
    """Call ``act(rank)`` if another rank of this machine ends within the body. Called by every rank; Linux.

    When a rank has died, a collective of gloo fails without saying why, and one of NCCL waits for the dead rank. So a
    thread calls ``act`` while the body waits, and the body's own thread calls ``act`` when the body fails.
    """
    pids = dist.all_gather_object((dist.get_node_rank(), os.getpid()))
    here = dist.get_node_rank()
    ranks: dict[int, int] = {}  # by file descriptor
    with contextlib.suppress(AttributeError, OSError):  # not Linux, or a container that forbids the call
        for rank, (node, pid) in enumerate(pids):
            if node == here and rank != dist.get_global_rank():
                ranks[os.pidfd_open(pid)] = rank
    is_over, once = threading.Event(), threading.Lock()

    def wait(milliseconds: int) -> bool:
        poll = select.poll()  # one for each thread
        for file in ranks:
            poll.register(file, select.POLLIN)
        ended = poll.poll(milliseconds)
        if ended:
            with once:
                act(ranks[ended[0][0]])
        return bool(ended)

    def keep_waiting() -> None:
        while not (is_over.is_set() or wait(200)):
            pass

    thread = threading.Thread(target=keep_waiting, daemon=True)
    if ranks:
        thread.start()
    try:
        yield
        is_over.set()
        if ranks:
            thread.join()
        dist.barrier()  # no rank ends while another one still watches
    except InputError:
        raise
    except Exception as error:
        if ranks:
            wait(1000 * (SECONDS_TO_END if _is_lost_connection(error) else 2))
        raise
    finally:
        is_over.set()
    for file in ranks:
        os.close(file)


def _is_lost_connection(error: Exception) -> bool:
    """Whether a collective failed because another rank closed its connections."""
    return isinstance(error, torch.distributed.DistError) or 'gloo' in str(error)
