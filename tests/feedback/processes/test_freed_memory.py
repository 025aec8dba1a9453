"""What a process frees: it stays with it until it is given back."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from tests.paths import ROOT

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator is asked")

FREES = """
import resource, torch
from feedback.processes.freed_memory import give_freed_memory_back, keep_freed_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

def pages_cleared():
    torch.ones(2**22)  # 16 MiB, and again twenty times
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        tensors = [torch.ones(2**22) for _ in range(8)]
        del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

by_itself = pages_cleared()
keep_freed_memory()
kept = pages_cleared()
before = resident()
give_freed_memory_back()
print(by_itself, kept, (before - resident()) >> 20)
"""


def test_what_is_freed_stays_until_it_is_given_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FREES], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    by_itself, kept, given_back = map(int, done.stdout.split())
    once = 8 * 2**24 // 4096
    assert kept < 1.25 * once
    assert by_itself > 1.5 * once
    assert given_back > 100
