"""The numbers of tables and curves, checked by hand."""

import json
import math
import statistics

import numpy as np
import pytest
from scipy import stats

from maelm_composer.errors import InputError
from maelm_composer.records import FinetuningRecord, load_folder, pack_numbers, parse_finetuning
from maelm_composer.reporting.artefacts import ABLATIONS, DELTAS, MAE_LM
from maelm_composer.reporting.cells import Cell, Estimate, Term, estimate, slope
from maelm_composer.sweep.search import SweepResult, TaskResult
from maelm_composer.tasks.catalogue import find_task
from tests.records import make_failed, make_running
from tests.reporting.conftest import Archive, build


@pytest.fixture(scope='module')
def rows(tmp_path_factory):
    made = Archive(tmp_path_factory.mktemp('full'), 'medium')
    made.add_everything()
    return build(made)


def test_models_are_paired_by_pretraining_seed():
    ours = {17: [0.5, 0.6, 0.9], 18: [0.7], 19: [0.8, 0.8]}
    theirs = {19: [0.7], 18: [0.55], 17: [0.4, 0.6]}
    found = estimate([Term(1.0, ours), Term(-1.0, theirs)])
    assert found.value == pytest.approx((0.1 + 0.15 + 0.1) / 3)  # of medians
    assert (found.count, found.pretraining_seeds) == (1, 3)
    half = 4.302653 * statistics.stdev([0.1, 0.15, 0.1]) / math.sqrt(3)  # t(0.975, 2)
    assert (found.low, found.high) == pytest.approx((found.value - half, found.value + half), abs=1e-6)
    assert estimate([Term(1.0, ours), Term(-1.0, {18: [0.5]})]) == Estimate(pytest.approx(0.2))  # one seed: no interval


def test_one_example_has_no_variance_of_examples():
    seeds = {17: [50.0], 18: [51.0], 19: [52.0]}
    found = estimate([Term(1.0, seeds, 'a task', dict.fromkeys(seeds, np.zeros(1)))])
    assert (found.value, found.examples) == (51, 0)
    assert found == estimate([Term(1.0, seeds)])


def test_what_a_pretraining_seed_lacks_is_named_in_the_cell(archive):
    made = archive('medium')
    made.add_everything()
    for path in made.records.rglob('rte-medium-s18-*.json'):
        path.unlink()
    rows = build(made)
    rte = rows['table1', 'MAE-LM', 'rte', None]
    assert (rte.pretraining_seeds, rte.note) == (2, 'rte of medium-s18 is not recorded')
    gap = rows['table1', 'MAE-LM − RoBERTa', 'rte', None]
    assert gap.pretraining_seeds == 2
    assert 'pretraining seeds 18 lack a part of the comparison' in gap.note
    made.add_run('medium-s20', identity={'seed': 20, 'content hash of data.remote': 'other data'})
    with pytest.raises(InputError, match=r'medium-s19 and medium-s20 differ in content hash of data.remote'):
        build(made)


def test_a_slope_is_that_of_least_squares():
    points = [(at, Cell((Term(1.0, {17: [3 - 2 * at]}),))) for at in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert slope(points).estimate.value == pytest.approx(-2)
    bent = [(at, Cell((Term(1.0, {17: [value]}),))) for at, value in ((0.0, 0.0), (1.0, 1.0), (3.0, 1.0))]
    assert slope(bent).estimate.value == pytest.approx(2 / 7)  # by hand; that of the ends is 1/3


def test_table1(rows):
    ours = rows['table1', 'MAE-LM', 'rte', None]
    assert (ours.value, ours.count, ours.paper, ours.difference) == (pytest.approx(63), 5, 79.1, None)
    half = 4.302653 * 0.4 / math.sqrt(3)  # the pretraining seeds' medians are 62.6, 63 and 63.4
    assert (ours.low, ours.high, ours.pretraining_seeds) == (pytest.approx(63 - half), pytest.approx(63 + half), 3)
    assert rows['table1', 'MAE-LM', 'mnli_mm', None].value == pytest.approx(62)
    assert rows['table1', 'a constant answer', 'rte', None].value == pytest.approx(40)
    assert rows['table1', 'a constant answer', 'glue_avg', None].value == pytest.approx(40)
    assert ('table1', 'a constant answer', 'mnli_mm', None) not in rows  # the record has that of its own metric
    assert rows['table1', 'MAE-LM', 'glue_avg', None].value == pytest.approx(63)
    gap = rows['table1', 'MAE-LM − RoBERTa', 'glue_avg', None]
    assert (gap.value, gap.paper, gap.difference) == (pytest.approx(4.1), 0.9, pytest.approx(3.2))
    assert gap.low > 0
    assert gap.verdict.startswith('holds: 3 pretraining seeds; not comparable')
    assert rows['table1', 'MAE-LM − RoBERTa', 'rte', None].verdict.startswith(
        'holds: 3 pretraining seeds, one of 13 by Holm'
    )
    assert gap.source == 'measured'


def test_avg_counts_mnli_once_and_is_the_mean_of_medians(archive):
    made = archive('medium')
    made.add_run('medium')
    tasks = ('mnli', 'qqp', 'qnli', 'sst2', 'cola', 'rte', 'mrpc', 'stsb')
    for task, score in zip(tasks, (0.80, 0.88, 0.72, 0.64, 0.16, 0.56, 0.72, 0.24), strict=True):
        for seed, shift in enumerate((-0.3, 0.0, 0.1), start=1):
            made.add_score('medium', task, seed, score + shift)
    # (80 + 88 + 72 + 64 + 16 + 56 + 72 + 24) / 8
    assert build(made)['table1', 'MAE-LM', 'glue_avg', None].value == pytest.approx(59)
    records = load_folder(made.records / 'finetuning', parse_finetuning)
    of_tasks = [[r for r in records if isinstance(r, FinetuningRecord) and r.task == task] for task in tasks]
    results = [TaskResult(find_task(task), None, r, r, 3) for task, r in zip(tasks, of_tasks, strict=True)]
    assert SweepResult(results, []).average == pytest.approx(0.59)  # a sweep prints the same average


@pytest.mark.parametrize('scale, published', [('base', 79.1), ('base_pp', 85.2)])
def test_only_the_papers_scale_is_compared_in_absolute_numbers(archive, scale, published):
    made = archive(scale)
    for pretraining_seed in (1, 2, 3):
        made.add_run(f'{scale}-s{pretraining_seed}')
        for task, score in (('rte', published / 100), ('qqp', 0.95), ('qnli', 0.8)):
            made.add_score(f'{scale}-s{pretraining_seed}', task, 1, score + (pretraining_seed - 1) / 1000)
    rows = build(made)
    rte, qqp, qnli = (rows['table1', 'MAE-LM', task, None] for task in ('rte', 'qqp', 'qnli'))
    assert (rte.paper, rte.difference) == pytest.approx((published, 0.1))
    assert rte.verdict == "the interval holds the paper's number"
    assert qqp.verdict.startswith("above the paper's number")
    assert qnli.verdict.startswith("below the paper's number")


def test_one_pretraining_seed_has_no_interval_and_decides_nothing(archive):
    made = archive('medium')
    made.add_everything(pretraining_seeds=(17,))
    gap = build(made)['table1', 'MAE-LM − RoBERTa', 'rte', None]
    assert (gap.low, gap.high, gap.p, gap.count, gap.pretraining_seeds) == (None, None, None, 5, 1)
    assert gap.value == pytest.approx(4.11)
    assert gap.verdict.startswith('undecided: with the sign of the claim, but from one pretraining seed')


def test_overlapping_seeds_are_undecided_and_a_reversed_gap_fails(archive):
    made = archive('medium')
    scores = {'medium': (0.50, 0.56, 0.53), 'medium-roberta': (0.52, 0.52, 0.53)}
    for run, of_seeds in scores.items():
        for seed, score in enumerate(of_seeds):
            made.add_run(f'{run}-s{seed}')
            made.add_score(f'{run}-s{seed}', 'rte', 1, score)
            made.add_score(f'{run}-s{seed}', 'sst2', 1, score if run == 'medium-roberta' else 0.1)
    rows = build(made)
    assert rows['table1', 'MAE-LM − RoBERTa', 'rte', None].verdict.startswith('undecided: 3')
    assert rows['table1', 'MAE-LM − RoBERTa', 'sst2', None].verdict.startswith('fails: 3')


def test_the_point_with_most_seeds_is_selected_then_the_best_median(archive):
    made = archive('medium')
    made.add_run('medium')
    low, high, lucky = ({'learning_rate': rate} for rate in (1e-5, 2e-5, 3e-5))
    for seed in (1, 2, 3):
        made.add_score('medium', 'rte', seed, 0.60, point=low)
        made.add_score('medium', 'rte', seed, 0.62, point=high)
    made.add_score('medium', 'rte', 1, 0.90, point=lucky)
    row = build(made)['table1', 'MAE-LM', 'rte', None]
    assert (row.value, row.count) == (pytest.approx(62), 3)


def test_table2_has_every_row_and_its_distance_to_maelm(rows):
    values = [key for key in rows if key[0] == 'table2' and not key[1].endswith('− MAE-LM')]
    assert len(values) == len(ABLATIONS)
    gap = rows['table2', '6 layer, 768 dimension − MAE-LM', 'glue_avg', None]
    assert gap.paper == pytest.approx(-1.3)
    assert gap.value == pytest.approx(rows['table2', '6 layer, 768 dimension', 'glue_avg', None].value - 63)
    assert gap.verdict.startswith('holds')


def test_table3(rows):
    assert rows['table3', 'MAE-LM', 'pretrained', None].value == 53  # 50 + 7 - 2 × 2: the last layer
    gap = rows['table3', 'MAE-LM − RoBERTa', 'pretrained', None]
    assert (gap.value, gap.paper, gap.difference) == (7, 29, None)  # of as many dimensions as base has
    assert gap.verdict.startswith('holds: 3 pretraining seeds, one of 3 by Holm')
    t = 7 * math.sqrt(3)  # the three differences are 6, 7 and 8
    assert gap.p == pytest.approx(3 * 2 * stats.t(2).sf(t))  # the other two columns have p = 1
    after = rows['table3', 'MAE-LM', 'squad2', None]
    assert (after.value, after.paper, after.high) == (49, 260, pytest.approx(49 + 4.302653 / 6))  # rounding alone


def test_figures_of_rank(rows):
    masks = [rows['figure1', 'RoBERTa', 'rank_masks', layer] for layer in range(3)]
    assert [row.value for row in masks] == [5, 15, 25]
    # Of the embeddings, equal ranks in all seeds are no chance of rounding.
    assert [row.low is None for row in masks] == [True, False, False]
    assert rows['figure1', 'RoBERTa', 'rank with − without [MASK], last layer', None].value == 58 - 46
    assert rows['figure1', 'RoBERTa', 'growth per layer of: rank with − without [MASK]', None].value == pytest.approx(1)
    assert not rows['figure1', 'RoBERTa', 'growth per layer of: rank with − without [MASK]', None].is_claim
    assert rows['figure5', 'MAE-LM', 'rank during mnli', 2.0].value == 50 - 4 + 3
    assert ('figure5', 'MAE-LM', 'rank_with_masks', 0) not in rows  # its encoder has never seen a [MASK]
    excess = rows['subspace', 'RoBERTa', 'mask_outside_excess, last layer', None]
    assert ('subspace', 'MAE-LM', 'mask_outside_excess, last layer', None) not in rows  # its encoder reads no [MASK]
    assert excess.is_claim
    assert excess.value == pytest.approx(0.3 - 0.09)
    layers = [rows['subspace', 'RoBERTa', 'mask_outside_excess', layer].value for layer in range(3)]
    assert layers == pytest.approx([0.01, 0.11, 0.21])
    assert rows['figure4', 'δ = 0.5', 'mask_outside_excess', 0.5].value == pytest.approx(0.3 - 0.09)


def test_figure4_ends_in_the_rows_of_table2(rows):
    for delta, label in ((0.0, MAE_LM.label), (1.0, 'enc. w. [MASK]')):
        point = rows['figure4', f'δ = {delta:g}', 'glue_avg', delta]
        row = rows['table2', label, 'glue_avg', None]
        assert (point.value, point.run_keys) == (row.value, row.run_keys)
    assert rows['figure4', 'δ = 1 − δ = 0', 'glue_avg', None].paper == -1
    assert rows['figure4', 'slope in δ', 'glue_avg', None].value < 0
    ranks = [rows['figure4', f'δ = {delta:g}', 'rank_real', delta].value for delta, _ in DELTAS]
    assert ranks == [53, 50, 49, 48, 47]
    fall = rows['figure4', 'δ = 1 − δ = 0', 'rank_real', None]
    assert (fall.value, fall.margin) == (-6, pytest.approx(0.05 * 53))
    assert rows['figure4', 'slope in δ', 'rank_real', None].word == 'holds'
    assert rows['figure4', 'δ = 1 − RoBERTa', 'rank_real', None].value == 1


def test_a_seed_that_failed_is_named_beside_the_median_of_the_others(archive):
    made = archive('medium')
    made.add_run('medium')
    made.add_score('medium', 'rte', 1, 0.6)
    made.add_score('medium', 'rte', 2, 0.7)
    made.add_score('medium', 'rte', 3, 0.0, status='failed', error='loss is nan')
    made.add_score('medium', 'rte', 2, 0.0, status='failed', error='elsewhere', point={'learning_rate': 1e-4})
    row = build(made)['table1', 'MAE-LM', 'rte', None]
    assert (row.value, row.count, row.note) == (
        pytest.approx(65),
        2,
        'rte from medium: fine-tuning seed 3 failed, of 3',
    )


def test_a_run_with_fewer_fine_tuning_seeds_than_the_others_is_named(full):
    for task in ('rte', 'mnli'):
        for seed in (4, 5):
            (full.records / f'finetuning/{task}-medium-s18-400-{seed}-3e-05.json').unlink()
    full.add_score('medium-s18', 'rte', 4, 0.0, error='loss is nan')
    rows = build(full)
    failed = 'rte from medium-s18: fine-tuning seed 4 failed, of 4'
    lack = 'from medium-s18: {} of 5 fine-tuning seeds recorded'.format
    rte = rows['table1', 'MAE-LM', 'rte', None]
    assert (rte.count, rte.pretraining_seeds, rte.note) == (3, 3, f'{failed}; rte {lack(4)}')
    assert rows['table1', 'MAE-LM − RoBERTa', 'rte', None].note == rte.note
    for artefact, column, x in (('table3', 'mnli', None), ('figure5', 'rank during mnli', 1)):
        assert rows[artefact, 'MAE-LM', column, x].note == f'mnli {lack(3)}'
        assert rows[artefact, 'RoBERTa', column, x].note == ''


def test_a_pretraining_seed_that_failed_is_named_with_its_reason(full):
    for name, seed in (('medium-s20', 20), ('medium', 17), ('medium-none-s17', 17)):
        full.write('pretraining', name, make_failed(name, seed, 'loss is nan'))
    full.write('pretraining', 'medium-s21', make_running('medium-s21') | {'identity': {'seed': 21}})
    rows = build(full)
    for artefact, row, column in (
        ('table1', 'MAE-LM', 'rte'),
        ('table3', 'MAE-LM', 'pretrained'),
        ('table3', 'MAE-LM − RoBERTa', 'pretrained'),
    ):
        found = rows[artefact, row, column, None]  # seed 17 has a finished run, and 21 is only not finished
        assert (found.pretraining_seeds, found.note) == (3, 'pretraining of medium-s20 failed: loss is nan')
    assert rows['table3', 'RoBERTa', 'pretrained', None].note == ''


def test_a_seed_that_failed_is_named_beside_ranks_and_costs_too(full):
    full.add_score('medium-s18', 'mnli', 9, 0.0, status='failed', error='loss is nan')
    rows = build(full)
    for artefact, column, x in (
        ('table3', 'mnli', None),
        ('figure5', 'rank during mnli', 1),
        ('figure3', 'hours', 400),
    ):
        row = rows[artefact, 'MAE-LM', column, x]
        assert row.note == 'mnli from medium-s18: fine-tuning seed 9 failed, of 6', artefact


def test_what_is_missing_is_empty_and_says_why(archive):
    made = archive('medium')
    made.add_run('medium')
    made.add_score('medium', 'rte', 1, 0.6)
    made.add_score('medium', 'qqp', 1, 0.0, status='failed', error='loss is nan')
    made.add_score('medium', 'sst2', 1, 0.0, 100, status='failed', error='loss is nan')
    made.write('pretraining', 'medium-misaligned', make_running('medium-misaligned'))
    made.write('pretraining', 'medium-cross', make_failed('medium-cross', 17, 'loss is nan'))
    rows = build(made)
    assert rows['table1', 'RoBERTa', 'rte', None].note == 'no finished pretraining run medium-roberta'
    assert rows['table1', 'MAE-LM', 'qnli', None].note == 'qnli of medium is not recorded'
    assert rows['table1', 'MAE-LM', 'qqp', None].note == 'qqp from medium failed: loss is nan'
    assert rows['table1', 'MAE-LM', 'sst2', None].note == 'sst2 of medium is not recorded'
    average = rows['table1', 'MAE-LM', 'glue_avg', None]
    assert (average.value, average.verdict, average.source) == (None, '', '')
    assert 'qnli of medium is not recorded' in average.note
    missing = rows['table2', 'misaligned position encoding', 'glue_avg', None]
    assert missing.note == 'no finished pretraining run medium-misaligned'
    failed = rows['table2', 'cross-attention', 'glue_avg', None]
    assert failed.note == 'no finished pretraining run medium-cross; pretraining of medium-cross failed: loss is nan'
    assert all(row.value is not None or row.note for row in rows.values())


def test_demo_rows_do_not_mix_with_measured_ones(archive):
    made = archive('medium')
    made.add_run('medium')
    made.add_score('medium', 'rte', 1, 0.6, protocol={'source': 'demo'})
    with pytest.raises(InputError, match='demo task, which is no evidence at medium'):
        build(made)
    demo = archive('demo')
    demo.add_everything(seeds=(1,))
    assert {row.source for row in build(demo).values() if row.value is not None} == {'demo'}


def test_provenance_stands_in_every_row(rows):
    for row in rows.values():
        assert row.value is not None, row
        assert row.run_keys
        assert (row.git_revision, row.tokenizer_hash) == ('abc123', 'tokenizer'), row
        assert 'recipe-of-medium' in row.recipe_hash
        assert 'pretraining 17' in row.seeds
        assert row.hardware == 'CPU, 2 threads, Test <CPU> × 2 cores'
        assert row.training_seconds > 0
        assert row.device_hours > 0


def test_with_influences_the_interval_covers_other_examples(archive):
    made = archive('medium')
    made.add_everything(seeds=(1,))
    rows = build(made)
    generator = np.random.default_rng(0)
    shared = generator.normal(0, 0.3, 200)  # of MAE-LM's lead, by example: the same for every pretraining seed
    for path in made.records.rglob('rte-*.json'):
        record = json.loads(path.read_text())
        own = generator.normal(0, 0.01, 200) + shared * record['checkpoint']['run_name'].startswith('medium-s')
        record['influences'] = {'accuracy': pack_numbers(own - own.mean())}
        path.write_text(json.dumps(record))
    covering = build(made)
    where = ('table1', 'MAE-LM − RoBERTa', 'rte', None)
    before, after = rows[where], covering[where]
    assert (before.examples, after.examples, before.value) == (0, 200, after.value)
    error = math.hypot((before.high - before.low) / 2 / 4.302653, 100 * shared.std(ddof=1) / math.sqrt(200))
    assert 1.96 < (after.high - after.low) / 2 / error < 2.1
    assert covering['table1', 'MAE-LM − RoBERTa', 'glue_avg', None].examples == 0  # the other tasks have none


def test_the_interval_does_not_depend_on_the_order_of_equal_medians(archive):
    made = archive('medium')
    made.add_everything(seeds=(1, 2, 3))
    generator = np.random.default_rng(0)
    drawn = [generator.normal(0, 1, 50) for _ in range(2)]

    def measure(*influences: np.ndarray) -> tuple[float, float]:
        for path in made.records.rglob('rte-*.json'):
            record = json.loads(path.read_text())
            tied = record['seed'] < 3  # seeds 1 and 2 have the median's score
            record |= {'score': 0.5 if tied else 0.6, 'metrics': {'accuracy': 0.5 if tied else 0.6}}
            own = (
                influences[record['seed'] % 2] if record['checkpoint']['run_name'].startswith('medium-s') else drawn[0]
            )
            record['influences'] = {'accuracy': pack_numbers(own)}
            path.write_text(json.dumps(record))
        row = build(made)['table1', 'MAE-LM − RoBERTa', 'rte', None]
        return row.low, row.high

    assert measure(*drawn) == measure(*reversed(drawn))
