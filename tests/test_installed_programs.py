"""What `make test` says of programs that tests run and that are missing."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.paths import ROOT

PROGRAMS = ("strace", "chromium", "prometheus", "promtool")
ALL = (
    "to be skipped: tests of power losses of the journal, the console in a browser, dashboards and alerts on a server "
    "under load, alert rules (missing; Debian: apt-get install strace chromium prometheus)"
)


def said(folder: Path, **environment: str) -> list[str]:
    """Its lines where only the programs in a folder are there; it must succeed."""
    variables = {"PATH": str(folder), **environment}
    done = subprocess.run(
        ["/bin/sh", ROOT / "tests" / "tools.sh"], env=variables, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.splitlines()


def program(folder: Path, name: str, does: str) -> None:
    found = shutil.which(does)
    assert found is not None
    (folder / name).symlink_to(found)


def test_where_all_are_there_it_says_nothing(tmp_path: Path) -> None:
    for name in PROGRAMS:
        program(tmp_path, name, "true")
    assert said(tmp_path) == []


def test_one_line_says_what_will_be_skipped_where_nothing_can_be_installed(tmp_path: Path) -> None:
    assert said(tmp_path) == [ALL]
    for name in ("strace", "prometheus"):
        program(tmp_path, name, "true")
    [line] = said(tmp_path, CHROMIUM="/opt/chromium")
    assert line == "to be skipped: tests of alert rules (missing; Debian: apt-get install prometheus)"


@pytest.mark.parametrize("user", ["true", "id"])  # whose id is no number, and the own
def test_an_installation_that_fails_fails_no_test(tmp_path: Path, user: str) -> None:
    program(tmp_path, "apt-get", "false")
    program(tmp_path, "id", user)
    assert said(tmp_path)[-1] == ALL
