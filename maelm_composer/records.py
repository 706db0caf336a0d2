"""The three kinds of record that runs leave, with their provenance, and their JSON files. Imports no torch.

A record without a ``version`` field is of version 1, whose code did not always write ``precision``, ``unigram_entropy``
and ``influences``. In version 2 a run without one of these fields has no such value.
"""

import base64
import functools
import importlib.metadata
import json
import os
import platform
import subprocess
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from maelm_composer import __version__
from maelm_composer.config import Precision
from maelm_composer.errors import InputError
from maelm_composer.files import parse_json, write_json
from maelm_composer.processor import describe_processor
from maelm_composer.recipe import hash_config

PACKAGES = ('torch', 'mosaicml', 'mosaicml-streaming', 'transformers', 'tokenizers', 'numpy')
CONTENT_HASH = 'content hash of data.remote'  # key of a pretraining run's identity
DIVERGED = 'diverged'  # begins the ending of a run whose loss or gradient was not finite
STRICT = ConfigDict(extra='forbid', strict=True)
FileName = Annotated[str, Field(pattern='^[^/.][^/]*$')]  # records are written under these names
AnyRecord = TypeVar('AnyRecord', bound='Record')


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Provenance:
    """Software and hardware of a run, and the hash of its recipe."""

    maelm_composer: str  # version
    git_revision: str | None  # of the source, with ``-dirty`` if files differ from it; None outside a checkout
    python: str
    packages: dict[str, str]  # name -> version
    platform: str
    cpu: str  # name (instruction set); of earlier records the name alone
    cpu_count: int | None
    recipe_hash: str


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EncoderIdentity:
    """Which encoder was fine-tuned or measured; fields of its pretraining are None if they are not known."""

    uri: str
    hash: str  # SHA-256 of model.safetensors, or of a Hugging Face model's configuration, tokenizer and weights
    run_name: FileName | None
    samples: int | None  # rows trained on
    recipe_hash: str | None
    training_seconds: float | None
    implementation: Literal['ours', 'huggingface']


@dataclass(frozen=True, order=True, config=STRICT)
class Point:
    """A point of a fine-tuning search space; points sort as in a grid of ascending lists."""

    learning_rate: float
    batch_size: int
    max_epochs: int
    warmup_proportion: float

    def __str__(self) -> str:
        size = f'batch {self.batch_size}, epochs {self.max_epochs}'
        return f'lr {self.learning_rate:g}, {size}, warm-up {self.warmup_proportion:g}'


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Process:
    """On what a process of a pretraining run trained."""

    device: str
    world_size: int
    provenance: Provenance
    since: int = 0  # rows that the run had been trained on before


class _Checked(BaseModel):
    model_config = STRICT | ConfigDict(frozen=True)


class Record(_Checked):
    version: Literal[1, 2] = 2
    provenance: Provenance


class _Pretraining(Record):
    status: str
    run_name: FileName
    identity: dict[str, Any]  # everything that decides the weights, flat
    world_size: int
    device: str
    precision: str | None = None  # with the reason for it
    attention: dict[str, str]  # stack -> backend
    tokenizer_hash: str
    flops: int | None = None  # of the whole run
    unigram_entropy: float | None = None  # of the whole validation split, nats
    eval_rows: int | None = None  # the first rows of this split, on which the run is validated; None: not recorded
    init_from: EncoderIdentity | None = None  # whose weights the run began with
    since: int = 0  # of the last process, as Process's
    earlier: list[Process] = []  # of a resumed run: on what it was trained before, where that differs

    @property
    def processes(self) -> list[Process]:
        """On what the run was trained, in order; like processes that follow each other are one."""
        own = {name: getattr(self, name) for name in ('device', 'world_size', 'provenance', 'since')}
        return [*self.earlier, Process(**own)]

    def following(self, before: '_Pretraining') -> Self:
        """This record of a process that resumes the run of ``before``, with that run's processes as far as saved."""
        past = [process for process in before.processes if process.since < self.since]
        if past and replace(past[-1], since=self.since) == self.processes[-1]:
            return self.model_copy(update={'earlier': past[:-1], 'since': past[-1].since})
        return self.model_copy(update={'earlier': past})

    @property
    def seed(self) -> int:
        return int(self.identity['seed'])

    @property
    def data_hash(self) -> str:
        return str(self.identity[CONTENT_HASH])

    @property
    def training_precision(self) -> Precision:
        return Precision[self.identity['training.precision']]


class UnfinishedPretraining(_Pretraining):
    """A pretraining run that has begun; a killed one stays ``running``."""

    status: Literal['running', 'stopped', 'failed'] = 'running'
    ending: str | None = None  # how it stopped, or the line of the error

    @property
    def has_diverged(self) -> bool:
        """Whether its loss or gradient was not finite, which it meets again whenever it is resumed."""
        return self.status == 'failed' and str(self.ending).startswith(DIVERGED)


class PretrainingRecord(_Pretraining):
    """A finished pretraining run."""

    status: Literal['finished'] = 'finished'
    samples: int  # rows
    batches: int  # optimizer steps
    tokens: int  # positions, padding included
    training_seconds: float
    device_hours: float  # of a GPU, or of a process on CPU threads, whose number ``device`` tells
    tokens_per_second: float
    eval_loss: float  # of the last validation, nats
    eval_perplexity: float
    eval_accuracy: float


class _Finetuning(Record):
    kind: Literal['finetuning'] = 'finetuning'
    key: FileName
    status: str
    error: str | None
    task: str
    seed: int
    point: Point
    protocol: dict[str, Any]  # the settings that all runs of a sweep share and that decide the scores
    checkpoint: EncoderIdentity
    data_hash: str


class FailedFinetuning(_Finetuning):
    """A fine-tuning run that ended with ``error``."""

    status: Literal['failed'] = 'failed'
    error: str
    traceback: str | None = None


class Evaluation(_Checked):
    step: int
    score: float


class RankAtEpoch(_Checked):
    epoch: int
    effective_rank: int


class FinetuningRecord(_Finetuning):
    """A finished fine-tuning run; scores are fractions."""

    status: Literal['finished'] = 'finished'
    metrics: dict[str, float]
    score: float  # the task's own metric
    baseline: float  # score of the best constant answer
    influences: dict[str, str] = {}  # metric -> :func:`pack_numbers`, one a row
    evaluations: list[Evaluation]
    best_step: int
    effective_rank: int | None  # of the last weights
    rank_curve: list[RankAtEpoch]
    steps: int
    train_loss: float
    train_examples: int
    answers_not_in_context: int
    padded_share: float
    examples_per_second: float  # in a span task windows
    training_seconds: float
    evaluation_seconds: float
    device_hours: float  # as PretrainingRecord's
    device: str


class LayerRanks(_Checked):
    """The measurements of one layer (docs/analysis.md)."""

    layer: int
    rank_real: int
    rank_with_masks: int
    rank_real_with_masks: int
    rank_masks: int
    mask_outside_share: float
    real_outside_share: float
    principal_angles_degrees: list[float]
    rank_one_residual: float


class RankRecord(Record):
    """Effective ranks of an encoder's layers."""

    kind: Literal['rank'] = 'rank'
    key: FileName
    checkpoint: EncoderIdentity
    data: dict[str, Any]  # the rows' source; ``hash`` decides the rows
    tokens: int  # without [CLS], [SEP] and padding
    mask_tokens: int  # those of them that are [MASK] in the input with [MASK]
    max_tokens: int
    mlm_probability: float
    threshold: float
    centered: bool
    precision: str
    seed: int  # of the masks
    layers: Annotated[list[LayerRanks], Field(min_length=1)]
    hidden_size: int
    device: str
    seconds: float

    @property
    def data_hash(self) -> str:
        return str(self.data['hash'])


def _parse(adapter: TypeAdapter[AnyRecord], kind: str, text: str | bytes, where: str) -> AnyRecord:
    plain = parse_json(text, where, remedy='restore or remove it')
    try:
        return adapter.validate_json(json.dumps({'version': 1} | plain))
    except ValidationError as error:
        first = error.errors()[0]
        # The status, by which pydantic has chosen a class, comes before the field.
        field = [str(part) for part in first['loc'] if part not in ('running', 'stopped', 'finished', 'failed')]
        raise InputError(f'{where} is no {kind} record: {": ".join([*field, first["msg"]])}') from None


Pretraining = UnfinishedPretraining | PretrainingRecord
Finetuning = FinetuningRecord | FailedFinetuning
_BY_STATUS = Field(discriminator='status')
# A parser takes the JSON text of a record and the name of its file. Its InputError names the file and the field.
Parser = Callable[[str | bytes, str], AnyRecord]
parse_pretraining: Parser[Pretraining] = partial(_parse, TypeAdapter(Annotated[Pretraining, _BY_STATUS]), 'pretraining')
parse_finetuning: Parser[Finetuning] = partial(_parse, TypeAdapter(Annotated[Finetuning, _BY_STATUS]), 'fine-tuning')
parse_rank: Parser[RankRecord] = partial(_parse, TypeAdapter(RankRecord), 'rank')


def load_record(path: Path, parse: Parser[AnyRecord]) -> AnyRecord:
    return parse(path.read_bytes(), str(path))


def load_folder(folder: Path, parse: Parser[AnyRecord]) -> list[AnyRecord]:
    """The records of every JSON file in ``folder``, by name; none if there is no such folder."""
    try:
        names = sorted(os.listdir(folder))  # a glob finds nothing in a folder that may not be read
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [load_record(folder / name, parse) for name in names if name.endswith('.json')]


def format_record(record: Record) -> dict[str, Any]:
    """``record``, JSON-ready; a field that has a default and no value is left out, as in the file it was read from."""
    plain = record.model_dump()
    for name, field in type(record).model_fields.items():
        if not field.is_required() and not plain[name]:
            del plain[name]
    if record.version == 1:
        del plain['version']
    return plain


def write_record(path: Path, record: Record) -> None:
    """Write ``record``, whole or not at all."""
    write_json(path, format_record(record))


def pack_numbers(values: Sequence[float] | np.ndarray) -> str:
    """Text that holds three significant digits of each value: little-endian half precision, zlib, base64."""
    return base64.b64encode(zlib.compress(np.asarray(values, '<f2').tobytes(), 9)).decode()


def unpack_numbers(text: str) -> np.ndarray:
    """The values in a text of :func:`pack_numbers`, in double precision."""
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), '<f2').astype(float)


def collect_provenance(config: Any) -> Provenance:
    """The provenance of a run of ``config`` on this machine."""
    return Provenance(
        maelm_composer=__version__,
        git_revision=_git_revision(),
        python=platform.python_version(),
        packages={name: importlib.metadata.version(name) for name in PACKAGES},
        platform=platform.platform(),
        cpu=describe_processor(),
        cpu_count=os.cpu_count(),
        recipe_hash=hash_config(config),
    )


@functools.cache  # the files may change while this process goes on with the code that it has imported
def _git_revision() -> str | None:
    root = Path(__file__).resolve().parent.parent
    if not (root / '.git').exists():
        return None
    command = ['git', '-C', str(root), 'describe', '--always', '--dirty', '--abbrev=40', '--exclude=*']
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
