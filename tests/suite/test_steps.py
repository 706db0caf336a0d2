"""What the artefacts of a scale need."""

import dataclasses
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from maelm_composer.config import PretrainingConfig
from maelm_composer.errors import InputError
from maelm_composer.recipe import load_config
from maelm_composer.reporting.artefacts import (
    ABLATIONS,
    ARTEFACTS,
    DELTAS,
    LADDER,
    MAE_LM,
    OWN,
    ROBERTA,
    RUNGS,
    RUNGS_OF,
    find_artefact,
)
from maelm_composer.suite.steps import Kind, choose_artefacts, list_saved_samples, list_steps, load_suite
from maelm_composer.training.checkpoints import is_due
from maelm_composer.training.plan import count_training_flops

SMALL = ('small', 'small_batch_32', 'small_3e14', 'small_3e14_batch_32')
SCALES = ('demo', *SMALL, 'medium', 'base', 'base_pp', 'large_pp')


def steps_of(suite, *names):
    return list_steps(suite, [find_artefact(name) for name in names])


def test_everything_is_made_once_and_in_order(demo):
    steps = list_steps(demo, ARTEFACTS)
    kinds = [step.kind for step in steps]
    assert kinds[:2] == [Kind.tokenizer, Kind.shards]
    for number, step in enumerate(steps[2:], start=2):  # a model's own steps stand together, in order
        if step.kind is not Kind.pretraining:
            assert (steps[number - 1].model, steps[number - 1].kind.value <= step.kind.value) == (step.model, True)
    # Beside Table 2: three models of Figure 4, and two earlier checkpoints of both models for Figure 3. Six have ranks.
    assert Counter(kinds) == {
        **{Kind.tokenizer: 1, Kind.shards: 1, Kind.rank: 6},
        **{Kind.pretraining: len(ABLATIONS) + 3, Kind.finetuning: len(ABLATIONS) + 3 + 2 * 2},
    }
    assert len({(s.kind, s.model and s.model.run_name('demo'), s.samples) for s in steps}) == len(steps)


def test_pretraining_seeds_are_a_dimension(demo, tmp_path):
    settings = dataclasses.replace(demo.settings, pretraining_seeds=[17, 18], pretraining_seeds_of={'table2': [17]})
    suite = dataclasses.replace(demo, settings=settings)
    steps = [step for step in steps_of(suite, 'table1', 'table2') if step.kind is Kind.pretraining]
    names = [step.model.run_name('demo') for step in steps]
    assert names[:2] == ['demo-roberta-s17', 'demo-s17']
    assert names[-2:] == ['demo-roberta-s18', 'demo-s18']  # of the second seed only what Table 1 needs
    assert len(names) == len(ABLATIONS) + 2
    configs = [suite.load_pretraining(step.model) for step in steps]
    assert [config.seed for config in configs] == [17] * len(ABLATIONS) + [18] * 2
    assert [config.run_name for config in configs] == names
    assert len({config.save_folder for config in configs}) == len(names)
    (first, *_) = [step for step in steps_of(suite, 'table1') if step.kind is Kind.finetuning]
    assert '-s17/samples-' in suite.load_finetuning(first.model, first.samples, first.tasks).checkpoint


def test_settings_of_a_file_replace_those_of_the_scale_even_by_nothing(tmp_path):
    path = tmp_path / 'settings.yaml'
    path.write_text('pretraining_seeds: []\npretraining: [seed=3]\n')
    scale, changed = load_suite('small', tmp_path), load_suite('small', tmp_path, added=path)
    assert (len(scale.settings.pretraining_seeds), changed.settings.pretraining_seeds) == (5, [])
    assert changed.settings.pretraining_seeds_of == scale.settings.pretraining_seeds_of
    assert changed.settings.pretraining == [*scale.settings.pretraining, 'seed=3']


def test_a_figure_of_every_checkpoint_refuses_that_some_are_removed(tmp_path):
    path = tmp_path / 'settings.yaml'
    path.write_text('pretraining: [training.checkpoints_to_keep=1]\n')
    suite = load_suite('demo', tmp_path, added=path)
    assert steps_of(suite, 'table1')  # needs the last one
    with pytest.raises(
        InputError, match=r'settings of demo: training\.checkpoints_to_keep=1: some artefacts need every'
    ):
        steps_of(suite, 'figure3')


@pytest.mark.parametrize('scale', ['demo', *SMALL, 'medium', 'base', 'base_pp', 'large_pp'])
def test_no_two_rows_of_table_2_are_one_model(scale, tmp_path, monkeypatch):
    monkeypatch.setenv('MAELM_DATA', str(tmp_path))
    suite = load_suite(scale, tmp_path)
    recipes = [dataclasses.replace(suite.load_pretraining(m), run_name=None, save_folder='') for m in ABLATIONS]
    assert [recipe for number, recipe in enumerate(recipes) if recipe in recipes[:number]] == []
    for model in ABLATIONS:  # `maelm train` gets the same recipe
        assert load_config(PretrainingConfig, [str(suite.write_recipe(model))]) == suite.load_pretraining(model)


def test_the_ladder_can_have_other_seeds_at_a_rung_and_its_rungs_cost_what_they_are_called(tmp_path, monkeypatch):
    monkeypatch.setenv('MAELM_DATA', str(tmp_path))
    suite = load_suite('ladder', tmp_path)
    fewer = dataclasses.replace(suite.settings, pretraining_seeds_of={'3e14': [17, 18, 19], '1e15': [17]})
    for chosen, *top in ((suite, 10, 6), (dataclasses.replace(suite, settings=fewer), 6, 2)):
        steps = [step for step in list_steps(chosen, [LADDER]) if step.kind is Kind.pretraining]
        counts = Counter(Path(step.model.overlays[0]).stem for step in steps)
        assert counts == {'3e13': 20, '1e14': 15, '3e14': top[0], '1e15': top[1]}
    for rung in RUNGS:
        mae_lm, roberta = suite.load_pretraining(rung.mae_lm), suite.load_pretraining(rung.roberta)
        assert count_training_flops(roberta) == pytest.approx(rung.flops, rel=0.01)
        assert dataclasses.replace(mae_lm.model, decoder=None) == roberta.model
        assert mae_lm.model.decoder.hidden_size == mae_lm.model.hidden_size
        for other in map(suite.load_pretraining, rung.models):
            assert (other.training, other.optimizer, other.data) == (mae_lm.training, mae_lm.optimizer, mae_lm.data)
        for variant in map(suite.load_pretraining, rung.variants):  # one setting is changed
            assert dataclasses.replace(variant.model, decoder=mae_lm.model.decoder) == mae_lm.model
            changed = variant.model.decoder.num_hidden_layers, variant.masking.encoder_mask_fraction
            assert changed in ((1, 0.0), (2, 1.0))


def test_the_ladder_of_batches_of_32_shares_the_first_rung_and_lacks_the_last(tmp_path, monkeypatch):
    monkeypatch.setenv('MAELM_DATA', str(tmp_path))
    suite, ladder = load_suite('ladder_batch_32', tmp_path), load_suite('ladder', tmp_path)
    models = {step.model for step in list_steps(suite, suite.artefacts) if step.kind is Kind.pretraining}
    assert Counter(Path(model.overlays[0]).stem for model in models) == {'3e13': 20, '1e14': 15, '3e14': 10}
    for rung in RUNGS_OF[suite.scale]:
        assert count_training_flops(suite.load_pretraining(rung.roberta)) == pytest.approx(rung.flops, rel=0.01)
    for model in models:
        own, theirs = suite.load_pretraining(model), ladder.load_pretraining(model)
        assert own.training.global_train_batch_size == 32
        assert (own == theirs) == model.overlays[0].endswith('3e13.yaml')
        assert (own.model, own.optimizer, own.run_name) == (theirs.model, theirs.optimizer, theirs.run_name)


@pytest.mark.parametrize(
    'scale, ladder, rung, batch',
    [
        ('small', 'ladder', RUNGS[1], 64),
        ('small_batch_32', 'ladder_batch_32', RUNGS[1], 32),
        ('small_3e14', 'ladder', RUNGS[2], 128),
        ('small_3e14_batch_32', 'ladder_batch_32', RUNGS[2], 32),
    ],
)
def test_small_shares_the_runs_of_a_rung(scale, ladder, rung, batch, tmp_path, monkeypatch):
    monkeypatch.setenv('MAELM_DATA', str(tmp_path))
    small, ladder = load_suite(scale, tmp_path), load_suite(ladder, tmp_path)
    for own, theirs in ((MAE_LM, rung.mae_lm), (ROBERTA, rung.roberta)):
        assert small.load_pretraining(own) == ladder.load_pretraining(theirs)
        assert small.load_pretraining(own).training.global_train_batch_size == batch
    assert set(small.settings.pretraining_seeds) <= set(ladder.settings.pretraining_seeds)


def test_a_scale_extends_another(tmp_path, monkeypatch):
    small, last = (load_suite(scale, tmp_path).settings for scale in ('small', 'small_3e14_batch_32'))
    assert (last.finetuning, last.data) == (small.finetuning, small.data)
    assert last.pretraining_seeds == [19, 20, 21] != small.pretraining_seeds
    same = {name for name, sizes in small.pretraining_of.items() if last.pretraining_of[name] == sizes}
    assert same == {'decoder_2_layers', 'decoder_6_layers'}
    assert list(last.pretraining_of) == list(small.pretraining_of)

    monkeypatch.chdir(tmp_path)
    Path('yamls/suite').mkdir(parents=True)
    for scale, other in (('first', 'second'), ('second', 'first'), ('third', 'tiny')):
        Path(f'yamls/suite/{scale}.yaml').write_text(f'extends: {other}\n')
    with pytest.raises(InputError, match=r'^yamls/suite/second\.yaml: extends first: a scale cannot extend itself'):
        load_suite('first')
    with pytest.raises(InputError, match=r'^yamls/suite/third\.yaml: extends tiny: no yamls/suite/tiny\.yaml'):
        load_suite('third')
    with pytest.raises(InputError, match=r'third\.yaml: extends is for the files of yamls/suite'):
        load_suite('demo', added='yamls/suite/third.yaml')


def test_what_two_artefacts_share_stands_there_once(demo):
    (last,) = [s for s in steps_of(demo, 'table1', 'figure3') if s.model is MAE_LM and s.samples == 768]
    assert last.tasks == ('demo_pair', 'demo_sentence', 'demo_regression', 'demo_span')
    early = [s for s in steps_of(demo, 'table1', 'figure3') if s.kind is Kind.finetuning and s.samples < 768]
    wanted = [(model, samples, ('demo_pair',)) for model in (ROBERTA, MAE_LM) for samples in (256, 512)]
    assert [(s.model, s.samples, s.tasks) for s in early] == wanted
    runs = [s.model.run_name('demo') for s in steps_of(demo, 'table2', 'figure4') if s.kind is Kind.pretraining]
    assert runs.count('demo-roberta') == runs.count('demo-encoder_with_mask') == 1


def test_own_tasks_join_the_sweeps_over_both_models(demo, own):
    assert (demo.artefacts, own.artefacts) == (ARTEFACTS, (*ARTEFACTS, OWN))
    assert list_steps(own, ARTEFACTS) == list_steps(demo, ARTEFACTS)
    alone = [(s.model, s.samples, s.tasks) for s in list_steps(own, [OWN]) if s.kind is Kind.finetuning]
    assert set(alone) == {(model, 768, ('reviews',)) for model in (MAE_LM, ROBERTA)}
    before, after = list_steps(demo, demo.artefacts), list_steps(own, own.artefacts)
    changed = {now.model: now.tasks for old, now in zip(before, after, strict=True) if now != old}
    tasks = ('demo_pair', 'demo_sentence', 'demo_regression', 'demo_span', 'reviews')
    assert changed == {MAE_LM: tasks, ROBERTA: tasks}


@pytest.mark.parametrize('batch, interval, samples', [(64, 3200, 9600), (64, 3000, 9601), (100, 10, 250)])
def test_checkpoints_are_where_training_saves(batch, interval, samples):
    config = load_config(
        PretrainingConfig,
        ['yamls/demo.yaml'],
        [f'training.{k}={v}' for k, v in (
            ('global_train_batch_size', batch), ('checkpoint_interval_samples', interval), ('max_samples', samples)
        )] + ['optimizer.warmup_samples=0'],
    )  # fmt: skip
    wanted, seen = [], 0
    while seen < samples:
        before, seen = seen, seen + batch
        at = {'timestamp': seen, 'previous_timestamp': before}
        state = SimpleNamespace(**{name: SimpleNamespace(sample=SimpleNamespace(value=n)) for name, n in at.items()})
        state.max_duration = SimpleNamespace(value=samples)
        if is_due(state, interval):
            wanted.append(seen)
    assert list_saved_samples(config) == wanted


@pytest.mark.parametrize('scale', SCALES)
def test_every_scale_loads_and_its_runs_bear_the_names_that_are_looked_for(scale, tmp_path, monkeypatch):
    monkeypatch.setenv('MAELM_DATA', str(tmp_path))
    suite = load_suite(scale, tmp_path)
    assert suite.load_corpus().remote == suite.load_pretraining(MAE_LM).data.remote
    for step in list_steps(suite, ARTEFACTS):
        if step.kind is Kind.pretraining:
            config = suite.load_pretraining(step.model)
            assert config.save_folder == str(suite.run_folder(step.model))
            if step.model in (MAE_LM, ROBERTA):
                assert load_config(PretrainingConfig, [str(suite.write_recipe(step.model))]) == config
        if step.kind is Kind.finetuning and step.model in (MAE_LM, ROBERTA, DELTAS[1][1]):
            config = suite.load_finetuning(step.model, step.samples, step.tasks)
            assert (tuple(config.sweep.tasks), config.measures_rank) == (step.tasks, step.model in (MAE_LM, ROBERTA))
            assert config.checkpoint.endswith(f'{step.samples:012d}')


def test_the_papers_scales_change_nothing(tmp_path):
    for scale in ('base', 'base_pp', 'large_pp'):
        suite = load_suite(scale, tmp_path)
        mine = suite.load_pretraining(ROBERTA)
        theirs = load_config(PretrainingConfig, [f'yamls/{scale}.yaml', 'yamls/roberta.yaml'])
        assert dataclasses.replace(mine, save_folder=theirs.save_folder) == theirs
        search = suite.load_finetuning(MAE_LM, 1, ['rte']).sweep
        assert {name: len(s.learning_rate) for name, s in search.search.items()} == {
            'glue_small': 4, 'glue_large': 4, 'squad2': 4
        }  # fmt: skip
        assert search.seeds == [1, 2, 3, 4, 5]


def test_the_demo_gives_every_delta_the_same_rows(demo):
    configs = [demo.load_pretraining(model) for _, model in DELTAS]
    assert [c.masking.encoder_mask_fraction for c in configs] == [0, 0.25, 0.5, 0.75, 1]
    assert len({(c.seed, c.training.max_samples, c.data.remote) for c in configs}) == 1


def test_bad_input_is_one_clear_line(demo, own, tmp_path):
    with pytest.raises(InputError, match=r'no yamls/suite/tiny.yaml: the scales are base, base_pp, demo'):
        load_suite('tiny')
    with pytest.raises(InputError, match=r'no yamls/suite/.yaml: the scales are base'):
        load_suite('')
    with pytest.raises(InputError, match=r"^'\.\./suite/small' is not the name of a scale, such as ladder"):
        load_suite('../suite/small')
    added = tmp_path / 'added.yaml'
    added.write_text('finetuning: [nope=1]')
    with pytest.raises(InputError, match=r'^settings of demo: unknown key nope'):
        load_suite('demo', added=str(added)).load_finetuning(MAE_LM, 0, ())
    with pytest.raises(InputError, match="scale ladder has no artefact 'table1': there are ladder"):
        choose_artefacts(dataclasses.replace(demo, scale='ladder'), 'ladder,table1')
    for names in ('table1,', ',table1', 'table1,table1'):
        assert [artefact.name for artefact in choose_artefacts(demo, names)] == ['table1']
    assert choose_artefacts(demo, ',') == choose_artefacts(demo, '')
    for option in ('work', 'results'):
        for address in ('s3://bucket/suite', Path('s3://bucket/suite')):
            with pytest.raises(InputError, match=f'--{option} s3:/+bucket/suite: must be a local or shared folder'):
                load_suite('demo', **{option: address})
    with pytest.raises(InputError, match=r"no artefact 'own'.*; own needs tasks in a recipe of finetuning"):
        choose_artefacts(demo, 'own')
    own.settings.finetuning.append('tasks.reviews.metrics=[f2]')
    with pytest.raises(InputError, match=r'tasks\.reviews\.metrics: f2 is no metric'):
        choose_artefacts(own, 'table1')
    for text, message in (
        ('pretraining_seeds_of: {table9: [1]}', 'names table9: the artefacts and overlays are table1, table2'),
        ('pretraining_of: {table2: [seed=1]}', 'pretraining_of names table2: the overlays are roberta, encoder_with'),
    ):
        added.write_text(text)
        with pytest.raises(InputError, match=message):
            load_suite('demo', added=str(added))


def test_a_pair_for_every_model_leaves_what_makes_a_model(demo, tmp_path):
    sizes = ['model.decoder.hidden_size=32', 'model.decoder.num_attention_heads=2']
    (tmp_path / 'added.yaml').write_text(f'pretraining: [{", ".join(sizes)}]')
    suite = load_suite('demo', added=tmp_path / 'added.yaml')
    assert suite.load_pretraining(MAE_LM).model.decoder.hidden_size == 32
    assert suite.load_pretraining(ROBERTA).model == demo.load_pretraining(ROBERTA).model
    for pair, overlay in (
        ('model.relative_position_buckets=16', 'no_relative_position'),
        ('masking.encoder_mask_fraction=0.5', 'roberta'),
    ):
        (tmp_path / 'added.yaml').write_text(f'pretraining: [{pair}]')
        changed = load_suite('demo', added=tmp_path / 'added.yaml')
        (model,) = (model for model in ABLATIONS if model.overlay_names == [overlay])
        message = rf'^settings of demo: {pair}: \S*{overlay}\.yaml sets this key, too: .* pretraining_of\.{overlay}'
        with pytest.raises(InputError, match=message):
            changed.load_pretraining(model)
        changed.load_pretraining(MAE_LM)
        (tmp_path / 'added.yaml').write_text(f'pretraining_of: {{{overlay}: [{pair}]}}')
        assert load_suite('demo', added=tmp_path / 'added.yaml')._list_entries(model)[-1] == pair
    (tmp_path / 'added.yaml').write_text(f'pretraining_of: {{roberta: [{sizes[0]}]}}')
    with pytest.raises(InputError, match=f'^settings of demo: {sizes[0]} sets keys .* yamls/roberta.yaml makes null'):
        load_suite('demo', added=tmp_path / 'added.yaml').load_pretraining(ROBERTA)


@pytest.mark.parametrize(
    'pair, message',
    [
        ('seed=7', 'seed: a sweep has its own'),
        ('learning_rate=1e-3', 'learning_rate: the sweep over .* tries sweep.search'),
        ('task=rte', 'task=rte: the suite chooses this itself: leave it out'),
        ('save_folder=elsewhere', 'save_folder=elsewhere: the suite chooses this itself'),
    ],
)
def test_a_pair_that_the_suite_would_ignore_is_refused(tmp_path, pair, message):
    (tmp_path / 'added.yaml').write_text(f'finetuning: [{pair}]')
    suite = load_suite('demo', added=tmp_path / 'added.yaml')
    with pytest.raises(InputError, match=rf'^settings of demo: {message}'):
        list_steps(suite, choose_artefacts(suite, 'table1'))


@pytest.mark.parametrize(
    'settings, pair',
    [
        ('pretraining: [run_name=mine]', 'run_name=mine'),
        ('pretraining_of: {roberta: [save_folder=mine]}', 'save_folder=mine'),
        ('{pretraining: [seed=3], pretraining_seeds_of: {table1: [18]}}', 'seed=3'),
    ],
)
def test_a_pair_of_pretraining_that_the_suite_would_ignore_is_refused(tmp_path, settings, pair):
    (tmp_path / 'added.yaml').write_text(settings)
    suite = load_suite('demo', added=tmp_path / 'added.yaml')
    with pytest.raises(InputError, match=f'^settings of demo: {pair}: the suite chooses this itself'):
        list_steps(suite, choose_artefacts(suite, 'table2,table1'))


def test_a_suite_can_be_run_anywhere(demo, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    elsewhere = dataclasses.replace(load_suite('demo', demo.work, demo.results), precision=demo.precision)
    assert elsewhere == demo
    assert steps_of(elsewhere, 'table2') == list_steps(elsewhere, choose_artefacts(elsewhere, 'table2'))
    Path('yamls/suite').mkdir(parents=True)
    Path('yamls/suite/demo.yaml').write_text('data: [mine.yaml]\npretraining: [mine.yaml]\nfinetuning: [mine.yaml]\n')
    assert load_suite('demo').settings.data == ['mine.yaml']


def test_models_of_a_suite_begin_anew(tmp_path):
    (tmp_path / 'added.yaml').write_text('pretraining: [init_from=/mine]')
    with pytest.raises(InputError, match=r'^settings of demo: init_from: models of a suite'):
        load_suite('demo', added=tmp_path / 'added.yaml').load_pretraining(MAE_LM)
