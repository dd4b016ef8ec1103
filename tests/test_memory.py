"""Freed blocks are kept: seen in the page faults of a process that takes and frees large blocks."""

import subprocess
import sys

from tests.tiny import ROOT

PROGRAM = """
import resource, runpy, sys
{load}
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def use():
    block = bytearray(40 * 2**20)
    block[::4096] = b"x" * (len(block) // 4096)
use()
before = faults()
for _ in range(5):
    use()
print(faults() - before)
"""
KEEP = f"assert runpy.run_path('{ROOT}/rope_fairseq/memory.py')['keep_freed_memory']()"
LEAVE = KEEP.replace("assert ", "assert not ")


def page_faults(load: str, **environment: str) -> int:
    command = [sys.executable, "-c", PROGRAM.format(load=load)]
    result = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8")
    assert result.returncode == 0, result.stderr
    return int(result.stdout)


def test_blocks_of_the_same_size_are_used_again():
    anew = page_faults("")
    assert page_faults(KEEP) < anew / 3
    # The environment has the last word, under either name.
    for environment in (
        {"MALLOC_MMAP_THRESHOLD_": "1048576"},
        {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1048576"},
    ):
        assert page_faults(LEAVE, **environment) > anew / 2
