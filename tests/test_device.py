"""How the host gives out memory."""

import subprocess
import sys

PROGRAM = """
import resource, torch
from maelm_composer.device import keep_freed_memory
def count_faults():
    for step in range(20):
        if step == 10:  # the heap has settled
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(2**24)  # 64 MiB, 16,384 pages
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
for keeps in (False, True):  # back again depends on what lies above the kept memory: not asserted
    keep_freed_memory(keeps)
    print(count_faults())
"""


def test_kept_memory_is_not_faulted_in_again():
    output = subprocess.run([sys.executable, '-c', PROGRAM], check=True, capture_output=True, text=True).stdout
    default, kept = map(int, output.split())
    assert default > 10 * 16_000
    assert kept < 1000
