"""How the host gives out memory."""

import subprocess
import sys

PROGRAM = """
import resource, torch
from maelm_composer.device import keep_freed_memory
def count_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(2**24)  # 64 MiB, 16,384 pages
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
for keeps in (False, True, True, False):  # the first time it is kept, it has to be taken
    keep_freed_memory(keeps)
    print(count_faults())
"""


def test_kept_memory_is_not_faulted_in_again():
    output = subprocess.run([sys.executable, '-c', PROGRAM], check=True, capture_output=True, text=True).stdout
    default, _, kept, default_again = map(int, output.split())
    assert default > 20 * 16_000
    assert kept < 1000
    assert default_again > 20 * 16_000
