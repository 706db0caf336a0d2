"""FLOPs, runs and bytes of a step, computed from its recipes alone. Imports no torch."""

from dataclasses import dataclass, replace

from maelm_composer.config import FinetuningConfig, ModelConfig, PretrainingConfig, TaskDataConfig
from maelm_composer.errors import InputError
from maelm_composer.model.cost import count_forward_flops, count_parameters
from maelm_composer.sweep.search import count_evaluations, count_runs, list_points
from maelm_composer.tasks.catalogue import Task, find_task
from maelm_composer.tasks.sources import count_characters, load_task_data
from maelm_composer.training.plan import FORWARD_AND_BACKWARD, count_training_flops

# Training rows, rows of all dev sets (official counts), and mean tokens per row with a vocabulary of 8,192.
TASK_SIZES = {
    'mnli': (392_702, 19_647, 40),
    'qqp': (363_846, 40_430, 31),
    'qnli': (104_743, 5_463, 54),
    'sst2': (67_349, 872, 14),
    'cola': (8_551, 1_043, 12),
    'rte': (2_490, 277, 75),
    'mrpc': (3_668, 408, 58),
    'stsb': (5_749, 1_500, 34),
    'squad2': (131_000, 12_000, 180),
    'demo_sentence': (600, 200, 18),
    'demo_pair': (600, 200, 20),
    'demo_regression': (600, 200, 28),
    'demo_span': (600, 200, 55),
}
CHARACTERS_PER_TOKEN = 4.0  # of these tasks, with that vocabulary
STATE_BYTES = 16  # per parameter of a checkpoint: the weights twice, and Adam's two moments
SHARD_BYTES_PER_TOKEN = 1.6  # compressed; 2.2 when unpacked in the cache


@dataclass(frozen=True)
class Cost:
    """The cost of one step from nothing."""

    flops: float = 0.0
    runs: int = 1
    disk_bytes: float = 0.0
    unknown: str = ''  # why ``flops`` is 0


def cost_pretraining(config: PretrainingConfig, num_checkpoints: int) -> Cost:
    """The cost of training. Validation and saving are negligible beside it."""
    parameters = sum(count_parameters(config.model).values())
    return Cost(count_training_flops(config), 1, num_checkpoints * STATE_BYTES * parameters)


def cost_finetuning(config: FinetuningConfig, model: ModelConfig, task_name: str) -> Cost:
    """The cost of the whole search of one task. The best point's epochs are not known: the grid's mean is assumed."""
    task = find_task(task_name, config.tasks)
    points, runs = list_points(config, task), count_runs(config, task)
    try:
        rows, dev_rows, length = _measure(task, config.data)
    except InputError as error:  # the rows are not on this machine; everything else can be planned
        return Cost(runs=runs, unknown=str(error))
    rows = min(rows, config.data.limit(task_name) or rows)
    dev_rows = min(dev_rows, config.data.max_dev_examples or dev_rows)
    epochs = sum(point.max_epochs for point in points) / len(points)
    passes = FORWARD_AND_BACKWARD * epochs * rows + count_evaluations(config, epochs) * dev_rows
    if config.measures_rank:
        passes += (epochs + 1) * dev_rows
    return Cost(runs * passes * _forward(model, min(length, config.max_seq_len, model.max_seq_len)), runs)


def _measure(task: Task, config: TaskDataConfig) -> tuple[int, int, int]:
    """As :data:`TASK_SIZES`; those of an own task from its files. Raises InputError where they cannot be read."""
    if not task.is_own:
        return TASK_SIZES[task.name]
    if task.dataset is not None:
        raise InputError(f'a plan does not load the rows of {task.dataset}')
    data = load_task_data(task, config)
    dev = [row for rows in data.evaluation.values() for row in rows]
    both = [*data.train, *dev]
    return len(data.train), len(dev), round(count_characters(both) / len(both) / CHARACTERS_PER_TOKEN)


def cost_rank(model: ModelConfig, tokens: int) -> Cost:
    """The cost of forward passes without and with [MASK], and of three Gram matrices for every layer."""
    forward = 2 * _forward(model, model.max_seq_len) / model.max_seq_len
    gram = 2 * 2 * model.hidden_size**2 * (model.num_hidden_layers + 1)
    return Cost(tokens * (forward + gram))


def _forward(model: ModelConfig, length: int) -> float:
    """FLOPs of the encoder's forward pass over one sequence."""
    alone = replace(model, decoder=None, max_seq_len=length)
    return float(count_forward_flops(alone, length, length)['encoder'])
