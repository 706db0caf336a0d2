"""One pretraining run, from a recipe to its checkpoints and record."""

import contextlib
import dataclasses
import sys
from functools import partial

import torch
from composer import Trainer
from composer.devices import Device
from composer.loggers import ProgressBarLogger
from composer.utils import dist
from composer.utils.parallelism import FSDP2Config, ParallelismConfig
from rich.console import Console
from rich.table import Table

from maelm_composer.checkpoints.find import find_encoder, read_record
from maelm_composer.checkpoints.names import METRICS, RECORD
from maelm_composer.config import HeadBiasInit, Precision, PretrainingConfig, Sharding
from maelm_composer.data.dataset import cache_folder
from maelm_composer.data.manifest import assert_own_tokenizer, load_id_counts, load_manifest
from maelm_composer.data.storage import OutageError
from maelm_composer.device import (
    LESS_MEMORY,
    explain_shortage,
    find_device,
    keep_freed_memory,
    name_device,
    raise_file_limit,
)
from maelm_composer.errors import InputError
from maelm_composer.files import assert_writable, lock_folder
from maelm_composer.masking.collate import build_collator
from maelm_composer.masking.draw import count_masked
from maelm_composer.model.kernels.attention import choose_backend
from maelm_composer.model.layer import recompute_layers
from maelm_composer.model.maelm import build_model
from maelm_composer.patches import allow_graphs, release_trainer, silence_warnings
from maelm_composer.precision import Choice, choose
from maelm_composer.records import Pretraining, PretrainingRecord, UnfinishedPretraining, collect_provenance
from maelm_composer.training.adapter import PretrainingModel
from maelm_composer.training.callbacks import (
    BatchSeed,
    GradientAverage,
    GradientClipping,
    MetricsLog,
    ProgressLines,
    TrainingClock,
)
from maelm_composer.training.checkpoints import CheckpointSaver, drop_unportable
from maelm_composer.training.ending import end_after, end_before_training, end_with_launcher, record_ending
from maelm_composer.training.initial import describe_start, load_initial_weights
from maelm_composer.training.loaders import build_evaluator, build_train_loader
from maelm_composer.training.loggers import build_loggers
from maelm_composer.training.optimizer import build_optimizer, build_schedule, restore_learning_rate
from maelm_composer.training.plan import Plan, count_training_flops
from maelm_composer.training.processes import (
    RankWatch,
    raise_on_all_ranks,
    start_rank,
    take_from_first_rank,
)
from maelm_composer.training.resume import find_resume_point, load_data_only
from maelm_composer.training.run_folder import RunFolder
from maelm_composer.training.run_record import (
    assert_same_run,
    assert_same_validation,
    finish_record,
    identify,
)


def pretrain(config: PretrainingConfig) -> PretrainingRecord | None:
    """Train to ``config.training.max_samples``, from the newest checkpoint in ``config.save_folder`` if there is one.

    Called by every rank. Returns the record in ``record.json``; None on all ranks but the first.

    Raises:
        InputError: the recipe does not fit the shards, the machine or the run folder, another process trains in that
            folder, a loss is not finite, or a checkpoint cannot be written.
        SystemExit: 128 + signal, after a checkpoint was saved because of SIGTERM or Ctrl-C.
    """
    silence_warnings()
    keep_freed_memory()
    raise_file_limit()
    end_with_launcher()
    device = start_rank(config.training)
    watch = RankWatch()
    with contextlib.ExitStack() as locks:
        with watch.acting(end_before_training):
            run = _Run(config, locks)
            if not run.was_complete:
                run.begin()
        if run.was_complete:
            return run.finish()
        with record_ending(run.folder, run.print), watch.acting(partial(end_after, run.folder)):
            run.train(device)
            return run.finish()


class _Run:
    """A run whose ranks have agreed that the recipe, the shards and the run folder fit together."""

    def __init__(self, config: PretrainingConfig, locks: contextlib.ExitStack) -> None:
        """Rank 0 keeps the lock on the run folder in ``locks``."""
        self.is_first = dist.get_global_rank() == 0
        self.print = Console(highlight=False, markup=False, emoji=False, soft_wrap=True, quiet=not self.is_first).print
        self.folder = RunFolder(config.save_folder, config.run_name)
        self.record: Pretraining | None = None
        choice = Choice(Precision.fp32)
        with raise_on_all_ranks():
            self.loggers = build_loggers(config, self.folder)
            self.manifest = load_manifest(config.data.remote)
            self.collator = build_collator(config)
            self.plan = Plan(config, dist.get_world_size(), self.manifest)
            self.plan.check()
            if not (cache := cache_folder(config.data, self.manifest)).exists():
                assert_writable(cache)  # fails here: once loaders are made, the other nodes would wait for it
            if self.is_first:
                assert_own_tokenizer(config.data.remote, self.manifest)
                locks.enter_context(lock_folder(self.folder.local, 'run'))
                self.folder.assert_writable()
                self.record = read_record(self.folder.uri)
                begun_in = self.record.training_precision if self.record else None
                choice = choose(config.training.precision, 'training.precision', begun_in)
        self.folder.assert_shared()
        self.precision = take_from_first_rank(choice)  # machines may measure different speeds
        training = dataclasses.replace(config.training, precision=self.precision.precision)
        self.config = dataclasses.replace(config, training=training)
        self.identity = identify(self.config, self.manifest.content_hash)
        self.is_sharded = training.sharding != Sharding.ddp
        with raise_on_all_ranks():
            if self.is_first:
                assert_same_run(self.folder.uri, self.record, self.identity)
                assert_same_validation(self.folder.uri, self.record, self.plan.eval_rows)
        self._prepare_model()
        start = self.start
        self.clock = TrainingClock(self.plan.tokens_per_batch, start.training_seconds, start.device_seconds)
        self.clipping = GradientClipping(self.config.optimizer.clip_norm)
        self.log = MetricsLog(self.folder.local / METRICS, self.clock, self.clipping)
        with raise_on_all_ranks():
            if self.is_first:
                self.log.begin(start.log, start.samples)

    @property
    def was_complete(self) -> bool:
        """Whether an earlier process had ended the run."""
        return self.start.samples >= self.config.training.max_samples

    def begin(self) -> None:
        """Print the start screen and write the record."""
        self.print(self._start_screen())
        if self.precision.notice:
            self.print(self.precision.notice)
        if isinstance(self.record, UnfinishedPretraining) and self.record.status == 'running':
            self.print(f'the run was killed before; if because memory ran out, {LESS_MEMORY}')
        if self.start.state is not None:
            self.print(f'resuming from {self.start.samples:,} samples')
        with raise_on_all_ranks():
            if self.is_first:
                self.record = self._begin_record()

    def train(self, device: Device) -> None:
        """Train to the end, or until a stop signal raises SystemExit."""
        state = self.start.state
        with contextlib.nullcontext() if state is None else load_data_only(state):
            trainer = self._build_trainer(device)
        if torch.cuda.is_available():
            # Composer allows TF32 when it shards a model, but training.precision=fp32 promises fp32.
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        if state is not None:
            self.folder.forget()
            restore_learning_rate(trainer.state.optimizers[0], trainer.state.schedulers[0])
        for destination in trainer.logger.destinations:
            if isinstance(destination, ProgressBarLogger):
                destination.hparams_already_logged_to_console = True  # the start screen has shown them
        trainer.logger.log_hyperparameters(self.identity)  # MLflow demands equal ones of a resumed run
        with explain_shortage(self.plan.microbatch_size):
            try:
                trainer.fit()
            finally:
                release_trainer(trainer)

    def finish(self) -> PretrainingRecord | None:
        """Print and return the record, to which the results are added unless it has them; None on the other ranks."""
        if self.was_complete:
            self.folder.forget()
        record = None
        with raise_on_all_ranks():
            if self.is_first:
                record = self._finish_record()
        if record is None:
            return None
        if self.was_complete:
            self.print(f'{record.run_name} is complete: {record.samples:,} samples, in {self.config.save_folder}')
        else:
            self.print(_summarize(self.config, record))
        return record

    def _finish_record(self) -> PretrainingRecord:
        record = self.record or self._begin_record()
        if isinstance(record, PretrainingRecord):
            return record
        if not self.log.last_eval:
            raise InputError(f'{self.folder.uri}/{METRICS}: holds no validation, so the record cannot be finished')
        clock, evaluation = self.clock, self.log.last_eval
        finished = finish_record(record, self.plan, clock.seconds, clock.device_seconds, evaluation)
        try:
            self.folder.write_record(finished)
        except OutageError as error:
            raise InputError(f'{error}; all is trained and saved, the same command writes the record') from None
        return finished

    def _prepare_model(self) -> None:
        """Build the model; find the checkpoint to resume from or, if there is none, load ``init_from``'s weights."""
        config = self.config
        counts = None
        with raise_on_all_ranks():
            if config.model.head_bias_init == HeadBiasInit.unigram:
                counts = load_id_counts(config.data.remote)
        self.model = build_model(config.model, config.seed, counts)
        self.model.select_attention(config.training.attention)
        stacks = ('encoder',) if self.model.decoder is None else ('encoder', 'decoder')
        self.attention = dict.fromkeys(stacks, choose_backend(config.training.attention, find_device().type).name)
        if config.training.activation_checkpointing:
            recompute_layers(self.model)
        self.start = find_resume_point(self.folder, self.model, self.is_sharded)
        with raise_on_all_ranks():
            if isinstance(self.record, PretrainingRecord) and self.start.state is None:
                raise InputError(
                    f'{self.folder.uri} holds the record of a finished run, but no checkpoint: restore `latest` and '
                    f'the newest checkpoint, or remove {RECORD} to train again'
                )
        self.init_from = begun_from = self.record.init_from if self.record else None
        self.taken = ''
        if config.init_from is not None and self.start.state is None:
            with raise_on_all_ranks():
                found = find_encoder(config.init_from) if self.is_first else None
            source = take_from_first_rank(found.uri if found else config.init_from)  # `latest` may change meanwhile
            with raise_on_all_ranks():
                self.init_from, self.taken = load_initial_weights(
                    self.model, dataclasses.replace(config, init_from=source)
                )
                if begun_from is not None and begun_from.hash != self.init_from.hash:
                    raise InputError(
                        f'{self.folder.uri} holds a run that began from {describe_start(begun_from)}; init_from is now '
                        f'{describe_start(self.init_from)}: choose another run_name or save_folder'
                    )

    def _build_trainer(self, device: Device) -> Trainer:
        """The callbacks' order matters: gradients are averaged, then clipped; batches logged, then saved."""
        config, training, plan = self.config, self.config.training, self.plan
        if training.compile:
            # One graph for training and one for validation; a smaller last batch or microbatch has a graph of its own.
            # FSDP2 gathers weights between layers, which breaks the graph there.
            allow_graphs()
            self.model.compile(fullgraph=not self.is_sharded, dynamic=False)
        # Parameters and gradients stay fp32; the adapter enters autocast for bf16.
        fsdp = FSDP2Config(reshard_after_forward=training.sharding == Sharding.full_shard, mixed_precision='FULL')
        adapter = PretrainingModel(self.model, training.precision)
        optimizer = build_optimizer(adapter.parameters(), config.optimizer)
        fewest, most = count_masked(config.masking, config.model.max_seq_len)
        return Trainer(
            model=adapter,
            train_dataloader=build_train_loader(plan, self.collator),
            eval_dataloader=build_evaluator(plan, self.collator),
            optimizers=optimizer,
            schedulers=build_schedule(optimizer, config.optimizer, training),
            step_schedulers_every_batch=True,
            max_duration=f'{training.max_samples}sp',
            callbacks=[
                BatchSeed(config.seed),
                *([GradientAverage()] if self.is_sharded else []),
                self.clock,
                self.clipping,
                self.log,
                ProgressLines(self.print, self.clock, self.log, training.compile, has_bar=sys.stderr.isatty()),
                CheckpointSaver(self.folder, self.clock, self.log, training, self.print),
            ],
            loggers=self.loggers,
            progress_bar=sys.stderr.isatty(),
            run_name=config.run_name,
            seed=config.seed,
            precision='fp32',  # the adapter enters autocast
            device=device,
            device_train_microbatch_size=plan.microbatch_size,
            # In these two cases rows differ in the number of predicted tokens, which then weights the microbatches.
            # Otherwise a mean over rows is a mean over tokens.
            accumulate_train_batch_on_tokens=fewest < most or self.collator.predicts_every_token,
            parallelism_config=ParallelismConfig(fsdp2=fsdp) if self.is_sharded else None,
            spin_dataloaders=False,
            load_path=str(self.start.state) if self.start.state else None,
            load_ignore_keys=drop_unportable,
        )

    def _begin_record(self) -> UnfinishedPretraining:
        first_choice = None if self.record is None else self.record.precision  # which a resumed run keeps
        record = UnfinishedPretraining(
            run_name=self.config.run_name,
            provenance=collect_provenance(self.config),
            identity=self.identity,
            world_size=dist.get_world_size(),
            device=name_device(),
            precision=first_choice or str(self.precision),
            attention=self.attention,
            tokenizer_hash=self.manifest.tokenizer_hash,
            flops=count_training_flops(self.config),
            unigram_entropy=self.manifest.unigram_entropy,
            eval_rows=self.plan.eval_rows,
            init_from=self.init_from,
            since=self.start.samples,
        )
        if self.record is not None:
            record = record.following(self.record)
        self.folder.copy_inputs(self.config)
        self.folder.write_record(record)
        return record

    def _start_screen(self) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_column()
        table.add_column(overflow='fold')
        table.add_row('run', self.config.run_name, style='bold')
        lines = self.plan.describe(name_device(), str(self.precision), self.attention)
        if self.init_from is not None:
            lines['starts from'] = describe_start(self.init_from) + (f': {self.taken}' if self.taken else '')
        for name, text in lines.items():
            table.add_row(name, text)
        return table


def _summarize(config: PretrainingConfig, record: PretrainingRecord) -> str:
    loss, entropy = record.eval_loss, record.unigram_entropy
    nothing = ': the model has learned nothing' if entropy is not None and loss >= entropy else ''
    beside = '' if entropy is None else f' (unigram entropy {entropy:.2f}{nothing})'
    return (
        f'{config.run_name}: validation loss {loss:.4f}{beside}\n'
        f'{record.batches:,} steps, {record.samples:,} samples\n'
        f'{record.tokens_per_second:,.0f} tokens/s, {record.training_seconds:,.0f} seconds of training\n'
        f'log and checkpoints: {config.save_folder}'
    )
