"""The tables of docs/scaling.md, the traffic that they predict, and runs that change their number of ranks.

``PYTHONPATH=. composer -n 2 tests/training/test_scaling.py RECIPE.yaml ... key=value ...`` trains and prints, as JSON,
what one optimizer step of rank 0 moved: bytes of every kind of collective, and bytes really written to sockets.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench import scaling
from maelm_composer.config import (
    AttentionBackend,
    DecoderAttention,
    DecoderConfig,
    ModelConfig,
    PretrainingConfig,
    Sharding,
)
from maelm_composer.masking.collate import build_collator
from maelm_composer.model.layer import Layer
from maelm_composer.model.maelm import build_model
from maelm_composer.recipe import load_config, split_arguments
from maelm_composer.training.plan import count_positions
from maelm_composer.training.run import pretrain
from maelm_composer.training.run_record import read_metrics

ROOT = Path(__file__).resolve().parents[2]
COLLECTIVES = {
    'allreduce_': 'all_reduce',
    '_allgather_base_': 'all_gather',
    '_reduce_scatter_base_': 'reduce_scatter',
    'broadcast_': 'broadcast',
}
# Wide enough that what is not weights (log lines, the gradient's norm, stop signals) is below a thousandth.
TRAFFIC = (
    'model.vocab_size=512',
    'model.hidden_size=256',
    'model.intermediate_size=1024',
    'model.decoder.hidden_size=256',
    'model.decoder.intermediate_size=1024',
    'training.max_samples=128',
    'training.eval_interval_samples=128',
)


class CollectiveCounter(TorchDispatchMode):
    """Adds up the bytes of the whole tensors that collectives work on, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == 'c10d' and func._opname in COLLECTIVES:
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            self.sizes[COLLECTIVES[func._opname]] += max(t.numel() * t.element_size() for t in tensors)
        return func(*args, **(kwargs or {}))


def count_traffic(config: PretrainingConfig) -> dict[str, int]:
    """Train, and return what went between the last optimizer step but two and the one after it."""
    snapshots: list[Counter[str]] = []

    def take_snapshot(*_) -> None:
        written = Path('/proc/self/io').read_text().split('wchar: ')[1].split()[0]
        snapshots.append(counter.sizes + Counter(written=int(written)))

    with CollectiveCounter() as counter:
        hook = register_optimizer_step_post_hook(take_snapshot)
        pretrain(config)
        hook.remove()
    return dict(snapshots[-2] - snapshots[-3])


@pytest.mark.parametrize('attention', DecoderAttention)
@pytest.mark.parametrize('ranks', [1, 7])
def test_padded_parameters_are_those_of_the_model(attention, ranks):
    decoder = DecoderConfig(2, 16, 2, 48, attention, relative_position_buckets=8)
    model = ModelConfig(101, 12, 3, 24, 2, 96, relative_position_buckets=8, decoder=decoder)
    root, *layers = scaling.list_groups(model)

    def pad(parameter: torch.Tensor) -> int:
        return -(-len(parameter) // ranks) * ranks * parameter[0].numel()

    built = build_model(model, seed=0)
    of_layers = [[pad(p) for p in m.parameters()] for m in built.modules() if isinstance(m, Layer)]
    assert [scaling.count_padded(layer, ranks) for layer in layers] == [sum(sizes) for sizes in of_layers]
    everything = sum(pad(p) for p in built.parameters())
    assert scaling.count_padded(root, ranks) == everything - sum(map(sum, of_layers))


def test_visible_and_masked_positions_are_the_collators():
    for fraction in (0.0, 0.5, 1.0):
        config = PretrainingConfig(run_name='x', save_folder='x')
        config.masking.encoder_mask_fraction = fraction
        batch = build_collator(config)([{'input_ids': torch.arange(4, 516).numpy(), 'row': 0, 'epoch': 0}])
        assert count_positions(config) == (batch.input_ids.shape[1], batch.predicted_index.shape[1])


def test_the_document_holds_the_tables():
    text = (ROOT / 'docs/scaling.md').read_text()
    tables = scaling.draw_tables()
    assert len(tables) == 4
    for name, table in tables.items():
        assert f'\n\n{table}\n' in text, f'{name} is out of date: python -m bench.scaling prints it'


@pytest.mark.parametrize('has_decoder', [False, True])
def test_activations_of_a_row_are_what_autograd_keeps(has_decoder):
    """No relative bias and no dropout, for which the CPU's kernels keep more than a GPU's."""
    model = ModelConfig(2048, 128, 3, 256, 4, 1024, 0.0, 0.0, relative_position_buckets=0)
    model.decoder = DecoderConfig(2, 256, 4, 1024) if has_decoder else None
    config = PretrainingConfig(run_name='x', save_folder='x', model=model)
    config.masking.encoder_mask_fraction = 0.0 if has_decoder else 1.0
    few, more = (_measure_kept(config, rows) for rows in (2, 6))
    of_a_row = (more - few) / 4
    assert scaling.estimate_activations(config) == pytest.approx(of_a_row, rel=0.05)
    state = scaling.estimate_state(model, Sharding.ddp, 1)
    assert state['bf16 weights'] == pytest.approx(few - 2 * of_a_row, rel=0.1)


def _measure_kept(config: PretrainingConfig, rows: int) -> int:
    """Bytes that the forward pass in bf16 keeps for the backward one."""
    model = build_model(config.model, seed=0)
    model.select_attention(AttentionBackend.sdpa)
    ids = torch.arange(128).remainder(1000).add(4).numpy()
    ids[[0, -1]] = 0, 2
    batch = build_collator(config)([{'input_ids': ids, 'row': row, 'epoch': 0} for row in range(rows)])
    kept: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), torch.autocast('cpu', torch.bfloat16):
        model(batch)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.slow
@pytest.mark.parametrize('passes', [1, 2])
@pytest.mark.parametrize('sharding', Sharding)
def test_two_ranks_send_what_is_predicted(recipe, sharding, passes):
    overrides = (
        *TRAFFIC,
        f'training.sharding={sharding.value}',
        f'training.device_train_microbatch_size={8 // passes}',
    )
    launcher = [str(Path(sys.executable).with_name('composer')), '-n', '2']
    result = subprocess.run(
        [*launcher, __file__, 'recipe.yaml', 'save_folder=run', *overrides],
        capture_output=True,
        text=True,
        env=os.environ | {'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT)},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    measured = json.loads(result.stdout[result.stdout.rindex('{') :].splitlines()[0])
    written = measured.pop('written')
    predicted = scaling.collect_payloads(recipe(*overrides).model, sharding, 2, passes)
    print(f'\n{sharding.value}, {passes} passes: predicted {predicted}, measured {measured}, written {written:,}')
    assert measured['broadcast'] < 16  # Composer's; constant tables are not sent
    for name, size in predicted.items():
        assert measured[name] == pytest.approx(size, rel=0.01)
    # gloo (torch 2.7) makes a reduce-scatter of an all-reduce, of which each rank forgets what is not its own.
    of_gloo = predicted | {'reduce_scatter': 2 * predicted.get('reduce_scatter', 0)}
    assert written == pytest.approx(scaling.count_sent(of_gloo, 2), rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize('sharding', ['ddp', 'full_shard'])
def test_a_run_goes_on_with_other_numbers_of_ranks(recipe, start, wait_for, sharding):
    exact = ('model.hidden_dropout_prob=0', 'model.attention_probs_dropout_prob=0', 'training.max_samples=768')
    exact += ('training.eval_rows=33',)  # of two ranks, the second has a row less than the first
    pretrain(recipe('save_folder=whole', *exact))
    arguments = ('recipe.yaml', 'save_folder=changing', f'training.sharding={sharding}', *exact)
    log, link = Path('changing/metrics.csv'), Path('changing/latest')
    resumed_at = []
    for ranks, until in ((2, 6), (0, 18), (2, None)):
        before = os.readlink(link) if link.is_symlink() else ''
        process = start(*arguments, ranks=ranks)
        if until is not None:
            wait_for(lambda until=until: log.exists() and log.read_text().count('\n') > until)
            process.terminate()
            process.communicate(timeout=300)
            wait_for(lambda before=before: link.is_symlink() and os.readlink(link) != before)
            resumed_at.append(int(os.readlink(link).removeprefix('samples-')))
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    assert f'resuming from {resumed_at[1]:,} samples' in out
    assert 0 < resumed_at[0] < resumed_at[1] < 768
    ours, theirs = (list(read_metrics(Path(folder, 'metrics.csv'))) for folder in ('whole', 'changing'))
    assert [row['samples'] for row in theirs] == [row['samples'] for row in ours]
    assert len(ours) == 48
    for column, tolerance in (('train_loss', 1e-5), ('learning_rate', 0), ('gradient_norm', 1e-4), ('eval_loss', 1e-5)):
        values = [[float(row[column]) for row in rows if row[column]] for rows in (ours, theirs)]
        assert values[1] == pytest.approx(values[0], rel=tolerance), column


if __name__ == '__main__':
    traffic = count_traffic(load_config(PretrainingConfig, *split_arguments(sys.argv[1:])))
    if os.environ.get('RANK', '0') == '0':
        print(json.dumps(traffic), flush=True)
