"""How the host gives out memory."""

import subprocess
import sys

PROGRAM = """
import resource, torch
from maelm_composer.device import keep_freed_memory
def count_faults(size):
    for step in range(20):
        if step == 10:  # the heap has settled
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(size)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
for keeps, size in ((False, 2**24), (True, 2**24), (False, 2**26)):  # at last larger than any piece that was kept
    keep_freed_memory(keeps)
    print(count_faults(size))
"""


def test_kept_memory_is_not_faulted_in_again():
    output = subprocess.run([sys.executable, '-c', PROGRAM], check=True, capture_output=True, text=True).stdout
    default, kept, default_again = map(int, output.split())
    assert default > 10 * 16_000  # 64 MiB are 16,384 pages
    assert kept < 1000
    assert default_again > 10 * 64_000
