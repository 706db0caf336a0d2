"""Comparisons with other settings than the ladder's: which runs are paired, and what names them."""

import json

import pytest

from maelm_composer.errors import InputError
from maelm_composer.records import CONTENT_HASH
from maelm_composer.reporting.load import load_evidence
from maelm_composer.reporting.report import build_tables, report
from tests.records import make_failed
from tests.reporting.conftest import Archive

SEEDS = (17, 18, 19)
SHARED = {
    CONTENT_HASH: 'pretraining-data',
    'model.num_hidden_layers': 2,
    'optimizer.learning_rate': 0.004,
    'training.max_samples': 400,
    'training.precision': 'fp32',
}
ROBERTA = {'model.decoder': None, 'masking.encoder_mask_fraction': 1.0}
MAE_LM = {'model.decoder.num_hidden_layers': 2, 'masking.encoder_mask_fraction': 0.0}


def add(archive: Archive, name: str, settings: dict, lead: int = 0, seeds=SEEDS, folder: str = '') -> None:
    """Runs whose last layer has rank 48 + 3 · ``lead``, and one more in the last seed if there is a lead."""
    made = Archive(archive.results, archive.scale)
    if folder:
        made.records = archive.results / archive.scale / 'recipes' / folder
    for seed in seeds:
        made.add_run(f'{name}-s{seed}', identity={'seed': seed, **SHARED, **settings}, eval_loss=4.0 - lead / 10)
        made.add_rank(f'{name}-s{seed}', lead=2 + 3 * lead + (seed == 19 and lead != 0))


@pytest.fixture
def ladder(archive) -> Archive:
    """Its first rung, where both models have one rank."""
    made = archive('ladder')
    add(made, 'ladder-3e13', MAE_LM)
    add(made, 'ladder-3e13-roberta', ROBERTA)
    return made


def find(archive: Archive) -> dict:
    tables = build_tables(load_evidence(archive.results / 'ladder', 'ladder'))
    return {(row.row, row.column): row for row in tables['recipes']}


def test_the_roberta_with_the_same_settings_is_the_baseline(ladder):
    slow = {'optimizer.learning_rate': 0.002, 'training.precision': 'bf16'}
    add(ladder, 'slow-roberta', ROBERTA | slow, folder='slow')
    add(ladder, 'slow', MAE_LM | slow, lead=4, folder='slow')
    rows, label = find(ladder), '2 + 2 layers, learning rate 0.002'
    lead = rows[f'MAE-LM − RoBERTa, {label}', 'real_rank_excess']
    assert lead.value == pytest.approx(100 * (12 + 1 / 3) / 48)
    assert (lead.x, lead.x_unit, lead.pretraining_seeds, lead.margin) == (3e13, 'FLOPs', 3, 5)
    assert lead.verdict.startswith('holds')
    assert lead.run_keys.startswith('slow-roberta-s17;slow-roberta-s18;slow-roberta-s19;slow-s17')
    assert rows[f'MAE-LM − RoBERTa, {label}', 'real_rank_excess, layer 1'].value == pytest.approx(
        100 * (12 + 1 / 3) / 50
    )
    assert rows[f'MAE-LM − RoBERTa, {label}', 'eval_loss'].value == pytest.approx(-0.4)
    assert rows[f'MAE-LM, {label}', 'rank_real'].value == pytest.approx(60 + 1 / 3)
    gain = rows['RoBERTa, 2 layers, learning rate 0.002', 'mask_rank_gain']
    assert (gain.value, gain.verdict) == (
        pytest.approx(100 * 12 / 48),
        "not comparable with the paper's absolute numbers",
    )
    assert rows['RoBERTa, 2 layers, learning rate 0.002', 'mask_outside_excess'].value == pytest.approx(0.3 - 0.09)


def test_another_decoder_is_compared_with_the_roberta_of_the_ladder(ladder):
    add(ladder, 'one', MAE_LM | {'model.decoder.num_hidden_layers': 1}, lead=-4, seeds=(18, 19), folder='one')
    rows = find(ladder)
    assert {row for row, _ in rows} == {'MAE-LM, 2 + 1 layers', 'MAE-LM − RoBERTa, 2 + 1 layers'}
    lead = rows['MAE-LM − RoBERTa, 2 + 1 layers', 'real_rank_excess']
    assert lead.value == pytest.approx(100 * -11.5 / 48)
    assert lead.verdict.startswith('undecided: without the sign of the claim, but from two pretraining seeds')
    assert lead.run_keys.startswith('ladder-3e13-roberta-s18;ladder-3e13-roberta-s19;one-s18;one-s19')


@pytest.mark.parametrize('setting', ['optimizer.learning_rate', 'model.num_hidden_layers', 'data.shuffle_block_size'])
def test_a_model_without_its_roberta_says_what_the_nearest_lacks(ladder, setting):
    add(ladder, 'alone', MAE_LM | {setting: 7}, folder='alone')
    rows = find(ladder)
    (lead,) = (row for row in rows.values() if row.row.startswith('MAE-LM − RoBERTa'))
    assert (lead.value, lead.x) == (None, 3e13)
    assert lead.note == f'no RoBERTa of these settings; ladder-3e13-roberta-s17 differs in {setting}'
    assert rows[lead.row.replace(' − RoBERTa', ''), 'rank_real'].value == 48


def test_a_roberta_whose_ranks_are_not_measured_is_named(ladder):
    slower = {'optimizer.learning_rate': 0.002}
    add(ladder, 'roberta', ROBERTA | slower, folder='slower')
    for path in (ladder.results / 'ladder/recipes/slower/rank').iterdir():
        path.unlink()
    add(ladder, 'ours', MAE_LM | slower, lead=4, folder='slower')
    rows = find(ladder)
    label = 'MAE-LM − RoBERTa, 2 + 2 layers, learning rate 0.002'
    assert 'roberta-s17' in rows[label, 'real_rank_excess'].note
    assert rows[label, 'eval_loss'].value == pytest.approx(-0.4)


def test_settings_of_the_decoder_are_not_those_of_the_encoder(ladder):
    for name, key in (('narrow', 'model.decoder.hidden_size'), ('narrower', 'model.hidden_size')):
        add(ladder, name, MAE_LM | {key: 32}, folder=name)
    add(ladder, 'narrower-roberta', ROBERTA | {'model.hidden_size': 32}, folder='narrower')
    labels = {row for row, column in find(ladder) if column == 'real_rank_excess'}
    assert {label.partition('layers, ')[2] for label in labels} == {'decoder hidden size 32', 'hidden size 32'}


def test_a_run_of_the_ladder_is_no_recipe(ladder):
    add(ladder, 'again', MAE_LM, seeds=(18,), folder='again')
    with pytest.raises(InputError, match=r'recipes/again: again-s18 is a run of the ladder itself: keep one'):
        find(ladder)


@pytest.mark.parametrize('changed', [{'training.precision': 'bf16'}, {}])
def test_two_comparisons_of_one_name_are_refused(ladder, changed):
    for name, seeds in (('one', (17, 18)), ('two', (19,))):
        settings = {'optimizer.learning_rate': 0.002} | (changed if name == 'two' else {})
        add(ladder, f'{name}-roberta', ROBERTA | settings, seeds=seeds, folder=name)
        add(ladder, name, MAE_LM | settings, seeds=seeds, folder=name)
    message = r'recipes/one and recipes/two both have 2 \+ 2 layers, learning rate 0.002 at 3e13 FLOPs: keep one'
    with pytest.raises(InputError, match=message):
        find(ladder)


def test_a_seed_without_its_rank_record_is_named(ladder):
    for name, model in (('one', MAE_LM), ('one-roberta', ROBERTA)):
        add(ladder, name, model | {'optimizer.learning_rate': 0.002}, seeds=(17, 18), folder='one')
        (path,) = (ladder.results / 'ladder/recipes/one/rank').glob(f'*{name}-s18*')
        path.unlink()
    rows = find(ladder)
    (lead,) = (row for row in rows.values() if row.is_claim)
    assert lead.pretraining_seeds == 1
    assert lead.note == 'effective rank of one-s18 is not recorded; effective rank of one-roberta-s18 is not recorded'


def test_a_seed_that_failed_is_named_by_its_recipe(ladder):
    one = MAE_LM | {'model.decoder.num_hidden_layers': 1}
    add(ladder, 'one', one, folder='one')
    folder = ladder.results / 'ladder/recipes/one/pretraining'
    for name, seed, settings in (('x', 20, one), ('y', 21, MAE_LM)):  # the name of a recipe's run tells nothing
        record = make_failed(name, seed, 'loss is nan') | {'identity': {'seed': seed, **SHARED, **settings}}
        (folder / f'{name}.json').write_text(json.dumps(record))
    rows = find(ladder)
    assert rows['MAE-LM, 2 + 1 layers', 'rank_real'].note == 'pretraining of x failed: loss is nan'
    assert rows['MAE-LM − RoBERTa, 2 + 1 layers', 'real_rank_excess'].note == 'pretraining of x failed: loss is nan'


def test_the_page_says_that_other_recipes_are_our_question(ladder):
    add(ladder, 'one', MAE_LM | {'model.decoder.num_hidden_layers': 1}, lead=4, folder='one')
    text = ' '.join(report('ladder', ladder.results)[0].read_text().split())
    assert 'whatever the recipe (our question).' in text
    assert 'In every other comparison, with other recipes, and for the change with compute, “holds” means only' in text


def test_the_figure_is_drawn_where_there_is_a_claim(ladder):
    for seed, name, model in ((17, 'one', MAE_LM), (18, 'one-roberta', ROBERTA)):
        add(ladder, name, model | {'optimizer.learning_rate': 0.002}, seeds=(seed,), folder='one')
    report('ladder', ladder.results)
    assert not (ladder.results / 'ladder/recipes.svg').exists()
    add(ladder, 'one-roberta', ROBERTA | {'optimizer.learning_rate': 0.002}, folder='one')
    report('ladder', ladder.results)
    assert (ladder.results / 'ladder/recipes.svg').exists()


def test_the_claims_of_all_recipes_are_one_family(ladder):
    for number, name in enumerate(('first', 'second', 'third'), 1):
        changed = {'optimizer.learning_rate': number / 100}
        add(ladder, f'{name}-roberta', ROBERTA | changed, folder=name)
        add(ladder, name, MAE_LM | changed, lead=number, folder=name)
    claims = [row for row in find(ladder).values() if row.is_claim]
    assert [row.value for row in claims] == sorted(row.value for row in claims)
    assert all('one of 3 by Holm' in row.verdict for row in claims)


def test_rows_of_no_rung_are_named(ladder):
    for name, model in (('long', MAE_LM), ('long-roberta', ROBERTA)):
        add(ladder, name, model | {'training.max_samples': 800}, folder='long')
    with pytest.raises(
        InputError, match=r'recipes/long: long-s17 has training.max_samples=800, as no MAE-LM of ladder'
    ):
        find(ladder)


def test_ranks_that_were_measured_otherwise_are_refused(ladder):
    add(ladder, 'one', MAE_LM | {'model.decoder.num_hidden_layers': 1}, folder='one')
    for path in (ladder.results / 'ladder/recipes/one/rank').glob('*.json'):
        path.write_text(path.read_text().replace('"max_tokens": 1000', '"max_tokens": 500'))
    with pytest.raises(InputError, match=r'effective rank: records .* differ in max_tokens'):
        find(ladder)


def test_two_records_of_one_run_are_refused(ladder):
    add(ladder, 'one', MAE_LM | {'model.decoder.num_hidden_layers': 1}, folder='one')
    folder = ladder.results / 'ladder/recipes/one/pretraining'
    (folder / 'copy.json').write_text((folder / 'one-s17.json').read_text())
    with pytest.raises(InputError, match=r'recipes/one/pretraining has two records of one-s17: keep one'):
        find(ladder)
    (folder / 'copy.json').unlink()
    add(ladder, 'copy', MAE_LM | {'model.decoder.num_hidden_layers': 1}, lead=4, seeds=(17,), folder='one')
    with pytest.raises(
        InputError, match=r'^the records of copy-s17 and one-s17 differ in nothing, not even the seed: keep those'
    ):
        find(ladder)
    (folder / 'copy-s17.json').unlink()
    path = next((folder.parent / 'rank').glob('*one-s17*'))
    again = json.loads(path.read_text()) | {'key': 'again'}
    path.with_name('again.json').write_text(json.dumps(again))
    with pytest.raises(InputError, match=r'^2 rank records of one-s17 \(.*again.*\): keep one'):
        find(ladder)


def test_two_robertas_of_one_name_are_refused(ladder):
    """The precision distinguishes them, and no name has the precision."""
    for precision, decoder in (('fp32', 1), ('bf16', 4)):
        slow = {'optimizer.learning_rate': 0.002, 'training.precision': precision}
        add(ladder, f'{precision}-roberta', ROBERTA | slow, folder=precision)
        add(ladder, precision, MAE_LM | slow | {'model.decoder.num_hidden_layers': decoder}, folder=precision)
    with pytest.raises(InputError, match=r'^RoBERTa, 2 layers, learning rate 0\.002 at 3e13 FLOPs is .* as well as'):
        find(ladder)


def test_a_rung_without_its_roberta_names_the_setting(ladder):
    for path in (ladder.records / 'pretraining').glob('ladder-3e13-roberta*'):
        path.unlink()
    add(ladder, 'one', MAE_LM | {'model.decoder.num_hidden_layers': 1}, folder='one')
    assert find(ladder)['MAE-LM − RoBERTa, 2 + 1 layers', 'real_rank_excess'].note == 'no RoBERTa of these settings'


def test_the_table_goes_with_its_records(ladder):
    assert 'recipes' not in build_tables(load_evidence(ladder.results / 'ladder', 'ladder'))
    stale = [ladder.results / f'ladder/recipes.{suffix}' for suffix in ('csv', 'svg')]
    for path in stale:
        path.write_text('stale')
    page, _ = report('ladder', ladder.results)
    assert not any(path.exists() for path in stale)
    add(ladder, 'one', MAE_LM | {'model.decoder.num_hidden_layers': 1}, folder='one')
    report('ladder', ladder.results)
    assert stale[0].read_text().startswith('scale,artefact')
    assert 'MAE-LM − RoBERTa, 2 + 1 layers' in page.read_text()
