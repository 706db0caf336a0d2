"""Making what is missing, step by step. Every step looks for its own result first, so a killed suite goes on."""

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
from maelm_composer.lock import hold
from maelm_composer.precision import choose_in
from maelm_composer.records import Finetuning
from maelm_composer.reporting.artefacts import Artefact, Model
from maelm_composer.reporting.report import report
from maelm_composer.suite.collect import collect_finetunings, collect_rank, collect_run
from maelm_composer.suite.steps import RANK_PRECISION, Kind, Step, Suite, list_steps
from maelm_composer.sweep.run import sweep
from maelm_composer.training.run import pretrain


def run_suite(suite: Suite, artefacts: Sequence[Artefact]) -> Path:
    """Make everything that ``artefacts`` rest on, record it, and make the report; returns the page's path.

    Raises:
        InputError: another process works in the same folder, or as the steps raise. A fine-tuning run that fails raises
            nothing: it is recorded, and its number is missing with the reason.
    """
    with hold(suite.work, 'benchmark suite'):
        suite = settle_precision(suite)
        for step in list_steps(suite, artefacts):
            make(suite, step)
        return report(suite.scale, suite.results)


def settle_precision(suite: Suite) -> Suite:
    """``suite`` with one precision for all recipes that say auto, chosen once for its folder of work."""
    if Precision.auto not in suite.list_precisions():
        return suite
    choice = choose_in(suite.work, Precision.auto, 'precision')
    print(f'precision of the suite: {choice}', flush=True)
    return replace(suite, precision=choice.precision)


def make(suite: Suite, step: Step) -> None:
    """Do ``step``, or nothing where its result is there, and copy its records to the results."""
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
    """Whether finished shards are there and their text is not, as on a machine that was given no more: they are used.

    Training compares their vocabulary and length with the recipe's; every record has their content hash.
    """
    try:
        for source in corpus.sources:
            describe_source(source)
    except InputError:
        return read_file(join(corpus.remote, FILE_NAME)) is not None
    return False


def _pretrain(suite: Suite, model: Model) -> None:
    """In this process on one device, which saves a start of many seconds; through the launcher on several."""
    count = torch.cuda.device_count()
    if count <= 1:
        pretrain(suite.load_pretraining(model))
        torch.compiler.reset()  # of one function torch compiles eight versions and then refuses, whatever the models
        gc.collect()
        torch.cuda.empty_cache()  # fine-tuning's workers share the device
    else:
        launcher = [sys.executable, '-m', 'composer.cli', '-n', str(count)]
        if subprocess.run([*launcher, 'train.py', *suite.list_arguments(model)], check=False).returncode:
            raise InputError(f'pretraining {model.run_name(suite.scale)} ended with an error, which stands above')
    collect_run(suite.run_folder(model), suite.records)
