"""``python -m tests.run ARGUMENTS``: pytest, and the few tests that failed beside others once more, alone.

A machine that is busy, or a third as fast, finds tests that a hurry decides. Such a test is a defect, and is named at
the end; it is no reason to refuse a change that did not touch it. Where more than ``MOST`` failed, the change is.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

import pytest

from tests.paths import ROOT

MOST: Final = 10


def main(arguments: list[str]) -> int:
    command = [sys.executable, "-m", "pytest"]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        code = subprocess.run([*command, "--cache-clear", f"--junitxml={report}", *arguments], cwd=ROOT).returncode
        if code != pytest.ExitCode.TESTS_FAILED:
            return code
        failures = failures_in(report)
    failed = list(json.loads((ROOT / ".pytest_cache/v/cache/lastfailed").read_text()))
    if failures > MOST:
        print(f"\n{failures} failures, more than {MOST}: none is run once more")
        return code
    print(f"\n{failures} failures; once more, alone:", *failed, sep="\n  ", flush=True)
    marked = arguments[arguments.index("-m") :][:2] if "-m" in arguments else []  # else pytest leaves long ones out
    code = subprocess.run([*command, "-v", *marked, *failed], cwd=ROOT).returncode
    if code == pytest.ExitCode.OK:
        print("\nfailed beside others and passed alone, which is a defect of theirs, or a race:", *failed, sep="\n  ")
    return code


def failures_in(report: Path) -> int:
    """How many tests failed, in a JUnit report. What a fixture says to all tests of a file counts once."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = sum(case.find("failure") is not None for case in cases)
    errors = {(case.get("classname"), error.get("message")) for case in cases for error in case.iter("error")}
    return failed + len(errors)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
