"""One pretraining run, from a recipe to checkpoints."""

import atexit
import contextlib
import dataclasses
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from composer import Trainer
from composer.devices import Device, DeviceCPU, DeviceGPU
from composer.loggers import LoggerDestination, MLFlowLogger, ProgressBarLogger, TensorboardLogger, WandBLogger
from composer.utils import dist
from rich.console import Console
from rich.table import Table
from torch.distributed.checkpoint import state_dict

from maelm_composer.checkpoints.names import METRICS
from maelm_composer.config import HeadBiasInit, Logger, Precision, PretrainingConfig, Sharding
from maelm_composer.data.manifest import Manifest, load_id_counts, load_manifest
from maelm_composer.device import find_device, keep_freed_memory, name_device
from maelm_composer.errors import InputError
from maelm_composer.lock import hold
from maelm_composer.masking.collate import MaskingCollator, build_collator
from maelm_composer.model.cost import count_forward_flops, count_parameters
from maelm_composer.model.maelm import build_model
from maelm_composer.precision import Choice, choose
from maelm_composer.records import Pretraining, PretrainingRecord
from maelm_composer.training.adapter import PretrainingModel
from maelm_composer.training.callbacks import (
    BatchSeed,
    DivergenceStop,
    GradientClipping,
    MetricsLog,
    Report,
    TrainingClock,
    find_last_eval,
    parse_metrics,
)
from maelm_composer.training.checkpoints import Checkpoints, drop_what_differs, find_checkpoint, follow_launcher
from maelm_composer.training.loaders import build_evaluator, build_train_loader
from maelm_composer.training.optimizer import build_optimizer, build_schedule
from maelm_composer.training.plan import Plan
from maelm_composer.training.run_folder import RunFolder, refusing_together
from maelm_composer.training.run_record import (
    assert_same_run,
    begin_record,
    find_begun_precision,
    finish_record,
    identify,
    read_record,
)
from maelm_composer.training.scaling import count_visible
from maelm_composer.training.sharding import GradientAverage, build_parallelism

DIST_TIMEOUT_SECONDS = 1800.0  # a collective waits this long for the slowest rank, which may be downloading


def pretrain(config: PretrainingConfig) -> PretrainingRecord | None:
    """Train to ``config.training.max_samples``, going on from the newest checkpoint in ``config.save_folder``.

    Called by every rank. Returns the record that is written to the run folder; None on all ranks but the first.

    Raises:
        InputError: the recipe, the shards, the machine and the run folder do not go together, another process trains in
            that folder, a loss is not finite, or a checkpoint cannot be written.
        SystemExit: 128 + signal, after SIGTERM or Ctrl-C was answered with a checkpoint.
    """
    _quieten_engines()
    _share_cores()
    keep_freed_memory()
    follow_launcher()
    if 0 < torch.cuda.device_count() <= dist.get_local_rank():
        raise InputError(
            f'{dist.get_local_world_size()} ranks on this machine, which has {torch.cuda.device_count()} GPUs: '
            f'start it with composer -n {torch.cuda.device_count()}'
        )
    # Composer's own default is TF32, which is not what training.precision=fp32 says.
    device = DeviceGPU(allow_tf32=False) if torch.cuda.is_available() else DeviceCPU()
    if dist.get_world_size() > 1 or config.training.sharding is not Sharding.ddp:
        dist.initialize_dist(device, timeout=DIST_TIMEOUT_SECONDS)
    with contextlib.ExitStack() as held:
        folder, choices = RunFolder(config.save_folder, config.run_name), [Choice(Precision.fp32)]
        record: Pretraining | None = None
        with refusing_together():
            loggers = _build_loggers(config)
            manifest = load_manifest(config.data.remote)
            collator = build_collator(config)
            plan = _build_plan(config, manifest, collator)
            if dist.get_global_rank() == 0:
                held.enter_context(hold(folder.local, 'run'))
                folder.assert_writable()
                record = read_record(folder)
                begun = find_begun_precision(record)
                choices = [choose(config.training.precision, 'training.precision', begun)]
        dist.broadcast_object_list(choices, src=0)  # machines may measure differently
        config = dataclasses.replace(
            config, training=dataclasses.replace(config.training, precision=choices[0].precision)
        )
        plan = dataclasses.replace(plan, config=config)
        identity = identify(config, manifest.content_hash)
        with refusing_together():
            if dist.get_global_rank() == 0:
                assert_same_run(folder, record, identity)
        return _train(config, identity, choices[0], device, folder, record, manifest, collator, plan, loggers)


def _train(
    config: PretrainingConfig,
    identity: dict[str, Any],
    precision: Choice,
    device: Device,
    folder: RunFolder,
    record: Pretraining | None,
    manifest: Manifest,
    collator: MaskingCollator,
    plan: Plan,
    loggers: list[LoggerDestination],
) -> PretrainingRecord | None:
    is_first, is_sharded = dist.get_global_rank() == 0, config.training.sharding is not Sharding.ddp
    say = Console(highlight=False, soft_wrap=True, quiet=not is_first).print
    counts = load_id_counts(config.data.remote) if config.model.head_bias_init is HeadBiasInit.unigram else None
    model = build_model(config.model, config.seed, counts)
    attention = model.select_attention(config.training.attention, find_device().type)
    checkpoint = find_checkpoint(folder, model, is_sharded)
    numbers = {
        'world_size': dist.get_world_size(),
        'device': name_device(),
        'precision': (record and record.precision) or str(precision),  # of a run that goes on, why it began so
        'attention': attention,
        'tokenizer_hash': manifest.tokenizer_hash,
        'flops': plan.flops,
        'unigram_entropy': manifest.unigram_entropy,
    }
    if checkpoint is not None and checkpoint.samples >= config.training.max_samples:
        folder.forget(checkpoint.state.parent.name)
        if is_first and not isinstance(record, PretrainingRecord):  # killed between its last checkpoint and its record
            record = record or begin_record(folder, config, identity, numbers)
            evaluation = find_last_eval(parse_metrics(folder.read(METRICS) or ''))
            record = finish_record(folder, record, plan, checkpoint.training_seconds, evaluation)
        say(f'{config.run_name} is complete: {checkpoint.samples:,} samples, in {config.save_folder}')
        return record if isinstance(record, PretrainingRecord) else None
    say(_start_screen(config, plan, manifest, precision, attention))
    if precision.notice:
        say(precision.notice)
    if checkpoint is not None:
        say(f'going on from {checkpoint.samples:,} samples')
    with refusing_together():
        if is_first:
            record = begin_record(folder, config, identity, numbers)

    if config.training.compile:
        # Shapes never change; validation is a second graph. FSDP2 gathers weights between layers, outside any graph.
        model.compile(fullgraph=not is_sharded, dynamic=False)
    adapter = PretrainingModel(model, config.training.precision)
    optimizer = build_optimizer(adapter.parameters(), config.optimizer)
    clipping = GradientClipping(config.optimizer.clip_norm)
    clock = TrainingClock(plan.tokens_per_batch, checkpoint.training_seconds if checkpoint else 0.0)
    log = MetricsLog(folder, clock, clipping)
    trainer = Trainer(
        model=adapter,
        train_dataloader=build_train_loader(config, manifest, collator, plan),
        eval_dataloader=build_evaluator(config, manifest, collator, plan),
        optimizers=optimizer,
        schedulers=build_schedule(optimizer, config.optimizer, config.training),
        step_schedulers_every_batch=True,
        max_duration=f'{config.training.max_samples}sp',
        callbacks=[
            BatchSeed(config.seed),
            *([GradientAverage()] if is_sharded else []),
            clipping,
            clock,
            DivergenceStop(clipping),
            log,
            Report(say, clock, log, config.training.compile),
            Checkpoints(folder, clock, config.training),
        ],
        loggers=loggers,
        progress_bar=sys.stderr.isatty(),
        run_name=config.run_name,
        seed=config.seed,
        precision='fp32',  # autocast is the adapter's
        device=device,
        device_train_microbatch_size=plan.microbatch_size,
        # Otherwise every row has as many predicted tokens, so a mean over rows is a mean over tokens.
        accumulate_train_batch_on_tokens=config.masking.rounds_at_random or collator.predicts_every_token,
        parallelism_config=build_parallelism(config.training.sharding),
        spin_dataloaders=False,
        dist_timeout=DIST_TIMEOUT_SECONDS,
        load_path=str(checkpoint.state) if checkpoint else None,
        load_ignore_keys=drop_what_differs,
        load_progress_bar=False,
    )
    if checkpoint is not None:
        folder.forget(checkpoint.state.parent.name)
    for destination in trainer.logger.destinations:
        if isinstance(destination, ProgressBarLogger):
            destination.hparams_already_logged_to_console = True  # the start screen has said it
    try:
        trainer.fit()
    except torch.OutOfMemoryError as error:
        raise InputError(
            f'{plan.microbatch_size} rows in one forward pass do not fit into the memory of {name_device()}: '
            'lower training.device_train_microbatch_size'
        ) from error
    finally:
        trainer.engine.close()  # trainer.close() would also wait for the other ranks, which may have failed
        # Composer holds a closed trainer until exit, and torch 2.7 every model that it saved.
        atexit.unregister(trainer.engine._close)
        if hasattr(state_dict._get_fqns, 'cache_clear'):
            state_dict._get_fqns.cache_clear()
    if is_first:
        assert record is not None
        finished = finish_record(folder, record, plan, clock.seconds, log.last_eval)
        say(_summary(config, finished))
        return finished
    return None


def _build_plan(config: PretrainingConfig, manifest: Manifest, collator: MaskingCollator) -> Plan:
    """Raises InputError where recipe, shards and ranks do not fit together."""
    for key in ('vocab_size', 'max_seq_len'):
        wanted, there = getattr(config.model, key), getattr(manifest, key)
        if wanted != there:
            raise InputError(f'model.{key} is {wanted}, but the shards in {config.data.remote} were made with {there}')
    visible, masked = count_visible(config)
    predicted = config.model.max_seq_len if collator.predicts_every_token else masked
    plan = Plan(
        config=config,
        world_size=dist.get_world_size(),
        rows_per_epoch=manifest.splits['train'].rows,
        parameters=count_parameters(config.model),
        forward_flops=sum(count_forward_flops(config.model, visible, predicted).values()),
    )
    plan.check()
    return plan


def _build_loggers(config: PretrainingConfig) -> list[LoggerDestination]:
    for logger in config.training.loggers:
        if importlib.util.find_spec(logger.name) is None:
            raise InputError(
                f'training.loggers names {logger.name}, which is not installed: '
                f"in the checkout, pip install -c constraints.txt -e '.[{logger.name}]'"
            )
    folder = RunFolder(config.save_folder, config.run_name).local
    build: dict[Logger, Callable[[], LoggerDestination]] = {
        Logger.tensorboard: lambda: TensorboardLogger(log_dir=str(folder / 'tensorboard')),
        Logger.wandb: lambda: WandBLogger(project='maelm-composer', name=config.run_name),
        Logger.mlflow: lambda: MLFlowLogger(experiment_name='maelm-composer', run_name=config.run_name),
    }
    return [build[logger]() for logger in config.training.loggers]


def _start_screen(
    config: PretrainingConfig, plan: Plan, manifest: Manifest, precision: Choice, attention: dict[str, str]
) -> Table:
    fill_rate = manifest.splits['train'].fill_rate
    data = (
        f'{config.data.remote}, {fill_rate:.2%} full, content hash {manifest.content_hash[:12]}, '
        f'tokenizer hash {manifest.tokenizer_hash[:12]}'
    )
    table = Table.grid(padding=(0, 2))
    table.add_row('[bold]run[/bold]', f'[bold]{config.run_name}[/bold]')
    for name, text in plan.describe(data, name_device(), str(precision), attention):
        table.add_row(name, text)
    return table


def _summary(config: PretrainingConfig, record: PretrainingRecord) -> str:
    loss, entropy = record.eval_loss, record.unigram_entropy
    nothing = ': it has learned nothing' if entropy is not None and loss >= entropy else ''
    beside = '' if entropy is None else f' (unigram entropy {entropy:.2f}{nothing})'
    return (
        f'{config.run_name}: validation loss {loss:.4f}{beside}\n'
        f'{record.batches:,} steps, {record.samples:,} samples\n'
        f'{record.tokens_per_second:,.0f} tokens/s, {record.training_seconds:,.0f} seconds of training\n'
        f'log and checkpoints: {config.save_folder}'
    )


def _share_cores() -> None:
    """Composer's launcher lets every rank take every core, which on a CPU costs a factor of ten."""
    if dist.get_local_world_size() > 1 and 'OMP_NUM_THREADS' not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // dist.get_local_world_size()))


def _quieten_engines() -> None:
    """Leave out what the engines say and nobody can act on."""
    for message in (
        'FSDP2 Config/APIs are experimental',
        'TypedStorage is deprecated',
        'No batches were trained',  # a run that goes on from the very end of an epoch
        'Cannot split tensor of length',  # the last microbatch may be smaller
    ):
        warnings.filterwarnings('ignore', message=f'.*{message}')
