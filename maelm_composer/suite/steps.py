"""The steps that a list of artefacts needs at one scale, each once. Imports no torch."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

from maelm_composer.checkpoints.names import name_checkpoint
from maelm_composer.config import CorpusConfig, FinetuningConfig, Precision, PretrainingConfig, SuiteConfig
from maelm_composer.errors import InputError
from maelm_composer.files import assert_local, write_text
from maelm_composer.finetuning.identity import limit_length
from maelm_composer.precision import read_choice
from maelm_composer.recipe import load_config, read_keys, split_arguments, to_yaml
from maelm_composer.reporting.artefacts import ARTEFACTS, MAE_LM, OWN, Artefact, Demand, Model, artefacts_of, tasks_of
from maelm_composer.shipped import find_shipped
from maelm_composer.sweep.search import refuse_searched
from maelm_composer.tasks.catalogue import find_task
from maelm_composer.training.plan import count_samples

SETTINGS_FOLDER = Path('yamls/suite')
LISTS = ('data', 'pretraining', 'finetuning')  # keys of SuiteConfig: recipes, to which --settings adds
REPLACED = ('pretraining_seeds', 'pretraining_seeds_of', 'pretraining_of')  # keys whose value --settings replaces
# Keys that the suite chooses itself, for every sweep and for every pretraining run.
CHOSEN = ('checkpoint', 'save_folder', 'task', 'sweep.tasks', 'measures_rank')
CHOSEN_OF_RUNS = ('run_name', 'save_folder')
# Overlays of the models whose rank is measured in fine-tuning, for every artefact alike, so that they share records.
MEASURED = {demand.model.overlays for artefact in ARTEFACTS for demand in artefact.demands if demand.finetuned_rank}
RANK_PRECISION = Precision.fp32  # of rank records, whatever precision the models were trained in
Kind = Enum('Kind', 'tokenizer shards pretraining finetuning rank')


@dataclass(frozen=True)
class Step:
    """One unit of work. Its result is looked up before the work is done."""

    kind: Kind
    model: Model | None = None
    samples: int = 0  # names the checkpoint to fine-tune or to measure
    tasks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Suite:
    """The settings of one scale with its folders for work and for results."""

    scale: str
    settings: SuiteConfig
    work: Path
    results: Path
    precision: Precision = Precision.auto  # for all recipes that say auto; auto: not chosen yet
    _loaded: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)  # recipes

    @property
    def finetuning_folder(self) -> Path:
        return self.work / 'finetuning'

    @property
    def rank_folder(self) -> Path:
        return self.work / 'ranks'

    @property
    def records(self) -> Path:
        return self.results / self.scale / 'records'

    @property
    def own_tasks(self) -> list[str]:
        """The tasks that the recipe of fine-tuning declares. Raises InputError for one that cannot be used."""
        tasks = self.finetuning.tasks
        return [find_task(name, tasks).name for name in tasks]

    @property
    def artefacts(self) -> tuple[Artefact, ...]:
        """All that can be made."""
        return artefacts_of(self.scale, bool(self.own_tasks))

    def list_seeds(self, artefact: str, model: Model) -> list[int | None]:
        """Pretraining seeds, None being the recipe's own. Seeds of an overlay take precedence over an artefact's."""
        seeds, own = self.settings.pretraining_seeds, self.settings.pretraining_seeds_of
        found = next((own[name] for name in (*model.overlay_names, artefact) if name in own), seeds)
        return list(found) or [None]

    def run_folder(self, model: Model) -> Path:
        return self.work / 'runs' / model.run_name(self.scale)

    def load_corpus(self) -> CorpusConfig:
        if 'MAELM_DATA' in os.environ:  # MAELM_DATA names the folder of text and tasks
            os.environ.setdefault('DATA_ROOT', os.environ['MAELM_DATA'])
        config: CorpusConfig = self._load(CorpusConfig, *self.settings.data)
        return config

    def list_precisions(self) -> tuple[Precision, Precision]:
        """The precision of pretraining and that of fine-tuning."""
        return self.load_pretraining(MAE_LM).training.precision, self.finetuning.precision

    def write_recipe(self, model: Model) -> Path:
        """The recipe of ``model`` as one file, the argument of `maelm train`."""
        path = self.work / 'recipes' / f'{model.run_name(self.scale)}.yaml'
        write_text(path, to_yaml(self.load_pretraining(model)))
        return path

    def load_pretraining(self, model: Model) -> PretrainingConfig:
        """The recipe of ``model``.

        Raises:
            InputError: as :func:`load_config`, or a pair of the settings names a key that makes the model what it is.
        """
        entries = self._list_entries(model)
        self._refuse([*CHOSEN_OF_RUNS, *(() if model.seed is None else ('seed',))], entries)
        if (PretrainingConfig, entries) not in self._loaded:
            self._assert_no_overlay_is_undone(model)
        config: PretrainingConfig = self._load(PretrainingConfig, *entries)
        if config.init_from is not None:  # its path would be published
            raise InputError(f'settings of {self.scale}: init_from: models of a suite begin anew: leave it out')
        if config.training.precision == Precision.auto:
            config = replace(config, training=replace(config.training, precision=self.precision))
        seed = config.seed if model.seed is None else model.seed
        return replace(config, save_folder=str(self.run_folder(model)), run_name=model.run_name(self.scale), seed=seed)

    @property
    def finetuning(self) -> FinetuningConfig:
        """The recipe of fine-tuning, of no checkpoint yet. Raises InputError for a key that the suite chooses."""
        config: FinetuningConfig = self._load(FinetuningConfig, *self.settings.finetuning, 'checkpoint=unknown')
        self._refuse(CHOSEN, self.settings.finetuning)
        return replace(config, precision=self.precision) if config.precision == Precision.auto else config

    def load_finetuning(self, model: Model, samples: int, tasks: Sequence[str]) -> FinetuningConfig:
        """The sweep over ``tasks`` from the checkpoint of ``model`` at ``samples``. Raises as :attr:`finetuning`."""
        config = limit_length(self.finetuning, self.load_pretraining(model).model.max_seq_len)
        return replace(
            config,
            checkpoint=str(self.run_folder(model) / name_checkpoint(samples)),
            save_folder=str(self.finetuning_folder),
            task=None,
            sweep=replace(config.sweep, tasks=list(tasks)),
            measures_rank=model.overlays in MEASURED,
        )

    def _list_entries(self, model: Model) -> tuple[str, ...]:
        """The recipe of ``model``: files and ``key=value`` pairs, of which later ones win.

        An overlay follows the settings' pairs, since these are for every model: RoBERTa has no decoder, whatever
        its size.
        """
        overlays = zip(model.overlays, model.overlay_names, strict=True)
        own = [[path, *self.settings.pretraining_of.get(name, [])] for path, name in overlays]
        return (*self.settings.pretraining, *chain.from_iterable(own))

    def _refuse(self, chosen: Sequence[str], entries: Sequence[str]) -> None:
        if ignored := [pair for pair in split_arguments(entries)[1] if pair.partition('=')[0] in chosen]:
            raise InputError(f'settings of {self.scale}: {ignored[0]}: the suite chooses this itself: leave it out')

    def _assert_no_overlay_is_undone(self, model: Model) -> None:
        """Refuse a pair for a key that a later overlay sets, too."""
        pairs: list[str] = []
        for entry in self._list_entries(model):
            if entry not in model.overlays:
                pairs += split_arguments([entry])[1]
                continue
            keys = read_keys(entry)
            for pair in pairs:
                if pair.partition('=')[0] in keys:
                    raise InputError(
                        f'settings of {self.scale}: {pair}: {entry} sets this key, too: move the pair to '
                        f'pretraining_of.{PurePosixPath(entry).stem}, or leave it out'
                    )

    def _load(self, root: type, *entries: str) -> Any:
        if (root, entries) not in self._loaded:  # a plan asks for the same recipe thousands of times
            try:
                self._loaded[root, entries] = load_config(root, entries)
            except InputError as error:  # the pairs are those of the settings
                raise InputError(f'settings of {self.scale}: {str(error).removeprefix("command line: ")}') from None
        return self._loaded[root, entries]


def load_suite(
    scale: str, work: str | Path | None = None, results: str | Path = 'results', added: str | Path | None = None
) -> Suite:
    """The suite of ``yamls/suite/<scale>.yaml``.

    Args:
        work: folder of runs and records; the default is runs/suite/<scale>.
        added: a file of the same keys. Its lists of recipes are appended to the scale's, so they win. The smaller
            ``rank_tokens`` counts. The file's other keys replace the scale's.

    Raises:
        InputError: an unknown scale, or settings or a choice of precision that cannot be read.
    """
    for name, place in (('--work', work), ('--results', results)):
        if place is not None:
            assert_local(place, name)
    if Path(scale).name != scale:
        raise InputError(f'{scale!r} is not the name of a scale, such as ladder')
    path, settings = _load_settings(scale)
    for name in LISTS:
        if not getattr(settings, name):
            raise InputError(f'{path}: {name} is empty: list recipes and key=value pairs')
    if added is not None:
        more = load_config(SuiteConfig, [str(added)])
        if more.extends:
            raise InputError(f'{added}: extends is for the files of {SETTINGS_FOLDER}; name the scale with --scale')
        lists = {name: getattr(settings, name) + getattr(more, name) for name in LISTS}
        given = read_keys(added)
        others = {name: getattr(more if name in given else settings, name) for name in REPLACED}
        settings = replace(settings, **lists, **others, rank_tokens=min(settings.rank_tokens, more.rank_tokens))
        path = Path(added)  # named in errors: the scale's own settings are tested
    overlays = dict.fromkeys(s for a in artefacts_of(scale) for d in a.demands for s in d.model.overlay_names)
    known = {artefact.name: None for artefact in artefacts_of(scale, has_own_tasks=True)} | overlays
    for name in settings.pretraining_seeds_of:
        if name not in known:
            raise InputError(
                f'{path}: pretraining_seeds_of names {name}: the artefacts and overlays are {", ".join(known)}'
            )
    for name in settings.pretraining_of:
        if name not in overlays:
            raise InputError(f'{path}: pretraining_of names {name}: the overlays are {", ".join(overlays)}')
    for seeds in (settings.pretraining_seeds, *settings.pretraining_seeds_of.values()):
        if len(set(seeds)) < len(seeds):
            raise InputError(f'{path}: pretraining seeds {seeds}: a seed is listed twice')
    folder = Path(work or f'runs/suite/{scale}')
    return Suite(scale, settings, folder, Path(results), read_choice(folder) or Precision.auto)


def _load_settings(scale: str) -> tuple[Path, SuiteConfig]:
    """The file of ``scale``, and its settings merged over those of the scales that it extends."""
    files: list[Path] = []
    while scale or not files:
        path = SETTINGS_FOLDER / f'{scale}.yaml'
        named = f'{files[0]}: extends {scale}: ' if files else ''
        if not find_shipped(path).is_file():
            there = ', '.join(sorted(found.stem for found in find_shipped(SETTINGS_FOLDER).glob('*.yaml')))
            raise InputError(f'{named}no {path}: the scales are {there}')
        if path in files:
            raise InputError(f'{named}a scale cannot extend itself')
        files.insert(0, path)
        scale = load_config(SuiteConfig, [str(path)]).extends
    path, settings = files[-1], load_config(SuiteConfig, [str(file) for file in files])
    given = read_keys(path)
    for name, seeds in settings.pretraining_seeds_of.items():
        is_inherited = 'pretraining_seeds' in given and f'pretraining_seeds_of.{name}' not in given
        if is_inherited and not {*seeds} <= {*settings.pretraining_seeds}:
            raise InputError(
                f'{path}: pretraining_seeds_of.{name} is {seeds} in {settings.extends}, but pretraining_seeds is '
                f'{settings.pretraining_seeds}: set both'
            )
    return path, settings


def choose_artefacts(suite: Suite, names: str) -> list[Artefact]:
    """The artefacts of ``suite`` with these names, separated by commas; all of them if ``names`` is empty.

    Raises:
        InputError: the suite has no such artefact.
    """
    found = {artefact.name: artefact for artefact in suite.artefacts}
    chosen = [*dict.fromkeys(filter(None, names.split(',')))]
    for name in chosen:
        if name not in found:
            hint = '; own needs tasks in a recipe of finetuning (docs/tasks.md)' if name == OWN.name else ''
            raise InputError(f'scale {suite.scale} has no artefact {name!r}: there are {", ".join(found)}{hint}')
    return [found[name] for name in chosen] or list(found.values())


def list_steps(suite: Suite, artefacts: Sequence[Artefact]) -> list[Step]:
    """The steps that ``artefacts`` need, each once.

    The fine-tuning and rank steps of a model follow its pretraining, so that models are completed one by one. All
    models of one pretraining seed come before those of the next.
    """
    steps: dict[Step, dict[str, None]] = {}  # step without its tasks -> these, in order
    for demand in _list_demands(suite, artefacts):
        model, checkpoints = demand.model, list_saved_samples(suite.load_pretraining(demand.model))
        tasks = [*tasks_of(suite.scale, demand.roles), *(suite.own_tasks if demand.own_tasks else ())]
        finetuned = checkpoints if demand.every_checkpoint else checkpoints[-1:]
        kept = suite.load_pretraining(model).training.checkpoints_to_keep
        if demand.every_checkpoint and kept > 0:
            raise InputError(
                f'settings of {suite.scale}: training.checkpoints_to_keep={kept}: some artefacts need every '
                'checkpoint: leave this out'
            )
        steps.setdefault(Step(Kind.pretraining, model), {})
        for samples in finetuned if tasks else ():
            steps.setdefault(Step(Kind.finetuning, model, samples), {}).update(dict.fromkeys(tasks))
        if demand.rank:
            steps.setdefault(Step(Kind.rank, model, checkpoints[-1]), {})
    models = list(dict.fromkeys(step.model for step in steps))
    ordered = sorted(steps, key=lambda step: (models.index(step.model), step.kind.value))
    made = [replace(step, tasks=tuple(steps[step])) for step in ordered]
    for step in {step.tasks: step for step in made if step.kind is Kind.finetuning}.values():
        sweep = suite.load_finetuning(step.model or MAE_LM, step.samples, step.tasks)
        try:
            refuse_searched(sweep, suite.settings.finetuning)  # now, not after pretraining
        except InputError as error:
            raise InputError(f'settings of {suite.scale}: {error}') from None
    return [Step(Kind.tokenizer), Step(Kind.shards), *made]


def _list_demands(suite: Suite, artefacts: Sequence[Artefact]) -> list[Demand]:
    """The demands of every artefact for every pretraining seed, ordered by seed."""
    seeded: dict[int | None, list[Demand]] = {}
    for artefact in artefacts:
        for demand in artefact.demands:
            for seed in suite.list_seeds(artefact.name, demand.model):
                model = demand.model if seed is None else replace(demand.model, seed=seed)
                seeded.setdefault(seed, []).append(replace(demand, model=model))
    return [demand for seed in sorted(seeded, key=lambda seed: seed or 0) for demand in seeded[seed]]


def list_saved_samples(config: PretrainingConfig) -> list[int]:
    """Samples at which the run saves a checkpoint: at the first batch end at or after each interval, and at the end."""
    batch, interval = config.training.global_train_batch_size, config.training.checkpoint_interval_samples
    total = count_samples(config.training)
    due = {math.ceil(multiple / batch) * batch for multiple in range(interval, total, interval)}
    return sorted({*due, total})
