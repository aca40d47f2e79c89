"""What workers are told about their heap, and whether their libc understands it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from paceline.heap import keep_freed

FAULTS = """
import resource, torch
def touch():
    for _ in range(20):
        kept = [torch.empty(2**20).fill_(1.0) for _ in range(4)]  # 4 MiB each: freed together, at the end of the heap
        del kept
touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
touch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_ARENA_MAX"])
def test_who_has_said_something_of_the_heap_is_not_contradicted(name: str) -> None:
    assert keep_freed({name: "1"}) == {}
    assert keep_freed({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1"}) == {}
    assert keep_freed({"GLIBC_TUNABLES": "glibc.pthread.rseq=0"}) == keep_freed({}) != {}


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc knows these variables")
def test_memory_is_not_mapped_again_in_every_step() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    faults = []
    for told in ({"MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"}, keep_freed(environment)):
        run = [sys.executable, "-c", FAULTS]
        done = subprocess.run(run, env=environment | told, check=True, capture_output=True, text=True, timeout=120)
        faults.append(int(done.stdout))
    assert faults[0] >= 20 * 4 * 2  # at least twice for each block, however large pages are
    assert faults[1] < faults[0] / 4
