"""Records that contradict each other are refused; of those that do not, each number uses its own alone."""

import json

import pytest

from maelm_composer.errors import InputError
from maelm_composer.reporting.artefacts import ABLATIONS, MAE_LM, ROBERTA
from tests.reporting.conftest import build

MISALIGNED = next(model for model in ABLATIONS if model.label == 'misaligned position encoding')


@pytest.fixture
def full(archive):
    made = archive('medium')
    made.add_everything(seeds=(1, 2, 3), models=(MAE_LM, ROBERTA, MISALIGNED))
    return made


def change(archive, kind, pattern, **values):
    """Set ``values`` in the records of ``kind`` whose names match ``pattern``."""
    for path in (archive.records / kind).glob(pattern):
        path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    'kind, pattern, values, reason',
    [
        ('finetuning', 'rte-medium-roberta-*', {'data_hash': 'other rows'}, 'rte: records .* differ in data_hash'),
        ('finetuning', 'rte-medium-roberta-*', {'protocol': {'source': 'hub'}}, 'rte: records .* differ in protocol'),
        ('rank', 'rank-medium-roberta-*', {'threshold': 0.8}, 'effective rank: records .* differ in threshold'),
        *(
            ('rank', 'rank-medium-roberta-*', {key: value}, f'effective rank: records .* differ in {named or key}')
            for key, value, named in (
                ('max_tokens', 7, ''),
                ('mlm_probability', 0.3, ''),
                ('centered', True, ''),
                ('precision', 'bf16', ''),
                ('seed', 5, ''),
                ('data', {'hash': 'other'}, 'data_hash'),
            )
        ),
        (
            'pretraining',
            'medium-roberta-*.json',
            {'batches': 7},
            'medium-roberta-s17 are compared, but differ in batches',
        ),
    ],
)
def test_models_that_were_measured_differently_are_not_compared(full, kind, pattern, values, reason):
    change(full, kind, pattern, **values)
    with pytest.raises(InputError, match=reason):
        build(full)


@pytest.mark.parametrize('key', ['data.shuffle_block_size', 'masking.mlm_probability', 'model.hidden_size'])
def test_models_that_were_trained_differently_are_not_compared(full, key):
    for path in (full.records / 'pretraining').glob('*.json'):
        record = json.loads(path.read_text())
        record['identity'] |= {key: 'roberta' in path.name, 'model.relative_position_buckets': len(path.name)}
        path.write_text(json.dumps(record))
    with pytest.raises(InputError, match=f'are compared, but differ in {key}: '):
        build(full)


def test_a_search_of_fewer_points_than_another_models_is_named(full):
    full.add_score('medium-s18', 'rte', 1, 0.1, point={'learning_rate': 1e-4})
    rows, lack = build(full), 'rte from medium-roberta-s18: 1 of 2 points of the search recorded'
    assert lack in rows['table1', 'RoBERTa', 'rte', None].note
    assert lack in rows['table1', 'MAE-LM − RoBERTa', 'rte', None].note
    assert rows['table1', 'RoBERTa', 'cola', None].note == ''


def test_models_that_were_validated_on_other_rows_are_not_compared(full):
    paths = sorted((full.records / 'pretraining').glob('*-s17.json'))
    for path, rows in zip(paths, (2048, None, 4096), strict=False):  # the second's rows are not recorded
        if rows is not None:
            path.write_text(json.dumps(json.loads(path.read_text()) | {'eval_rows': rows}))
    with pytest.raises(InputError, match='are compared, but differ in eval_rows: '):
        build(full)
    paths[2].write_text(json.dumps(json.loads(paths[2].read_text()) | {'eval_rows': 2048}))
    build(full)


def test_whether_ranks_were_measured_makes_no_other_protocol(full):
    changed = json.loads(next((full.records / 'finetuning').glob('rte-medium-roberta-*')).read_text())['protocol']
    change(full, 'finetuning', 'rte-medium-roberta-*', protocol=changed | {'measures_rank': True})
    assert build(full)['table1', 'MAE-LM − RoBERTa', 'rte', None].value is not None


def test_two_checkpoints_or_two_rank_records_of_a_run_are_refused(full):
    (path,) = (full.records / 'rank').glob('rank-medium-s17*')
    again = json.loads(path.read_text()) | {'key': 'again'}
    path.with_name('again.json').write_text(json.dumps(again))
    with pytest.raises(InputError, match=r'2 rank records of medium-s17 \(.*again.*\): keep one'):
        build(full)
    path.with_name('again.json').unlink()
    path = next((full.records / 'finetuning').glob('rte-medium-s17-*'))
    checkpoint = json.loads(path.read_text())['checkpoint'] | {'hash': 'another'}
    change(full, 'finetuning', path.name, checkpoint=checkpoint)
    refusal = r'records .* of medium-s17 at 400 samples are of different weights'
    with pytest.raises(InputError, match=refusal):
        build(full)
    checkpoint |= {'hash': 'weights-medium-s17-400'}
    change(full, 'finetuning', path.name, checkpoint=checkpoint | {'recipe_hash': 'another'})
    with pytest.raises(InputError, match=r'record .* is of another recipe than the run medium-s17'):
        build(full)
    change(full, 'finetuning', path.name, checkpoint=checkpoint)
    checkpoint |= {'hash': 'another'}
    change(full, 'rank', 'rank-medium-s17.json', checkpoint=checkpoint)
    with pytest.raises(InputError, match=refusal):
        build(full)


def test_a_fine_tuning_seed_counts_once(full):
    path = next((full.records / 'finetuning').glob('rte-medium-s17-*'))
    change(full, 'finetuning', path.name, key='again')
    path.with_name('again.json').write_text(path.read_text())
    change(full, 'finetuning', path.name, key=path.stem)
    with pytest.raises(InputError, match='are of one fine-tuning seed: keep one'):
        build(full)


@pytest.mark.parametrize('line', ['600,300', '600,300,four,0.001,1.0,300,', ''])
def test_a_damaged_log_is_named(full, line):
    path = full.records / 'pretraining' / 'medium-s17.csv'
    lines = path.read_text().splitlines()
    path.write_text('\n'.join([*lines[:-1], line]) + '\n' if line else 'samples,batch\n2,1\n')
    with pytest.raises(InputError, match=r'medium-s17\.csv: line \d+ is damaged: copy the metrics.csv of the run'):
        build(full)


def test_a_log_that_is_cut_off_is_named(full):
    path = full.records / 'pretraining' / 'medium-s17.csv'
    lines = path.read_text().splitlines()
    for rest in (lines[:150], lines[:1]):
        path.write_text('\n'.join(rest) + '\n')
        with pytest.raises(InputError, match=r'medium-s17\.csv is cut off: copy the metrics.csv of the run'):
            build(full)
    path.write_text('\n'.join(lines)[:-1])  # the last number is another one
    with pytest.raises(InputError, match=r'medium-s17\.csv is cut off'):
        build(full)
    content = bytearray('\n'.join(lines).encode())
    content[len(content) // 2] ^= 0x80
    path.write_bytes(content)
    with pytest.raises(InputError, match=r'medium-s17\.csv is damaged: copy the metrics.csv of the run'):
        build(full)


def test_the_log_of_another_run_is_refused(full):
    """As one that was left when the record of its run was replaced."""
    path = full.records / 'pretraining' / 'medium-s17.json'
    path.write_text(json.dumps(json.loads(path.read_text()) | {'eval_loss': 3.25}))
    with pytest.raises(InputError, match=r'medium-s17\.csv is the log of another run: .*, the record has 3\.2500'):
        build(full)


def test_a_log_that_is_not_there_is_named_beside_the_loss(full):
    (full.records / 'pretraining' / 'medium-s17.csv').unlink()
    loss = build(full)['training', 'MAE-LM', 'eval_loss', 200]
    assert (loss.pretraining_seeds, loss.note) == (2, 'metrics.csv of medium-s17 is not recorded')


def test_runs_with_other_tokenizers_are_not_compared(full):
    path = full.records / 'pretraining' / 'medium-s18.json'
    path.write_text(json.dumps(json.loads(path.read_text()) | {'tokenizer_hash': 'another'}))
    with pytest.raises(InputError, match=r'are compared, but differ in tokenizer_hash: .*another'):
        build(full)


@pytest.mark.parametrize('seed', [17, 19])
def test_a_pretraining_seed_counts_once(full, seed):
    path = full.records / 'pretraining' / f'medium-s{seed}.json'
    path.with_name('medium.json').write_text(json.dumps(json.loads(path.read_text()) | {'run_name': 'medium'}))
    with pytest.raises(InputError, match='differ in nothing, not even the seed'):
        build(full)


def test_a_difference_names_the_runs_that_it_is_computed_from(full):
    for path in (full.records / 'finetuning').glob('rte-medium-roberta-s18-*'):
        path.unlink()
    gap = build(full)['table1', 'MAE-LM − RoBERTa', 'rte', None]
    assert gap.pretraining_seeds == 2
    assert gap.note == 'rte of medium-roberta-s18 is not recorded; pretraining seeds 18 lack a part of the comparison'
    assert {'medium-s17', 'medium-s19'} <= set(gap.run_keys.split(';'))
    assert not any('s18' in key for key in gap.run_keys.split(';'))


def test_an_ablation_of_fewer_seeds_is_compared_with_these_and_complete(full):
    for path in [*full.records.rglob('*medium-misaligned-s18*'), *full.records.rglob('*medium-misaligned-s19*')]:
        path.unlink()
    rows = build(full)
    gap = rows['table2', 'misaligned position encoding − MAE-LM', 'glue_avg', None]
    assert (gap.pretraining_seeds, gap.note) == (1, '')
    assert rows['table2', 'MAE-LM', 'glue_avg', None].pretraining_seeds == 3


def test_the_rank_after_fine_tuning_is_that_of_the_last_weights(full):
    """Searches of different seeds may choose different numbers of epochs."""
    curve = [{'epoch': epoch, 'effective_rank': 20 + epoch} for epoch in range(5)]
    change(full, 'finetuning', 'mnli-medium-s17-400-*', rank_curve=curve, effective_rank=24)
    rows = build(full)
    assert rows['table3', 'MAE-LM', 'mnli', None].value == pytest.approx((24 + 48 + 48) / 3)
    assert rows['figure5', 'MAE-LM', 'rank during mnli', 2].value == pytest.approx((22 + 48 + 48) / 3)


def test_a_record_without_ranks_is_named(full):
    change(full, 'finetuning', 'mnli-medium-s18-400-1-*', rank_curve=[], effective_rank=None)
    rows = build(full)
    lack = 'a record of mnli from medium-s18 holds no rank'
    assert rows['table3', 'MAE-LM', 'mnli', None].note == f'{lack} after fine-tuning'
    assert rows['figure5', 'MAE-LM', 'rank during mnli', 0].note == f'{lack} during fine-tuning'


def test_the_logs_of_a_models_seeds_have_the_same_rows(full):
    path = full.records / 'pretraining/medium-s18.csv'
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(''.join([lines[0], *lines[3::3]]))
    rows = build(full)
    differ = rows['training', 'MAE-LM', 'train_loss', None]
    assert differ.note == 'the logs of medium-s17, medium-s18, medium-s19 have different rows: copy all of them whole'
    assert ('training', 'RoBERTa', 'train_loss', None) not in rows


def test_the_constant_answer_needs_no_common_seed_of_all_tasks(full):
    for path in (full.records / 'finetuning').glob('rte-medium-roberta-s17-*'):
        path.unlink()
    assert build(full)['table1', 'a constant answer', 'glue_avg', None].value == pytest.approx(40)
