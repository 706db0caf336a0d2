"""Making what is missing, step by step. Every step looks for its own result first, so a killed suite goes on."""

import contextlib
import fcntl
import gc
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from maelm_composer.data.manifest import load_manifest
from maelm_composer.errors import InputError
from maelm_composer.reporting.artefacts import Artefact, Model
from maelm_composer.reporting.report import report
from maelm_composer.suite.collect import collect_finetunings, collect_rank, collect_run
from maelm_composer.suite.cost import count_training_flops
from maelm_composer.suite.steps import Kind, Step, Suite, list_steps, name_checkpoint


def run_suite(suite: Suite, artefacts: Sequence[Artefact]) -> Path:
    """Make everything that ``artefacts`` rest on, record it, and make the report; returns the page's path.

    Raises:
        InputError: another process works in the same folder, or as the steps raise. A fine-tuning run that fails raises
            nothing: it is recorded, and its number is missing with the reason.
    """
    with hold(suite.work):
        for step in list_steps(suite, artefacts):
            make(suite, step)
        return report(suite.scale, suite.results)


@contextlib.contextmanager
def hold(work: Path) -> Iterator[None]:
    """Keep ``work`` for this process; the lock ends with it, however that ends."""
    work.mkdir(parents=True, exist_ok=True)
    with (work / '.lock').open('w') as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f'another benchmark suite is at work in {work}: wait, or choose another folder') from None
        yield


def make(suite: Suite, step: Step) -> None:
    """Do ``step``, or nothing where its result is there, and copy its records to the results."""
    match step.kind:
        case Kind.tokenizer:
            from maelm_composer.data.tokenizer import build_tokenizer

            build_tokenizer(suite.load_corpus())
        case Kind.shards:
            from maelm_composer.data.shards import build_shards

            build_shards(suite.load_corpus())
        case Kind.pretraining:
            assert step.model is not None
            _pretrain(suite, step.model)
        case Kind.finetuning:
            _finetune(suite, step)
        case Kind.rank:
            _measure_rank(suite, step)


def _pretrain(suite: Suite, model: Model) -> None:
    import torch

    config = suite.load_pretraining(model)
    _train(suite, model)
    gc.collect()
    torch.cuda.empty_cache()  # fine-tuning's workers share the device
    manifest = load_manifest(config.data.remote)
    facts = {'flops': count_training_flops(config), 'tokenizer_hash': manifest.tokenizer_hash}
    collect_run(suite.run_folder(model), suite.records, facts)


def _train(suite: Suite, model: Model) -> None:
    """In this process on one device, which saves a start of many seconds; through the launcher on several."""
    import torch

    if torch.cuda.device_count() <= 1:
        from maelm_composer.training.run import pretrain

        pretrain(suite.load_pretraining(model))
        return
    command = ['composer', '-n', str(torch.cuda.device_count()), 'train.py', *suite.list_arguments(model)]
    if subprocess.run(command, check=False).returncode:
        raise InputError(f'pretraining {model.run_name(suite.scale)} ended with an error, which stands above')


def _finetune(suite: Suite, step: Step) -> None:
    from maelm_composer.finetuning.run import run_key
    from maelm_composer.finetuning.search import plan_grid, plan_repeats
    from maelm_composer.finetuning.sweep import sweep

    assert step.model is not None
    config = suite.load_finetuning(step.model, step.samples, step.tasks)
    result = sweep(config)
    for found in result.tasks:
        task = found.task
        failed = [record for record in result.failures if record['task'] == task.name]
        known: list[dict[str, Any]] = [*found.records, *failed]
        facts = known[0]['checkpoint'], known[0]['data_hash']
        runs = [*plan_grid(config, task), *plan_repeats(config, task, found.records)]
        keys = [run_key(run, *facts) for run in runs]
        name = step.model.run_name(suite.scale)
        collect_finetunings(suite.finetuning_folder, keys, suite.records, name, step.samples, task.name)


def _measure_rank(suite: Suite, step: Step) -> None:
    from maelm_composer.analysis.ranks import RankOptions, analyze_ranks

    assert step.model is not None
    checkpoint = suite.run_folder(step.model) / name_checkpoint(step.samples)
    options = RankOptions(max_tokens=suite.settings.rank_tokens)
    collect_rank(analyze_ranks(str(checkpoint), options, folder=str(suite.rank_folder)), suite.records)
