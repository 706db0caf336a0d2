"""Two encoders by one protocol: real sweeps, and differences that follow from their records."""

import re
import shutil
import sys

import numpy as np
import pytest
import torch
from transformers import RobertaConfig, RobertaModel

from maelm_composer import cli
from maelm_composer.cluster import connect_ray
from maelm_composer.records import FinetuningRecord, load_folder, parse_finetuning, unpack_numbers
from maelm_composer.statistics import estimate_contrast, measure_example_variance
from tests.tiny import SIZES, N, V

RECIPE = """
precision: fp32
batch_size: 16
max_epochs: 1
data: {{source: files, folder: {tasks}}}
sweep:
  tasks: [rte, stsb]
  seeds: [1, 2]
  search:
    glue_small: {{learning_rate: [1e-3]}}
"""


@pytest.fixture(scope='module')
def ray():
    """A Ray of two cores: the session's, where another test has started one."""
    with connect_ray(num_cpus=2):
        yield


@pytest.fixture
def compare(checkpoint, task_folder, tmp_path, monkeypatch, capsys):
    """``compare('sweep.seeds=..')``: exit code and output of our tiny model against a Hugging Face one."""
    torch.manual_seed(0)
    stock = RobertaModel(RobertaConfig(vocab_size=V, max_position_embeddings=N + 2, type_vocab_size=1, **SIZES))
    stock.save_pretrained(tmp_path / 'stock')
    shutil.copytree(checkpoint / 'tokenizer', tmp_path / 'stock', dirs_exist_ok=True)
    (tmp_path / 'recipe.yaml').write_text(RECIPE.format(tasks=task_folder))

    def call(*values: str, second: str = str(tmp_path / 'stock')) -> tuple[int, str, str]:
        recipe = [str(tmp_path / 'recipe.yaml'), f'save_folder={tmp_path}/out', *values]
        monkeypatch.setattr(sys, 'argv', ['maelm', 'compare', str(checkpoint), second, *recipe])
        capsys.readouterr()  # Transformers' bars for the folders that a test writes
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capsys.readouterr()
        return caught.value.code or 0, out, err

    return call


def read_rows(out: str) -> dict[str, list[str]]:
    rows = [re.split(r' {2,}', line.strip()) for line in out.splitlines()]
    return {row[0]: row[1:7] for row in rows if row[0] in ('rte', 'stsb', 'mean')}


def test_the_differences_are_those_of_the_records_paired_by_seed(compare, ray, checkpoint, tmp_path):
    code, out, err = compare()
    assert (code, len(re.findall(r'^\[\d', err, re.M))) == (0, 2 * 2 * 2)
    assert compare() == (0, out, '')  # nothing is run again
    records = [r for r in load_folder(tmp_path / 'out', parse_finetuning) if isinstance(r, FinetuningRecord)]
    seeds, samples, scores = (1, 2), [], {}
    for task, metric in (('rte', 'accuracy'), ('stsb', 'spearman')):
        found = [
            {r.seed: r for r in records if r.task == task and bool(r.checkpoint.run_name) is o} for o in (True, False)
        ]
        scores[task] = [[100 * side[seed].score for seed in seeds] for side in found]
        ours, theirs = ([100 * unpack_numbers(side[s].influences[metric]) for s in seeds] for side in found)
        samples.append(np.subtract(ours, theirs))
    scores['mean'] = np.mean([scores['rte'], scores['stsb']], axis=0)
    rows = read_rows(out)
    for name, weighted in (('rte', samples[:1]), ('stsb', samples[1:]), ('mean', [sample / 2 for sample in samples])):
        first, second = np.array(scores[name])
        variances = [measure_example_variance([sample]) for sample in weighted]
        expected = estimate_contrast([(first - second).tolist()], variances)
        # Where the predictions of both encoders are equal there is no interval.
        interval = [] if expected.low is None else [f'{expected.low:+.2f} to {expected.high:+.2f}']
        means = f'{first.mean():.2f}', f'{second.mean():.2f}', f'{expected.mean:+.2f}'
        cells = [*means, *interval, '2', str(48 * len(weighted))]
        assert rows[name][: len(cells)] == cells
    assert 'not for other pretraining runs' in out


def test_one_seed_has_no_interval_and_a_failed_task_no_row(compare, ray):
    code, out, err = compare('sweep.seeds=[2]', 'sweep.search.stsb={learning_rate: [1e30]}')
    assert code == 1
    assert err.count('failed: stsb') == 2
    rows = read_rows(out)
    assert list(rows) == ['rte']
    assert rows['rte'][3:5] == ['1', '48']  # the interval is empty


def test_encoders_that_cannot_be_compared_are_refused_before_any_run(compare, checkpoint, tmp_path):
    longer = RobertaModel(RobertaConfig(vocab_size=V, max_position_embeddings=2 * N + 2, type_vocab_size=1, **SIZES))
    folder = tmp_path / 'run #2: longer'  # no YAML
    longer.save_pretrained(folder)
    shutil.copytree(checkpoint / 'tokenizer', folder, dirs_exist_ok=True)
    for second, message in (
        (str(checkpoint / 'latest'), 'have the same weights: name two encoders'),
        (str(folder), f'run #2: longer {2 * N}: give max_seq_len={N}'),
        ('./nowhere', 'nowhere: there is no such checkpoint'),
    ):
        code, _, err = compare(second=second)
        assert code == 2
        assert message in err
        assert err.count('\n') == 1
    for pair, message in (
        ('checkpoint=x', 'the two encoders are compared; leave this out'),
        ('seed=7', 'sweep.seeds='),
    ):
        code, _, err = compare(pair)
        assert (code, err.count('\n')) == (2, 1)
        assert message in err
    assert not (tmp_path / 'out').exists()
