"""Making what is missing: whole, and killed."""

import contextlib
import dataclasses
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from maelm_composer import precision
from maelm_composer.config import Precision
from maelm_composer.data.manifest import SPLITS, Manifest, SplitStatistics, save_manifest
from maelm_composer.errors import InputError
from maelm_composer.files import write_json
from maelm_composer.finetuning.identity import describe_protocol
from maelm_composer.precision import Speeds
from maelm_composer.records import CONTENT_HASH
from maelm_composer.reporting.artefacts import MAE_LM, OWN, ROBERTA, find_artefact
from maelm_composer.suite import run
from maelm_composer.suite.checks import assert_one_protocol
from maelm_composer.suite.cost import Device
from maelm_composer.suite.plan import plan_suite
from maelm_composer.suite.steps import Kind, Step, Suite, list_steps, load_suite
from maelm_composer.training.run_record import identify
from tests.records import make_finetuning, make_pretraining, make_rank, make_running
from tests.reporting.conftest import Archive

EMPTY = dict.fromkeys(SPLITS, SplitStatistics())
TINY = {
    'data': ['tokenizer.vocab_size=600', 'sources=[{kind: documentation, max_documents: 600}]'],
    'pretraining': [
        *('model.vocab_size=600', 'model.hidden_size=32', 'model.num_attention_heads=2', 'model.intermediate_size=64'),
        *('model.decoder.hidden_size=32', 'model.decoder.num_attention_heads=2', 'model.decoder.intermediate_size=64'),
        *('training.max_samples=1280', 'training.checkpoint_interval_samples=640', 'optimizer.warmup_samples=128'),
        *('training.eval_rows=64', 'training.eval_interval_samples=640'),
    ],
    'finetuning': ['data.max_train_examples=64', 'sweep.search.glue_small.max_epochs=[1]'],
}
# What a clock or a path decides, not the work.
VOLATILE = {'provenance', 'uri', 'device_hours', 'recipe_hash', 'examples_per_second', 'tokens_per_second', 'remote'}
SLOW = Device('cpu', 1, fp32=1e11, bf16=5e9)
PROGRAM = """
import dataclasses, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.suite.test_run import make_tiny
from maelm_composer.config import Precision
from maelm_composer.suite.run import run_suite
from maelm_composer.reporting.artefacts import find_artefact
suite = dataclasses.replace(make_tiny(Path(sys.argv[2])), precision=Precision.fp32)  # not the faster one of the moment
run_suite(suite, [find_artefact('figure3'), find_artefact('figure1')])
"""


def make_tiny(folder: Path) -> Suite:
    """The demo, a hundred times smaller, with everything under ``folder``."""
    suite = load_suite('demo', folder / 'work', folder / 'results')
    lists = {name: [*getattr(suite.settings, name), *more] for name, more in TINY.items()}
    lists['data'].append(f'remote={folder}/data')
    lists['pretraining'].append(f'data.remote={folder}/data')
    return dataclasses.replace(suite, settings=dataclasses.replace(suite.settings, rank_tokens=500, **lists))


def read_records(folder: Path, scale: str = 'demo') -> dict[str, Any]:
    """Every record under results, without what a clock or a path decides."""

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: strip(v) for k, v in value.items() if k not in VOLATILE and not k.endswith('seconds')}
        return [strip(v) for v in value] if isinstance(value, list) else value

    records = folder / 'results' / scale / 'records'
    found = {str(path.relative_to(records)): strip(json.loads(path.read_text())) for path in records.rglob('*.json')}
    for path in records.rglob('*.csv'):
        lines = [line.split(',') for line in path.read_text().splitlines()]
        clocks = [i for i, name in enumerate(lines[0]) if name.endswith('seconds') or name == 'tokens_per_second']
        found[path.name] = [[cell for i, cell in enumerate(line) if i not in clocks] for line in lines]
    return found


@pytest.mark.slow
def test_a_killed_suite_ends_with_the_same_records(tmp_path):
    whole = tmp_path / 'whole'
    command = [sys.executable, '-c', PROGRAM, str(Path.cwd())]
    started = time.monotonic()
    subprocess.run([*command, str(whole)], check=True)
    seconds = time.monotonic() - started
    wanted = read_records(whole)
    assert len([name for name in wanted if name.startswith('finetuning')]) == 6
    assert (whole / 'results/demo/figure3.csv').exists()

    killed, generator, kills = tmp_path / 'killed', random.Random(0), 0
    while kills < 10:
        process = subprocess.Popen([*command, str(killed)], start_new_session=True)
        try:
            process.wait(generator.uniform(0.1, 0.5) * seconds)
            assert read_records(killed) == wanted
            for name in ('work', 'data', 'results/demo'):  # finished before the tenth: once more from nothing
                shutil.rmtree(killed / name)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            kills += 1
    subprocess.run([*command, str(killed)], check=True)
    assert read_records(killed) == wanted


LAUNCHER = """
import os, sys, time
try:
    with open(sys.argv[1] + '.part', 'w') as file:
        file.write(str(os.getpgrp()))
    os.rename(sys.argv[1] + '.part', sys.argv[1])
    time.sleep(100)
except KeyboardInterrupt:
    time.sleep(1)  # its ranks save
    open(sys.argv[2], 'w').close()
"""


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_suite_waits_for_the_ranks_of_its_launcher(tmp_path, number, wait_for, monkeypatch):
    begun, saved = tmp_path / 'begun', tmp_path / 'saved'
    waits, wait = threading.Event(), subprocess.Popen.wait
    command = [sys.executable, '-c', LAUNCHER, str(begun), str(saved)]

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    def note_and_wait(process: subprocess.Popen, timeout: float | None = None) -> int:
        waits.set()
        return wait(process, timeout)

    def terminate() -> None:
        wait_for(lambda: begun.exists() and waits.is_set())
        os.kill(os.getpid(), number)

    monkeypatch.setattr(subprocess.Popen, 'wait', note_and_wait)
    before, thread = signal.signal(number, stop), threading.Thread(target=terminate)
    thread.start()
    try:
        with pytest.raises((SystemExit, KeyboardInterrupt)):
            run._launch(command)
    finally:
        thread.join()
        signal.signal(number, before)
    assert saved.exists()
    assert int(begun.read_text()) != os.getpgrp()  # a Ctrl-C in the terminal reaches the suite alone
    assert run._launch([sys.executable, '-c', 'raise SystemExit(3)']) == 3


def test_the_launcher_of_a_killed_suite_ends(tmp_path, wait_for):
    begun, saved = tmp_path / 'begun', tmp_path / 'saved'
    command = [sys.executable, '-c', LAUNCHER, str(begun), str(saved)]
    suite = multiprocessing.get_context('fork').Process(target=run._launch, args=(command,))
    suite.start()
    wait_for(begun.exists)
    os.kill(suite.pid, signal.SIGKILL)
    suite.join()
    assert suite.exitcode == -signal.SIGKILL  # so no line of Python has told the launcher
    wait_for(saved.exists)
    assert saved.exists()


def test_a_pretraining_that_fails_on_several_devices_leaves_the_published_records(demo, monkeypatch):
    failed = make_running('demo') | {'status': 'failed', 'ending': 'loss is nan'}
    write_json(demo.run_folder(MAE_LM) / 'record.json', failed)
    (demo.run_folder(MAE_LM) / 'metrics.csv').write_text('samples,eval_loss\n64,\n')
    write_json(demo.records / 'pretraining/demo.json', make_pretraining('demo'))
    write_json(demo.records / 'finetuning/rte.json', make_finetuning('rte', 'demo'))
    write_json(demo.records / 'rank/demo.json', make_rank('demo'))
    before = {path: path.read_bytes() for path in demo.records.rglob('*.*')}
    launched = []
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 2)
    monkeypatch.setattr(run, '_launch', lambda command: launched.append(command) or 1)
    with pytest.raises(InputError, match=r'^pretraining demo failed: the error is printed above'):
        run.make(demo, Step(Kind.pretraining, MAE_LM))
    assert {path: path.read_bytes() for path in demo.records.rglob('*.*')} == before
    launcher = [sys.executable, '-m', 'composer.cli', '-n', '2', '-m', 'maelm_composer.train']
    assert launched == [[*launcher, str(demo.work / 'recipes/demo.yaml')]]


@pytest.mark.parametrize('published_seed', [17, 18])
def test_a_divergence_leaves_what_is_published_of_the_same_recipe(demo, published_seed):
    config = demo.load_pretraining(MAE_LM)
    identity, other = (identify(dataclasses.replace(config, seed=s), 'data') for s in (config.seed, published_seed))
    failed = make_running('demo') | {'status': 'failed', 'ending': 'diverged: loss is nan', 'identity': identity}
    write_json(demo.run_folder(MAE_LM) / 'record.json', failed)
    write_json(demo.records / 'pretraining/demo.json', make_pretraining('demo', identity=other))
    (demo.records / 'pretraining/demo.csv').write_text('samples,eval_loss\n64,5\n')
    write_json(demo.records / 'finetuning/rte.json', make_finetuning('rte', 'demo'))
    write_json(demo.records / 'rank/demo.json', make_rank('demo'))
    before = {path: path.read_bytes() for path in demo.records.rglob('*.*')}
    with pytest.raises(run.DivergedError, match='loss is nan'):
        run.make(demo, Step(Kind.pretraining, MAE_LM))
    after = {path: path.read_bytes() for path in demo.records.rglob('*.*')}
    if published_seed == config.seed:
        assert after == before
    else:
        assert [path.name for path in after] == ['demo.json']
        assert json.loads(*after.values())['status'] == 'failed'


@pytest.mark.parametrize('models, code', [((MAE_LM,), 1), ((MAE_LM, ROBERTA), 0)])
def test_the_exit_code_tells_whether_a_number_is_missing(demo, monkeypatch, models, code):
    Archive(demo.results, 'demo').add_everything(models=models)
    monkeypatch.setattr(run, 'start_suite', lambda *_: contextlib.nullcontext((demo, None)))
    monkeypatch.setattr(run, 'run_suite', lambda *_: None)
    assert run.make_and_print(demo, [find_artefact('table1')]) == code


def test_models_that_are_compared_share_a_precision(tmp_path, monkeypatch):
    suite = make_tiny(tmp_path)
    assert suite.list_precisions() == (Precision.auto, Precision.auto)
    for name, bf16 in (('bf16', 9e11), ('fp32', 5e9)):
        monkeypatch.setattr(precision, 'measure_speeds', lambda bf16=bf16: Speeds(1e11, bf16, 'CPU'))
        of_folder = dataclasses.replace(suite, work=tmp_path / name)
        assert run.settle_precision(of_folder).list_precisions() == (Precision[name],) * 2
    again = run.settle_precision(dataclasses.replace(suite, work=tmp_path / 'bf16'))  # where fp32 is faster
    assert again.list_precisions() == (Precision.bf16, Precision.bf16)
    assert 'precision: bf16' in again.write_recipe(MAE_LM).read_text()  # through the launcher, too
    assert load_suite('demo', tmp_path / 'bf16').precision is Precision.bf16
    base = load_suite('base', tmp_path / 'base')
    assert run.settle_precision(base) is base
    assert not (tmp_path / 'base').exists()


def test_shards_are_used_where_their_text_is_not(demo, tmp_path):
    elsewhere = [f'remote={tmp_path}/data', f'sources=[{{kind: files, paths: ["{tmp_path}/none/*.parquet"]}}]']
    settings = dataclasses.replace(demo.settings, data=[*demo.settings.data, *elsewhere])
    alone = dataclasses.replace(demo, settings=settings)
    for kind in (Kind.tokenizer, Kind.shards):
        with pytest.raises(InputError, match='matches no file' if kind is Kind.tokenizer else 'no tokenizer at'):
            run.make(alone, Step(kind))
    save_manifest(str(tmp_path / 'data'), Manifest(8192, 64, {}, EMPTY, 7.0, 'tokenizer', 'content', 'recipe', []))
    for kind in (Kind.tokenizer, Kind.shards):
        run.make(alone, Step(kind))
    assert [path.name for path in (tmp_path / 'data').iterdir()] == ['manifest.json']


def test_results_of_another_text_are_refused_before_anything_is_trained(demo, tmp_path):
    elsewhere = [f'remote={tmp_path}/data', f'sources=[{{kind: files, paths: ["{tmp_path}/none/*.parquet"]}}]']
    settings = dataclasses.replace(demo.settings, data=[*demo.settings.data, *elsewhere])
    suite = dataclasses.replace(demo, scale='medium', settings=settings)
    save_manifest(str(tmp_path / 'data'), Manifest(8192, 64, {}, EMPTY, 7.0, 'tokenizer', 'content', 'recipe', []))
    run.make(suite, Step(Kind.shards))
    record = make_pretraining('medium', identity={'seed': 17, CONTENT_HASH: 'other'})
    write_json(suite.records / 'pretraining/medium.json', record)
    with pytest.raises(
        InputError, match=r'records has runs on another text, such as medium: give --results another fol'
    ):
        run.make(suite, Step(Kind.shards))
    run.make(dataclasses.replace(suite, scale='demo'), Step(Kind.shards))


def test_a_seed_is_not_trained_twice_under_two_names(demo):
    def seeds(own, of):
        return dataclasses.replace(demo.settings, pretraining_seeds=own, pretraining_seeds_of=of)

    figures = [find_artefact(name) for name in ('figure1', 'figure3')]
    own_seed = demo.load_pretraining(MAE_LM).seed
    twice = dataclasses.replace(demo, settings=seeds([own_seed, 18], {'figure3': []}))
    with pytest.raises(
        InputError, match=rf'demo-roberta-s{own_seed} is the run demo-roberta once more, .*: leave {own_seed}'
    ):
        run.run_suite(twice, figures)
    write_json(demo.records / 'pretraining/demo-roberta.json', make_pretraining('demo-roberta'))
    with pytest.raises(InputError, match=f'leave {own_seed} out of the pretraining seeds'):
        run.run_suite(dataclasses.replace(demo, settings=seeds([own_seed, 18], {})), figures[:1])


def test_records_of_another_protocol_that_stay_are_refused_before_anything_is_trained(demo):
    steps = [step for step in list_steps(demo, [find_artefact('table1')]) if step.model == ROBERTA]
    (step,) = [step for step in steps if step.kind is Kind.finetuning]
    config = dataclasses.replace(demo.load_finetuning(ROBERTA, step.samples, step.tasks), task='demo_pair')
    record = make_finetuning('demo_pair', 'demo', protocol=describe_protocol(config) | {'measures_rank': True})
    write_json(demo.records / 'finetuning/demo_pair.json', record)
    assert_one_protocol(demo, steps)
    record['protocol']['clip_norm'] = 7.0
    write_json(demo.records / 'finetuning/demo_pair.json', record)
    message = 'demo at 400 samples was fine-tuned on demo_pair with clip_norm = 7.0, not 0.0, which this call does not'
    with pytest.raises(InputError, match=message):
        run.run_suite(demo, [find_artefact('table1')])
    mine = make_finetuning('demo_pair', 'demo-roberta', step.samples, protocol=record['protocol'])
    write_json(demo.records / 'finetuning/demo_pair.json', mine)
    assert_one_protocol(demo, steps)  # is replaced


def test_a_run_with_other_settings_is_refused_before_anything_is_made(demo):
    identity = identify(demo.load_pretraining(ROBERTA), 'content') | {'optimizer.adam_beta1': 0.5}
    write_json(demo.run_folder(ROBERTA) / 'record.json', make_pretraining('demo-roberta', identity=identity))
    with pytest.raises(InputError, match=r'adam_beta1 = 0.5, not 0.9: give --work .* or remove .*roberta$'):
        run.run_suite(demo, [find_artefact('figure1')])


def test_a_task_that_cannot_be_read_is_refused_before_anything_is_made(own, tmp_path):
    (tmp_path / 'dev.csv').write_text('text,label\nx,neither\n')
    with pytest.raises(InputError, match='neither'):
        run.run_suite(own, [OWN])
    assert not (own.work / 'runs').exists()


def test_a_suite_goes_on_without_a_run_that_diverges(tmp_path, capfd):
    suite = make_tiny(tmp_path)
    Archive(suite.results, 'demo').add_everything(models=(MAE_LM,))
    pairs = {'roberta': ['optimizer.learning_rate=1e30', 'training.compile=false']}
    suite = dataclasses.replace(suite, settings=dataclasses.replace(suite.settings, pretraining_of=pairs))
    for turn in range(2):
        run.run_suite(suite, [find_artefact('figure1')])
        told = capfd.readouterr()
        assert ('schedule     learning rate 0 to 1e+30' in told.out) == (turn == 0)  # the second call trains nothing
        assert 'failed: pretraining demo-roberta: diverged: loss is nan at batch ' in told.err
        assert f'to try it again, remove {suite.run_folder(ROBERTA)}\n' in told.err
    planned = plan_suite(run.settle_precision(suite), [find_artefact('figure1')], SLOW)
    assert [item.step.model for item in planned] == [None, None]
    assert read_records(tmp_path)['pretraining/demo-roberta.json']['ending'].startswith('diverged: loss is nan')
    assert 'pretraining of demo-roberta failed: diverged' in (tmp_path / 'results/demo/figure1.csv').read_text()


def test_every_model_of_a_suite_can_be_compiled(demo, monkeypatch):
    """torch gives up on a function after eight versions, and so does a compiled model that must be one graph."""

    class Scale(torch.nn.Module):
        def forward(self, x):
            return x * self.factor

    def train(config):
        model = Scale()
        model.factor = next(factors)
        model.compile(fullgraph=True, dynamic=False, backend='eager')
        model(torch.ones(2))

    factors = itertools.count(2)
    monkeypatch.setattr(run, 'pretrain', train)
    monkeypatch.setattr(run, 'collect_run', lambda *_: None)
    for _ in range(17):
        run.make(demo, Step(Kind.pretraining, MAE_LM))
    assert next(factors) == 2 + 17  # all were compiled
