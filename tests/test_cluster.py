"""Which Ray a command joins."""

import socket

import pytest

from maelm_composer.cluster import connect_ray
from maelm_composer.errors import InputError


@pytest.mark.parametrize('scheme', ['', 'ray://'])
def test_a_cluster_that_does_not_answer_is_told_at_once(monkeypatch, scheme):
    with socket.socket() as closed:
        closed.bind(('127.0.0.1', 0))
        address = f'{scheme}127.0.0.1:{closed.getsockname()[1]}'
        monkeypatch.setenv('RAY_ADDRESS', address)
        with (
            pytest.raises(InputError, match=f'RAY_ADDRESS {address}: .*refused; start Ray there') as told,
            connect_ray(),
        ):
            pass
    assert '\n' not in str(told.value)
