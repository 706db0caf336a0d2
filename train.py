"""composer train.py RECIPE.yaml [OVERLAY.yaml ...] [key=value ...]: pretrain MAE-LM or its baseline."""

import sys

from maelm_composer.config import PretrainingConfig
from maelm_composer.errors import InputError, one_line_errors
from maelm_composer.recipe import load_config


def main(arguments: list[str]) -> None:
    """Files are merged in their order, then the ``key=value`` pairs; the same command resumes a stopped run."""
    recipes = [argument for argument in arguments if '=' not in argument]
    overrides = [argument for argument in arguments if '=' in argument]
    with one_line_errors():
        if not recipes:
            raise InputError('usage: composer train.py RECIPE.yaml [OVERLAY.yaml ...] [key=value ...]')
        config = load_config(PretrainingConfig, recipes, overrides)
        from maelm_composer.training.run import pretrain  # once the recipe is known to be good: torch takes seconds

        pretrain(config)


if __name__ == '__main__':
    main(sys.argv[1:])
