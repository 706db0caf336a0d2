"""The commands as a user types them: what they print, and one line with exit code 2 for bad input."""

import contextlib
import mmap
import subprocess
import sys
from pathlib import Path

import pytest

from maelm_composer import cli, device
from maelm_composer.config import CorpusConfig
from maelm_composer.device import find_dead_segments
from maelm_composer.recipe import to_yaml


def run(monkeypatch, capfd, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, 'argv', ['maelm', *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    output = capfd.readouterr()
    return caught.value.code or 0, output.out, output.err


@pytest.fixture
def recipe_file(recipe: CorpusConfig, tmp_path: Path) -> str:
    (tmp_path / 'recipe.yaml').write_text(to_yaml(recipe))
    return str(tmp_path / 'recipe.yaml')


def test_tokenizer_then_shards(recipe_file, ray_here, monkeypatch, capfd):
    code, out, _ = run(monkeypatch, capfd, 'tokenizer', recipe_file)
    assert (code, '320 pieces' in out) == (0, True)
    code, out, err = run(monkeypatch, capfd, 'shards', recipe_file)
    assert (code, 'tokens/s' in out, 'rows of 32' in out) == (0, True, True)
    assert 'tokens' in err  # the progress bar
    for command in ('tokenizer', 'shards'):
        code, out, _ = run(monkeypatch, capfd, command, recipe_file)
        assert (code, 'nothing to do' in out) == (0, True)


@pytest.mark.parametrize(
    'command,arguments,message',
    [
        ('tokenizer', ['max_seq=3'], 'unknown key max_seq; did you mean max_seq_len?'),
        ('tokenizer', ['max_seq_len=many'], 'max_seq_len'),
        ('tokenizer', ['nowhere.yaml'], 'no such recipe: nowhere.yaml'),
        ('tokenizer', ['tokenizer.vocab_size=9000'], '*.txt: the text is too small for tokenizer.vocab_size 9000'),
        ('tokenizer', ['remote=/proc/nowhere'], '/proc/nowhere'),
        ('shards', [], 'remote/tokenizer: run `maelm tokenizer` with the same recipe first'),
        ('shards', ['remote=s3://nowhere/x'], 'there is no such bucket'),
        ('shards', ['remote=hdfs://nowhere/x'], 'only a local folder or s3://'),
    ],
)
def test_bad_input_is_one_line(recipe_file, s3, monkeypatch, capfd, command, arguments, message):
    code, _, err = run(monkeypatch, capfd, command, recipe_file, *arguments)
    assert code == 2
    assert message in err
    assert err.count('\n') == 1
    assert 'Traceback' not in err


def test_too_little_text_is_named(recipe_file, ray_here, monkeypatch, capfd):
    assert run(monkeypatch, capfd, 'tokenizer', recipe_file)[0] == 0
    code, _, err = run(monkeypatch, capfd, 'shards', recipe_file, 'validation_fraction=1e-9')
    assert code == 2
    assert err.splitlines()[-1].endswith(
        '*.txt: too little text for one validation row of 32 tokens: add text (a .txt is divided at blank lines), or '
        'change validation_fraction 1e-09'
    )


@pytest.mark.parametrize(
    'words, found',
    [
        ('tokenizer yamls/data/de', ['yamls/data/demo.yaml']),
        ('train training.prec', ['training.precision=']),
        ('sweep yamls/finetune/demo.yaml sweep.se', ['sweep.seeds=', 'sweep.selection=']),
        ('compare runs/a runs/b sweep.se', ['sweep.seeds=', 'sweep.selection=']),
        ('train my', ['my.yaml']),
        ('sui', ['suite']),
    ],
)
def test_the_shell_completes_commands_recipes_and_keys(tmp_path, monkeypatch, capfd, words, found):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'my.yaml').touch()
    monkeypatch.setenv('_MAELM_COMPLETE', 'complete_bash')
    monkeypatch.setenv('COMP_WORDS', f'maelm {words}')
    monkeypatch.setenv('COMP_CWORD', str(len(words.split())))
    code, out, _ = run(monkeypatch, capfd)
    assert (code, sorted(out.split())) == (0, found)


def test_a_suite_runs_on_the_devices_that_are_there(monkeypatch, capfd):
    code, _, err = run(monkeypatch, capfd, 'suite', '--scale', 'demo', '--gpus', '8')
    assert (code, err) == (2, 'error: --gpus and --gpu are for --plan: a suite runs on the devices of this machine\n')


def test_the_home_folder_is_found_where_the_shell_leaves_its_name(monkeypatch, capfd, tmp_path):
    monkeypatch.setenv('HOME', str(tmp_path))
    code, _, err = run(monkeypatch, capfd, 'report', '--scale', 'demo', '--results=~/mine')
    assert (code, err.split(': run the')[0]) == (2, f'error: no records in {tmp_path}/mine/demo/records')


def test_bad_input_as_a_process_is_exit_code_2():
    result = subprocess.run(
        [sys.executable, '-m', 'maelm_composer.cli', 'shards', 'no.yaml'], capture_output=True, text=True
    )
    assert (result.returncode, result.stderr) == (2, 'error: no such recipe: no.yaml\n')


def leave_segment() -> Path:
    """A file as a killed run leaves it, of a number that no run reaches and no other test of the machine has taken."""
    for number in range(999_999, 900_000, -1):
        path = Path(f'/dev/shm/{number}_locals')
        with contextlib.suppress(FileExistsError), path.open('xb') as file:
            file.write(b'left')
            return path
    raise AssertionError('no number is free')


def test_doctor_removes_what_no_process_holds(monkeypatch, capfd):
    path, live = mine = (leave_segment(), leave_segment())
    monkeypatch.setattr(device, 'find_dead_segments', lambda: [p for p in find_dead_segments() if p in mine])
    try:
        with live.open('r+b') as file, mmap.mmap(file.fileno(), 0):
            assert run(monkeypatch, capfd, 'doctor', '--clean')[0] == 0
        assert (path.exists(), live.exists()) == (False, True)
    finally:
        for left in mine:
            left.unlink(missing_ok=True)


def test_doctor_tells_versions_and_devices(monkeypatch, capfd):
    code, out, _ = run(monkeypatch, capfd, 'doctor')
    assert code == 0
    assert 'mosaicml-streaming' in out
    assert 'cores' in out
