"""``python -m tests.run ARGUMENTS``: pytest, and the few tests that failed beside others once more, alone.

A machine that is busy, or a third as fast, finds tests that a hurry decides. Such a test is a defect, and is named at
the end; it is no reason to refuse a change that did not touch it. Where more than ``MOST`` failed, the change is.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Final

import pytest

from tests.paths import ROOT

MOST: Final = 5


def main(arguments: list[str]) -> int:
    command = [sys.executable, "-m", "pytest"]
    code = subprocess.run([*command, "--cache-clear", *arguments], cwd=ROOT).returncode
    if code != pytest.ExitCode.TESTS_FAILED:
        return code
    failed = list(json.loads((ROOT / ".pytest_cache/v/cache/lastfailed").read_text()))
    if len(failed) > MOST:
        return code
    print(f"\n{len(failed)} failed; once more, alone:", *failed, sep="\n  ", flush=True)
    code = subprocess.run([*command, "-v", *failed], cwd=ROOT).returncode
    if code == pytest.ExitCode.OK:
        print("\nfailed beside others and passed alone, which is a defect of theirs, or a race:", *failed, sep="\n  ")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
