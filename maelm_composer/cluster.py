"""Starts Ray on this machine, or joins the cluster at ``RAY_ADDRESS``."""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

from maelm_composer.errors import InputError

SECONDS_TO_ANSWER = 10


@contextlib.contextmanager
def connect_ray(num_cpus: int | None = None) -> Iterator[None]:
    """Connect this process to Ray, without Ray's log output, while the body runs. An open connection is left as it is.

    A SIGTERM then ends the body with SystemExit 143; the handlers of Ray print a stack and exit with 15. A Ray on this
    machine may use ``num_cpus`` CPUs; None: every core that this process may use.

    Raises:
        InputError: no cluster answers at ``RAY_ADDRESS``, or this machine is too busy to start Ray.
    """
    import ray

    if ray.is_initialized():
        yield
        return
    os.environ.setdefault('RAY_USAGE_STATS_ENABLED', '0')  # sends no usage statistics
    os.environ.setdefault('RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO', '0')  # Ray's future default; Ray warns if it is not set
    before, received = signal.getsignal(signal.SIGTERM), []

    def stop(number: int, frame: object) -> None:
        received.append(number)
        raise SystemExit(128 + number)

    is_main = threading.current_thread() is threading.main_thread()  # only there Ray sets a handler, or anyone may
    try:
        _init_ray(num_cpus)
        if is_main:
            signal.signal(signal.SIGTERM, stop)
        yield
    except SystemExit as ending:
        # Ray's own handler ends with 15 while Ray starts, and Ray's calls turn every SystemExit into one of code 1.
        if received or ending.code == signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM) from None
        raise
    finally:
        ray.shutdown()
        if is_main:
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _init_ray(num_cpus: int | None) -> None:
    import ray

    quiet: dict[str, Any] = {'log_to_driver': False, 'logging_level': 'ERROR'}
    address = os.environ.get('RAY_ADDRESS')
    if address is not None:
        _assert_answers(address)
        try:
            ray.init(**quiet)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise InputError(f'RAY_ADDRESS {address}: {error}') from None
    else:
        cores = len(os.sched_getaffinity(0))
        _start_ray(address='local', num_cpus=num_cpus or cores, include_dashboard=False, **quiet)


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


def _start_ray(**options: Any) -> None:
    """``ray.init``, once more if Ray's processes did not start within the 30 s that it gives them."""
    import ray

    for _ in range(2):
        try:
            ray.init(**options)
            return
        except Exception as error:  # Ray raises no narrower class
            ray.shutdown()
            if 'timed out during startup' not in str(error):
                raise
    raise InputError('Ray did not start within 30 s, twice: other processes keep this machine busy; try again')


def get_result(reference: Any) -> Any:
    """The value that a Ray task returned. An InputError or OSError of the task is raised again unwrapped."""
    import ray

    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, (InputError, OSError)):
            raise error.cause from None
        raise
