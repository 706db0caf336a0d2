"""Sentences about verdicts: the main number, the others by kind, and what is not made."""

from dataclasses import replace

import pytest

from maelm_composer.reporting.findings import describe_findings, describe_lacks
from maelm_composer.reporting.formatting import shorten_note
from maelm_composer.reporting.ladder import TREND
from maelm_composer.reporting.page import make_grid
from maelm_composer.reporting.rows import GAP, SLOPE, Row


def make_claim(column: str, value: float, word: str = 'undecided') -> Row:
    verdict = f'{word}: 3 pretraining seeds'
    claim = Row('small', 'table1', GAP, column, 'points', value=value, low=value - 1, high=value + 1, verdict=verdict)
    return replace(claim, pretraining_seeds=3, paper=1.5, difference=value - 1.5, detectable=1.2)


def describe(name: str, *rows: Row) -> str:
    ((_, text, _),) = describe_findings({name: [replace(row, artefact=name) for row in rows]})
    return text.partition('. ')[2]


def test_the_mean_is_the_main_number_and_the_others_are_counted():
    rows = [make_claim('qqp', 0.0, 'no difference'), make_claim('rte', 2.0, 'holds'), make_claim('cola', 0.5)]
    assert describe('table1', *rows, make_claim('glue_avg', 0.3)) == (
        'Here, GLUE AVG +0.3 points (−0.7 to 1.3; 3 pretraining seeds): undecided; the paper’s +1.5 lies outside the '
        'interval; a true difference of 1.2 points would be found in four of five such experiments. Of the 3 others: '
        'holds for 1 (RTE +2.0 points), no difference for 1 (QQP 0.0 points), undecided for 1.'
    )


def test_a_number_from_few_seeds_is_not_the_main_one():
    few = {'pretraining_seeds': 1, 'low': None, 'high': None}
    rows = [replace(make_claim('glue_avg', 0.3), **few), make_claim('rte', 2.0, 'holds')]
    assert describe('table1', *rows) == (
        'Here, RTE +2.0 points (1.0 to 3.0; 3 pretraining seeds): holds; the paper’s +1.5 lies in the interval. The '
        'other, GLUE AVG +0.3 points: undecided for want of pretraining seeds.'
    )
    assert describe('table1', *rows[:1]) == 'Here, GLUE AVG +0.3 points: undecided for want of pretraining seeds.'


def test_another_reason_than_the_interval_is_told_instead_of_the_power():
    stalls = replace(make_claim('glue_avg', 0.3), paper=None, verdict='undecided: the logs show stalls; not comparable')
    assert describe('table1', stalls).endswith('3 pretraining seeds): undecided; the logs show stalls.')
    of_family = replace(stalls, verdict='undecided: 3 pretraining seeds, one of 5 by Holm; not comparable')
    assert describe('table1', of_family).endswith(
        'would be found in four of five such experiments (before Holm’s correction).'
    )


def test_a_missing_number_is_never_the_best():
    made = Row('small', 'table1', 'RoBERTa', 'rte', 'percent', value=50.0)
    missing = [replace(made, row=row, column='squad2_em', value=None, paper=81.0) for row in ('RoBERTa', 'MAE-LM')]
    assert make_grid([made, *missing])['best'] == set()
    assert make_grid([made, replace(made, row='MAE-LM', value=49.0), *missing])['best'] == {('RoBERTa', 'rte')}


@pytest.mark.parametrize('scale, ending', [('small', ' by itself, but the ladder’s verdict counts'), ('medium', '')])
def test_the_ladder_s_verdict_counts_where_it_judges_the_same_runs(scale, ending):
    claim = replace(make_claim('pretrained', 5.0, 'holds'), scale=scale, unit='rank', paper=None)
    assert describe('table3', claim).endswith(f'dimensions (4.0 to 6.0; 3 pretraining seeds): holds{ending}.')


def test_rungs_that_decide_alike_have_one_name_and_the_trend_is_the_main_number():
    claim = replace(make_claim('real_rank_excess', 5.0, 'holds'), unit='percent', scale='ladder', paper=None)
    rungs = [claim.at(x, 'FLOPs') for x in (3e13, 1e14)]
    trend = replace(
        claim, row=f'{GAP}, {TREND}', unit='percent a decade', value=0.2, low=-0.8, high=1.2, detectable=None
    )
    text = describe('ladder', *rungs, replace(trend, verdict='undecided: 3 pretraining seeds'))
    assert text.startswith("Here, change with ten times the compute, effective rank +0.2 % of RoBERTa's rank (−0.8 to")
    assert text.endswith('. Of 2 comparisons: holds for 2 (effective rank at 3e13, 1e14 FLOPs) (table).')


def test_records_that_the_same_runs_lack_are_one_part_of_a_note():
    lacks = [f'{task} of {run} is not recorded' for task in ('rte', 'cola') for run in ('one-s17', 'one-s18')]
    note = '; '.join([*lacks, 'never reached by 18', 'effective rank of two is not recorded'])
    assert shorten_note(note) == (
        'never reached by 18; rte, cola of one-s17, one-s18 is not recorded; effective rank of two is not recorded'
    )


def test_lines_and_columns_without_a_number_are_named():
    made = Row('small', 'table1', 'RoBERTa', 'rte', 'percent', value=50.0, paper=79.0)
    rows = [
        *(made, replace(made, row='MAE-LM'), replace(made, row='MAE-LM', column='squad2_em', value=None)),
        *(
            replace(made, column='squad2_em', value=None),
            replace(made, column='squad2_em_at_0', value=None, paper=None),
        ),
        replace(made, row=GAP, value=None),
    ]
    point = Row('small', 'figure4', 'δ = 0', 'rank_real', 'rank', x=0.0, value=40.0)
    points = [point, replace(point, row='δ = 0.5', x=0.5, value=None), replace(point, row=SLOPE, x=None, value=None)]
    assert describe_lacks({'table1': rows, 'figure4': points}) == 'Table 1: SQuAD 2.0 EM. Figure 4: δ = 0.5'
    assert describe_lacks({'table1': rows[:2]}) == ''
