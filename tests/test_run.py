from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import LONGEST
from tests.paths import ROOT
from tests.run import failures_in

TESTS = """
import pytest

@pytest.fixture(scope="module")
def server():
    raise RuntimeError("it did not start")

@pytest.mark.parametrize("n", range(7))
def test_of_the_server(server, n):
    pass

@pytest.mark.parametrize("n", range(3))
def test_plain(n):
    assert n == 0
"""


def test_a_fixture_that_fails_counts_once_and_each_test_that_fails_does(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_others.py").write_text(TESTS)
    options = ["-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", f"--junitxml={tmp_path / 'report.xml'}"]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run([sys.executable, "-m", "pytest", *options], cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 1
    assert failures_in(tmp_path / "report.xml") == 2 * (1 + 2)


def test_the_files_that_begin_first_are_there() -> None:
    assert [name for name in LONGEST if not (ROOT / name).exists()] == []
