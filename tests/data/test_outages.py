"""Waiting while an object store does not answer."""

import pytest

from maelm_composer.data.storage import OutageError, wait_out


@pytest.mark.parametrize('has_locks', [True, False])
def test_a_call_is_tried_again_until_the_store_answers_with_or_without_locks(tmp_path, capsys, has_locks):
    """Only the lock's holder speaks; a file system without locks must not end the wait."""
    lock = tmp_path / '.outage'
    if not has_locks:
        lock.write_text('no folder')
        lock = lock / 'below'
    answers = [OutageError('away'), 'content']

    def call() -> str:
        answer = answers.pop(0)
        if isinstance(answer, OutageError):
            raise answer
        return answer

    assert wait_out(call, 's3://bucket/x', 1.0, lock) == 'content'
    assert ('trying again for 1 minutes' in capsys.readouterr().out) == has_locks


def test_the_wait_has_an_end(tmp_path):
    def call() -> None:
        raise OutageError('away')

    with pytest.raises(OutageError, match=r'^away$'):
        wait_out(call, 's3://bucket/x', 0.0, tmp_path / '.outage')
