"""Data loaders for training and validation."""

from typing import Any

import torch
from composer import DataSpec, Evaluator
from composer.core import Event
from composer.utils import dist
from streaming import StreamingDataLoader
from torch.utils.data import DataLoader, Subset

from maelm_composer.config import PretrainingConfig
from maelm_composer.data.dataset import PretrainingRows
from maelm_composer.data.manifest import Manifest
from maelm_composer.errors import InputError
from maelm_composer.masking.collate import MaskingCollator
from maelm_composer.training.adapter import count_predicted
from maelm_composer.training.checkpoints import is_due
from maelm_composer.training.plan import Plan
from maelm_composer.training.signals import ignore_stop_signals


def build_train_loader(
    config: PretrainingConfig, manifest: Manifest, collator: MaskingCollator, plan: Plan
) -> DataSpec:
    dataset = _open_rows(config, manifest, 'train', plan.device_batch_size)
    loader = StreamingDataLoader(
        dataset, batch_size=plan.device_batch_size, drop_last=True, **_loader_settings(config, collator)
    )
    return DataSpec(loader, get_num_tokens_in_batch=count_predicted)


def build_evaluator(config: PretrainingConfig, manifest: Manifest, collator: MaskingCollator, plan: Plan) -> Evaluator:
    """Evaluate the first ``eval_rows`` validation rows, each once, with the same masks every time.

    Raises:
        InputError: there are fewer validation rows than ranks.
    """
    dataset = _open_rows(config, manifest, 'validation', plan.microbatch_size)
    rows = min(config.training.eval_rows, manifest.splits['validation'].rows)
    rows -= rows % plan.world_size  # every rank gets as many rows; a padded sampler would repeat some
    if rows == 0:
        raise InputError(f'{config.data.remote} holds no validation rows for {plan.world_size} ranks')
    subset, interval = Subset(dataset, range(rows)), config.training.eval_interval_samples
    loader = DataLoader(
        subset,
        batch_size=plan.microbatch_size,
        sampler=dist.get_sampler(subset, shuffle=False),
        **_loader_settings(config, collator),
    )
    return Evaluator(
        label='eval',
        dataloader=DataSpec(loader, get_num_tokens_in_batch=count_predicted),
        # Validation at the last batch too, before its row of metrics.csv is written.
        eval_interval=lambda state, event: event is Event.BATCH_END and is_due(state, interval),
    )


def _open_rows(config: PretrainingConfig, manifest: Manifest, split: str, batch_size: int) -> PretrainingRows:
    patience = config.training.max_outage_minutes
    return PretrainingRows(
        config.data, manifest, split, batch_size=batch_size, seed=config.seed, max_outage_minutes=patience
    )


def _loader_settings(config: PretrainingConfig, collator: MaskingCollator) -> dict[str, Any]:
    num_workers = config.data.num_workers
    return {
        'collate_fn': collator,
        'num_workers': num_workers,
        'prefetch_factor': 4 if num_workers else None,
        'persistent_workers': num_workers > 0,
        'pin_memory': torch.cuda.is_available(),
        'worker_init_fn': ignore_stop_signals,
        'generator': torch.Generator(),
    }
