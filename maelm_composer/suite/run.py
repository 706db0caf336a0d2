"""Runs the missing steps of a suite. Every step looks for its result first, so a killed suite can be resumed.

The records are copied from the folder of work to results/<scale>/records, which holds those of one experiment.
"""

import contextlib
import gc
import math
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from maelm_composer.analysis.ranks import RankOptions, analyze_ranks
from maelm_composer.checkpoints.names import METRICS, RECORD, name_checkpoint
from maelm_composer.cluster import connect_ray
from maelm_composer.config import CorpusConfig, Precision, PretrainingConfig
from maelm_composer.console import format_duration
from maelm_composer.data.corpora import describe_source
from maelm_composer.data.manifest import MANIFEST, load_manifest
from maelm_composer.data.shards import build_shards
from maelm_composer.data.storage import join, read_file
from maelm_composer.data.tokenizer import build_tokenizer
from maelm_composer.errors import InputError, telling_of_stop
from maelm_composer.files import hash_json, lock_folder, write_text
from maelm_composer.precision import choose_in
from maelm_composer.records import (
    AnyRecord,
    EncoderIdentity,
    FailedFinetuning,
    Finetuning,
    Parser,
    PretrainingRecord,
    RankRecord,
    load_record,
    parse_finetuning,
    parse_pretraining,
    parse_rank,
    write_record,
)
from maelm_composer.reporting.artefacts import Artefact, Model
from maelm_composer.reporting.load import load_evidence
from maelm_composer.reporting.report import print_tables, report, write_tables
from maelm_composer.suite.checks import assert_can_be_made, assert_own_records, find_divergence
from maelm_composer.suite.cost import describe_device
from maelm_composer.suite.plan import Forecast, Item, plan_suite, sum_seconds
from maelm_composer.suite.steps import RANK_PRECISION, Kind, Step, Suite, list_steps
from maelm_composer.sweep.run import sweep
from maelm_composer.training.ending import end_with_parent
from maelm_composer.training.plan import fit_ranks
from maelm_composer.training.run import pretrain
from maelm_composer.training.run_record import is_run_of

CURVE_ROWS = 2000  # rows without a validation loss that are kept of a metrics.csv
STOPPED = 'stopped; the same command resumes'
# Called with a step and the seconds that it took; None if it failed, so that its model's other steps are not made.
Note = Callable[[Step, float | None], None]


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
    # The planner does not know every GPU, and a file that the suite would write anew may be damaged: no estimate then.
    with contextlib.suppress(InputError):
        planned = plan_suite(suite, artefacts, describe_device())
    forecast, start = Forecast(planned), time.monotonic()

    def note(step: Step, took: float | None) -> None:
        if took is None:
            forecast.drop(step.model)
        elif (left := forecast.finish(step, took)) is not None:
            of = '' if step.model is None else f' {step.model.run_name(suite.scale)}'
            show(f'{step.kind.name}{of}: {took:,.0f} s; about {format_duration(left)} left')

    with connect_ray():
        yield suite, note
    if forecast.is_over and (estimated := sum_seconds(planned)):
        took = time.monotonic() - start
        ratio = f'{took / estimated:.2f} times the estimate'
        show(f'scale {suite.scale}: estimated {estimated:,.0f} s, took {took:,.0f} s: {ratio}')


def make_and_print(suite: Suite, artefacts: Sequence[Artefact]) -> int:
    """:func:`run_suite` for the console; returns the exit code: 1 where a number is missing."""
    with telling_of_stop(STOPPED), start_suite(suite, artefacts, partial(print, flush=True)) as (settled, note):
        run_suite(settled, artefacts, note)
    page, made = report(suite.scale, suite.results)
    tables = {artefact.name: made[artefact.name] for artefact in artefacts if artefact.name in made}
    print_tables(suite.scale, tables)
    print(f'report: {page}')
    return int(len(tables) < len(artefacts) or any(row.is_missing for rows in tables.values() for row in rows))


def run_suite(suite: Suite, artefacts: Sequence[Artefact], note: Note | None = None) -> None:
    """Run every missing step of ``artefacts``, copy the records to the results, and make the tables.

    A pretraining run that diverges and a fine-tuning run that fails raise nothing: their records say why, and the
    tables show a missing number. Figures and the page take seconds, so a caller makes the report when all artefacts
    are made.

    Args:
        note: called after every step.

    Raises:
        InputError: another process works in the same folder, or a step raises it.
    """
    with contextlib.ExitStack() as locks:
        for folder in sorted({suite.work.resolve(), suite.records.parent.resolve()}):
            locks.enter_context(lock_folder(folder, 'benchmark suite'))
        suite = settle_precision(suite)
        steps, diverged = list_steps(suite, artefacts), set[Model | None]()
        assert_can_be_made(suite, steps)
        for step in steps:
            if step.model in diverged:
                continue
            start = time.monotonic()
            try:
                make(suite, step)
            except DivergedError as error:
                print(f'failed: {error}', file=sys.stderr, flush=True)
                diverged.add(step.model)
                if note is not None:
                    note(step, None)
                continue
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
            if step.kind is Kind.shards:
                assert_own_records(suite, load_manifest(corpus.remote).content_hash)
        case Step(Kind.pretraining, Model() as model):
            _pretrain(suite, model)
        case Step(Kind.finetuning, Model() as model):
            config = suite.load_finetuning(model, step.samples, step.tasks)
            if not Path(config.checkpoint).is_dir():
                raise InputError(
                    f'{config.checkpoint} is missing: it was removed, or the run was made with another '
                    'training.checkpoint_interval_samples; set that one, or give --work another folder'
                )
            result = sweep(config)
            finished = [record for of_task in result.tasks for record in of_task.finished]
            collect_finetunings([*finished, *result.failures], suite.records)
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


class DivergedError(InputError):
    """A pretraining run has diverged, now or in an earlier call of the suite. Its record is published."""


def _pretrain(suite: Suite, model: Model) -> None:
    config, folder = suite.load_pretraining(model), suite.run_folder(model)
    if (failed := find_divergence(suite, model)) is None:
        try:
            _train(suite, model, config)
        except InputError:
            if (failed := find_divergence(suite, model)) is None:
                raise
    if failed is None:
        collect_run(folder, suite.records)
        return
    path = suite.records / 'pretraining' / f'{failed.run_name}.json'
    published = load_record(path, parse_pretraining) if path.exists() else None
    if not (isinstance(published, PretrainingRecord) and is_run_of(published, config)):
        _remove_measurements(suite.records, failed.run_name)
        path.with_suffix('.csv').unlink(missing_ok=True)
        write_record(path, failed)
    raise DivergedError(f'pretraining {failed.run_name}: {failed.ending}; to try it again, remove {folder}')


def _train(suite: Suite, model: Model, config: PretrainingConfig) -> None:
    """Pretrain in this process on one device, which saves seconds of start-up; else through Composer's launcher."""
    count = fit_ranks(config.training, torch.cuda.device_count() or 1)
    if count == 1:
        try:
            pretrain(config)
        finally:
            torch.compiler.reset()  # torch compiles only so many versions of one function in a process
            gc.collect()
            torch.cuda.empty_cache()  # fine-tuning's workers share the device
    else:
        launcher = [sys.executable, '-m', 'composer.cli', '-n', str(count), '-m', 'maelm_composer.train']
        if _launch([*launcher, str(suite.write_recipe(model))]):
            raise InputError(f'pretraining {model.run_name(suite.scale)} failed: the error is printed above')


def _launch(command: Sequence[str]) -> int:
    """Run Composer's launcher; its exit code. The end of this process ends the launcher once its ranks have saved."""
    # In a process group of its own: a Ctrl-C in the terminal would be a second signal, which ends the launcher's wait.
    end = partial(end_with_parent, signal.SIGINT)  # where this process is killed, as when its terminal is closed
    with subprocess.Popen(command, process_group=0, preexec_fn=end) as launcher:
        try:
            return launcher.wait()
        except BaseException:
            launcher.send_signal(signal.SIGINT)  # upon which the launcher sends its ranks SIGTERM and waits for them
            try:
                launcher.wait()
            except BaseException:  # a second Ctrl-C, which ends the wait
                launcher.send_signal(signal.SIGINT)
            raise


def collect_run(folder: Path, records: Path) -> None:
    """Copy the record and the log of the finished run in ``folder``.

    Fine-tuning and rank records of an earlier run of that name are removed, even if the recipe is the same.
    """
    record = load_record(folder / RECORD, parse_pretraining)
    path = records / 'pretraining' / f'{record.run_name}.json'
    if path.exists() and load_record(path, parse_pretraining) != record:
        _remove_measurements(records, record.run_name)
    write_text(path.with_suffix('.csv'), thin_curve((folder / METRICS).read_text(encoding='utf-8')))
    _publish(path, record, parse_pretraining)


def collect_finetunings(found: Sequence[Finetuning], records: Path) -> None:
    """Write the records of searches; other records of the same checkpoints and tasks are removed.

    If every run of a search fails now, as for want of memory, finished records of the same points stay.
    """
    for record in found:
        path = records / 'finetuning' / f'{record.key}.json'
        if record.status == 'failed' and path.exists() and load_record(path, parse_finetuning).status == 'finished':
            continue
        changes: dict[str, Any] = {'checkpoint': _hide_path(record.checkpoint)}
        if isinstance(record, FailedFinetuning):
            # Both name places of the machine.
            changes |= {'traceback': None, 'error': re.sub(r'(?<![\w/])/(?:[^\s/:]+/)+', '', record.error)}
        named = record.model_copy(update=changes)
        _publish(path, named, parse_finetuning)
    keys, places = {record.key for record in found}, {_find_place(record) for record in found}
    finished = {_find_place(record) for record in found if record.status == 'finished'}
    failed = {_name_point(record) for record in found if _find_place(record) not in finished}

    def is_stale(old: Finetuning) -> bool:
        survives = old.status == 'finished' and _name_point(old) in failed
        return _find_place(old) in places and old.key not in keys and not survives

    _remove(records / 'finetuning', parse_finetuning, is_stale)


def _find_place(record: Finetuning) -> tuple[str, str | None, int | None]:
    """Task and checkpoint of a search."""
    return record.task, record.checkpoint.run_name, record.checkpoint.samples


def _name_point(record: Finetuning) -> str:
    """A search's point on one set of weights and rows; its seeds have one name."""
    return hash_json([record.task, record.checkpoint.hash, record.data_hash, record.protocol, asdict(record.point)])


def collect_rank(record: RankRecord, records: Path) -> None:
    """Write ``record``; other rank records of the same run are removed."""
    run_name = record.checkpoint.run_name
    _remove(records / 'rank', parse_rank, lambda old: old.checkpoint.run_name == run_name and old.key != record.key)
    data = {name: Path(value).name if name == 'remote' else value for name, value in record.data.items()}
    named = record.model_copy(update={'checkpoint': _hide_path(record.checkpoint), 'data': data})
    _publish(records / 'rank' / f'{record.key}.json', named, parse_rank)


def thin_curve(text: str) -> str:
    """A metrics.csv, thinned to every row with a validation loss and about ``CURVE_ROWS`` evenly spaced other rows."""
    head, *rows = text.splitlines()
    stride = math.ceil(len(rows) / CURVE_ROWS)
    if stride <= 1:
        return text
    column = head.split(',').index('eval_loss')
    kept = [row for i, row in enumerate(rows) if i % stride == 0 or row.split(',')[column]]
    return '\n'.join([head, *kept]) + '\n'


def _publish(path: Path, record: AnyRecord, parse: Parser[AnyRecord]) -> None:
    """Write ``record``; a file that holds the same values, perhaps in another order, is left as it is."""
    if not path.exists() or load_record(path, parse) != record:
        write_record(path, record)


def _hide_path(checkpoint: EncoderIdentity) -> EncoderIdentity:
    """Reduce the path to a file name, since results are published; the hash identifies the file."""
    return replace(checkpoint, uri=Path(checkpoint.uri).name)


def _remove_measurements(records: Path, run_name: str) -> None:
    _remove(records / 'finetuning', parse_finetuning, lambda old: old.checkpoint.run_name == run_name)
    _remove(records / 'rank', parse_rank, lambda old: old.checkpoint.run_name == run_name)


def _remove(folder: Path, parse: Parser[AnyRecord], is_stale: Callable[[AnyRecord], bool]) -> None:
    stale = [path for path in folder.glob('*.json') if is_stale(load_record(path, parse))]
    for path in stale:  # after all files have been read, as one that is no record raises
        path.unlink()
