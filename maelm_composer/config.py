"""The keys of a recipe, with their types, ranges and defaults; ``recipe.load_config`` reads recipes into these classes.

There are four kinds of recipe: :class:`CorpusConfig` (``yamls/data/*.yaml``: documents to shards),
:class:`PretrainingConfig` (``yamls/*.yaml``: shards to a checkpoint), :class:`FinetuningConfig`
(``yamls/finetune/*.yaml``: a checkpoint to scores) and :class:`SuiteConfig` (``yamls/suite/*.yaml``: a benchmark). The
defaults are the paper's base setting (Meng et al., arXiv:2302.02060, preprint, Sec. 4.1, Tables 4 to 6). An object made
in Python is not checked, as a recipe is; give members of the enums (``Precision.bf16``), not their names.
"""

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

MISSING: Any = '???'  # OmegaConf's mark of a value that a recipe must give


def number(default: float, **limits: float) -> Any:
    """A field for a number within ``limits``: above, at_least, below, at_most; ``or_else`` is accepted too.

    A number whose field has no limits must be positive.
    """
    return field(default=default, metadata=limits)


SEED = {'at_least': 0, 'below': 2**31}  # Composer adds the number of the rank, and the sum must be below 2**32

# OmegaConf reads an Enum by member name; a member's value is the same text, as which JSON writes it.
# A variant of the model or the masking is one of these values; see yamls/ablations/.
SourceKind = StrEnum('SourceKind', 'documentation files huggingface')
EncoderMaskContent = StrEnum('EncoderMaskContent', 'mask_token random_token')
PositionIds = StrEnum('PositionIds', 'aligned consecutive')
RelativePositionFunction = StrEnum('RelativePositionFunction', 't5 authors')
RelativePositionInit = StrEnum('RelativePositionInit', 'normal local')
HeadBiasInit = StrEnum('HeadBiasInit', 'zeros unigram')
Schedule = StrEnum('Schedule', 'linear cosine constant')
Precision = StrEnum('Precision', 'fp32 bf16 auto')  # auto: the faster one on the device (precision.py)
AttentionBackend = StrEnum('AttentionBackend', 'auto dense sdpa')
Logger = StrEnum('Logger', 'tensorboard wandb mlflow')
TaskSource = StrEnum('TaskSource', 'huggingface files demo')
Implementation = StrEnum('Implementation', 'auto ours huggingface')
EvaluationProtocol = StrEnum('EvaluationProtocol', 'final half_epochs')
SelectionProtocol = StrEnum('SelectionProtocol', 'grid_on_one_seed full_grid')


class DecoderAttention(StrEnum):
    """What the decoder's layers attend to (Table 2)."""

    bidirectional = 'bidirectional'  # all positions of the row
    bidirectional_cross = 'bidirectional_cross'  # these, then the encoder's outputs
    causal_cross = 'causal_cross'  # the positions up to their own, then the encoder's outputs
    cross = 'cross'  # the encoder's outputs

    @property
    def has_self_attention(self) -> bool:
        return self in (
            DecoderAttention.bidirectional,
            DecoderAttention.bidirectional_cross,
            DecoderAttention.causal_cross,
        )

    @property
    def has_cross_attention(self) -> bool:
        return self in (DecoderAttention.bidirectional_cross, DecoderAttention.causal_cross, DecoderAttention.cross)

    @property
    def is_causal(self) -> bool:
        return self == DecoderAttention.causal_cross


class Sharding(StrEnum):
    ddp = 'ddp'  # replicate; fastest while model and optimizer fit on one device
    shard_grad_op = 'shard_grad_op'  # FSDP2, parameters kept gathered between forward and backward
    full_shard = 'full_shard'  # FSDP2, parameters gathered layer by layer


class TaskKind(StrEnum):
    classification = 'classification'
    regression = 'regression'
    span = 'span'  # questions on passages, some without an answer


@dataclass
class SourceConfig:
    """One source of documents; each kind reads only its own fields."""

    kind: SourceKind = SourceKind.documentation  # documentation: what is installed on the machine
    paths: list[str] = field(default_factory=list)  # files: globs of .parquet, or .txt and .jsonl (also .gz, .zst)
    text_column: str = 'text'  # files (.jsonl, .parquet) and huggingface
    dataset: str | None = None  # huggingface: hub name or local folder
    config_name: str | None = None  # huggingface: configuration of the data set
    split: str = 'train'  # huggingface: split of the data set
    revision: str | None = None  # huggingface: commit, tag or branch; null: the newest
    max_documents: int | None = None  # the first so many; null: all
    joins_lines: bool = False  # true: lines up to a blank one become one, as in books with wrapped lines
    note: str | None = None  # the corpus that this source replaces


@dataclass
class TokenizerConfig:
    vocab_size: int = number(32_768, above=261)  # with 256 bytes and 5 special tokens
    lowercase: bool = True  # true: the vocabulary is uncased
    max_training_bytes: int = 2_000_000_000  # UTF-8 bytes; larger corpora are sampled by document


@dataclass
class CorpusConfig:
    """Documents -> ``remote``/{tokenizer, train, validation, manifest.json}."""

    remote: str = MISSING  # local folder or s3://bucket/prefix
    max_seq_len: int = number(512, at_least=8)  # N, tokens of a packed row
    validation_fraction: float = number(0.005, above=0, below=1)  # share of the documents, chosen by hash
    documents_per_task: int = 10_000  # of a Ray task, which is repeated as a whole after a crash
    sources: list[SourceConfig] = field(default_factory=lambda: [SourceConfig()])
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)


@dataclass
class DataConfig:
    remote: str = MISSING  # output of `maelm shards`: local folder or s3://bucket/prefix
    local: str | None = None  # cache of unpacked shards; null: $MAELM_CACHE or ~/.cache/maelm
    num_workers: int = number(2, at_least=0)  # loader processes per rank in training; validation has none
    shuffle_block_size: int = 262_144  # rows that are shuffled together


@dataclass
class MaskingConfig:
    mlm_probability: float = number(0.15, above=0, below=1)  # share of masked positions; up to 1/6 fits every row
    encoder_mask_fraction: float = number(0.0, at_least=0, at_most=1)  # δ: share of the [MASK]s that the encoder sees
    encoder_mask_content: EncoderMaskContent = EncoderMaskContent.mask_token  # at masks that the encoder sees
    decoder_resets_masks: bool = False  # true: the decoder reads e_[MASK] at masks that the encoder saw
    position_ids: PositionIds = PositionIds.aligned  # consecutive: renumbered (Table 2)
    masks_special_tokens: bool = False  # true: [CLS] and [SEP] are masked like other tokens, as by the authors
    rounds_at_random: bool = False  # true: floor(mlm_probability·N + U[0, 1)) masks in a row, as by the authors


@dataclass
class DecoderConfig:
    num_hidden_layers: int = 4  # layers; model.decoder=null: no decoder, plain MLM
    hidden_size: int = 768  # width; if it is not the encoder's, linear layers convert
    num_attention_heads: int = 12  # heads; they divide the width
    intermediate_size: int = 3072  # width of the feed-forward network
    attention: DecoderAttention = DecoderAttention.bidirectional  # what the decoder's layers attend to (Table 2)
    relative_position_buckets: int = number(0, at_least=0)  # 0: no relative positions
    hidden_dropout_prob: float = number(0.0, at_least=0, below=1)  # dropout of hidden states
    attention_probs_dropout_prob: float = number(0.0, at_least=0, below=1)  # dropout of attention probabilities


@dataclass
class ModelConfig:
    vocab_size: int = number(32_768, above=5)  # with the 5 special tokens
    max_seq_len: int = 512  # N, tokens of a row: that of the shards
    num_hidden_layers: int = 12  # layers of the encoder
    hidden_size: int = 768  # width of the encoder
    num_attention_heads: int = 12  # heads; they divide the width
    intermediate_size: int = 3072  # width of the feed-forward network
    hidden_dropout_prob: float = number(0.1, at_least=0, below=1)  # dropout of hidden states
    attention_probs_dropout_prob: float = number(0.1, at_least=0, below=1)  # dropout of attention probabilities
    layer_norm_eps: float = 1e-5  # ε of every LayerNorm
    initializer_range: float = 0.02  # standard deviation of the initial weights
    relative_position_buckets: int = number(32, at_least=0)  # 0: no relative positions
    relative_position_max_distance: int = 128  # tokens; farther ones share the last bucket
    relative_position_function: RelativePositionFunction = RelativePositionFunction.t5  # T5's buckets or the authors'
    relative_position_init: RelativePositionInit = RelativePositionInit.normal  # local: higher biases for near tokens
    head_bias_init: HeadBiasInit = HeadBiasInit.zeros  # unigram: log frequencies of the training tokens
    decoder: DecoderConfig | None = field(default_factory=DecoderConfig)  # null: plain MLM

    @property
    def predicts_every_token(self) -> bool:
        """Whether the loss is that of all positions, as an autoregressive decoder's, instead of the masked ones'."""
        return self.decoder is not None and self.decoder.attention.is_causal


@dataclass
class OptimizerConfig:
    learning_rate: float = 5e-4  # peak, after the warm-up
    warmup_samples: int = number(20_480_000, at_least=0)  # rows of linear warm-up, from 0 to the peak
    schedule: Schedule = Schedule.linear  # of the learning rate after the warm-up: decay to 0, or its peak throughout
    adam_beta1: float = number(0.9, above=0, below=1)  # decay of the first moment
    adam_beta2: float = number(0.98, above=0, below=1)  # decay of the second moment
    adam_eps: float = 1e-6  # ε of AdamW
    weight_decay: float = number(0.01, at_least=0)  # of AdamW, on every parameter
    clip_norm: float = number(2.0, at_least=0)  # norm to which gradients are clipped; 0: no clipping


@dataclass
class TrainingConfig:
    max_samples: int = 256_000_000  # rows to train on, over all epochs
    extends: list[int] = field(default_factory=list)  # earlier values of max_samples, of the finished run to extend
    global_train_batch_size: int = 2048  # rows per optimizer step, over all ranks
    device_train_microbatch_size: int | None = None  # rows per forward pass; null: all rows of a rank
    precision: Precision = Precision.bf16  # auto: the faster of bf16 and fp32 on the device
    compile: bool = True  # torch.compile
    activation_checkpointing: bool = False  # true: layers are computed again in the backward pass, to save memory
    attention: AttentionBackend = AttentionBackend.auto  # kernel; the start screen shows the choice of auto
    sharding: Sharding = Sharding.ddp  # not ddp: the ranks divide weights, gradients and optimizer states
    eval_interval_samples: int = 20_480_000  # rows between validations
    eval_rows: int = 8192  # rows of a validation
    checkpoint_interval_samples: int = 20_480_000  # rows between checkpoints
    checkpoints_to_keep: int = number(-1, at_least=1, or_else=-1)  # -1: all, as time-to-accuracy curves need them
    max_outage_minutes: float = number(30.0, at_least=0, at_most=10**6)  # a run waits so long for an object store
    loggers: list[Logger] = field(default_factory=list)  # in addition to metrics.csv


@dataclass
class PretrainingConfig:
    """Shards -> checkpoints in ``save_folder``."""

    run_name: str = MISSING  # default: the recipe's file names, joined
    save_folder: str = MISSING  # default: runs/<run_name>; local folder or s3://bucket/prefix
    init_from: str | None = None  # checkpoint, or its exported folder, whose weights replace the initial ones
    seed: int = number(17, **SEED)  # of initial weights, order of the rows, masks and dropout
    data: DataConfig = field(default_factory=DataConfig)
    masking: MaskingConfig = field(default_factory=MaskingConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)


@dataclass
class TaskDataConfig:
    source: TaskSource = TaskSource.huggingface  # demo: made from documentation
    folder: str | None = None  # files: holds glue/<task>/*.parquet and squad_v2/*.parquet
    max_train_examples: int | None = None  # a sample, equal for all models and seeds; null: all
    max_train_examples_of: dict[str, int] = field(default_factory=dict)  # by task, overrides the number for all
    max_dev_examples: int | None = None  # a sample of each evaluation split; null: all

    def limit(self, task_name: str) -> int | None:
        return self.max_train_examples_of.get(task_name, self.max_train_examples)


@dataclass
class TaskConfig:
    """One task. ``tasks/catalogue.py`` declares the built-in ones; docs/tasks.md shows a recipe with another."""

    kind: TaskKind = MISSING  # selects the head, the loss and the metrics
    text_columns: list[str] = field(default_factory=list)  # one or two; span: the question's, then the passage's
    label_column: str = 'label'  # span: of the answers, each a pair of the lists text and answer_start
    label_names: list[str] = field(default_factory=list)  # classification: all names, in the order of the classes
    label_range: list[float] = field(default_factory=list, metadata={'above': -math.inf})  # regression: least, greatest
    metrics: list[str] = field(default_factory=list)  # the first is the score; empty: those of docs/tasks.md
    files: dict[str, str] = field(default_factory=dict)  # train and evaluation splits: .parquet, .csv or .jsonl files
    dataset: str | None = None  # in place of files: hub name or local folder
    config_name: str | None = None  # dataset: configuration of the data set
    splits: dict[str, str] = field(default_factory=dict)  # names in dataset; empty: train, and validation as dev
    group: str = 'glue_small'  # search space of the task unless sweep.search names the task


@dataclass
class SpanConfig:
    """SQuAD 2.0 (Table 6; docs/deviations.md lists the choices that the paper leaves open)."""

    doc_stride: int = 128  # tokens between the starts of two windows of a long passage
    max_query_length: int = 64  # tokens of a question; longer ones are cut
    n_best: int = 20  # starts and ends that are combined to answers
    max_answer_length: int = 30  # tokens


@dataclass
class SearchSpace:
    """The values of a grid search (Tables 5 and 6)."""

    learning_rate: list[float] = field(default_factory=list)  # values to try; empty: the recipe's own
    batch_size: list[int] = field(default_factory=list)  # values to try; empty: the recipe's own
    max_epochs: list[int] = field(default_factory=list)  # values to try; empty: the recipe's own
    warmup_proportion: list[float] = field(default_factory=list, metadata={'at_least': 0, 'below': 1})  # as above


@dataclass
class SweepConfig:
    tasks: list[str] = field(default_factory=list)  # names of the tasks; `task` in its place sweeps over one
    search: dict[str, SearchSpace] = field(default_factory=dict)  # by task, or by group: glue_small, glue_large, squad2
    selection: SelectionProtocol = SelectionProtocol.grid_on_one_seed  # full_grid: every point on every seed
    seeds: list[int] = field(  # grid_on_one_seed: every point on the first, the best point on the others
        default_factory=lambda: [1, 2, 3, 4, 5], metadata={'at_least': 0}
    )
    cpus_per_run: float = number(1.0, at_least=0.0001)  # cores that Ray reserves for a run
    gpus_per_run: float = number(0.25, at_least=0.0001, at_most=1, or_else=0)  # a share of one GPU; 0: CPU only
    max_retries: int = number(2, at_least=0)  # of a run whose worker died; one that raised waits for the next call


@dataclass
class FinetuningConfig:
    """One fine-tuning run on one task; ``sweep`` lists the runs of ``maelm sweep``."""

    task: str | None = None  # name of the task; null in a recipe of a sweep
    tasks: dict[str, TaskConfig] = field(default_factory=dict)  # tasks of one's own, by name
    checkpoint: str = MISSING  # run folder or checkpoint, local or s3://, or folder or name of a Hugging Face encoder
    save_folder: str = 'finetuned'  # of one JSON record and one file of predictions per run
    implementation: Implementation = Implementation.auto  # of a Hugging Face encoder; auto: ours if equivalent
    seed: int = number(1, at_least=0)  # of the head's initial weights, the order of the examples and dropout
    learning_rate: float = 3e-5  # peak, after the warm-up
    batch_size: int = 32  # rows of a step
    device_train_microbatch_size: int | None = None  # rows per forward pass; null: all rows of a step
    max_epochs: int = 3  # epochs
    warmup_proportion: float = number(0.06, at_least=0, below=1)  # share of the steps; linear decay to 0 follows
    adam_beta1: float = number(0.9, above=0, below=1)  # decay of the first moment
    adam_beta2: float = number(0.98, above=0, below=1)  # decay of the second moment
    adam_eps: float = 1e-6  # ε of AdamW
    weight_decay: float = number(0.01, at_least=0)  # of AdamW, on every parameter
    clip_norm: float = number(0.0, at_least=0)  # norm to which gradients are clipped; 0: no clipping
    dropout: float = number(0.1, at_least=0, below=1)  # of the encoder and the head
    max_seq_len: int = number(512, at_least=16)  # at most the checkpoint's own
    evaluation: EvaluationProtocol = EvaluationProtocol.final  # half_epochs: the best of two evaluations per epoch
    precision: Precision = Precision.bf16  # auto: the faster of bf16 and fp32 on the device
    saves_model: bool = False  # true: the best weights are saved, for export
    measures_rank: bool = False  # effective rank of the last layer before the first epoch and after each
    data: TaskDataConfig = field(default_factory=TaskDataConfig)
    span: SpanConfig = field(default_factory=SpanConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)


@dataclass
class SuiteConfig:
    """The recipes of the benchmark suite at one scale (``yamls/suite/<scale>.yaml``).

    Each list holds files and ``key=value`` pairs, as a command line does.
    """

    extends: str = ''  # a scale, over whose file this one is merged, key by key
    data: list[str] = field(default_factory=list)  # recipe of the shards
    pretraining: list[str] = field(default_factory=list)  # recipe of every model, before the model's overlay
    pretraining_of: dict[str, list[str]] = field(default_factory=dict)  # by overlay, merged after it
    finetuning: list[str] = field(default_factory=list)  # recipe of the sweep over all tasks of the scale
    rank_tokens: int = 5_000_000  # tokens measured for a rank record
    pretraining_seeds: list[int] = field(default_factory=list, metadata=SEED)  # of every model; empty: the recipe's
    pretraining_seeds_of: dict[str, list[int]] = field(default_factory=dict, metadata=SEED)  # of an artefact or overlay
