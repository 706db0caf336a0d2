"""The artefacts' data against the recipes, the tasks and the published numbers."""

import csv
from collections import defaultdict
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import pytest

from maelm_composer.config import PretrainingConfig
from maelm_composer.errors import InputError
from maelm_composer.recipe import load_config
from maelm_composer.reporting.artefacts import (
    ABLATIONS,
    ARTEFACTS,
    DELTAS,
    GLUE_AVERAGE,
    LADDER,
    MAE_LM,
    OWN,
    RECIPES,
    ROBERTA,
    Role,
    columns_of,
    tasks_of,
)
from maelm_composer.reporting.load import load_published
from maelm_composer.reporting.report import BUILDERS
from maelm_composer.tasks.catalogue import GLUE, TASKS

ROOT = Path(__file__).resolve().parents[2]
PAPER = ROOT / 'results' / 'paper'
MODELS = list(dict.fromkeys(demand.model for artefact in (*ARTEFACTS, LADDER) for demand in artefact.demands))


@pytest.mark.parametrize('model', MODELS, ids=lambda model: model.run_name('medium'))
def test_a_model_is_a_recipe_that_loads_under_the_name_of_its_run(model):
    paths = [str(ROOT / path) for path in ('yamls/medium.yaml', *model.overlays)]
    assert load_config(PretrainingConfig, paths).run_name == model.run_name('medium')


def test_every_ablation_and_its_published_number_are_there():
    with (PAPER / 'table2.csv').open() as file:
        published = [line['row'] for line in csv.DictReader(file)]
    assert [model.label for model in ABLATIONS][: len(published)] == published  # a fork's rows may follow
    assert len({model.run_name('base') for model in ABLATIONS}) == len(ABLATIONS)
    stems = {path.stem for path in (ROOT / 'yamls' / 'ablations').glob('*.yaml')} | {'roberta'}
    assert {Path(path).stem for model in ABLATIONS for path in model.overlays} == stems


@pytest.mark.parametrize('delta, model', DELTAS)
def test_a_point_of_figure_4_is_the_recipe_of_its_delta(delta, model):
    base = str(ROOT / 'yamls/small.yaml')
    ours = load_config(PretrainingConfig, [base, *(str(ROOT / path) for path in model.overlays)])
    named = load_config(PretrainingConfig, [base, str(ROOT / f'yamls/delta/delta_{delta:.2f}.yaml')])
    assert ours.masking == named.masking
    assert ours.model == named.model


def test_artefacts_share_their_runs():
    runs = {a.name: {d.model.run_name('medium') for d in a.demands} for a in ARTEFACTS}
    assert runs['table1'] == {'medium', 'medium-roberta'}
    assert runs['table1'] < runs['table2']
    assert runs['figure4'] & runs['table2'] == {'medium', 'medium-encoder_with_mask', 'medium-roberta'}
    assert {*runs, LADDER.name, OWN.name, RECIPES.name} == set(BUILDERS)


def test_tasks_are_those_of_finetuning():
    assert tasks_of('base', (Role.glue, Role.squad)) == [*GLUE, 'squad2']
    assert set(tasks_of('demo', (Role.glue, Role.squad))) == {name for name in TASKS if name.startswith('demo')}
    for scale in ('base', 'demo'):
        for column in (*columns_of(scale, Role.glue), *columns_of(scale, Role.squad)):
            metrics = [metric.name for metric in TASKS[column.task].list_metrics()]
            assert column.metric is None or column.metric in metrics


def test_avg_counts_mnli_once_and_reproduces_every_published_row_but_one():
    rows: dict[tuple[str, str], dict[str, Decimal]] = defaultdict(dict)
    with (PAPER / 'table1.csv').open() as file:
        for line in csv.DictReader(file):
            rows[line['setting'], line['row']][line['column']] = Decimal(line['value'])
    averaged = [column.name for column in GLUE_AVERAGE.parts]
    assert len(averaged) == 8
    whole = {key: row for key, row in rows.items() if 'glue_avg' in row}
    assert len(whole) == 10
    misses = {}
    for key, row in whole.items():
        ours = (sum(row[name] for name in averaged) / 8).quantize(Decimal('0.1'), ROUND_HALF_UP)
        if ours != row['glue_avg']:
            misses[key] = (ours, row['glue_avg'])
    # The cells of this one row do not give its printed average, whichever way MNLI is counted.
    assert misses == {('base++', 'UniLMv2 (Bao et al., 2020)'): (Decimal('87.3'), Decimal('87.1'))}


def test_published_numbers_are_found_by_our_labels():
    published = load_published(PAPER)
    assert published['base', ROBERTA.published[0], 'mnli_m'] == 85.9
    assert published['base++', ROBERTA.published[1], 'glue_avg'] == 86.4
    assert published['base', MAE_LM.label, 'pretrained'] == 491
    with pytest.raises(KeyError):
        published['base++', MAE_LM.label, 'pretrained']


@pytest.mark.parametrize('line', ['base,RoBERTa,mnli_m,-', 'base,RoBERTa'])
def test_published_numbers_that_cannot_be_read_are_one_line(tmp_path, line):
    (tmp_path / 'table1.csv').write_text(f'setting,row,column,value\n{line}\n')
    with pytest.raises(InputError, match=r'table1\.csv holds no published numbers .*: repair the file, or remove'):
        load_published(tmp_path)
