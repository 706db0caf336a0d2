"""The ladder's rows, from records whose numbers are easy to check by hand."""

import dataclasses
import html
import json
import math
import re

import numpy as np
import pytest

from maelm_composer.reporting.artefacts import LADDER, RUNGS, Role, tasks_of
from maelm_composer.reporting.cells import Cell, Term, subtract_relative
from maelm_composer.reporting.figures import draw_ladder
from maelm_composer.reporting.load import load_evidence
from maelm_composer.reporting.report import build_tables, report
from maelm_composer.reporting.rows import FAILS, HOLDS, NOT_COMPARABLE, UNDECIDED

SEEDS = (17, 18, 19)


def add_rung(archive, number, seeds=SEEDS):
    """At rung n MAE-LM is above RoBERTa by 3n points, and in rank by 10n percent, both with a spread over seeds.

    The first variant of a rung is below RoBERTa by as much as MAE-LM is above it at the second; other variants are
    missing. At the first rung the logarithm of both models' FLOPs lies half-way to the second.
    """
    rung = RUNGS[number]
    for nth, seed in enumerate(seeds):
        for model, lead in zip(rung.models, (0, number, -1), strict=False):
            run = f'{model.run_name("ladder")}-s{seed}'
            flops = round(rung.flops * (1 if model is rung.roberta else math.sqrt(10 / 3)))
            archive.add_run(run, eval_loss=5.0 - number - 0.1 * lead + 0.01 * nth, tokens=400 * 128, flops=flops)
            archive.add_rank(run, lead=2 + lead * (10 + nth) * 5)  # RoBERTa's last layer: 48
            for task in tasks_of('ladder', (Role.quick,)):
                archive.add_score(run, task, 1, 0.6 + lead * (0.03 + 0.001 * nth))


@pytest.fixture
def rows(archive):
    made = archive('ladder')
    add_rung(made, 0)
    add_rung(made, 1)
    return build_tables(load_evidence(made.results / 'ladder', 'ladder'))['ladder']


def find(rows, row, column):
    return {r.x: r for r in rows if (r.row, r.column) == (row, column)}


def test_both_models_stand_at_every_rung(rows):
    ranks = {x: r.value for x, r in find(rows, 'RoBERTa', 'rank_real').items()}
    assert ranks == {3e13: 48, 1e14: 48, 3e14: None, 1e15: None}
    losses = find(rows, 'MAE-LM', 'eval_loss')
    assert losses[1e14].value == pytest.approx(3.91)
    assert 'no finished pretraining run ladder-3e14' in losses[3e14].note
    # The loss falls by 0.01 a batch of two rows: the window of 20 that is a nat below the first is 101 to 120.
    assert find(rows, 'MAE-LM', 'departure')[3e13].value == pytest.approx((101 + 120) / 2 * 2 * 128, abs=2 * 128)


def test_differences_are_paired_and_their_growth_is_per_decade(rows):
    gaps = find(rows, 'MAE-LM − RoBERTa', 'real_rank_excess')
    assert (gaps[3e13].value, gaps[3e13].p) == (0, 1)
    # Ranks are whole numbers: those of three seeds, equal by chance, leave the variance of rounding, 1/12 a model.
    assert gaps[3e13].high == pytest.approx(4.302653 * 100 / 48 * math.sqrt(2 / 12 / 3), abs=1e-5)
    assert gaps[1e14].value == pytest.approx(100 * 55 / 48)
    assert gaps[1e14].verdict.startswith(HOLDS)
    assert gaps[1e14].paper == pytest.approx(100 * (491 / 462 - 1), abs=0.01)
    decade = math.log10(1e14 / 3e13)
    for column, step in (('real_rank_excess', 100 * 55 / 48), ('quick_avg', 3.1)):
        (trend,) = find(rows, 'MAE-LM − RoBERTa, change with ten times the compute', column).values()
        assert trend.value == pytest.approx(step / decade)
        assert trend.low < trend.value < trend.high
        assert trend.pretraining_seeds == 3
        assert 'seeds over 3e13 and 1e14 FLOPs, one of 5 by Holm' in trend.verdict


def test_a_variant_of_one_rung_is_compared_there_and_has_no_trend(rows):
    (gap,) = find(rows, 'MAE-LM, one decoder layer − RoBERTa', 'quick_avg').values()
    assert gap.value == pytest.approx(-3.1)
    assert gap.verdict.startswith(FAILS)
    assert (gap.x, gap.paper) == (3e13, None)
    assert find(rows, 'MAE-LM, one decoder layer', 'eval_loss')[3e13].value == pytest.approx(5.11)
    assert not [r for r in rows if r.row.startswith('MAE-LM, one decoder layer − RoBERTa,')]


def test_the_lead_is_what_the_decoder_makes_and_what_the_missing_mask_adds(rows):
    of_decoder, of_mask = 'MAE-LM, [MASK] in the encoder − RoBERTa', 'MAE-LM − MAE-LM, [MASK] in the encoder'
    for column, unit, step in (('real_rank_excess', 'percent', 100 * 55 / 48), ('quick_avg', 'points', 3.1)):
        decoder, mask = (find(rows, row, column)[1e14] for row in (of_decoder, of_mask))
        assert (decoder.value, mask.value) == (pytest.approx(-step), pytest.approx(2 * step))  # in percent of RoBERTa's
        assert (mask.unit, mask.pretraining_seeds, mask.paper) == (unit, 3, None)
        assert decoder.verdict.startswith(FAILS)
        assert mask.verdict.startswith(HOLDS)
        assert 'no finished pretraining run ladder-3e13-encoder_with_mask' in find(rows, of_mask, column)[3e13].note
    assert not [r for r in rows if r.row.startswith((f'{of_decoder},', f'{of_mask},'))]  # no trends


def test_at_equal_flops_roberta_lies_between_its_rungs(rows, archive):
    losses = find(rows, 'MAE-LM − RoBERTa at equal FLOPs', 'eval_loss')
    assert losses[3e13].value == pytest.approx(5.01 - (5.01 + 4.01) / 2)
    assert losses[3e13].low is None  # here a seed moves all models and rungs alike, so the differences are equal
    assert (losses[3e13].verdict, losses[3e13].p, losses[3e13].unit) == (NOT_COMPARABLE, None, 'nats')
    assert 'no finished pretraining run ladder-3e14' in losses[1e14].note
    assert list(losses) == [3e13, 1e14, 3e14]  # above the last rung there is none
    ranks, shares = (find(rows, 'MAE-LM − RoBERTa at equal FLOPs', name) for name in ('rank_real', 'real_rank_excess'))
    assert shares[1e14].note == ranks[1e14].note
    roberta = find(rows, 'RoBERTa', 'rank_real')
    middle = (roberta[3e13].value + roberta[1e14].value) / 2  # MAE-LM takes as much as this RoBERTa
    assert shares[3e13].value == pytest.approx(100 * ranks[3e13].value / middle)
    (gap,) = find(rows, 'MAE-LM, one decoder layer − RoBERTa at equal FLOPs', 'quick_avg').values()
    assert gap.value == pytest.approx(-3.1)  # both rungs' RoBERTas are equally good
    old = archive('ladder')  # as recorded by an earlier version
    for seed in SEEDS:
        old.add_run(f'ladder-3e13-s{seed}', flops=None)
    rows = build_tables(load_evidence(old.results / 'ladder', 'ladder'))['ladder']
    assert 'number of FLOPs of ladder-3e13-s17' in find(rows, 'MAE-LM − RoBERTa at equal FLOPs', 'eval_loss')[3e13].note


def test_rungs_with_too_few_common_seeds_are_independent(archive):
    made = archive('ladder')
    add_rung(made, 0)
    add_rung(made, 1, SEEDS[:2])
    rows = build_tables(load_evidence(made.results / 'ladder', 'ladder'))['ladder']
    loss = find(rows, 'MAE-LM − RoBERTa at equal FLOPs', 'eval_loss')[3e13]
    # MAE-LM less half of its seed's RoBERTa, from three seeds, and half of the next rung's, from two.
    parts = 4.302653 * 0.005 / math.sqrt(3), 12.706205 * 0.0025
    assert loss.high - loss.value == pytest.approx(math.hypot(*parts))
    assert loss.pretraining_seeds == 2
    share = find(rows, 'MAE-LM − RoBERTa at equal FLOPs', 'real_rank_excess')[3e13]
    assert share.note == 'a ratio needs 3 pretraining seeds that both rungs have'


def test_what_mask_adds_to_roberta_is_judged_at_every_rung(rows):
    gains = find(rows, 'RoBERTa', 'mask_rank_gain')
    assert (gains[3e13].value, gains[3e13].unit) == (pytest.approx(100 * (60 - 48) / 48), 'percent')
    assert 'one of 2 by Holm' in gains[3e13].verdict
    shares = find(rows, 'RoBERTa', 'mask_outside_excess')
    assert shares[1e14].value == pytest.approx(0.3 - 0.09)
    assert 'no finished pretraining run ladder-3e14' in shares[3e14].note


@pytest.mark.parametrize('count', [1, 2])
def test_a_rung_of_fewer_than_three_seeds_has_no_verdict_and_no_part_in_the_trend(archive, count):
    made = archive('ladder')
    for number, seeds in enumerate((SEEDS, SEEDS, SEEDS[:count])):
        add_rung(made, number, seeds)
    rows = build_tables(load_evidence(made.results / 'ladder', 'ladder'))['ladder']
    gaps = find(rows, 'MAE-LM − RoBERTa', 'quick_avg')
    assert gaps[3e14].value == pytest.approx(6 if count == 1 else 6.1)
    named = 'one pretraining seed' if count == 1 else 'two pretraining seeds'
    assert gaps[3e14].verdict.startswith(f'{UNDECIDED}: with the sign of the claim, but from {named};')
    assert gaps[3e14].p is None
    assert 'Holm' not in gaps[1e14].verdict  # its family: the judged rungs; those of 3e13 are all equal
    assert (gaps[3e14].low is None) == (count == 1)
    assert gaps[3e14].drawn_interval is None
    assert gaps[1e14].drawn_interval == (gaps[1e14].low, gaps[1e14].high)
    (trend,) = find(rows, 'MAE-LM − RoBERTa, change with ten times the compute', 'quick_avg').values()
    assert trend.value == pytest.approx(3.1 / math.log10(1e14 / 3e13))  # of the two other rungs
    assert trend.low < trend.value


def test_the_trend_is_paired_by_the_seeds_that_all_rungs_have(archive):
    made = archive('ladder')
    for number, seeds in enumerate((SEEDS, SEEDS, [*SEEDS, 20])):
        add_rung(made, number, seeds)
    rows = build_tables(load_evidence(made.results / 'ladder', 'ladder'))['ladder']
    (trend,) = find(rows, 'MAE-LM − RoBERTa, change with ten times the compute', 'quick_avg').values()
    x = np.log10([3e13, 1e14, 3e14])
    weights = (x - x.mean()) / np.sum((x - x.mean()) ** 2)
    slopes = weights @ np.array([[0.0, 0.0, 0.0], [3.0, 3.1, 3.2], [6.0, 6.2, 6.4]])
    assert trend.value == pytest.approx(slopes.mean())
    assert 'seeds over 3e13, 1e14 and 3e14 FLOPs' in trend.verdict
    assert trend.high - trend.value == pytest.approx(4.302653 * slopes.std(ddof=1) / math.sqrt(3))
    # A rung that was planned with fewer seeds is complete: nothing is missing, and the suite exits with 0.
    assert (trend.pretraining_seeds, trend.note, trend.is_missing) == (3, '', False)


def test_a_trend_over_unequal_learning_rates_says_so(archive):
    made = archive('ladder')
    for number in range(2):
        add_rung(made, number)
    for path in (made.records / 'pretraining').glob('ladder-1e14-*.json'):
        record = json.loads(path.read_text())
        record['identity'] |= {'optimizer.learning_rate': 0.002}
        path.write_text(json.dumps(record))
    rows = build_tables(load_evidence(made.results / 'ladder', 'ladder'))['ladder']
    (trend,) = find(rows, 'MAE-LM − RoBERTa, change with ten times the compute', 'quick_avg').values()
    assert '3e13 and 1e14 FLOPs with unequal learning rates (0.004 and 0.002)' in trend.verdict


def test_rounding_of_a_ratio_is_that_of_both_ranks():
    """100 (80 / 57 − 1): the errors of 80 and of 57 move the ratio by 1 / 57 and by 80 / 57²."""
    ours, theirs, third = (
        Cell((Term(1.0, {seed: [rank] for seed in SEEDS}, rounding=1 / 12),)) for rank in (80.0, 57.0, 57.0)
    )
    rounding = 100**2 / 12 * (1 / 57**2 + 80**2 / 57**4)
    for base in (None, theirs, third):
        (term,) = subtract_relative(ours, theirs, base).terms
        expected = 100**2 / 12 * (2 / 57**2 + 23**2 / 57**4) if base is third else rounding
        assert term.rounding == pytest.approx(expected)


def test_one_rung_has_no_trend_and_a_loss_that_never_falls_is_said(archive):
    made = archive('ladder')
    add_rung(made, 0)
    path = made.records / 'pretraining' / 'ladder-3e13-s17.csv'
    lines = path.read_text().splitlines()
    path.write_text('\n'.join([*lines[:50], lines[-1]]) + '\n')
    rows = build_tables(load_evidence(made.results / 'ladder', 'ladder'))['ladder']
    trends = [r for r in rows if 'ten times' in r.row]
    assert {r.note for r in trends} == {'a slope needs two rungs of at least three pretraining seeds'}
    never = find(rows, 'MAE-LM', 'departure')[3e13]
    assert (never.value, never.note, never.is_missing) == (math.inf, 'never in 1 of 3 seeds', False)
    assert dataclasses.replace(never, note=f'{never.note}; run 9 is not recorded').is_missing


def test_the_page_has_a_table_of_the_verdicts_of_every_rung(archive):
    made = archive('ladder')
    add_rung(made, 0)
    add_rung(made, 1)
    page, _ = report('ladder', made.results)
    text = ' '.join(html.unescape(re.sub(r'<[^>]+>', ' ', page.read_text())).split())
    assert '3e13 FLOPs 1e14 FLOPs change with ten times the compute MAE-LM − RoBERTa effective rank' in text
    assert "effective rank [% of RoBERTa's rank] 0.0 no difference +114.6 holds +219.1 holds" in text
    assert 'SST-2 [points] −3.1 fails STS-B' in text
    assert 'no difference : 3 pretraining seeds MAE-LM' in text  # without p, which does not decide it
    assert 'Where the ladder judges' not in text


def test_the_scale_of_the_ladder_has_one_artefact(archive):
    made = archive('ladder')
    add_rung(made, 0)
    add_rung(made, 1)
    page, _ = report('ladder', made.results)
    assert {path.name for path in page.parent.glob('*.csv')} == {f'{LADDER.name}.csv'}
    assert (page.parent / 'ladder.svg').is_file()


def test_every_point_of_the_figure_is_inside_its_panel(archive):
    made, last = archive('ladder'), len(RUNGS) - 1
    add_rung(made, 0)
    add_rung(made, last)
    figure = draw_ladder(build_tables(load_evidence(made.results / 'ladder', 'ladder'))['ladder'])
    drawn = [(panel, line.get_xdata()) for panel in figure.axes for line in panel.lines if line.get_marker() != 'None']
    assert max(max(x) for _, x in drawn) > 1.15 * RUNGS[last].flops  # MAE-LM's own FLOPs, which name no rung
    assert all(panel.get_xlim()[0] < min(x) and max(x) < panel.get_xlim()[1] for panel, x in drawn)
