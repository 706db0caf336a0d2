"""Runs the missing steps of a suite. Every step looks for its result first, so a killed suite can be resumed."""

import contextlib
import gc
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from maelm_composer.analysis.ranks import RankOptions, analyze_ranks
from maelm_composer.checkpoints.names import name_checkpoint
from maelm_composer.cluster import connect_ray
from maelm_composer.config import CorpusConfig, Precision
from maelm_composer.console import format_duration
from maelm_composer.data.corpora import describe_source
from maelm_composer.data.manifest import MANIFEST
from maelm_composer.data.shards import build_shards
from maelm_composer.data.storage import join, read_file
from maelm_composer.data.tokenizer import build_tokenizer
from maelm_composer.errors import InputError
from maelm_composer.files import lock_folder
from maelm_composer.precision import choose_in
from maelm_composer.records import Finetuning
from maelm_composer.reporting.artefacts import Artefact, Model
from maelm_composer.reporting.evidence import load_evidence
from maelm_composer.reporting.report import report, write_tables
from maelm_composer.suite.collect import collect_finetunings, collect_rank, collect_run
from maelm_composer.suite.cost import describe_device
from maelm_composer.suite.plan import Forecast, Item, plan_suite, sum_seconds
from maelm_composer.suite.steps import RANK_PRECISION, Kind, Step, Suite, list_steps
from maelm_composer.suite.terminal import print_tables
from maelm_composer.sweep.run import sweep
from maelm_composer.training.run import pretrain

STOPPED = 'stopped; the same command resumes'
Note = Callable[[Step, float], None]  # called with a step and the seconds that it took


@contextlib.contextmanager
def start_suite(
    suite: Suite, artefacts: Sequence[Artefact], show: Callable[[str], None]
) -> Iterator[tuple[Suite, Note]]:
    """Choose the precision, and keep Ray running while the body makes ``artefacts`` (:func:`connect_ray`).

    Yields the suite in its precision and a function for :func:`run_suite` that shows the time left after every step.
    When all is made, the planner's estimate is compared with the time that was taken.
    """
    suite = settle_precision(suite)
    planned: list[Item] = []
    with contextlib.suppress(InputError):  # the planner does not know every GPU; the suite runs without an estimate
        planned = plan_suite(suite, artefacts, describe_device())
    forecast, start = Forecast(planned), time.monotonic()

    def note(step: Step, took: float) -> None:
        if (left := forecast.finish(step, took)) is not None:
            of = '' if step.model is None else f' {step.model.run_name(suite.scale)}'
            show(f'{step.kind.name}{of}: {took:,.0f} s; about {format_duration(left)} left')

    with connect_ray():
        yield suite, note
    if forecast.is_over and (estimated := sum_seconds(planned)):
        took = time.monotonic() - start
        ratio = f'{took / estimated:.2f} times the estimate'
        show(f'scale {suite.scale}: estimated {estimated:,.0f} s, took {took:,.0f} s: {ratio}')


def make_and_print(suite: Suite, artefacts: Sequence[Artefact]) -> int:
    """:func:`run_suite` for the console; returns the exit code: 1 where a number is missing, 128 + signal after one."""
    try:
        with start_suite(suite, artefacts, partial(print, flush=True)) as (settled, note):
            run_suite(settled, artefacts, note)
    except (KeyboardInterrupt, SystemExit) as stop:
        print(STOPPED, file=sys.stderr)
        return int(stop.code or 0) if isinstance(stop, SystemExit) else 128 + signal.SIGINT
    page, made = report(suite.scale, suite.results)
    tables = {artefact.name: made[artefact.name] for artefact in artefacts}
    print_tables(suite.scale, tables)
    print(f'report: {page}')
    return int(any(row.note or row.value is None for rows in tables.values() for row in rows))


def run_suite(suite: Suite, artefacts: Sequence[Artefact], note: Note | None = None) -> None:
    """Run every missing step of ``artefacts``, copy the records to the results, and make the tables.

    A fine-tuning run that fails raises nothing: its record says why, and the tables show a missing number. Figures
    and the page take seconds, so a caller makes the report when all artefacts are made.

    Args:
        note: called after every step.

    Raises:
        InputError: another process works in the same folder, or a step raises it.
    """
    with lock_folder(suite.work, 'benchmark suite'):
        suite = settle_precision(suite)
        for step in list_steps(suite, artefacts):
            start = time.monotonic()
            make(suite, step)
            if note is not None:
                note(step, time.monotonic() - start)
        write_tables(suite.records.parent, load_evidence(suite.records.parent, suite.scale))


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
        case Step(Kind.tokenizer | Kind.shards):
            if not _are_shards_alone(corpus := suite.load_corpus()):
                build = build_tokenizer if step.kind is Kind.tokenizer else build_shards
                build(corpus)
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
        return read_file(join(corpus.remote, MANIFEST)) is not None
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
        launcher = [sys.executable, '-m', 'composer.cli', '-n', str(count), '-m', 'maelm_composer.train']
        if subprocess.run([*launcher, *suite.list_arguments(model)], check=False).returncode:
            raise InputError(f'pretraining {model.run_name(suite.scale)} failed: the error is printed above')
    collect_run(suite.run_folder(model), suite.records)
