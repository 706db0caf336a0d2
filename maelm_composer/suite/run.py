"""Runs the missing steps of a suite. Every step looks for its result first, so a killed suite can be resumed."""

import gc
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from maelm_composer.analysis.ranks import RankOptions, analyze_ranks
from maelm_composer.checkpoints.names import name_checkpoint
from maelm_composer.config import CorpusConfig, Precision
from maelm_composer.data.corpora import describe_source
from maelm_composer.data.manifest import FILE_NAME
from maelm_composer.data.shards import build_shards
from maelm_composer.data.storage import join, read_file
from maelm_composer.data.tokenizer import build_tokenizer
from maelm_composer.errors import InputError
from maelm_composer.lock import lock_folder
from maelm_composer.precision import choose_in
from maelm_composer.records import Finetuning
from maelm_composer.reporting.artefacts import Artefact, Model
from maelm_composer.reporting.report import report, write_tables
from maelm_composer.suite.collect import collect_finetunings, collect_rank, collect_run
from maelm_composer.suite.steps import RANK_PRECISION, Kind, Step, Suite, list_steps
from maelm_composer.sweep.run import sweep
from maelm_composer.training.run import pretrain


def run_suite(suite: Suite, artefacts: Sequence[Artefact], draws: bool = True) -> Path:
    """Run every missing step of ``artefacts``, copy the records to the results, and make the report.

    Args:
        draws: false: CSV files alone. Figures and the page take seconds, so a caller of many artefacts draws once.

    A fine-tuning run that fails raises nothing: its record says why, and the report shows a missing number.

    Returns:
        The folder of the report.

    Raises:
        InputError: another process works in the same folder, or a step raises it.
    """
    with lock_folder(suite.work, 'benchmark suite'):
        suite = settle_precision(suite)
        for step in list_steps(suite, artefacts):
            make(suite, step)
        (report if draws else write_tables)(suite.scale, suite.results)
        return suite.records.parent


def settle_precision(suite: Suite) -> Suite:
    """``suite`` with one precision for all recipes that say auto. The choice is stored in the folder of work."""
    if Precision.auto not in suite.list_precisions():
        return suite
    choice = choose_in(suite.work, Precision.auto, 'precision')
    print(f'precision of the suite: {choice}', flush=True)
    return replace(suite, precision=choice.precision)


def make(suite: Suite, step: Step) -> None:
    """Run ``step`` unless its result exists, and copy its records to the results."""
    match step:
        case Step(Kind.tokenizer):
            if not _are_shards_alone(corpus := suite.load_corpus()):
                build_tokenizer(corpus)
        case Step(Kind.shards):
            if not _are_shards_alone(corpus := suite.load_corpus()):
                build_shards(corpus)
        case Step(Kind.pretraining, Model() as model):
            _pretrain(suite, model)
        case Step(Kind.finetuning, Model() as model):
            result = sweep(suite.load_finetuning(model, step.samples, step.tasks))
            for found in result.tasks:
                name = found.task.name
                records: list[Finetuning] = [*found.finished]
                records += [record for record in result.failures if record.task == name]
                collect_finetunings(records, suite.records, model.run_name(suite.scale), step.samples, name)
        case Step(Kind.rank, Model() as model):
            checkpoint = suite.run_folder(model) / name_checkpoint(step.samples)
            options = RankOptions(max_tokens=suite.settings.rank_tokens, precision=RANK_PRECISION)
            collect_rank(analyze_ranks(str(checkpoint), options, folder=str(suite.rank_folder)), suite.records)


def _are_shards_alone(corpus: CorpusConfig) -> bool:
    """Whether there are finished shards but not their text. Such shards are used without a look at the text.

    Training compares the shards' vocabulary and length with the recipe's, and every record has their content hash.
    """
    try:
        for source in corpus.sources:
            describe_source(source)
    except InputError:
        return read_file(join(corpus.remote, FILE_NAME)) is not None
    return False


def _pretrain(suite: Suite, model: Model) -> None:
    """Pretrain in this process on one device, which saves seconds of start-up; else through Composer's launcher."""
    count = torch.cuda.device_count()
    if count <= 1:
        pretrain(suite.load_pretraining(model))
        torch.compiler.reset()  # torch refuses to compile a ninth version of one function
        gc.collect()
        torch.cuda.empty_cache()  # fine-tuning's workers share the device
    else:
        launcher = [sys.executable, '-m', 'composer.cli', '-n', str(count)]
        if subprocess.run([*launcher, 'train.py', *suite.list_arguments(model)], check=False).returncode:
            raise InputError(f'pretraining {model.run_name(suite.scale)} failed: the error is printed above')
    collect_run(suite.run_folder(model), suite.records)
