"""Ray, as this project uses it: on this machine, or on the cluster at ``RAY_ADDRESS``."""

import os
from typing import Any

from maelm_composer.errors import InputError


def start_ray(num_cpus: int | None = None) -> bool:
    """Start or join Ray quietly, unless that is done already.

    Args:
        num_cpus: that a Ray on this machine shares out; None: every core this process may use.

    Returns:
        Whether this call did it, so that the caller is the one to call ``ray.shutdown``.

    Raises:
        InputError: no cluster answers at ``RAY_ADDRESS``.
    """
    import ray

    if ray.is_initialized():
        return False
    os.environ.setdefault('RAY_USAGE_STATS_ENABLED', '0')  # nothing is reported to anyone
    os.environ.setdefault('RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO', '0')  # its future default; unset, it warns
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
