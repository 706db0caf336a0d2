"""Data loaders for training and validation."""

import multiprocessing
import os
import signal
import sys
import threading
from typing import Any

import torch
from composer import DataSpec, Evaluator
from composer.core import Event
from composer.utils import dist
from streaming import StreamingDataLoader
from torch.utils.data import DataLoader, Subset

from maelm_composer.data.dataset import PretrainingRows
from maelm_composer.masking.collate import MaskingCollator
from maelm_composer.training.adapter import count_tokens
from maelm_composer.training.checkpoints import is_due
from maelm_composer.training.ending import STOP_SIGNALS
from maelm_composer.training.plan import Plan


class TrainLoader(StreamingDataLoader):
    """Starts its workers with the stop signals blocked in all of their threads, for :func:`follow_trainer`.

    Unless OMP_NUM_THREADS is set, torch makes a thread in a worker before it calls ``worker_init_fn``, and one thread
    that does not block a signal is enough for the signal to end the process.
    """

    def _get_iterator(self) -> Any:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            return super()._get_iterator()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def follow_trainer(worker: int) -> None:
    """Have a loader worker end with its trainer alone: stop signals for the whole group must not lose a batch.

    A worker whose trainer was killed prints no traceback of the connection that this broke.
    """
    trainer = multiprocessing.parent_process()  # not the parent of the process: that may be a forkserver
    assert trainer is not None

    def end_with_trainer() -> None:
        while signal.sigwaitinfo(STOP_SIGNALS).si_pid != trainer.pid:
            pass
        os._exit(0)

    def report_unless_trainer_died(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if isinstance(error, ConnectionError):
            trainer.join(1)
            if not trainer.is_alive():
                return
        sys.__excepthook__(kind, error, trace)

    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    threading.Thread(target=end_with_trainer, daemon=True).start()
    sys.excepthook = report_unless_trainer_died


def build_train_loader(plan: Plan, collator: MaskingCollator) -> DataSpec:
    num_workers = plan.config.data.num_workers
    loader = TrainLoader(
        _open_rows(plan, 'train', plan.device_batch_size),
        batch_size=plan.device_batch_size,
        drop_last=True,
        num_workers=num_workers,
        prefetch_factor=4 if num_workers else None,
        persistent_workers=num_workers > 0,
        worker_init_fn=follow_trainer,
        **_loader_settings(collator),
    )
    return DataSpec(loader, get_num_tokens_in_batch=count_tokens)


def build_evaluator(plan: Plan, collator: MaskingCollator) -> Evaluator:
    """Evaluate the first ``eval_rows`` validation rows, each once, with the same masks every time."""
    training = plan.config.training
    # Rows are read by their index, so the batch size of the dataset has no effect.
    subset = Subset(_open_rows(plan, 'validation', plan.microbatch_size), range(plan.eval_rows))
    sampler = dist.get_sampler(subset, shuffle=False)
    # Without workers: Python 3.11 may hang in a fork while another thread, as gloo's after a training step, makes its
    # thread state. In a run on two ranks the first validation's worker hung so, and with it the run.
    loader = DataLoader(subset, batch_size=plan.microbatch_size, sampler=sampler, **_loader_settings(collator))
    return Evaluator(
        label='eval',
        dataloader=loader,
        # Validation at the last batch too, before its row of metrics.csv is written.
        eval_interval=lambda state, event: event is Event.BATCH_END and is_due(state, training.eval_interval_samples),
    )


def _open_rows(plan: Plan, split: str, batch_size: int) -> PretrainingRows:
    config, minutes = plan.config, plan.config.training.max_outage_minutes
    return PretrainingRows(
        config.data, plan.manifest, split, batch_size=batch_size, seed=config.seed, max_outage_minutes=minutes
    )


def _loader_settings(collator: MaskingCollator) -> dict[str, Any]:
    return {'collate_fn': collator, 'pin_memory': torch.cuda.is_available(), 'generator': torch.Generator()}
