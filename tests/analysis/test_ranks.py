"""The rank record: equal to the definition, measured once, for our checkpoints and Hugging Face's."""

import json
import shutil
import sys

import pytest
import torch
from transformers import RobertaConfig, RobertaModel

from maelm_composer import cli, precision
from maelm_composer.analysis.ranks import RankOptions, analyze_ranks, print_ranks
from maelm_composer.analysis.rows import find_shards, iterate_views
from maelm_composer.checkpoints.pretrained import load_pretrained
from maelm_composer.config import DataConfig, Implementation, Precision
from maelm_composer.errors import InputError
from maelm_composer.files import hash_json, parse_json, write_json
from maelm_composer.precision import Speeds
from maelm_composer.recipe import to_plain
from maelm_composer.records import load_record, parse_rank
from tests.tiny import HF_SETTINGS, SIZES, N

D = SIZES['hidden_size']


@pytest.fixture
def measure(folder, tmp_path):
    """``measure(text=..., ...)``: the record of the run, kept in tmp_path."""

    def call(checkpoint='run/latest', options=None, **arguments):
        where = str(folder / checkpoint)
        return analyze_ranks(where, options or RankOptions(), folder=str(tmp_path / 'ranks'), **arguments)

    return call


@pytest.fixture(scope='module')
def roberta(folder):
    """A Hugging Face RoBERTa with the run's tokenizer and random weights."""
    config = RobertaConfig(**HF_SETTINGS, type_vocab_size=1, initializer_range=0.2, layer_norm_eps=1e-5)
    return save(RobertaModel(config, add_pooling_layer=False), folder, 'roberta')


def save(model, folder, name):
    model.save_pretrained(folder / name)
    for file in (folder / 'run/tokenizer').iterdir():
        shutil.copy(file, folder / name)
    return name


def rank_by_svd(rows: torch.Tensor, centered: bool, threshold: float) -> int:
    rows = rows.double()
    squares = torch.linalg.svdvals(rows - rows.mean(0) if centered else rows).square()
    return int((squares.cumsum(0) / squares.sum() < threshold).sum()) + 1


def norm(matrix: torch.Tensor) -> torch.Tensor:
    """‖·‖_{1,∞} of App. A"""
    return (torch.linalg.matrix_norm(matrix, 1) * torch.linalg.matrix_norm(matrix, float('inf'))).sqrt()


@pytest.mark.parametrize('centered, threshold', [(False, 0.9), (True, 0.9), (False, 0.6)])
def test_every_number_of_the_last_layer_from_the_states_themselves(folder, measure, centered, threshold):
    record = measure(options=RankOptions(centered=centered, threshold=threshold))
    pretrained = load_pretrained(str(folder / 'run'))
    source = find_shards(DataConfig(remote=str(folder / 'shards')), pretrained.tokenizer, N)
    real, kept, masks, residuals = [], [], [], []
    for view in iterate_views(source, max_tokens=10**9, mlm_probability=0.15, seed=17, is_packed=True):
        with torch.inference_mode():
            plain = pretrained.encoder(view.plain_ids, view.position_ids, view.segment_ids)
            masked = pretrained.encoder(view.masked_ids, view.position_ids, view.segment_ids)
        real.append(plain[view.is_real])
        kept.append(masked[view.is_real & ~view.is_masked])
        masks.append(masked[view.is_masked])
        for states, segments, is_kept in zip(masked, view.segment_ids, view.is_real & ~view.is_masked, strict=True):
            for segment in range(1, int(segments.max()) + 1):
                rows = states[(segments == segment) & is_kept]
                if len(rows) > 1:
                    residuals.append(float(norm(rows - rows.mean(0)) / norm(rows)))
    real, kept, masks = (torch.cat(rows) for rows in (real, kept, masks))
    last = record.layers[-1]
    assert [layer.layer for layer in record.layers] == [0, 1, 2]
    assert (record.tokens, record.mask_tokens) == (len(real), len(masks))
    assert last.rank_real == rank_by_svd(real, centered, threshold)
    assert last.rank_with_masks == rank_by_svd(torch.cat([kept, masks]), centered, threshold)
    assert last.rank_real_with_masks == rank_by_svd(kept, centered, threshold)
    assert last.rank_masks == rank_by_svd(masks, centered, threshold)

    kept, masks = (rows.double() - rows.double().mean(0) * centered for rows in (kept, masks))
    span = torch.linalg.svd(kept, full_matrices=False).Vh[: last.rank_real_with_masks]
    left = masks - masks @ span.t() @ span
    assert last.mask_outside_share == pytest.approx(float(left.square().sum() / masks.square().sum()))
    rest = kept - kept @ span.t() @ span
    assert last.real_outside_share == pytest.approx(float(rest.square().sum() / kept.square().sum()))
    other = torch.linalg.svd(masks, full_matrices=False).Vh[: last.rank_masks]
    angles = torch.linalg.svdvals(span @ other.t()).clamp(max=1).acos().rad2deg()
    quantiles = angles.quantile(torch.tensor([0, 0.25, 0.5, 0.75, 1], dtype=torch.float64))
    assert last.principal_angles_degrees == pytest.approx(quantiles.tolist(), abs=1e-2)
    assert last.rank_one_residual == pytest.approx(sum(residuals) / len(residuals), rel=1e-4)


def test_the_record_says_where_it_comes_from_and_is_written_whole(measure, tmp_path):
    record = measure()
    (path,) = (tmp_path / 'ranks').iterdir()
    assert path.name == f'{record.key}.json'
    assert load_record(path, parse_rank) == record
    assert record.kind == 'rank'
    assert (record.checkpoint.run_name, record.checkpoint.samples) == ('run', 64)
    assert record.data_hash == 'c' * 64
    assert (record.threshold, record.centered, record.mlm_probability) == (0.9, False, 0.15)
    assert record.hidden_size == D
    assert record.provenance.packages


def test_a_measurement_is_made_once_and_another_one_is_another(folder, measure, tmp_path, monkeypatch):
    first = measure()
    assert measure('run') == first  # the run's newest checkpoint; seconds would differ
    others = [RankOptions(seed=1), RankOptions(threshold=0.5), RankOptions(precision=Precision.bf16)]
    ranks = [measure(options=options) for options in others]
    assert len({record.key for record in (first, *ranks)}) == 4
    assert ranks[1].layers[-1].rank_real < first.layers[-1].rank_real
    shares = [record.layers[-1].mask_outside_share for record in (first, ranks[2])]
    assert shares[0] != shares[1] == pytest.approx(shares[0], rel=0.05)  # bf16
    assert measure(text=[str(folder / 'text.txt')]).key not in {first.key, *(record.key for record in ranks)}
    assert len(list((tmp_path / 'ranks').iterdir())) == 5
    monkeypatch.setattr(precision, 'measure_speeds', lambda: Speeds(1e11, 5e9, 'CPU'))
    assert measure(options=RankOptions(precision=Precision.auto)) == first


def test_seed_and_probability_of_the_masks_reach_them(measure):
    first, other, twice = (measure(options=RankOptions(**o)) for o in ({}, {'seed': 1}, {'mlm_probability': 0.3}))
    assert twice.mask_tokens == 2 * first.mask_tokens == 2 * other.mask_tokens  # 14 and 7 of a row's 48 tokens
    for ours, theirs in zip(first.layers, other.layers, strict=True):
        assert ours.rank_real == theirs.rank_real  # without [MASK]
        assert ours.real_outside_share != theirs.real_outside_share


def test_the_command_hands_on_its_options(folder, measure, tmp_path, monkeypatch, capsys):
    text = str(folder / 'text.txt')
    options = RankOptions(max_tokens=2000, centered=True, precision=Precision.bf16)
    record = measure(options=options, text=[text], text_column='x')
    (tmp_path / 'ranks' / f'{record.key}.json').unlink()
    arguments = ['--max-tokens', '2000', '--centered', '--precision', 'bf16', '--text', text, '--text-column', 'x']
    where = ['--folder', str(tmp_path / 'elsewhere'), '--implementation', 'ours']
    monkeypatch.setattr(sys, 'argv', ['maelm', 'rank', str(folder / 'run/latest'), *arguments, *where])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert not caught.value.code
    again = load_record(tmp_path / 'elsewhere' / f'{record.key}.json', parse_rank)
    assert again.layers == record.layers
    assert f'record: {tmp_path}/elsewhere/{record.key}.json' in capsys.readouterr().out


def test_a_record_belongs_to_the_run(folder, measure, tmp_path, monkeypatch, capsys):
    shutil.copytree(folder / 'run', tmp_path / 'run', symlinks=True)
    record = measure()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'argv', ['maelm', 'rank', 'run/latest'])
    with pytest.raises(SystemExit):
        cli.main()
    place = f'run/ranks/{record.key}.json'
    assert f'record: {place}' in capsys.readouterr().out
    found = load_record(tmp_path / place, parse_rank)
    assert found.checkpoint.uri.startswith('run/')  # where the weights are now
    assert (found.key, found.layers) == (record.key, record.layers)
    assert analyze_ranks('run') == found


def test_other_weights_are_another_measurement(folder, measure, tmp_path):
    shutil.copytree(folder / 'run', tmp_path / 'run', symlinks=True)
    before = measure(tmp_path / 'run')
    weights = tmp_path / 'run/latest/model.safetensors'
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    after = measure(tmp_path / 'run')
    assert before.checkpoint.uri == after.checkpoint.uri
    assert before.key != after.key


def test_a_hugging_face_encoder_has_the_same_ranks_by_its_own_class_and_by_ours(folder, measure, roberta):
    text = [str(folder / 'text.txt')]
    theirs = measure(roberta, text=text, implementation=Implementation.huggingface)
    ours = measure(roberta, text=text, implementation=Implementation.ours)
    for record, is_as_before in ((theirs, False), (ours, True)):  # earlier versions took other states of theirs
        encoder = record.checkpoint
        former = hash_json([encoder.hash, encoder.implementation, record.data_hash, to_plain(RankOptions())])[:16]
        assert (record.key == former) == is_as_before
    assert theirs.tokens == ours.tokens > 5000
    for one, other in zip(theirs.layers, ours.layers, strict=True):
        for name, value in vars(one).items():
            assert value == pytest.approx(getattr(other, name), rel=1e-3, abs=0.5 if 'angles' in name else 1e-3), name


def test_the_table_shows_every_layer(measure, capsys):
    record = measure()
    print_ranks(record)
    _, _, *layers, note = capsys.readouterr().out.splitlines()
    assert [int(line.split()[0]) for line in layers] == [0, 1, 2]
    last = record.layers[-1]
    assert layers[-1].split()[1:5] == [
        str(getattr(last, name)) for name in ('rank_real', 'rank_with_masks', 'rank_real_with_masks', 'rank_masks')
    ]
    assert f'{record.tokens:,} real tokens' in note


def test_an_encoder_without_a_recipe_needs_to_be_told_what_to_read(measure, roberta):
    with pytest.raises(InputError, match='give --data or --text'):
        measure(roberta)


def test_shards_that_are_elsewhere_are_named(folder, tmp_path):
    shutil.copytree(folder / 'run', tmp_path / 'run', symlinks=True)
    recipe = tmp_path / 'run/recipe.yaml'
    recipe.write_text(recipe.read_text().replace(str(folder / 'shards'), 'gone'))
    with pytest.raises(InputError, match=r'^gone, with the rows of .*/run, is not there .* give --data or --text'):
        analyze_ranks(str(tmp_path / 'run'))


def test_records_in_object_storage_are_refused(roberta):
    with pytest.raises(InputError, match='--folder s3://bucket/ranks: must be a local or shared folder'):
        analyze_ranks(str(roberta), folder='s3://bucket/ranks')


def test_bad_input_is_named(folder, measure, tmp_path, roberta):
    (tmp_path / 'short.txt').write_text('the sea\n')
    for arguments, message in (
        ({'data': 'x', 'text': ['y']}, 'choose one'),
        ({'text_column': 'x'}, '--text-column x is for text files: give --text'),
        ({'data': str(tmp_path)}, 'no shards'),
        ({'text': [str(tmp_path / 'none.txt')]}, 'matches no file'),
        ({'text': [str(tmp_path / 'short.txt')]}, '0 real tokens for 32 dimensions'),
        ({'options': RankOptions(max_tokens=50)}, r'\[MASK\]s for 32 dimensions'),
        ({'options': RankOptions(threshold=1.0)}, 'threshold 1.0'),
        ({'options': RankOptions(max_tokens=0)}, 'raise max_tokens'),
    ):
        with pytest.raises(InputError, match=message):
            measure(**arguments)
    assert not (tmp_path / 'ranks').exists()


def test_shards_of_another_vocabulary_or_length_are_refused(folder, measure, tmp_path):
    shutil.copytree(folder / 'shards', tmp_path / 'shards')
    tokenizer = tmp_path / 'shards/tokenizer/tokenizer.json'
    plain = json.loads(tokenizer.read_text())
    pieces = plain['model']['vocab']
    one, other = list(pieces)[100:102]
    pieces[one], pieces[other] = pieces[other], pieces[one]
    tokenizer.write_text(json.dumps(plain))
    with pytest.raises(InputError, match='vocabulary'):
        measure(data=str(tmp_path / 'shards'))
    manifest = tmp_path / 'shards/manifest.json'
    write_json(manifest, parse_json(manifest.read_text(), 'manifest.json') | {'max_seq_len': 64})
    with pytest.raises(InputError, match='rows of 64 tokens, the encoder takes 48'):
        measure(data=str(tmp_path / 'shards'))
