"""Whole runs in this process: what is written, what is stopped, what is gone on with."""

import gc
import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from maelm_composer import precision
from maelm_composer.checkpoints.names import name_checkpoint
from maelm_composer.cli import runs as compare_runs
from maelm_composer.config import PretrainingConfig
from maelm_composer.data.dataset import PretrainingRows
from maelm_composer.data.manifest import load_manifest
from maelm_composer.errors import InputError
from maelm_composer.files import parse_json, write_json
from maelm_composer.precision import Speeds
from maelm_composer.recipe import load_config, to_yaml
from maelm_composer.records import UnfinishedPretraining, format_record, load_record, parse_pretraining
from maelm_composer.training.adapter import PretrainingModel
from maelm_composer.training.ending import STOP_SIGNALS
from maelm_composer.training.plan import count_training_flops
from maelm_composer.training.run import pretrain
from maelm_composer.training.run_folder import RunFolder
from maelm_composer.training.run_record import read_metrics
from tests.training.conftest import forget_hashes, write_rows


def test_a_run_leaves_its_recipe_record_log_and_checkpoints(recipe, capsys):
    config = recipe('training.checkpoints_to_keep=2', 'training.eval_interval_samples=160')
    record = pretrain(config)
    folder = Path(config.save_folder)
    assert sorted(p.name for p in folder.glob('samples-*')) == ['samples-000000000256', 'samples-000000000384']
    assert os.readlink(folder / 'latest') == 'samples-000000000384'
    assert load_config(PretrainingConfig, [str(folder / 'recipe.yaml')]) == config
    assert load_record(folder / 'record.json', parse_pretraining) == record
    assert load_manifest(str(folder)) == load_manifest(config.data.remote)
    assert record.status == 'finished'
    assert (record.flops, record.tokenizer_hash) == (count_training_flops(config), 't' * 64)
    assert record.provenance.packages['torch'] == torch.__version__.split('+')[0]
    rows = list(read_metrics(folder / 'metrics.csv'))
    assert [int(row['samples']) for row in rows] == list(range(16, 385, 16))
    evaluated = {int(row['samples']): row for row in rows if row['eval_loss']}
    assert sorted(evaluated) == [160, 320, 384]  # the last batch, too, whatever the interval
    assert float(evaluated[384]['eval_loss']) == record.eval_loss < float(evaluated[160]['eval_loss'])
    assert float(rows[3]['learning_rate']) == pytest.approx(2e-3 * 48 / 64)
    assert 0 < float(rows[-1]['training_seconds']) == pytest.approx(record.training_seconds, abs=1e-3)

    out = capsys.readouterr().out
    assert '16 rows = 1 ranks × 16 rows × 1 accumulated' in out
    assert 'measured' in out
    assert f'validation loss {record.eval_loss:.4f}' in out
    assert record.unigram_entropy == 5.0  # the manifest's
    assert f'(unigram entropy {record.unigram_entropy:.2f}' in out
    assert pretrain(config) == record  # complete: nothing is done twice
    assert 'is complete' in capsys.readouterr().out
    plain, begun = format_record(record), UnfinishedPretraining.model_fields
    killed = {name: value for name, value in plain.items() if name in begun} | {'status': 'running'}
    (folder / 'record.json').write_text(json.dumps(killed))
    assert pretrain(config) == record  # killed after its last checkpoint: its record is finished
    assert load_record(folder / 'record.json', parse_pretraining) == record
    (folder / 'record.json').unlink()
    assert pretrain(config).eval_loss == record.eval_loss  # and one that was lost is made again
    compare_runs([str(folder)])
    assert f'{record.eval_loss:.4f}' in capsys.readouterr().out
    compare_runs(['nowhere', str(folder)])
    assert 'no runs: nowhere' in capsys.readouterr().out
    (folder / 'new').touch()
    mode = (folder / 'new').stat().st_mode
    assert all((folder / 'latest' / name).stat().st_mode == mode for name in ('model.safetensors', 'state.pt'))
    with pytest.raises(InputError, match=r'nowhere holds no run'):
        compare_runs(['nowhere'])


def test_of_a_run_that_has_ended_nothing_is_kept(recipe):
    def count_kept() -> int:
        gc.collect()
        large = (PretrainingRows, PretrainingModel, torch.optim.Optimizer)
        return sum(issubclass(type(thing), large) for thing in gc.get_objects())

    before = count_kept()
    pretrain(recipe('training.max_samples=48', 'optimizer.warmup_samples=16'))  # in the middle of an epoch
    deadline = time.monotonic() + 60  # the loader's threads leave in their own time
    while count_kept() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert count_kept() <= before


def test_a_stop_signal_saves_and_the_run_ends_as_if_never_stopped(
    recipe, train_once, assert_same_run, signal_after, capsys
):
    whole, stopped = train_once(), recipe('run_name=stopped')
    handlers = [signal.getsignal(number) for number in STOP_SIGNALS]
    # In the first and in the second pass over the rows, and after the last batch: a suite must not go on then.
    for rows, number in ((5, signal.SIGINT), (13, signal.SIGINT), (24, signal.SIGTERM)):
        signal_after(rows, number)
        with pytest.raises(SystemExit) as stop:
            pretrain(stopped)
        assert stop.value.code == 128 + number
        assert os.readlink('runs/stopped/latest') == name_checkpoint(16 * rows)
        if rows == 13:
            Path('runs/stopped/metrics.csv').unlink()  # the checkpoint has the rows of the log, too
    compare_runs(['runs/stopped'])
    out = ' '.join(capsys.readouterr().out.split())
    numbers, ending = r'\d+\.\d{4} 5\.00 \d\.\d{4} 24', 'SIGTERM: saved at 384 samples; the same command resumes'
    assert re.search(rf'runs/stopped +stopped {numbers} .*{ending}', out)
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == handlers
    before = parse_json((progress := Path('runs/stopped/latest/progress.json')).read_text(), 'progress.json')
    assert before['device_seconds'] == before['training_seconds'] > 0
    write_json(progress, before | {'device_seconds': before['device_seconds'] + 3600})  # as if on more ranks
    record = pretrain(stopped)
    assert record.device_hours == pytest.approx(record.training_seconds / 3600 + 1)
    assert_same_run(whole, stopped.save_folder)


@pytest.mark.parametrize('unequal', ['masking.rounds_at_random=true', 'model.decoder.attention=causal_cross'])
def test_microbatches_and_workers_change_nothing_but_rounding(recipe, unequal):
    """Rows differ in the number of predicted tokens: of masks, or of all that are not padding."""
    exact = ['training.max_samples=96', 'model.hidden_dropout_prob=0', 'model.attention_probs_dropout_prob=0']
    exact += [unequal, 'masking.mlm_probability=0.1', f'data.remote={write_rows(Path("padded"), shortest=8)}']
    runs = [
        pretrain(recipe('run_name=whole', *exact)),
        pretrain(recipe('run_name=split', 'training.device_train_microbatch_size=5', 'data.num_workers=1', *exact)),
    ]
    assert runs[0].eval_loss == pytest.approx(runs[1].eval_loss, abs=1e-5)
    assert runs[0].eval_accuracy == pytest.approx(runs[1].eval_accuracy, abs=1e-5)
    weights = [load_file(f'runs/{name}/latest/model.safetensors') for name in ('whole', 'split')]
    torch.testing.assert_close(*weights, rtol=0, atol=2e-5)


def test_a_batch_too_large_for_the_device_is_told(recipe, monkeypatch):
    def overflow(*_):
        raise torch.OutOfMemoryError('CUDA out of memory')

    monkeypatch.setattr(PretrainingModel, 'loss', overflow)
    with pytest.raises(InputError, match=r'16 rows in one forward pass .* lower training.device_train_microbatch_size'):
        pretrain(recipe('training.max_samples=16', 'optimizer.warmup_samples=16'))


@pytest.mark.gpu
def test_fp32_on_a_gpu_is_not_tf32(recipe):
    pretrain(recipe('training.max_samples=64', 'training.sharding=full_shard'))
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.slow
@pytest.mark.parametrize(
    'sharding, ranks, recomputes', [('full_shard', 0, False), ('full_shard', 0, True), ('ddp', 2, False)]
)
def test_a_run_on_several_ranks_can_be_compiled(recipe, start, monkeypatch, sharding, ranks, recomputes):
    short = ('training.max_samples=64', 'model.hidden_dropout_prob=0', 'model.attention_probs_dropout_prob=0')
    if ranks:  # 53 MB of gradients: three buckets, at whose ends torch cuts the graph
        short += ('model.num_hidden_layers=4', 'model.hidden_size=512', 'model.intermediate_size=2048')
    if not ranks:  # last microbatches of another size, three kinds of layers, and more layers than graphs are allowed
        short += ('model.num_hidden_layers=34', 'model.decoder.num_hidden_layers=2', 'training.eval_rows=20')
        short += ('training.device_train_microbatch_size=12',)
    eager = pretrain(recipe('run_name=eager', *short))
    changes = (f'training.sharding={sharding}', 'training.compile=true', *short)
    changes += (f'training.activation_checkpointing={recomputes}',)
    monkeypatch.setenv('TORCH_LOGS', 'graph_code')
    process = start('recipe.yaml', 'run_name=compiled', *changes, ranks=ranks)
    out, _ = process.communicate(timeout=500)
    assert process.returncode == 0, out
    assert 'compiling the model in the first step' in out
    assert 'compiled: the first step took' in out
    assert 'modules_intermediate_parameters_weight' in out  # of the layers, in a graph
    assert 'recompile_limit' not in out
    compiled = json.loads(Path('runs/compiled/record.json').read_text())
    assert compiled['eval_loss'] == pytest.approx(eager.eval_loss, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize('variant', [(), ('model.decoder=null', 'masking.encoder_mask_fraction=1')])
def test_a_compiled_bf16_run_can_be_repeated_and_is_close_to_an_eager_one(recipe, assert_same_run, variant):
    torch.set_num_threads(2)  # without a fixed order, these would add up differently each time
    losses = {}
    for name in ('runs/compiled', 'runs/again', 'runs/eager'):
        short = ('training.max_samples=96', 'training.precision=bf16', f'training.compile={name != "runs/eager"}')
        losses[name] = pretrain(recipe(f'save_folder={name}', *short, *variant)).eval_loss
    assert_same_run('runs/compiled', 'runs/again')
    assert losses['runs/compiled'] == pytest.approx(losses['runs/eager'], abs=0.05)
    keys = [load_file(f'{name}/latest/model.safetensors').keys() for name in ('runs/compiled', 'runs/eager')]
    assert keys[0] == keys[1]


def test_a_loss_that_is_not_finite_stops_the_run_before_it_is_saved(recipe):
    config = recipe('optimizer.learning_rate=1e30', 'optimizer.clip_norm=0', 'training.checkpoint_interval_samples=16')
    with pytest.raises(InputError, match=r'(loss|gradient norm) is (nan|inf) at batch (\d+), \d+ samples') as stop:
        pretrain(config)
    batch = int(str(stop.value).split('at batch ')[1].split(',')[0])
    record = load_record(Path(config.save_folder, 'record.json'), parse_pretraining)
    assert (record.status, record.ending) == ('failed', str(stop.value))
    saved = max(int(p.name.split('-')[1]) for p in Path(config.save_folder).glob('samples-*'))
    assert saved == 16 * (batch - 1)


@pytest.mark.parametrize(
    'bytes_left, what', [(50_000, 'samples-000000000256 could not .*recipe'), (500, 'recipe/metrics.csv could not .*')]
)
def test_a_disk_that_is_full_is_told_and_costs_no_checkpoint(recipe, bytes_left, what):
    import resource

    config = recipe('training.max_samples=256', 'training.eval_interval_samples=256')
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def publish_and_fill_up(*arguments) -> None:
        publish(*arguments)
        resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_left, limits[1]))

    publish = RunFolder.publish
    told = pytest.raises(InputError, match=rf'{what}: File too large; .*samples-000000000128')
    with told, pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, 'publish', publish_and_fill_up)
        try:
            pretrain(config)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, handler)
    assert [p.name for p in Path(config.save_folder).glob('*samples-*')] == ['samples-000000000128']
    pretrain(config)


def test_a_checkpoint_that_was_never_named_the_latest_costs_no_other(recipe):
    config = recipe('training.checkpoints_to_keep=1')
    Path(config.save_folder, 'samples-000000999999').mkdir(parents=True)  # as a kill leaves it
    pretrain(config)
    assert Path(config.save_folder, 'latest/model.safetensors').is_file()


SHORT = ('training.max_samples=64', 'training.eval_interval_samples=64')


@pytest.fixture
def short_run(recipe, train_once) -> PretrainingConfig:
    """The recipe of a finished run in ``runs/recipe``."""
    shutil.copytree(train_once(*SHORT), 'runs/recipe', symlinks=True)
    return recipe(*SHORT)


@pytest.mark.parametrize('knows_hashes', [True, False])
@pytest.mark.parametrize('name', ['model.safetensors', 'state.pt', 'progress.json'])
def test_a_damaged_checkpoint_is_named(short_run, name, knows_hashes):
    path = Path('runs/recipe/latest', name)
    content = bytearray(path.read_bytes()[: None if knows_hashes else -100])
    if knows_hashes:
        # Among the values of a tensor, which have no checksum; JSON is then not UTF-8.
        content[len(content) // 2] ^= 0x80
    else:
        forget_hashes(path.parent)
    path.write_bytes(content)
    with pytest.raises(InputError, match=rf'samples-\d+/{name} is damaged.*to an older checkpoint'):
        pretrain(short_run)


@pytest.mark.parametrize('name', ['state.pt', 'metrics.csv', 'progress.json'])
def test_a_missing_file_of_a_checkpoint_is_named(short_run, name):
    Path('runs/recipe/latest', name).unlink()
    with pytest.raises(InputError, match=rf'samples-\d+/{name} is missing: point `latest` to an older'):
        pretrain(short_run)


@pytest.mark.parametrize(
    'override, message',
    [
        ('model.vocab_size=600', r'model.vocab_size 600: the shards in .* need model.vocab_size=512'),
        ('model.max_seq_len=64', r'model.max_seq_len 64: the shards in .* need model.max_seq_len=32'),
        ('training.global_train_batch_size=201', r'200 training rows, fewer than .* 201'),
        ('data.remote=nowhere', r'no shards at nowhere'),
        ('save_folder=gs://bucket/runs', r'only a local folder or s3'),
    ],
)
def test_what_does_not_fit_is_one_line(recipe, override, message):
    with pytest.raises(InputError, match=message):
        pretrain(recipe(override))


@pytest.mark.usefixtures('short_run')
def test_a_folder_of_another_recipe_or_another_shape_is_refused(recipe):
    for path in Path('runs/recipe/record.json'), Path('runs/recipe/recipe.yaml'):
        with pytest.raises(InputError, match=r'holds a run with optimizer.learning_rate = 0.002, not 0.001'):
            pretrain(recipe(*SHORT, 'optimizer.learning_rate=0.001'))
        path.unlink()
    wider = recipe(*SHORT, 'model.decoder.intermediate_size=96')
    path.write_text(to_yaml(wider))
    with pytest.raises(InputError, match=r'does not fit the recipe: decoder\.layers.* is \(64.*, \(96'):
        pretrain(wider)


@pytest.mark.parametrize('name, bf16', [('bf16', 9e11), ('fp32', 5e9)])
def test_auto_is_settled_before_the_run_begins_and_kept(recipe, monkeypatch, capsys, signal_after, name, bf16):
    measured = [Speeds(1e11, bf16, 'CPU'), Speeds(1e11, 1e22 / bf16, 'CPU')]  # then a machine of the other kind
    monkeypatch.setattr(precision, 'measure_speeds', lambda: measured[0])
    short = ('training.precision=auto', 'training.max_samples=192', 'training.checkpoint_interval_samples=64')
    signal_after(4)
    with pytest.raises(SystemExit):
        pretrain(recipe(*short))
    assert f'{name} (auto: bf16 runs at' in capsys.readouterr().out.replace('\n', ' ')
    measured.reverse()
    record = pretrain(recipe(*short))
    assert f'training.precision=auto: resuming in {name}, as begun, although bf16 runs at' in capsys.readouterr().out
    assert record.identity['training.precision'] == name
    assert record.precision.startswith(f'{name} (auto: bf16 runs at')  # why it began so
    assert load_config(PretrainingConfig, ['runs/recipe/recipe.yaml']).training.precision.name == name
    other = 'fp32' if name == 'bf16' else 'bf16'
    with pytest.raises(InputError, match=f'holds a run with training.precision = {name}, not {other}'):
        pretrain(recipe(*short, f'training.precision={other}'))


def test_bf16_that_is_asked_for_and_slow_is_said(recipe, monkeypatch, capsys):
    monkeypatch.setattr(precision, 'measure_speeds', lambda: Speeds(1e11, 5e9, 'CPU'))
    pretrain(recipe('training.precision=bf16', 'training.max_samples=64'))
    assert 'bf16 takes 20.0 times as long as fp32 here: training.precision=fp32, or auto' in capsys.readouterr().out


def test_a_stopped_run_is_finished_before_it_is_extended(recipe, signal_after):
    signal_after(2)
    with pytest.raises(SystemExit):
        pretrain(recipe('training.max_samples=192'))
    with pytest.raises(
        InputError, match=r'finish it first, with training.max_samples=192 and training.extends=\[\]; else'
    ):
        pretrain(recipe('training.extends=[192]'))


def test_a_finished_run_is_extended_only_on_purpose(recipe, capsys, assert_same_run):
    pretrain(recipe('training.max_samples=192'))
    with pytest.raises(InputError, match=r'max_samples = 192, not 384: to extend .*set training.extends=\[192\]; else'):
        pretrain(recipe())
    capsys.readouterr()
    record = pretrain(recipe('training.extends=[192]'))
    screen = ' '.join(capsys.readouterr().out.split())
    assert 'over 64 samples, then to 0 at 192, then up to 0.0012 and to 0 at 384' in screen
    assert (record.samples, record.identity['training.extends']) == (384, [192])
    pretrain(recipe('training.extends=[192]', 'save_folder=whole', 'training.eval_interval_samples=192'))
    weights = [load_file(f'{folder}/latest/model.safetensors') for folder in ('runs/recipe', 'whole')]
    torch.testing.assert_close(*weights, rtol=0, atol=0)
    with pytest.raises(InputError, match=r'validations of 32 rows, not 16: give training.eval_rows=32'):
        pretrain(recipe('training.extends=[192]', 'training.eval_rows=16'))
    with pytest.raises(InputError, match=r'training.extends \[400\]: must hold ascending numbers below'):
        recipe('training.extends=[400]')
