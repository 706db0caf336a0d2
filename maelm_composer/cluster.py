"""Starts Ray on this machine, or joins the cluster at ``RAY_ADDRESS``."""

import contextlib
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

import psutil
from tqdm import tqdm

from maelm_composer.errors import InputError, first_line
from maelm_composer.processor import count_cores

SECONDS_TO_ANSWER = 10
# Ray's processes without which its calls wait for up to a minute, or forever. A raylet ends with its agents.
SERVERS, AGENTS = {'raylet', 'gcs_server'}, ('ray::DashboardAgent', 'ray::RuntimeEnvAgent', 'agent.py', 'agent/main.py')
UNSTARTED = 'timed out during startup', 'Failed to start GCS'  # Ray's words where a server of its own does not answer
# Of a task whose worker Ray itself kills, since memory runs out: else without end, and not counted by max_retries. More
# than those, since a neighbouring run may need the memory.
MEMORY_RETRIES = 10
DEAD = 'a server process of Ray has died, most likely because memory ran out: the same command resumes'


class LostWorkerError(InputError):
    """The process of a Ray task was killed on every try."""


@contextlib.contextmanager
def connect_ray(num_cpus: int | None = None) -> Iterator[None]:
    """Connect this process to Ray, without Ray's log output, while the body runs. An open connection is left as it is.

    A SIGTERM then ends the body with SystemExit 143; the handlers of Ray print a stack and exit with 15. Ctrl-C is a
    KeyboardInterrupt, also where a call of Ray has made a SystemExit of it. A Ray on this machine may use ``num_cpus``
    CPUs; None: every core that this process may use. If one of its servers dies, this process ends with one line and
    exit code 2.

    Raises:
        InputError: no cluster answers at ``RAY_ADDRESS``, or this machine is too busy to start Ray.
    """
    import ray

    if ray.is_initialized():
        yield
        return
    os.environ.setdefault('RAY_USAGE_STATS_ENABLED', '0')  # sends no usage statistics
    os.environ.setdefault('RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO', '0')  # Ray's future default; Ray warns if it is not set
    before, interrupt, received = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT), []

    def stop(number: int, frame: object) -> None:
        received.append(number)
        if number == signal.SIGINT and callable(interrupt):
            interrupt(number, None)
        raise SystemExit(128 + number)

    is_main = threading.current_thread() is threading.main_thread()  # only there Ray sets a handler, or anyone may
    try:
        if is_main and callable(interrupt):  # not ignored, as in the background of a shell
            signal.signal(signal.SIGINT, stop)
        _init_ray(num_cpus)
        if is_main:
            signal.signal(signal.SIGTERM, stop)
        with _ending_with_ray():
            yield
    except SystemExit as ending:
        if received[-1:] == [signal.SIGINT]:
            raise KeyboardInterrupt from None
        # Ray's own handler ends with 15 while Ray starts, and Ray's calls turn every SystemExit into one of code 1.
        if received or ending.code == signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM) from None
        raise
    finally:
        ray.shutdown()
        if is_main:
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
            signal.signal(signal.SIGINT, interrupt or signal.SIG_DFL)


@contextlib.contextmanager
def _ending_with_ray() -> Iterator[None]:
    """End this process with one line and exit code 2 if, during the body, a server of a Ray that it has started dies.

    No exception can be raised: Ray itself ends the process, without a word, as soon as its object store is gone.
    """
    is_over = threading.Event()

    def watch() -> None:
        poller, descriptors = select.poll(), []
        for process in _list_servers():
            with contextlib.suppress(ProcessLookupError):
                descriptors.append(os.pidfd_open(process.pid))
                poller.register(descriptors[-1], select.POLLIN)
        while descriptors and not is_over.is_set():
            if poller.poll(1000) and not is_over.is_set():
                tqdm.write(f'error: {DEAD}', file=sys.stderr)
                if sys.stdout.isatty():
                    print('\x1b[?25h', end='', flush=True)  # the cursor, which a live table hides
                os._exit(2)
        for descriptor in descriptors:
            os.close(descriptor)

    if hasattr(os, 'pidfd_open'):  # Linux
        threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def _list_servers() -> list[psutil.Process]:
    """The servers that this process has started, and their agents."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            is_agent = any(part.endswith(AGENTS) for part in process.cmdline())
            if process.name() in SERVERS or (is_agent and (parent := process.parent()) and parent.name() in SERVERS):
                found.append(process)
    return found


def _init_ray(num_cpus: int | None) -> None:
    """Join the cluster at ``RAY_ADDRESS``, or start Ray here, once more if it did not start within its own 30 s."""
    import ray

    # Ray would print the last lines of a dead server's log. Its option log_to_driver does not cover them.
    ray._private.worker._worker_logs_enabled = False
    os.environ.setdefault('RAY_task_oom_retries', str(MEMORY_RETRIES))
    quiet: dict[str, Any] = {'log_to_driver': False, 'logging_level': 'ERROR'}
    if address := os.environ.get('RAY_ADDRESS'):
        _assert_answers(address)
        try:
            ray.init(**quiet)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise InputError(f'RAY_ADDRESS {address}: {error}') from None
        return
    num_cpus = num_cpus or count_cores()
    for _ in range(2):
        try:
            ray.init(address='local', num_cpus=num_cpus, include_dashboard=False, **quiet)
            return
        except Exception as error:  # Ray raises no narrower class
            ray.shutdown()
            if 'AF_UNIX path length' in str(error):  # of Ray's sockets, which lie below TMPDIR
                raise InputError(f'Ray cannot start: {first_line(error)}; set RAY_TMPDIR to a short path') from None
            if not any(words in str(error) for words in UNSTARTED):
                raise
    raise InputError(
        'Ray did not start within 30 s, twice: other processes keep this machine busy, or its logs cannot be written '
        '(a full disk, ulimit -f); try again'
    )


def _assert_answers(address: str) -> None:
    """Raise InputError if nothing listens at ``host:port`` or ``ray://host:port``; Ray itself would try for minutes."""
    host, _, port = address.rpartition('://')[2].rpartition(':')
    if not (host and port.isdecimal()):
        return  # `auto`, `local` or a mistake, which Ray explains at once
    try:
        socket.create_connection((host.strip('[]'), int(port)), timeout=SECONDS_TO_ANSWER).close()
    except (OSError, OverflowError) as error:
        raise InputError(
            f'RAY_ADDRESS {address}: {error}; start Ray there (ray start --head), or unset RAY_ADDRESS'
        ) from None


def get_result(reference: Any) -> Any:
    """The value that a Ray task returned. An InputError or OSError of the task is raised again unwrapped.

    Raises:
        LostWorkerError: the task's process was killed on every try.
    """
    import ray

    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, (InputError, OSError)):
            raise error.cause from None
        raise
    except ray.exceptions.RayError as error:
        reason = 'a worker was lost on every try, perhaps for want of memory: let fewer run at once'
        raise LostWorkerError(f'{reason} ({first_line(error)})') from None
