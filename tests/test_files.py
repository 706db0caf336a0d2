"""Files that cannot be written, or cannot be read."""

import errno
import resource
from collections.abc import Iterator

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from maelm_composer.errors import InputError
from maelm_composer.files import parse_json, writing_tensors


@pytest.fixture
def small_files() -> Iterator[None]:
    """This process may write no file of more than 1,000 bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_tensors_on_a_full_disk_are_an_error_of_the_system(tmp_path, small_files):
    path = tmp_path / 'model.safetensors'
    with pytest.raises(OSError, match='File too large') as error, writing_tensors(path):
        save_file({'weight': torch.zeros(1000)}, path)
    assert (error.value.errno, error.value.filename) == (errno.EFBIG, str(path))
    with pytest.raises(SafetensorError, match='no error of the system'), writing_tensors(path):
        raise SafetensorError('no error of the system')


@pytest.mark.parametrize(
    'content, message',
    [
        ('{"a": 1, "b"', r'x\.json is damaged: .*; remove it'),
        ('{"a": 1, "c": 2}', r'x\.json is damaged: it lacks b; remove it'),
        ('[1]', r'x\.json is damaged: it lacks a, b; remove it'),
        (b'\xff\xfe{}', r'x\.json is damaged: .*; remove it'),
    ],
)
def test_damaged_json_is_one_line(content, message):
    with pytest.raises(InputError, match=message):
        parse_json(content, 'x.json', ['a', 'b'], 'remove it')
    assert parse_json('{"a": 1, "b": 2}', 'x.json', ['a', 'b']) == {'a': 1, 'b': 2}
