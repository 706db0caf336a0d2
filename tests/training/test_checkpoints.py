"""What a checkpoint holds can be read by other versions of torch than the one that wrote it."""

import copyreg
import errno
import io
import json
import os
import pickle
import shutil
import signal
from pathlib import Path

import pytest
import torch
from composer.utils.reproducibility import get_rng_state
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorProperties

from maelm_composer.checkpoints.find import read_record
from maelm_composer.checkpoints.names import name_checkpoint
from maelm_composer.errors import InputError
from maelm_composer.model.maelm import build_model
from maelm_composer.records import UnfinishedPretraining, parse_pretraining
from maelm_composer.training.checkpoints import METADATA, drop_unportable, make_portable
from maelm_composer.training.resume import find_resume_point, load_data_only
from maelm_composer.training.run import pretrain
from maelm_composer.training.run_folder import RunFolder
from maelm_composer.training.run_record import read_metrics
from tests.records import make_running
from tests.training.conftest import forget_hashes

SHORT = ('training.max_samples=32', 'optimizer.warmup_samples=16')
LONGER = ('training.max_samples=64', 'training.extends=[32]')  # the finished run reads its state again


class PropertiesOfTorch27:
    """Takes apart the state of a tensor's properties as torch 2.7 does, which knows of these five."""

    def __setstate__(self, state):
        self.dtype, self.layout, self.requires_grad, self.memory_format, self.pin_memory = state


class UnpicklerOfTorch27(pickle.Unpickler):
    def find_class(self, module, name):
        return PropertiesOfTorch27 if name == 'TensorProperties' else super().find_class(module, name)


def test_a_checkpoint_holds_nothing_of_the_device(recipe):
    """An empty loss scale of a CPU is refused by a GPU, and a GPU's generator is missing on a CPU."""
    pretrain(recipe('training.max_samples=64'))
    content = torch.load('runs/recipe/latest/state.pt', weights_only=False)
    assert 'scaler' not in content['state']
    assert 'rng' not in content
    of_a_gpu = {'state': {'scaler': {'scale': 1.0}, 'run_name': 'x'}, 'rng': [{'torch': 1, 'cuda': 2}]}
    drop_unportable(of_a_gpu)
    assert of_a_gpu == {'state': {'run_name': 'x'}}


def test_a_whole_checkpoint_names_nothing_that_torch_2_7_lacks(recipe):
    pretrain(recipe(*SHORT))
    state = torch.load('runs/recipe/latest/state.pt', weights_only=False)['state']
    (schedule,) = state['schedulers'].values()
    assert set(schedule) == {
        'base_lrs',
        'last_epoch',
        '_step_count',
        '_get_lr_called_within_step',
        '_last_lr',
        'lr_lambdas',
    }
    assert 'callbacks' not in state


def test_a_run_goes_on_from_an_older_checkpoint(recipe, train_once, assert_same_run):
    """As the message about a damaged one advises; the newer ones are made again."""
    shutil.copytree(train_once(), 'runs/recipe', symlinks=True)
    latest = Path('runs/recipe/latest')
    (latest / 'model.safetensors').write_bytes(b'damaged')
    latest.unlink()
    latest.symlink_to(name_checkpoint(128))
    pretrain(recipe())
    assert_same_run('runs/recipe', train_once())


def test_a_sharded_checkpoint_is_readable_on_torch_2_7_and_else_refused(recipe, start):
    process = start('recipe.yaml', 'training.sharding=full_shard', *SHORT)
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0, out
    metadata = Path('runs/recipe/latest/state', METADATA)
    with metadata.open('rb') as file:
        content = UnpicklerOfTorch27(file).load()
    assert (
        sum(
            isinstance(getattr(entry, 'properties', None), PropertiesOfTorch27)
            for entry in content.state_dict_metadata.values()
        )
        > 20
    )
    schedule = {name.split('.')[-1] for name in content.state_dict_metadata if '.schedulers.' in name}
    assert 'last_epoch' in schedule
    assert '_is_initial' not in schedule
    config = recipe('training.sharding=full_shard', *SHORT)
    folder, model = RunFolder(config.save_folder, config.run_name), build_model(config.model, seed=1)
    before = metadata.read_bytes()
    make_portable(metadata)
    assert metadata.read_bytes() == before
    found = find_resume_point(folder, model, is_sharded=True)
    assert found.samples == 32
    with pytest.raises(InputError, match=r'with training\.sharding shard_grad_op or full_shard: resume with it, or'):
        find_resume_point(folder, model, is_sharded=False)

    class PicklerOfTomorrow(pickle.Pickler):
        def reducer_override(self, thing):
            if type(thing) is not TensorProperties:
                return NotImplemented
            return copyreg.__newobj__, (TensorProperties,), (*thing.__getstate__(), 'something', 'new')

    content = pickle.loads(before)
    forget_hashes(metadata.parents[1])
    for broken in (lambda file: PicklerOfTomorrow(file).dump(content), lambda file: file.write(before[:-100])):
        with metadata.open('wb') as file:
            broken(file)
        with pytest.raises(
            InputError, match=r'state is damaged, or written by a torch .*: resume with that torch, or'
        ) as error:
            find_resume_point(folder, model, is_sharded=True)
        assert '\n' not in str(error.value)


def test_a_signal_while_the_last_checkpoint_is_written_ends_the_caller(recipe, monkeypatch):
    publish = RunFolder.publish

    def publish_and_stop(folder, *arguments):
        publish(folder, *arguments)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(RunFolder, 'publish', publish_and_stop)
    with pytest.raises(SystemExit, match='143'):
        pretrain(recipe(*SHORT))
    monkeypatch.setattr(RunFolder, 'publish', publish)
    assert os.readlink('runs/recipe/latest') == name_checkpoint(32)
    assert pretrain(recipe(*SHORT)).status == 'finished'


def test_the_record_of_a_resumed_run_names_all_that_it_was_trained_on(recipe, signal_after):
    threads = torch.get_num_threads()
    signal_after(11)
    torch.set_num_threads(threads + 1)
    try:
        with pytest.raises(SystemExit):
            pretrain(recipe())
    finally:
        torch.set_num_threads(threads)
    Path('runs/recipe/.saving-of-a-killed-process').mkdir()
    for _ in range(2):  # the second call has nothing to train
        pretrain(recipe())
        found = [(process.device, process.since) for process in read_record('runs/recipe').processes]
        assert found == [(f'CPU, {threads + 1} threads', 0), (f'CPU, {threads} threads', 176)]
    assert not list(Path('runs/recipe').glob('.saving*'))


def test_a_process_whose_training_was_not_saved_is_not_named():
    def begin(device: str, since: int) -> UnfinishedPretraining:
        return parse_pretraining(json.dumps(make_running('run') | {'device': device, 'since': since}), 'run.json')

    runs = [begin('A', 0), begin('B', 64), begin('A', 64), begin('A', 128), begin('C', 192), begin('A', 0)]
    found = []
    record = runs[0]
    for run in runs[1:]:
        record = run.following(record)
        found.append([(process.device, process.since) for process in record.processes])
    assert found == [[('A', 0), ('B', 64)], [('A', 0)], [('A', 0)], [('A', 0), ('C', 192)], [('A', 0)]]


def test_a_file_system_without_links_has_a_text(recipe, monkeypatch):
    def refuse(path: Path, target: str) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))

    monkeypatch.setattr(Path, 'symlink_to', refuse)
    for arguments, name in (
        (SHORT, 'samples-000000000032'),
        ((*LONGER, 'optimizer.warmup_samples=16'), 'samples-000000000064'),
    ):
        pretrain(recipe(*arguments))
        assert Path('runs/recipe/latest').read_text() == name


def test_a_whole_checkpoint_is_refused_for_sharded_weights_and_one_of_version_0_1_resumes(recipe):
    pretrain(config := recipe(*SHORT))
    folder, model = RunFolder(config.save_folder, config.run_name), build_model(config.model, seed=1)
    with pytest.raises(InputError, match=r'was written with training\.sharding ddp: resume with it, or choose another'):
        find_resume_point(folder, model, is_sharded=True)
    latest = Path(config.save_folder, 'latest')
    forget_hashes(latest)
    progress = json.loads((latest / 'progress.json').read_text())
    del progress['device_seconds']
    (latest / 'progress.json').write_text(json.dumps(progress | {'training_seconds': 3600}))
    (latest / 'metrics.csv').unlink()  # the log of the run folder alone has the rows
    content = torch.load(latest / 'state.pt', weights_only=False)
    torch.save(content | {'rng': get_rng_state()}, latest / 'state.pt')  # with arrays of NumPy
    assert find_resume_point(folder, model, is_sharded=False).device_seconds == 3600
    pretrain(recipe(*SHORT, *LONGER))
    rows = list(read_metrics(Path(config.save_folder, 'metrics.csv')))
    assert [int(row['samples']) for row in rows] == [16, 32, 48, 64]


class Hostile:
    """Creates the file ``ran`` when it is unpickled."""

    def __reduce__(self):
        return Path('ran').touch, ()


def plant(state: Path) -> None:
    """Add a hostile object to a whole checkpoint, or to each file of a sharded one that is read as a pickle."""
    forget_hashes(state.parent)
    if state.is_file():
        content = torch.load(state, weights_only=False)
        torch.save(content | {'more': Hostile()}, state)
    else:
        content = pickle.loads((state / METADATA).read_bytes())
        content.planner_data['more'] = Hostile()
        (state / METADATA).write_bytes(pickle.dumps(content))


def plant_in_shard(state: Path) -> None:
    """Replace a value of a sharded checkpoint, which torch keeps as a pickle among the tensors."""
    forget_hashes(state.parent)
    content = pickle.loads((state / METADATA).read_bytes())
    index = next(index for index in content.storage_data if index.fqn.endswith('last_epoch'))
    torch.save(Hostile(), hostile := io.BytesIO())
    where = content.storage_data[index]
    with (state / where.relative_path).open('ab') as file:
        where.offset, where.length = file.tell(), len(hostile.getvalue())
        file.write(hostile.getvalue())
    (state / METADATA).write_bytes(pickle.dumps(content))


REFUSED = 'which no checkpoint of a run does and which might run code: point `latest` to an older checkpoint'


def test_a_hostile_checkpoint_is_refused_and_runs_nothing(recipe, monkeypatch):
    monkeypatch.setenv('TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD', '1')
    pretrain(recipe(*SHORT))
    plant(Path('runs/recipe/latest/state.pt'))
    with pytest.raises(InputError, match=REFUSED):
        pretrain(recipe(*SHORT, *LONGER))
    assert not Path('ran').exists()


@pytest.mark.slow
def test_a_hostile_sharded_checkpoint_is_refused_and_runs_nothing(recipe, start, monkeypatch):
    monkeypatch.setenv('TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD', '1')
    arguments = ('recipe.yaml', 'training.sharding=full_shard', *SHORT)
    out, _ = start(*arguments).communicate(timeout=240)
    assert json.loads(Path('runs/recipe/record.json').read_text())['status'] == 'finished', out
    shutil.copytree('runs', 'other/runs', symlinks=True)
    processes = []
    for folder, harm in (('.', plant), ('other', plant_in_shard)):
        harm(Path(folder, 'runs/recipe/latest/state'))
        processes.append(start(*arguments, f'save_folder={folder}/runs/recipe', *LONGER))
    for process in processes:
        out, _ = process.communicate(timeout=240)
        assert process.returncode == 2, out
        assert REFUSED in out
        assert 'Traceback' not in out
    assert not Path('ran').exists()


def test_what_interrupts_the_load_of_a_sharded_checkpoint_is_no_damage(tmp_path):
    """torch wraps whatever a rank raises."""
    for cause in (SystemExit(143), MemoryError('all'), OSError(5, 'Input/output error'), torch.OutOfMemoryError('all')):
        with pytest.raises(type(cause)), load_data_only(tmp_path):
            raise CheckpointException('load', {1: (cause, None)})
    with pytest.raises(InputError, match=f'^{tmp_path} is damaged'), load_data_only(tmp_path):
        raise CheckpointException('load', {1: (pickle.UnpicklingError('cut off'), None)})
