"""TensorBoard, Weights & Biases and MLflow."""

import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from typing import Any

from composer.loggers import LoggerDestination, MLFlowLogger, TensorboardLogger, WandBLogger

from maelm_composer.config import Logger, PretrainingConfig
from maelm_composer.errors import InputError, first_line
from maelm_composer.training.run_folder import RunFolder


def build_loggers(config: PretrainingConfig, folder: RunFolder) -> list[LoggerDestination]:
    """The loggers that ``training.loggers`` names, beside metrics.csv. Raises InputError if one is not installed."""
    for logger in config.training.loggers:
        if importlib.util.find_spec(logger.name) is None:
            wanted = importlib.metadata.requires('maelm-composer') or []
            version = next(name.split(';')[0].strip() for name in wanted if f'extra == "{logger.name}"' in name)
            raise InputError(
                f"training.loggers names {logger.name}, which is not installed: pip install '{version}', or "
                f"in the checkout, pip install -c constraints.txt -e '.[{logger.name}]'"
            )
    build: dict[Logger, Callable[[], LoggerDestination]] = {
        Logger.tensorboard: lambda: TensorboardLogger(log_dir=str(folder.local / 'tensorboard')),
        Logger.wandb: lambda: WandBLogger(
            project=os.environ.get('WANDB_PROJECT', 'maelm-composer'), name=config.run_name
        ),
        Logger.mlflow: lambda: MLFlowLogger(
            experiment_name=os.environ.get('MLFLOW_EXPERIMENT_NAME', 'maelm-composer'), run_name=config.run_name
        ),
    }
    return [explaining(build[logger](), logger.name) for logger in config.training.loggers]


def explaining(logger: LoggerDestination, name: str) -> LoggerDestination:
    """``logger``, whose ``init`` raises InputError where its service refuses the run, as without a login."""
    init = logger.init

    def explain(*arguments: Any) -> None:
        try:
            init(*arguments)
        except Exception as error:  # each library has its own classes
            if isinstance(error, OSError) and error.errno is not None:  # as of a full disk
                raise
            raise InputError(
                f'training.loggers: {name} cannot start: {first_line(error).rstrip(".")}; mend that, leave {name} out, '
                'or work without a network (WANDB_MODE=offline, or a folder as MLFLOW_TRACKING_URI)'
            ) from None

    logger.init = explain  # type: ignore[method-assign, assignment]
    return logger
