"""The campaign of faults: what it draws, which rows it goes on from, and where it limits memory."""

import os
import subprocess
import sys
import time

import pytest

from bench.faults.command import find_clock
from bench.faults.faults import KINDS, choose_kinds, draw
from bench.faults.jobs import JOBS, copy_needs
from bench.faults.memory import find_parent
from bench.faults.table import assert_drawn_alike, describe_draw
from maelm_composer.errors import InputError


def make_row(number: int, **changes: str) -> dict[str, str]:
    row = {'seed': '7', 'number': str(number), 'git_revision': '0123456789'}
    return row | describe_draw(draw(number, 7, list(JOBS), KINDS)) | changes


def test_a_campaign_goes_on_from_rows_that_it_would_have_drawn_itself():
    rows = [make_row(number) for number in range(50)]
    assert_drawn_alike(rows, 7, list(JOBS), KINDS)
    other = make_row(50, at='2.000')  # as of an older source, with fewer kinds
    assert_drawn_alike([*rows, other], 8, list(JOBS), KINDS)
    with pytest.raises(InputError, match=r'fault 50 of seed 7 is recorded .*git_revision 0123456\): choose another'):
        assert_drawn_alike([*rows, other], 7, list(JOBS), KINDS)
    with pytest.raises(InputError, match='choose another --seed'):
        assert_drawn_alike(rows, 7, ['train'], KINDS)


def test_kinds_are_chosen_by_name():
    assert choose_kinds([], []) == list(KINDS)
    (kind,) = choose_kinds(['SIGKILL'], [])
    assert {draw(number, 1, list(JOBS), [kind]).kind for number in range(20)} == {kind}
    assert kind not in choose_kinds([], ['SIGKILL'])
    with pytest.raises(InputError, match=r"there is no fault 'SIGKIL': there are "):
        choose_kinds(['SIGKIL'], [])
    with pytest.raises(InputError, match='no kind of fault is left'):
        choose_kinds(['SIGKILL'], ['SIGKILL'])


def test_a_job_has_its_work_before_it_and_a_kind_meets_something(tmp_path):
    for name in ('runs/model/ranks/old.json', 'runs/model/record.json', 'shards/manifest.json', 'recipe.yaml'):
        path = tmp_path / 'golden' / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{}')
    copy_needs(JOBS['rank'], tmp_path / 'golden', tmp_path / 'work')
    found = {str(path.relative_to(tmp_path / 'work')) for path in (tmp_path / 'work').rglob('*') if path.is_file()}
    assert found == {'recipe.yaml', 'runs/model/record.json', 'shards/manifest.json'}
    lacks = {kind.name for kind in KINDS if not kind.fits('report')}
    assert {'SIGKILL of a child', '/dev/shm full', '500', 'byte flipped'} <= lacks
    assert 'SIGKILL' not in lacks


def test_a_rare_kind_is_drawn_rarely():
    drawn = [draw(number, 1, list(JOBS), KINDS).kind.name for number in range(3000)]
    assert 0 < drawn.count('stopped for two minutes') < drawn.count('SIGKILL') / 3


def test_memory_is_limited_below_our_own_group_of_version_1(tmp_path):
    mounts = f'cgroup {tmp_path} cgroup rw,relatime,memory 0 0\ncgroup2 {tmp_path}/unified cgroup2 rw 0 0\n'
    (tmp_path / 'ours').mkdir()
    assert find_parent(mounts, '4:memory:/ours\n0::/\n') == (tmp_path / 'ours', False)
    assert find_parent(mounts, '4:memory,hugetlb:/docker/seen/from/outside\n') == (tmp_path, False)


@pytest.mark.parametrize('own, parent, enables', [('/user/ours', 'user', False), ('/', '', True)])
def test_memory_is_limited_beside_our_own_group_of_version_2(tmp_path, own, parent, enables):
    (tmp_path / 'user/ours').mkdir(parents=True)
    (tmp_path / 'cgroup.controllers').write_text('cpu memory\n')
    for folder, enabled in ((tmp_path, 'cpu'), (tmp_path / 'user', 'cpu memory')):
        (folder / 'cgroup.subtree_control').write_text(f'{enabled}\n')
    assert find_parent(f'cgroup2 {tmp_path} cgroup2 rw 0 0\n', f'0::{own}\n') == (tmp_path / parent, True)
    assert (tmp_path / 'cgroup.subtree_control').read_text() == ('+memory' if enables else 'cpu\n')


def test_a_machine_without_a_memory_cgroup_says_so():
    with pytest.raises(OSError, match='no memory cgroup is mounted here'):
        find_parent('tmpfs /tmp tmpfs rw 0 0\n', '0::/\n')


@pytest.mark.skipif(not find_clock(), reason='needs libfaketime and a C compiler')
def test_a_program_that_sees_the_clock_of_yesterday_can_sleep():
    program = 'import threading, time; time.sleep(0.01); threading.Event().wait(0.01); print(time.time())'
    ended = subprocess.run(
        [sys.executable, '-c', program], env=os.environ | find_clock(), capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert time.time() - float(ended.stdout) == pytest.approx(86_400, abs=60)
