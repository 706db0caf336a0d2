"""What a plan says before anything runs, and what it counts as done."""

import dataclasses
import json
import os

import pytest

from maelm_composer import cli
from maelm_composer.config import Precision
from maelm_composer.errors import InputError
from maelm_composer.finetuning.identity import describe_protocol
from maelm_composer.masking.collate import build_collator
from maelm_composer.masking.draw import count_visible
from maelm_composer.model.cost import count_forward_flops
from maelm_composer.processor import name_processor
from maelm_composer.records import parse_pretraining
from maelm_composer.reporting.artefacts import ARTEFACTS, MAE_LM, OWN, find_artefact
from maelm_composer.reporting.evidence import Evidence
from maelm_composer.suite import plan
from maelm_composer.suite.cost import Device, count_finetuning_flops, describe_device
from maelm_composer.suite.plan import Forecast, plan_suite, print_budget, print_plan, sum_seconds
from maelm_composer.suite.steps import Kind, list_steps, load_suite
from maelm_composer.sweep.search import count_runs, list_points
from maelm_composer.tasks.catalogue import find_task
from maelm_composer.training.plan import count_training_flops
from maelm_composer.training.run_record import identify
from tests.records import make_finetuning, make_pretraining, make_rank

from .conftest import make_run, write_record

SLOW = Device('cpu', 1, fp32=1e11, bf16=5e9)
H100 = Device('h100', 8, 67e12, 989e12)


def test_flops_are_those_of_the_batches_that_are_made(demo):
    for step in list_steps(demo, ARTEFACTS):
        if step.kind is not Kind.pretraining:
            continue
        config = demo.load_pretraining(step.model)
        collator, length = build_collator(config), config.model.max_seq_len
        visible = count_visible(config.masking, length)
        masked = length if collator.predicts_every_token else round(0.15 * length)
        per_row = sum(count_forward_flops(config.model, visible, masked).values())
        assert count_training_flops(config) == 3 * 768 * per_row


def test_nothing_is_done_and_nothing_is_written(demo, tmp_path):
    items = plan_suite(demo, ARTEFACTS, SLOW)
    assert [item.step for item in items] == list_steps(demo, ARTEFACTS)
    models = [item for item in items if item.step.model is not None]
    assert all(item.done == 0 and item.seconds > 0 and 'FLOPs model' in item.basis for item in models)
    assert not (tmp_path / 'work').exists()
    fast = plan_suite(demo, ARTEFACTS, dataclasses.replace(SLOW, fp32=2e11))
    assert sum_seconds(fast) < sum_seconds(items)


def test_a_plan_is_made_in_the_precision_that_a_run_would_take(demo):
    open_to_both = dataclasses.replace(demo, precision=Precision.auto)
    artefacts = [find_artefact('table3')]

    def estimate(**speeds):
        items = plan_suite(open_to_both, artefacts, dataclasses.replace(SLOW, **speeds))
        return {item.step.kind: item for item in items}

    slow, fast = estimate(bf16=5e9), estimate(bf16=1e12)
    for kind in (Kind.pretraining, Kind.finetuning):
        assert slow[kind].basis.endswith('of 1.0e+11 in fp32')
        assert fast[kind].basis.endswith('of 1.0e+12 in bf16')
        assert fast[kind].seconds < slow[kind].seconds
    assert fast[Kind.rank] == slow[Kind.rank]  # always in fp32
    settled = plan_suite(demo, artefacts, dataclasses.replace(SLOW, bf16=1e12))
    assert [item.basis for item in settled] == [item.basis for item in plan_suite(demo, artefacts, SLOW)]


def test_the_time_left_is_estimated_again_from_the_steps_so_far(demo):
    items = plan_suite(demo, [find_artefact('table1'), find_artefact('figure3')], SLOW)
    forecast, total = Forecast(items), sum(item.seconds for item in items)
    first, second = (item for item in items if item.step.kind is Kind.pretraining)
    assert forecast.finish(first.step, 3 * first.seconds) == pytest.approx(3 * (total - first.seconds))
    assert forecast.finish(first.step, 0.1) is None  # another artefact needs it, too
    tuned = next(item for item in items if item.step.tasks[1:])
    part = tuned.left['demo_pair'] + tuned.left['']  # Figure 3 needs one of Table 1's tasks
    left = forecast.finish(dataclasses.replace(tuned.step, tasks=('demo_pair',)), 5 * part)
    tuning = sum(item.seconds for item in items if item.step.kind is Kind.finetuning) - part
    rest = total - first.seconds - second.seconds - part - tuning
    of_all = (3 * first.seconds + 5 * part) / (first.seconds + part)
    assert left == pytest.approx(3 * second.seconds + 5 * tuning + of_all * rest)
    for item in items:
        forecast.finish(item.step, 1.0)
    assert forecast.is_over
    forecast = Forecast(items)
    forecast.drop(first.step.model)
    assert forecast.finish(first.step, 1.0) is None
    assert not forecast.is_over  # not all is made


def make_matching(suite):
    """A record of MAE-LM's last checkpoint that counts."""
    config = dataclasses.replace(suite.load_finetuning(MAE_LM, 768, ['demo_pair']), task='demo_pair')
    (point,) = list_points(config, find_task('demo_pair'))
    protocol = describe_protocol(config)
    assert protocol['max_seq_len'] == 64  # the checkpoint's own length
    return make_finetuning('demo_pair', 'demo', 768, point=dataclasses.asdict(point), protocol=protocol)


def test_records_are_found(demo):
    artefacts = [find_artefact('figure1'), find_artefact('figure3')]
    before = {item.name: item for item in plan_suite(demo, artefacts, SLOW)}
    run = make_run('demo', identity=identify(demo.load_pretraining(MAE_LM), 'any rows'))
    write_record(demo.run_folder(MAE_LM) / 'record.json', run)
    record = make_matching(demo)
    for seed in (1, 2):
        write_record(demo.finetuning_folder / f'{seed}.json', record | {'seed': seed})
    failed = make_finetuning('demo_pair', 'demo', 384, error='no memory')
    write_record(demo.finetuning_folder / 'failed.json', failed)
    tokens = demo.settings.rank_tokens
    write_record(demo.rank_folder / 'r.json', make_rank('demo-roberta', 768, max_tokens=tokens))
    write_record(demo.rank_folder / 'fewer.json', make_rank('demo', 768, max_tokens=tokens - 1))
    after = {item.name: item for item in plan_suite(demo, artefacts, SLOW)}
    done = {name for name, item in after.items() if item.done == item.total and item.step.model is not None}
    assert done == {'pretraining demo', 'rank demo-roberta', 'fine-tuning demo at 768, demo_pair'}
    assert all(after[name].seconds == 0 and before[name].seconds > 0 for name in done)
    assert after['fine-tuning demo at 256, demo_pair'] == before['fine-tuning demo at 256, demo_pair']


def test_records_of_another_recipe_do_not_count(demo):
    artefacts = [find_artefact('figure3')]
    identity = identify(demo.load_pretraining(MAE_LM), 'any rows')
    record = make_matching(demo)

    def count_done():
        return {item.name: item.done for item in plan_suite(demo, artefacts, SLOW) if item.done and item.step.model}

    write_record(demo.run_folder(MAE_LM) / 'record.json', make_run('demo', identity=identity | {'seed': 18}))
    for change in (
        {'point': record['point'] | {'batch_size': 17}},
        {'protocol': record['protocol'] | {'max_train_examples': 5}},
        {'seed': 9},
    ):
        write_record(demo.finetuning_folder / 'one.json', record | change)
        assert count_done() == {}
    write_record(demo.finetuning_folder / 'one.json', record)
    assert list(count_done()) == ['fine-tuning demo at 768, demo_pair']


def test_a_machine_shows_the_gpus_that_this_process_may_use(tmp_path, monkeypatch):
    program = tmp_path / 'nvidia-smi'
    program.write_text('#!/bin/sh\necho NVIDIA H100\necho NVIDIA H100\n')
    program.chmod(0o755)
    monkeypatch.setenv('PATH', f'{tmp_path}:{os.environ["PATH"]}')
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    assert describe_device().count == 2
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '1')
    assert describe_device().count == 1
    for none in ('', '-1', '-1,0'):
        monkeypatch.setenv('CUDA_VISIBLE_DEVICES', none)
        assert describe_device().is_cpu


def test_measured_speed_takes_the_place_of_the_model(demo):
    artefacts = [find_artefact('table1')]
    write_record(demo.records / 'pretraining/demo.json', make_run('demo'))  # 2e12 FLOPs in 10 seconds
    provenance = make_run('demo')['provenance']
    finetuning = make_finetuning('demo_pair', protocol={'precision': 'fp32'}, provenance=provenance)
    write_record(demo.records / 'finetuning/x.json', finetuning)
    items = {item.name: item for item in plan_suite(demo, artefacts, SLOW)}
    mine = items['pretraining demo-roberta']
    assert mine.basis == 'measured speed, 2.0e+11 FLOP/s'
    flops = count_training_flops(demo.load_pretraining(mine.step.model))
    assert mine.seconds == pytest.approx(flops / 2e11 + 4)
    assert items['fine-tuning demo at 768, 4 tasks'].basis.endswith('measured runs')
    other = plan_suite(dataclasses.replace(demo, precision=Precision.bf16), artefacts, SLOW)
    assert not any('measured' in item.basis for item in other)  # nor in another precision
    write_record(demo.records / 'pretraining/demo.json', make_run('demo') | {'training_seconds': 0.0})  # of three steps
    assert 'FLOPs model' in {i.name: i for i in plan_suite(demo, artefacts, SLOW)}['pretraining demo-roberta'].basis
    elsewhere = make_run('demo')
    elsewhere['provenance']['cpu'] = f'{name_processor()} (another instruction set)'
    write_record(demo.records / 'pretraining/demo.json', elsewhere)
    assert 'FLOPs model' in {i.name: i for i in plan_suite(demo, artefacts, SLOW)}['pretraining demo'].basis
    assert 'FLOPs model' in plan_suite(demo, artefacts, H100)[2].basis


def test_finetuning_costs_what_the_search_space_says(tmp_path):
    suite = load_suite('base', tmp_path)
    model = suite.load_pretraining(MAE_LM).model
    config = dataclasses.replace(suite.load_finetuning(MAE_LM, 1, ['rte']), measures_rank=False)
    flops = count_finetuning_flops(config, model, find_task('rte'))
    assert count_runs(config, find_task('rte')) == 64 + 4
    alone = dataclasses.replace(model, decoder=None, max_seq_len=75)
    per_row = count_forward_flops(alone, 75, 75)['encoder']
    assert flops == pytest.approx((3 * 5 * 2490 + 277) * per_row)  # 2, 3, 5, 10 epochs: 5 on average


def test_files_cost_what_their_rows_do_and_the_official_ones_until_they_are_there(task_folder, tmp_path):
    suite = load_suite('small', tmp_path)
    model = suite.load_pretraining(MAE_LM).model
    config = dataclasses.replace(suite.load_finetuning(MAE_LM, 1, ['rte']), measures_rank=False)
    per_row = count_forward_flops(dataclasses.replace(model, decoder=None, max_seq_len=75), 75, 75)['encoder']
    for folder, train, dev in (task_folder, 96, 48), (tmp_path / 'nowhere', 2490, 277):
        from_files = dataclasses.replace(config, data=dataclasses.replace(config.data, folder=str(folder)))
        flops = count_finetuning_flops(from_files, model, find_task('rte'))
        assert flops == pytest.approx((3 * 3 * train + dev) * per_row)  # three epochs


def test_an_own_task_costs_what_its_rows_do(own, tmp_path):
    model = own.load_pretraining(MAE_LM).model
    config = dataclasses.replace(own.load_finetuning(MAE_LM, 768, ['reviews']), measures_rank=False)
    flops = count_finetuning_flops(config, model, find_task('reviews', config.tasks))
    per_row = count_forward_flops(dataclasses.replace(model, decoder=None, max_seq_len=10), 10, 10)['encoder']
    assert flops == pytest.approx((3 * 3 * 3 + 2) * per_row)  # three epochs of three rows
    hub = dataclasses.replace(find_task('reviews', config.tasks), files={}, dataset='me/reviews')
    with pytest.raises(InputError, match='a plan does not load the rows of me/reviews'):
        count_finetuning_flops(config, model, hub)

    config = dataclasses.replace(own.load_finetuning(MAE_LM, 768, []), task='reviews')
    (point,) = list_points(config, find_task('reviews', config.tasks))
    settings = {'point': dataclasses.asdict(point), 'protocol': describe_protocol(config)}
    write_record(own.finetuning_folder / 'one.json', make_finetuning('reviews', 'demo', 768, **settings))
    assert {item.done for item in plan_suite(own, [OWN], SLOW) if 'reviews' in item.name} == {0}  # of other rows
    (tmp_path / 'dev.csv').unlink()
    items = {item.name: item for item in plan_suite(own, [OWN], SLOW)}
    item = items['fine-tuning demo at 768, reviews']
    assert (item.done, item.total) == (1, 2)
    assert item.basis == f'not known: task reviews: {tmp_path}/dev.csv is not there'


def test_a_budget_does_not_depend_on_the_runs_that_are_here(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan, 'SCALES', ('medium',))
    print_budget(8, 'H100', 24.0)
    before = capsys.readouterr().out
    (tmp_path / 'runs/suite/medium').mkdir(parents=True)
    (tmp_path / 'runs/suite/medium/precision.txt').write_text('fp32\n')
    print_budget(8, 'H100', 24.0)
    assert capsys.readouterr().out == before


def test_small_models_on_gpus_take_the_time_of_their_steps_and_ranks_divide_the_batch(demo):
    base, six = load_suite('base', demo.work), dataclasses.replace(H100, count=6)
    (of_base,) = [i for i in plan_suite(base, [find_artefact('figure1')], six) if i.step.kind is Kind.pretraining]
    assert of_base.num_devices == 4  # 2,048 rows
    (of_demo,) = [i for i in plan_suite(demo, [find_artefact('figure1')], six) if i.step.kind is Kind.pretraining]
    assert of_demo.seconds == pytest.approx(4 + 48 * 0.005)  # 768 rows in batches of 16


def test_shards_of_files_are_about_as_large_as_their_compressed_text(tmp_path, monkeypatch):
    monkeypatch.setenv('DATA_ROOT', str(tmp_path))
    (tmp_path / 'corpus').mkdir()
    (tmp_path / 'corpus/text.parquet').write_bytes(bytes(10**8))
    shards = plan_suite(load_suite('small', tmp_path), [find_artefact('figure1')], SLOW)[1]
    assert shards.disk_bytes == pytest.approx(1.28e8)


def test_a_budget_says_what_fits(capsys, monkeypatch):
    monkeypatch.setattr(plan, 'SCALES', ('base',))
    print_budget(8, 'H100', 24.0)
    lines = capsys.readouterr().out.splitlines()
    (last,) = [line for line in lines if line.startswith('8 × H100')]
    assert '192 GPU-hours' in last
    assert 'pretraining 40%' in last
    row = {line.split('  ')[0].strip(): line.split()[-2:] for line in lines if 'fits' in line or '—' in line}
    assert row['Figure 1'][1] == 'fits'
    assert row['all of them'][1] == '—'
    hours = {name: float(cells[0].replace(',', '')) for name, cells in row.items()}
    # 6.0e20 FLOPs at 40 % of 989e12 FLOP/s are 420 hours; a model of Table 2 each.
    assert hours['all of them'] > hours['Table 2'] > 10 * hours['Figure 1']


def test_the_command_plans_the_five_scales_together(capsys, monkeypatch):
    monkeypatch.setattr('sys.argv', ['maelm', 'plan', '--gpus', '8', '--gpu', 'h100', '--hours', '24'])
    with pytest.raises(SystemExit, match='0'):
        cli.main()
    heading = capsys.readouterr().out.splitlines()[0]
    assert heading.split()[-5:] == ['small', 'medium', 'base', 'base_pp', 'large_pp']


def test_a_plan_is_printed_whole(demo, capsys):
    print_plan(demo, plan_suite(demo, ARTEFACTS, SLOW), SLOW)
    text = capsys.readouterr().out
    for name in ('tokenizer', 'shards', 'pretraining demo-cross', 'rank demo-roberta', 'scale demo on this CPU'):
        assert name in text


def test_devices(monkeypatch):
    assert describe_device('NVIDIA H100 80GB HBM3', 4) == Device('h100', 4, 67e12, 989e12)
    assert describe_device('NVIDIA H100 PCIe', 1) == Device('h100 pcie', 1, 51e12, 756e12)
    runs = {'a': parse_pretraining(json.dumps(make_pretraining('a', device='NVIDIA H100 PCIe')), 'a.json')}
    of_a = Evidence('small', runs, {}, [], [], [])
    assert describe_device('h100', 1).select_same(of_a).runs == {}  # another kind, whose name contains this one
    assert describe_device('h100 pcie', 1).select_same(of_a).runs == runs
    names = 'a100, h100 pcie, h100 nvl, h100, h200'
    for gpu in ('rtx', 'NVIDIA RTX A1000'):  # no A100
        with pytest.raises(InputError, match=f'GPU {gpu}: its peak is not known; choose one of {names}'):
            describe_device(gpu, 1)
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '')
    with pytest.raises(InputError, match=f'this machine has no GPU: name the kind with --gpu, one of {names}'):
        describe_device(count=8)
    assert describe_device().fp32 > 0
