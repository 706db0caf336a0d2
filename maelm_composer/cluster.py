"""Starts Ray on this machine, or joins the cluster at ``RAY_ADDRESS``."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from maelm_composer.errors import InputError


@contextlib.contextmanager
def connect_ray(num_cpus: int | None = None) -> Iterator[None]:
    """Connect this process to Ray, without Ray's log output, while the body runs. An open connection is left as it is.

    Args:
        num_cpus: CPUs that a Ray on this machine may use; None: every core that this process may use.

    Raises:
        InputError: no cluster answers at ``RAY_ADDRESS``.
    """
    import ray

    if ray.is_initialized():
        yield
        return
    os.environ.setdefault('RAY_USAGE_STATS_ENABLED', '0')  # sends no usage statistics
    os.environ.setdefault('RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO', '0')  # Ray's future default; Ray warns if it is not set
    quiet: dict[str, Any] = {'log_to_driver': False, 'logging_level': 'ERROR'}
    if 'RAY_ADDRESS' in os.environ:
        try:
            ray.init(**quiet)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise InputError(f'RAY_ADDRESS {os.environ["RAY_ADDRESS"]}: {error}') from None
    else:
        cores = len(os.sched_getaffinity(0))
        ray.init(address='local', num_cpus=num_cpus or cores, include_dashboard=False, **quiet)
    try:
        yield
    finally:
        ray.shutdown()


def get_result(reference: Any) -> Any:
    """The value that a Ray task returned. An InputError or OSError of the task is raised again unwrapped."""
    import ray

    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, (InputError, OSError)):
            raise error.cause from None
        raise
