"""`composer train.py RECIPE.yaml [OVERLAY.yaml ...] [key=value ...]`: one pretraining or fine-tuning run.

A recipe that names a task (yamls/finetune/) fine-tunes a checkpoint; any other recipe pretrains MAE-LM or its baseline.
From any folder: `maelm train RECIPE.yaml ...` in one process, `composer -n 8 -m maelm_composer.train ...` in eight.
"""

import os
import sys

from maelm_composer.config import FinetuningConfig, PretrainingConfig
from maelm_composer.errors import InputError, one_line_errors
from maelm_composer.keys import print_keys
from maelm_composer.recipe import is_finetuning, load_config, split_arguments
from maelm_composer.versions import warn_of_untested_torch


def main(arguments: list[str]) -> None:
    """Merge the files in their order, then the ``key=value`` pairs, and run; the same command resumes a pretraining."""
    is_help = not {'-h', '--help'}.isdisjoint(arguments)
    recipes, overrides = split_arguments([a for a in arguments if a not in ('-h', '--help')])
    with one_line_errors():
        if is_help:
            print(__doc__)
            print_keys('finetuning' if is_finetuning(recipes, overrides) else 'pretraining')
            return
        if not recipes:
            raise InputError('no recipe: maelm train RECIPE.yaml [OVERLAY.yaml ...] [key=value ...]')
        # The import of torch takes seconds, so an invalid recipe fails before it.
        if is_finetuning(recipes, overrides):
            _finetune_once(load_config(FinetuningConfig, recipes, overrides))
            return
        config = load_config(PretrainingConfig, recipes, overrides)
        warn_of_untested_torch()
        from maelm_composer.training.run import pretrain

        pretrain(config)


def _finetune_once(config: FinetuningConfig) -> None:
    """Fine-tune on one device; of the processes that the launcher starts, only rank 0 works."""
    if os.environ.get('RANK', '0') != '0':
        return
    if config.task is None and config.sweep.tasks:
        raise InputError(
            f'the recipe is for {len(config.sweep.tasks)} tasks: add task={config.sweep.tasks[0]}, or use `maelm sweep`'
        )
    if os.environ.get('WORLD_SIZE', '1') != '1':
        print('fine-tuning uses one device; `maelm sweep` uses all of them', flush=True)
    warn_of_untested_torch()
    from maelm_composer.finetuning.run import finetune, summarize

    print(summarize(finetune(config), config.save_folder))


if __name__ == '__main__':
    main(sys.argv[1:])
