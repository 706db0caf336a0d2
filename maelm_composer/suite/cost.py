"""FLOPs of fine-tuning and of rank measurements, computed from their recipes alone. Imports no torch."""

from dataclasses import replace

from maelm_composer.config import FinetuningConfig, ModelConfig, TaskDataConfig
from maelm_composer.errors import InputError
from maelm_composer.model.cost import count_forward_flops
from maelm_composer.sweep.search import count_evaluations, list_points
from maelm_composer.tasks.catalogue import Task
from maelm_composer.tasks.sources import count_characters, load_task_data
from maelm_composer.training.plan import FORWARD_AND_BACKWARD

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


def count_finetuning_flops(config: FinetuningConfig, model: ModelConfig, task: Task) -> float:
    """FLOPs of a run of the search of ``task``. The best point's epochs are not known: the grid's mean is assumed.

    Raises:
        InputError: the rows of an own task are not on this machine.
    """
    rows, dev_rows, length = _measure(task, config.data)
    rows = min(rows, config.data.limit(task.name) or rows)
    dev_rows = min(dev_rows, config.data.max_dev_examples or dev_rows)
    points = list_points(config, task)
    epochs = sum(point.max_epochs for point in points) / len(points)
    passes = FORWARD_AND_BACKWARD * epochs * rows + count_evaluations(config, epochs) * dev_rows
    if config.measures_rank:
        passes += (epochs + 1) * dev_rows
    return passes * _count_encoder_flops(model, min(length, config.max_seq_len, model.max_seq_len))


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


def count_rank_flops(model: ModelConfig, tokens: int) -> float:
    """FLOPs of the passes over ``tokens`` without and with [MASK], and of three Gram matrices for every layer."""
    forward = 2 * _count_encoder_flops(model, model.max_seq_len) / model.max_seq_len
    gram = 2 * 2 * model.hidden_size**2 * (model.num_hidden_layers + 1)
    return tokens * (forward + gram)


def _count_encoder_flops(model: ModelConfig, length: int) -> float:
    """FLOPs of the encoder's forward pass over one sequence."""
    alone = replace(model, decoder=None, max_seq_len=length)
    return float(count_forward_flops(alone, length, length)['encoder'])
