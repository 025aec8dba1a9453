"""`make loadtest` on the session's server: users of all kinds by locust, and the page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.paths import ROOT
from tests.serve.conftest import LiveServer

RUN = [sys.executable, "-m", "loadtests.capacity", "--users", "4", "--pace", "0.2", "--max-tokens", "4"]
SLOW = ["--p95", "60", "--first-token", "60"]
LONGEST_S = 240


def test_a_load_test_counts_what_the_server_recorded_and_names_what_fails(server: LiveServer, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, said = load_test(server, out, "--profile", "stream", "--seconds", "4", *SLOW)
    assert (code, said["passed"], said["failed"], said["problems"]) == (0, True, 0, [])
    assert said["holds_users"] == 4
    assert said["breaks_at_users"] is None
    assert said["first_token_p95_s"] <= said["p95_s"]
    assert said["limited_by"]
    entries = [json.loads(line) for line in (out / "account.jsonl").read_text().splitlines()]
    assert len(entries) == said["requests"] > 4
    ids = {entry["ids"][0].removeprefix("chatcmpl-") for entry in entries}
    assert len(server.rows("interactions", f"response_id IN {(*ids, '')}")) == len(ids) == len(entries)
    page = (out / "index.html").read_text()
    assert "Holds <b>4 users</b>" in page
    assert "http://" not in page.replace("http://www.w3.org/", "")

    code, said = load_test(
        server, tmp_path / "refused", "--profile", "generate", "--seconds", "2", "--max-tokens", "5000"
    )
    assert (code, said["passed"], said["holds_users"], said["breaks_at_users"]) == (1, False, 0, 4)
    assert said["errors"] == {"/generate: 422 max_tokens: #### is more than the #### allowed": said["requests"]}


def load_test(server: LiveServer, out: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Its exit code and last line."""
    command = [*RUN, *options, "--out", str(out)]
    environment = os.environ | {"URL": server.url}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=LONGEST_S, check=False)
    return done.returncode, json.loads(done.stdout.decode().splitlines()[-1])
