import os
import platform

import pytest

from maelm_composer.processor import CPUINFO, count_cores, find_instruction_set, name_processor

X86 = """processor\t: 0
model name\t: AMD EPYC
flags\t\t: fpu sse2 avx avx2 fma {more}

processor\t: 1
model name\t: another
"""
ARM = 'processor\t: 0\nFeatures\t: fp asimd sve {more}\n'


@pytest.mark.parametrize(
    'text, more, expected',
    [
        (X86, '', 'avx2'),
        (X86, 'avx512f', 'avx512f'),
        (X86, 'amx_bf16 avx512f avx512_bf16', 'amx_bf16'),
        (ARM, '', 'sve'),
        (ARM, 'svebf16', 'svebf16'),
        ('processor: 0\n', '', platform.machine()),
    ],
)
def test_cpus_of_one_name_differ_in_their_instruction_set(text, more, expected, tmp_path):
    file = tmp_path / 'cpuinfo'
    file.write_text(text.format(more=more))
    assert find_instruction_set(file) == expected
    assert name_processor(file) == ('AMD EPYC' if text == X86 else platform.processor())


def test_this_machine_has_a_name_and_an_instruction_set():
    assert find_instruction_set()
    assert name_processor() or not CPUINFO.exists()
    assert find_instruction_set(CPUINFO / 'missing') == platform.machine()


@pytest.mark.parametrize(
    'files, quota',
    [
        ({}, 4),
        ({'cpu.max': 'max 100000'}, 4),
        ({'cpu.max': '250000 100000'}, 2),
        ({'cpu.max': '50000 100000'}, 1),
        ({'cpu.max': '900000 100000'}, 4),
        ({'cpu/cpu.cfs_quota_us': '-1', 'cpu/cpu.cfs_period_us': '100000'}, 4),
        ({'cpu/cpu.cfs_quota_us': '300000', 'cpu/cpu.cfs_period_us': '100000'}, 3),
    ],
)
def test_a_container_may_have_less_time_than_cores(files, quota, tmp_path, monkeypatch):
    monkeypatch.setattr(os, 'sched_getaffinity', lambda _: {0, 1, 2, 3})
    (tmp_path / 'cpu').mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(f'{text}\n')
    assert count_cores(tmp_path) == quota
