"""Starts Ray on this machine, or joins the cluster at ``RAY_ADDRESS``."""

import os
from typing import Any

from maelm_composer.errors import InputError


def start_ray(num_cpus: int | None = None) -> bool:
    """Start or join Ray without its log output, unless this process already has.

    Args:
        num_cpus: CPUs that a Ray on this machine may use; None: every core that this process may use.

    Returns:
        Whether this call started or joined Ray; the caller must then call ``ray.shutdown``.

    Raises:
        InputError: no cluster answers at ``RAY_ADDRESS``.
    """
    import ray

    if ray.is_initialized():
        return False
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
    return True
