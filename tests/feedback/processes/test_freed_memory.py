"""What a process of training frees on a CPU: it stays with it until it is given back."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from tests.paths import ROOT

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator is asked")

FREES = """
import torch
from feedback.processes.freed_memory import give_freed_memory_back, keep_freed_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

def frees():
    before = resident()
    for _ in range(2):
        tensor = torch.ones(2**26)  # 256 MiB
        del tensor
    return resident() - before

given_at_once = frees()
keep_freed_memory()
kept = frees()
before = resident()
give_freed_memory_back()
print(given_at_once >> 20, kept >> 20, (before - resident()) >> 20)
"""


def test_what_is_freed_stays_until_it_is_given_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FREES], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    given_at_once, kept, given_back = map(int, done.stdout.split())
    assert given_at_once < 32
    assert 250 < kept < 300
    assert given_back > 250
