"""schemathesis asks a real server by its OpenAPI page: what the page allows is taken, what it does not is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtests.tiny_model import make_model_folder
from serve.policies.store import PolicyStore
from tests.paths import ROOT
from tests.serve.conftest import LiveServer, start_server, stop_server

pytestmark = pytest.mark.long

CONTEXT = 32_768  # more than any text that is generated here has tokens, which no schema can count
CASES = 15  # of each operation and kind, beside those that cover the schema's every corner
TIMEOUT_S = 400
SCHEMATHESIS = Path(sys.executable).with_name("schemathesis")


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server of a policy with a long context, and of short responses."""
    home = tmp_path_factory.mktemp("roomy")
    store = PolicyStore(home / "policies")
    folder = make_model_folder(home / "model", 1, context=CONTEXT)
    store.publish(folder, parent=None, lineage={"test": True}, metrics={})
    store.promote(1, expected=None, who="test", why="first")
    live = start_server(home, store, limits={"max_tokens": 8, "default_max_tokens": 4, "n": 3})
    yield live
    assert stop_server(live) == 0
    assert "Traceback" not in live.log.read_text()


def complaints(server: LiveServer, folder: Path, *options: str) -> str:
    """What schemathesis finds wrong, by all of its checks but those that are left out; empty if nothing is."""
    command = [str(SCHEMATHESIS), "--no-color", "run", f"{server.url}/openapi.json", *options]
    command += ["--mode", "all", "--phases", "coverage,fuzzing", "--max-examples", str(CASES), "--seed", "1"]
    command += ["--no-shrink", "--continue-on-failure"]
    root = ROOT
    environment = os.environ | {"SCHEMATHESIS_HOOKS": "tests.serve.schemathesis_hooks", "PYTHONPATH": str(root)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert "generated" in done.stdout, done.stdout + done.stderr
    return "" if done.returncode == 0 else done.stdout[-15_000:]


def test_what_the_page_allows_is_taken_and_all_else_is_refused(roomy: LiveServer, tmp_path: Path) -> None:
    found = complaints(roomy, tmp_path, "--exclude-path-regex", "^/v1/")
    assert not found, found


def test_below_v1_nothing_is_taken_that_the_page_does_not_allow(roomy: LiveServer, tmp_path: Path) -> None:
    # What vLLM takes of grammars, templates and token ids is less than a schema can say: the refusals name the field.
    found = complaints(roomy, tmp_path, "--include-path-regex", "^/v1/", "--exclude-checks", "positive_data_acceptance")
    assert not found, found
