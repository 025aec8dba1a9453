"""Memory of a process and all below it over a run: what those that stay grow by, by name.

What a process has is its PSS: its own pages, and its part of those that it shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
from scipy.special import stdtrit

from loadtests.paired import CONFIDENCE

SETTLED: Final = 10
"""Samples that don't count: caches fill."""
COMMANDS: Final = ("up", "serve", "schedule")

Sample = dict[tuple[int, float], tuple[str, float]]
"""Name and MiB of each process, by its number and the second of its start."""


def sample(process: psutil.Process) -> Sample:
    """The processes that are there now."""
    found: Sample = {}
    for each in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            found[each.pid, each.create_time()] = (name(each.cmdline()), each.memory_full_info().pss / 2**20)
    return found


def name(command: Sequence[str]) -> str:
    """Of a process, by its command: a command of Millrace, else the module that Python runs, else the program."""
    module = command[command.index("-m") + 1] if "-m" in command[:-1] else ""
    if module.endswith("cli") or any(Path(word).name == "millrace" for word in command[:2]):
        return next((f"millrace {word}" for word in COMMANDS if word in command), "millrace")
    return module or (Path(command[0].split()[0]).name if command and command[0] else "no command")


def growth(samples: Sequence[Sample]) -> dict[str, dict[str, Any]]:
    """By name and of "all": MiB at the first and the last sample that counts, and ``mib_each`` from one to the next.

    Of the processes that are in each sample after the first SETTLED; empty with fewer than three of those. The slope
    is by least squares, its interval by Student's t, as if the deviations from the line were independent.
    """
    counted = samples[SETTLED:]
    if len(counted) < 3:
        return {}
    stayed = set[tuple[int, float]](counted[0]).intersection(*counted[1:])
    if not stayed:
        return {}
    named = {key: counted[0][key][0] for key in stayed}  # what Ray's workers are called says what they do at the moment
    series = {
        of: [sum(one[key][1] for key in stayed if named[key] == of) for one in counted]
        for of in sorted(set(named.values()))
    }
    series["all"] = list(np.sum([*series.values()], axis=0))
    return {of: _line(mib) for of, mib in series.items()}


def _line(mib: Sequence[float]) -> dict[str, Any]:
    (slope, _), covariance = np.polyfit(np.arange(len(mib)), mib, 1, cov=True)
    half = stdtrit(len(mib) - 2, (1 + CONFIDENCE) / 2) * np.sqrt(covariance[0, 0])
    each, *ends = (round(float(one), 3) for one in (slope, slope - half, slope + half))
    return {
        "mib_first": round(float(mib[0]), 1),
        "mib_last": round(float(mib[-1]), 1),
        "mib_each": each,
        "mib_each_interval": ends,
    }
