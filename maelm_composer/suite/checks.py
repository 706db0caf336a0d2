"""What a suite refuses before its work, since the report would refuse it in the end, and what it does not repeat."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from maelm_composer.checkpoints.find import read_record
from maelm_composer.config import Precision, TaskSource
from maelm_composer.errors import InputError
from maelm_composer.finetuning.identity import describe_protocol
from maelm_composer.recipe import hash_config
from maelm_composer.records import UnfinishedPretraining, load_folder, parse_finetuning, parse_pretraining
from maelm_composer.reporting.artefacts import DEMO, MAE_LM, Model
from maelm_composer.suite.steps import Kind, Step, Suite
from maelm_composer.tasks.catalogue import find_task
from maelm_composer.tasks.sources import find_task_files, load_task_data
from maelm_composer.training.run_record import assert_same_run, identify, is_run_of


def assert_can_be_made(suite: Suite, steps: Sequence[Step]) -> None:
    """Every refusal before the first step, but that of another text, whose hash the finished shards have."""
    models = list(dict.fromkeys(step.model for step in steps if step.model is not None))
    assert_one_name(suite, models)
    assert_different_models(suite, models)
    assert_own_shards(suite)
    assert_own_runs(suite, models)
    assert_one_protocol(suite, steps)
    assert_readable_tasks(suite, steps)


def assert_one_name(suite: Suite, models: Sequence[Model]) -> None:
    """Raise InputError if a run without a seed in its name is to be trained again under the name with its seed."""
    for model in models:
        unnamed = replace(model, seed=None)
        name, seed = unnamed.run_name(suite.scale), suite.load_pretraining(unnamed).seed
        is_there = unnamed in models or (suite.records / 'pretraining' / f'{name}.json').exists()
        if model.seed == seed and is_there:
            raise InputError(
                f'{model.run_name(suite.scale)} is the run {name} once more, which counts as this seed: leave {seed} '
                'out of the pretraining seeds'
            )


def assert_different_models(suite: Suite, models: Sequence[Model]) -> None:
    """Raise InputError if two models have one recipe: a table would compare a model with itself."""
    found: dict[str, Model] = {}
    for model in models:
        recipe = hash_config(replace(suite.load_pretraining(model), run_name='', save_folder=''))
        other = found.setdefault(recipe, model)
        if other is not model:
            overlay = (*other.overlay_names, *model.overlay_names)[-1]
            raise InputError(
                f'settings of {suite.scale}: {other.label!r} and {model.label!r} have the same recipe: set '
                f'pretraining_of.{overlay}'
            )


def assert_own_shards(suite: Suite) -> None:
    """Raise InputError if the suite would make shards in one folder and train on those of another."""
    made, read = suite.load_corpus().remote, suite.load_pretraining(MAE_LM).data.remote
    if made != read:
        raise InputError(
            f'settings of {suite.scale}: data makes shards in {made}, pretraining reads {read}: add '
            f'data.remote={made} to pretraining'
        )


def assert_one_protocol(suite: Suite, steps: Sequence[Step]) -> None:
    """Raise InputError if the results have records of another protocol that these ``steps`` do not replace."""
    protocols, replaced = dict[str, dict[str, Any]](), set()
    for step in steps:
        if step.kind is Kind.finetuning and step.model is not None:
            config = suite.load_finetuning(step.model, step.samples, step.tasks)
            protocols |= {task: describe_protocol(replace(config, task=task)) for task in step.tasks}
            replaced |= {(step.model.run_name(suite.scale), step.samples, task) for task in step.tasks}
    for record in load_folder(suite.records / 'finetuning', parse_finetuning):
        ours, checkpoint = protocols.get(record.task), record.checkpoint
        is_replaced = (checkpoint.run_name, checkpoint.samples, record.task) in replaced
        if ours is None or is_replaced or record.status == 'failed':
            continue
        for name in sorted((ours.keys() | record.protocol.keys()) - {'measures_rank'}):
            if (new := ours.get(name)) != (old := record.protocol.get(name)):
                raise InputError(
                    f'{suite.records}: {checkpoint.run_name} at {checkpoint.samples} samples was fine-tuned on '
                    f'{record.task} with {name} = {old}, not {new}, which this call does not repeat: give --results '
                    'another folder'
                )


def assert_own_runs(suite: Suite, models: Sequence[Model]) -> None:
    """Raise InputError if the folder of a run has one with other settings, on whatever data."""
    for model in models:
        folder = str(suite.run_folder(model))
        if (record := read_record(folder)) is not None:
            config = suite.load_pretraining(model)
            if config.training.precision == Precision.auto:  # which the run resolves
                config = replace(config, training=replace(config.training, precision=record.training_precision))
            identity = identify(config, record.data_hash)
            assert_same_run(folder, record, identity, f'give --work another folder, or remove {folder}')


def assert_readable_tasks(suite: Suite, steps: Sequence[Step]) -> None:
    """Raise InputError if files of a task to fine-tune are missing or, of a task of one's own, cannot be read."""
    config = suite.finetuning
    for name in dict.fromkeys(name for step in steps for name in step.tasks):
        task = find_task(name, config.tasks)
        if task.find_source(config.data.source) == TaskSource.files:
            find_task_files(task, config.data)
            if name in config.tasks:
                load_task_data(task, config.data)


def find_divergence(suite: Suite, model: Model) -> UnfinishedPretraining | None:
    """The record in the run's folder if the run has diverged: it would do so again whenever it is resumed."""
    record = read_record(str(suite.run_folder(model)))
    if not (isinstance(record, UnfinishedPretraining) and record.has_diverged):
        return None
    return record if is_run_of(record, suite.load_pretraining(model)) else None


def assert_own_records(suite: Suite, content_hash: str) -> None:
    """Raise InputError if the results are of another text, whose records the report would refuse in the end."""
    for record in load_folder(suite.records / 'pretraining', parse_pretraining):
        if record.data_hash != content_hash and suite.scale != DEMO:  # the demo makes all of its runs anew
            raise InputError(
                f'{suite.records} has runs on another text, such as {record.run_name}: give --results another folder'
            )
