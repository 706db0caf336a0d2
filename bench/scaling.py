"""Estimates the memory and the traffic of a rank for any size, sharding and number of ranks, without torch.

``python -m bench.scaling`` prints the tables of docs/scaling.md. All sizes are in bytes. Weights,
gradients, Adam's moments and all traffic are fp32; matrix products and the activations kept for the backward pass are
bf16. Memory is that of MAE-LM's own decoder or of none; cross-attention is not counted.
"""

from collections.abc import Sequence
from math import ceil

from maelm_composer.config import DecoderConfig, ModelConfig, PretrainingConfig, Sharding
from maelm_composer.model.cost import Parameter, count_parameters, list_parameters
from maelm_composer.recipe import load_config
from maelm_composer.suite.cost import PEAKS
from maelm_composer.suite.plan import UTILIZATION
from maelm_composer.suite.steps import Kind
from maelm_composer.training.plan import count_positions, count_row_flops

FP32, BF16 = 4, 2

RECIPES = ('base', 'base_pp', 'large_pp')
WORLD_SIZES = (1, 8, 64, 512)
GPUS = ['1 GPU', *(f'{n} GPUs' for n in WORLD_SIZES[1:])]
GPU_BYTES = 80e9
# Bytes per second that a ring passes on: NVLink within a machine and eight 400 Gb/s cards between machines are alike.
FAST_LINK, SLOW_LINK = 300e9, 10e9  # the slow link is one 100 Gb/s card per machine


def list_groups(model: ModelConfig) -> list[list[Parameter]]:
    """The parameters that FSDP2 gathers together: the root's (embeddings, head, norms), then each layer's."""
    parts = list_parameters(model).values()
    root = [parameter for outside, *_ in parts for parameter in outside]
    return [root, *(layer for _, *layers in parts for layer in layers)]


def count_padded(parameters: Sequence[Parameter], world_size: int) -> int:
    """Numbers in all shards of ``parameters``; FSDP2 pads the first axis to a multiple of the number of ranks."""
    return sum(ceil(first / world_size) * world_size * rest for first, rest in parameters)


def collect_payloads(model: ModelConfig, sharding: Sharding, world_size: int, passes: int = 1) -> dict[str, int]:
    """Bytes of the whole tensors that each kind of collective moves in one optimizer step.

    DDP reduces once per step. FSDP2 under Composer gathers and reduces in each of the ``passes`` microbatches of
    a step; the root is gathered once per microbatch under either FSDP2 sharding.
    """
    groups = list_groups(model)
    if sharding == Sharding.ddp:
        return {'all_reduce': FP32 * sum(count_padded(group, 1) for group in groups)}
    root, *layers = (FP32 * passes * count_padded(group, world_size) for group in groups)
    gathers = 2 if sharding == Sharding.full_shard else 1
    return {'all_gather': root + gathers * sum(layers), 'reduce_scatter': root + sum(layers)}


def count_sent(payloads: dict[str, int], world_size: int) -> float:
    """Bytes that a rank sends: in a ring of n, (n − 1)/n of a tensor, and twice that for an all-reduce."""
    times = {'all_reduce': 2, 'all_gather': 1, 'reduce_scatter': 1}
    return sum(times[name] * size for name, size in payloads.items()) * (world_size - 1) / world_size


def estimate_state(model: ModelConfig, sharding: Sharding, world_size: int) -> dict[str, float]:
    """Bytes on one rank that do not depend on the number of rows in a batch."""
    sizes = [FP32 * count_padded(group, 1) for group in list_groups(model)]
    total, largest = sum(sizes), max(sizes)
    kept = total / world_size
    match sharding:
        case Sharding.ddp:
            kept = total
            working = total if world_size > 1 else 0  # DDP copies the gradients into buckets
        case Sharding.shard_grad_op:
            working = total + 2 * largest  # all weights; one group's gradients and the copy that is reduced
        case Sharding.full_shard:
            root, *layers = sizes
            working = root + 2 * max(layers) + 2 * largest  # a layer's weights, the next one's, and gradients as above
    return {
        'weights': kept,
        'gradients': kept,
        'moments': 2 * kept,
        'working': working,
        # Autocast's copies of the weights, which the backward pass holds under every sharding.
        'bf16 weights': total * BF16 / FP32,
    }


def estimate_activations(config: PretrainingConfig) -> float:
    """Bytes of activations that one row keeps for the backward pass: fused attention, no recomputation."""
    model, decoder = config.model, config.model.decoder
    visible, masked = count_positions(config)
    stacks: list[tuple[ModelConfig | DecoderConfig, int]] = [(model, visible)]
    if decoder is not None:
        stacks.append((decoder, model.max_seq_len))
    kept = 0.0
    for stack, length in stacks:
        size = stack.hidden_size
        # The second term is the LayerNorm of the embeddings.
        kept += length * (stack.num_hidden_layers * _keep_a_token(stack) + _keep_a_norm(stack))
        kept += BF16 * length**2 * (stack.num_attention_heads if stack.relative_position_buckets else 1)  # SDPA's bias
    # The last layer computes only M positions; of the other positions the layer keeps input, keys and values.
    kept -= (length - masked) * (_keep_a_token(stack) - BF16 * 3 * size)
    logits = masked * model.vocab_size * (BF16 + FP32)  # the logits and their log-softmax
    return kept + logits + masked * size * (3 * BF16 + FP32)


def _keep_a_token(stack: ModelConfig | DecoderConfig) -> float:
    """Bytes of one token in one layer."""
    size, inner = stack.hidden_size, stack.intermediate_size
    attention = BF16 * (1 + 3 + 1) * size  # input, query, key and value, output
    feed_forward = BF16 * (size + 2 * inner)  # input, before and after GELU
    return attention + feed_forward + 2 * _keep_a_norm(stack)


def _keep_a_norm(stack: ModelConfig | DecoderConfig) -> float:
    """Bytes of one token: LayerNorm's input, and dropout's mask of one byte per number."""
    return (FP32 + (1 if stack.hidden_dropout_prob else 0)) * stack.hidden_size


def choose_passes(config: PretrainingConfig, sharding: Sharding, world_size: int) -> tuple[int, int]:
    """Forward passes of a step on one rank, and the rows of each: as many as fit into 90 % of ``GPU_BYTES``."""
    share = rows = config.training.global_train_batch_size // world_size
    free = 0.9 * GPU_BYTES - sum(estimate_state(config.model, sharding, world_size).values())
    while rows > 1 and rows * estimate_activations(config) > free:
        rows //= 2
    return ceil(share / rows), rows


def estimate_compute(config: PretrainingConfig, world_size: int) -> float:
    """Seconds of an optimizer step without communication."""
    rows = config.training.global_train_batch_size / world_size
    _, peak = PEAKS['h100']  # of dense bf16
    return count_row_flops(config) * rows / (UTILIZATION[Kind.pretraining]['gpu'] * peak)


def estimate_communication(config: PretrainingConfig, sharding: Sharding, world_size: int, link: float) -> float:
    """Seconds to send a step's bytes at ``link`` bytes per second, without overlap with computation or latency."""
    passes, _ = choose_passes(config, sharding, world_size)
    return count_sent(collect_payloads(config.model, sharding, world_size, passes), world_size) / link


def draw_tables() -> dict[str, str]:
    """The Markdown tables of docs/scaling.md by name."""
    tables = {
        'batch': [['', 'parameters', 'activations of a row, MB', *GPUS]],
        'memory': [['', 'training.sharding', *GPUS]],
        'traffic': [['', 'training.sharding', *GPUS]],
        'time': [['', 'GPUs', 'compute, ms', *(f'`{sharding.value}`, fast / slow link, ms' for sharding in Sharding)]],
    }
    for name in RECIPES:
        config = load_config(PretrainingConfig, [f'yamls/{name}.yaml'], ['run_name=plan', 'save_folder=plan'])
        parameters, activations = sum(count_parameters(config.model).values()), estimate_activations(config)
        batches = []
        for n in WORLD_SIZES:
            passes, rows = choose_passes(config, Sharding.ddp, n)
            batches.append(f'{passes * rows} = {passes} × {rows}')
        tables['batch'].append([name, f'{parameters:,}', f'{activations / 1e6:.0f}', *batches])
        for sharding in Sharding:
            held = [sum(estimate_state(config.model, sharding, n).values()) for n in WORLD_SIZES]
            sent = [count_sent(collect_payloads(config.model, sharding, n), n) for n in WORLD_SIZES]
            for table, sizes in (('memory', held), ('traffic', sent)):
                tables[table].append([name, f'`{sharding.value}`', *(f'{size / 1e9:.2f}' for size in sizes)])
        for n in WORLD_SIZES[1:]:
            links = (FAST_LINK, SLOW_LINK if n > 8 else FAST_LINK)
            times = [[1e3 * estimate_communication(config, s, n, link) for link in links] for s in Sharding]
            cells = [f'{fast:.0f} / {slow:.0f}' for fast, slow in times]
            tables['time'].append([name, str(n), f'{1e3 * estimate_compute(config, n):.1f}', *cells])
    return {name: _to_markdown(*lines) for name, lines in tables.items()}


def _to_markdown(head: Sequence[str], *lines: Sequence[str]) -> str:
    rule = ['---', *('---:' for _ in head[1:])]
    return ''.join('| ' + ' | '.join(line) + ' |\n' for line in (head, rule, *lines))


if __name__ == '__main__':
    for table_name, table in draw_tables().items():
        print(f'{table_name}\n\n{table}')
