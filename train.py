"""composer train.py RECIPE.yaml [OVERLAY.yaml ...] [key=value ...]: pretrain MAE-LM or its baseline, or fine-tune one.

A recipe that names a task (yamls/finetune/) is one fine-tuning run; any other is pretraining.
"""

import os
import sys

from maelm_composer.config import FinetuningConfig, PretrainingConfig
from maelm_composer.errors import InputError, one_line_errors
from maelm_composer.recipe import is_finetuning, load_config, split_arguments
from maelm_composer.stack import warn_of_untested_torch


def main(arguments: list[str]) -> None:
    """Files are merged in their order, then the ``key=value`` pairs; the same command resumes a stopped pretraining."""
    if {'-h', '--help'} & set(arguments):
        print(__doc__)
        return
    recipes, overrides = split_arguments(arguments)
    with one_line_errors():
        if not recipes:
            raise InputError('usage: composer train.py RECIPE.yaml [OVERLAY.yaml ...] [key=value ...]')
        # Torch takes seconds, so it is imported once the recipe is known to be good.
        if is_finetuning(recipes, overrides):
            _finetune_once(load_config(FinetuningConfig, recipes, overrides))
            return
        config = load_config(PretrainingConfig, recipes, overrides)
        warn_of_untested_torch()
        from maelm_composer.training.run import pretrain

        pretrain(config)


def _finetune_once(config: FinetuningConfig) -> None:
    """One run uses one device; the launcher starts a process for each, of which the first does the work."""
    if os.environ.get('RANK', '0') != '0':
        return
    if config.task is None and config.sweep.tasks:
        raise InputError(
            f'a recipe of {len(config.sweep.tasks)} tasks: add task={config.sweep.tasks[0]}, or `maelm sweep` it'
        )
    if os.environ.get('WORLD_SIZE', '1') != '1':
        print('fine-tuning uses one device; `maelm sweep` keeps all of them busy', flush=True)
    warn_of_untested_torch()
    from maelm_composer.finetuning.run import finetune, summarize

    print(summarize(finetune(config), config.save_folder))


if __name__ == '__main__':
    main(sys.argv[1:])
