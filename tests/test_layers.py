"""What YAML makes of a value, and in which order files and pairs are merged."""

from pathlib import Path

import pytest

from maelm_composer.config import CorpusConfig, FinetuningConfig, PretrainingConfig, SuiteConfig
from maelm_composer.errors import InputError
from maelm_composer.recipe import load_config, read_keys

PRETRAINING = 'data: {remote: shards}\n'
CORPUS = 'remote: shards\n'
FINETUNING = 'checkpoint: none\n'


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a file into the working folder."""
    monkeypatch.chdir(tmp_path)

    def write_text(name: str, text: str) -> str:
        Path(name).write_text(text)
        return name

    return write_text


@pytest.mark.parametrize(
    'root, text, message',
    [
        (PretrainingConfig, 'training: {precision: 2}', "training.precision: Invalid value '2', expected one of"),
        (PretrainingConfig, 'run_name: 017', 'run_name: YAML reads this value as 15, so put it in quotes'),
        (PretrainingConfig, 'data: {remote: 1e15}', 'data.remote: YAML reads this value as 1000000000000000.0'),
        (PretrainingConfig, 'training: {loggers: [1]}', r"training.loggers\[0\]: Invalid value '1', expected one of"),
        (CorpusConfig, 'sources: [{kind: files, paths: [1.5]}]', r'sources\[\].paths: YAML reads this value as 1.5'),
        (
            CorpusConfig,
            'sources: [{kind: huggingface, dataset: 7}]',
            r'sources\[\].dataset: YAML reads this value as 7',
        ),
        (FinetuningConfig, 'tasks: {mine: {label_names: [off, on]}}', 'tasks.mine.label_names: .* as False, so put'),
        (SuiteConfig, 'pretraining_of: {medium: [on]}', 'pretraining_of.medium: YAML reads this value as True'),
    ],
)
def test_a_value_that_yaml_changes_is_named(write, root, text, message):
    with pytest.raises(InputError, match=rf'^own\.yaml: {message}'):
        load_config(root, [write('own.yaml', text)])


def test_whole_numbers_may_be_the_names_of_classes(write):
    path = write('own.yaml', FINETUNING + 'tasks: {mine: {kind: classification, label_names: [1, 2, 3]}}')
    assert load_config(FinetuningConfig, [path]).tasks['mine'].label_names == ['1', '2', '3']


@pytest.mark.parametrize(
    'root, text, message',
    [
        (CorpusConfig, 'remote: ""', "remote is '': name a folder of its own"),
        (CorpusConfig, 'remote: /', "remote is '/': name a folder of its own"),
        (FinetuningConfig, FINETUNING + 'save_folder: ""', "save_folder is '': name a folder of its own"),
        (FinetuningConfig, FINETUNING + 'sweep: {cpus_per_run: 1e-5}', 'cpus_per_run 1e-05: must be at least 0.0001'),
        (FinetuningConfig, FINETUNING + 'sweep: {gpus_per_run: 1e-5}', 'must be at least 0.0001, or 0'),
        (
            CorpusConfig,
            CORPUS + 'sources: [{revision: main}]',
            r'sources\[0\].revision is read by the kind huggingface',
        ),
    ],
)
def test_folders_and_shares_that_cannot_be_are_named(write, root, text, message):
    with pytest.raises(InputError, match=message):
        load_config(root, [write('own.yaml', text)])


def test_a_file_cannot_give_back_a_decoder_that_another_took_away(write):
    write('base.yaml', PRETRAINING)
    plain = write('plain.yaml', 'model: {decoder: null}\nmasking: {encoder_mask_fraction: 1.0}\n')
    sizes = write('sizes.yaml', 'model: {decoder: {num_hidden_layers: 2}}\n')
    with pytest.raises(InputError, match=r'^sizes\.yaml sets keys of model\.decoder, which plain\.yaml makes null'):
        load_config(PretrainingConfig, ['base.yaml', plain, sizes])
    assert load_config(PretrainingConfig, ['base.yaml', sizes, plain]).model.decoder is None
    pair = 'model.decoder.num_hidden_layers=2'
    with pytest.raises(InputError, match=rf'^{pair} sets keys .* plain\.yaml makes null: leave the pair out'):
        load_config(PretrainingConfig, ['base.yaml', plain], [pair])
    assert load_config(PretrainingConfig, ['base.yaml', pair, plain]).model.decoder is None


def test_entries_are_merged_in_their_order(write):
    entries = [write('one.yaml', PRETRAINING + 'seed: 1\n'), 'seed=2', write('three.yaml', 'seed: 3\n')]
    assert load_config(PretrainingConfig, entries).seed == 3
    assert load_config(PretrainingConfig, [*entries, 'seed=4']).seed == 4
    assert load_config(PretrainingConfig, entries).run_name == 'one-three'


def test_the_keys_of_a_file_are_those_of_its_sections_too_and_those_without_a_value(write):
    path = write('own.yaml', 'model: {decoder: null}\nsweep: {tasks: []}\nseed: 1\n')
    assert read_keys(path) == {'model', 'model.decoder', 'sweep', 'sweep.tasks', 'seed'}
