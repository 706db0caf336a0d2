"""Files that cannot be written, or cannot be read."""

import errno
import math
import os
import resource

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from maelm_composer.checkpoints.find import find_encoder
from maelm_composer.data.storage import list_names
from maelm_composer.errors import InputError
from maelm_composer.files import format_json, parse_json, raising_os_errors, write_text


def test_tensors_on_a_full_disk_are_an_error_of_the_system(tmp_path):
    path, limits = tmp_path / 'model.safetensors', resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match='File too large') as error, raising_os_errors(path):
            save_file({'weight': torch.zeros(1000)}, path)
    finally:  # within the test: pytest's own output may be a file, too
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (error.value.errno, error.value.filename) == (errno.EFBIG, str(path))
    with pytest.raises(SafetensorError, match='no error of the system'), raising_os_errors(path):
        raise SafetensorError('no error of the system')


def test_a_failed_write_names_the_file_and_leaves_the_old_one(tmp_path):
    path, limits = tmp_path / 'table.csv', resource.getrlimit(resource.RLIMIT_FSIZE)
    write_text(path, 'old')
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match='File too large') as error:
            write_text(path, 'new' * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (error.value.filename, path.read_text()) == (str(path), 'old')
    assert os.listdir(tmp_path) == ['table.csv']


def test_an_unreadable_folder_is_not_taken_for_an_empty_one(tmp_path, monkeypatch):
    (tmp_path / 'below/deeper').mkdir(parents=True)
    for name in ('a', 'below/b', 'below/deeper/.c'):
        (tmp_path / name).touch()
    (tmp_path / 'link').symlink_to('below')
    assert list_names(str(tmp_path)) == ['a']
    assert list_names(str(tmp_path), recursive=True) == ['a', 'below/b', 'below/deeper/.c']
    assert list_names(str(tmp_path / 'none')) == list_names(str(tmp_path / 'a')) == []
    user = os.geteuid()
    monkeypatch.chdir(tmp_path)  # another user may not pass the folders above it
    tmp_path.chmod(0o755)
    (tmp_path / 'below').chmod(0)
    try:
        if user == 0:  # who may read everything
            os.seteuid(65534)
        for read in (list_names, find_encoder):
            with pytest.raises(PermissionError, match="'below'"):
                read('below')
    finally:
        os.seteuid(user)
        (tmp_path / 'below').chmod(0o700)


@pytest.mark.parametrize(
    'content, message',
    [
        ('{"a": 1, "b"', r'x\.json is damaged: .*; remove it'),
        ('{"a": 1, "c": 2}', r'x\.json is damaged: it lacks b; remove it'),
        ('[1]', r'x\.json is damaged: it is no JSON object; remove it'),
        (b'\xff\xfe{}', r'x\.json is damaged: .*; remove it'),
    ],
)
def test_damaged_json_is_one_line(content, message):
    with pytest.raises(InputError, match=message):
        parse_json(content, 'x.json', ['a', 'b'], 'remove it')
    assert parse_json('{"a": 1, "b": 2}', 'x.json', ['a', 'b']) == {'a': 1, 'b': 2}


@pytest.mark.parametrize('indent', [None, 2])
def test_a_changed_digit_in_our_json_is_named(indent):
    plain = {'a': 0.1, 'b': [1, {'c': 25}], 'd': (math.nan, None, 'é')}
    text = format_json(plain, indent)
    read = parse_json(text, 'x.json')
    assert format_json(read, indent) == text
    with pytest.raises(
        InputError, match=r'^x\.json is damaged: its checksum is not that of its other fields; remove it$'
    ):
        parse_json(text.replace('25', '24'), 'x.json', remedy='remove it')
