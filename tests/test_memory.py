"""Freed blocks are kept: seen in the page faults of a process that takes and frees large blocks."""

import subprocess
import sys

from tests.tiny import ROOT

PROGRAM = """
import resource
import torch
{load}
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def use():
    torch.empty(10 * 2**20).fill_(1)  # 40 MiB: 10,240 pages
use()
before = faults()
for _ in range(5):
    use()
print(faults() - before)
"""


def page_faults(load: str, **environment: str) -> int:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(load=load)],
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    return int(result.stdout)


KEEP = "from rope_fairseq.memory import keep_freed_memory as keep; assert keep()"
LEAVE = KEEP.replace("assert ", "assert not ")


def test_blocks_of_the_same_size_are_used_again():
    anew = page_faults("")
    assert page_faults(KEEP) < anew / 3
    # The environment has the last word, under either name.
    for environment in (
        {"MALLOC_MMAP_THRESHOLD_": "1048576"},
        {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1048576"},
    ):
        assert page_faults(LEAVE, **environment) > anew / 2
