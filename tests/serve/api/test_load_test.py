"""`make loadtest` on a real server: users of all kinds by locust, in all shapes, and the page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from feedback.events import TURN
from loadtests.capacity.__main__ import PROFILES, SHAPES
from tests.paths import ROOT
from tests.serve.conftest import LiveServer

RUN = [sys.executable, "-m", "loadtests.capacity", "--pace", "0.2", "--max-tokens", "4"]
SLOW = ["--p95", "60", "--first-token", "60"]
LONGEST_S = 240


@dataclass
class Found:
    """``said``: the last line; ``account``: of the users, one row a request."""

    code: int
    said: dict[str, Any]
    account: list[dict[str, Any]]
    page: str

    def ids(self, kind: str) -> set[str]:
        ids = (one for row in self.account if row["kind"] == kind for one in row["ids"])
        return {one.removeprefix("chatcmpl-") for one in ids}


@pytest.fixture
def short(tmp_path: Path) -> list[str]:
    """Prompts of which five turns fit into the context of the server's model."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": f"{n + 1}"}) + "\n" for n in range(9)))
    return ["--prompts", str(file)]


def load_test(server: LiveServer, out: Path, *options: str) -> Found:
    command = [*RUN, *options, "--out", str(out)]
    environment = os.environ | {"URL": server.url}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=LONGEST_S, check=False)
    account = [json.loads(line) for line in (out / "account.jsonl").read_text().splitlines()]
    said = json.loads(done.stdout.decode().splitlines()[-1])
    return Found(done.returncode, said, account, (out / "index.html").read_text())


def passed(server: LiveServer, out: Path, profile: str, shape: str, users: int, seconds: int, *more: str) -> Found:
    """What a run found in which nothing failed, having seen that the server recorded all that it acknowledged."""
    sizes = ["--users", str(users), "--seconds", str(seconds)]
    found = load_test(server, out, "--profile", profile, "--shape", shape, *sizes, *SLOW, *more)
    said = found.said
    assert (found.code, said["passed"], said["failed"], said["problems"], said["errors"]) == (0, True, 0, [], {}), said
    assert (said["profile"], said["shape"], said["most_users"]) == (profile, shape, users)
    assert (said["holds_users"], said["breaks_at_users"]) == (users, None)
    assert said["limited_by"]
    assert len(found.account) == said["requests"] > users
    times = Counter(row["response_id"] for row in server.rows("interactions"))
    assert {times[response_id] for response_id in found.ids("generate")} == {1}
    # Of feedback on a session there is a row for each response, whose id goes on behind the feedback's.
    recorded = {row["feedback_id"].partition(TURN)[0] for row in server.rows("feedback")}
    assert found.ids("feedback") <= recorded
    assert f"Holds <b>{users} users</b>" in found.page
    assert "http://" not in found.page.replace("http://www.w3.org/", "")
    return found


def starts(found: Found, users: int) -> list[float]:
    """When requests began that were sent while there were so many users, as shares of the time of all."""
    began = [row["at"] - row["ms"] / 1e3 for row in found.account]
    rows = zip(began, found.account, strict=True)
    return [(at - min(began)) / (max(began) - min(began)) for at, row in rows if row["users"] == users]


def test_a_load_test_counts_what_the_server_recorded_and_names_what_fails(server: LiveServer, tmp_path: Path) -> None:
    found = passed(server, tmp_path / "out", "stream", "steady", 4, 4)
    assert found.said["first_token_p95_s"] <= found.said["p95_s"]
    assert {row["route"] for row in found.account} == {"/v1/chat/completions (stream)"}

    sizes = ["--users", "4", "--seconds", "2", "--max-tokens", "5000"]
    refused = load_test(server, tmp_path / "refused", "--profile", "generate", *sizes)
    said = refused.said
    assert (refused.code, said["passed"], said["holds_users"], said["breaks_at_users"]) == (1, False, 0, 4)
    assert said["errors"] == {"/generate: 422 max_tokens: #### is more than the #### allowed": said["requests"]}


def test_a_ramp_of_users_who_judge_goes_through_all_numbers_of_them(server: LiveServer, tmp_path: Path) -> None:
    found = passed(server, tmp_path / "out", "feedback", "ramp", 4, 5)
    assert {row["users"] for row in found.account} == {1, 2, 3, 4}
    assert max(starts(found, 1)) < min(starts(found, 4))
    assert {row["route"] for row in found.account} == {"/generate", "/feedback"}


def test_a_spike_of_chats_has_all_users_only_in_the_middle(server: LiveServer, tmp_path: Path) -> None:
    found = passed(server, tmp_path / "out", "chat", "spike", 8, 5)
    assert {row["users"] for row in found.account} == {2, 8}
    few, many = starts(found, 2), starts(found, 8)
    assert min(few) < min(many) < max(many) < max(few)
    assert {row["route"] for row in found.account} == {"/v1/chat/completions"}


def test_a_soak_of_mixed_sessions_uses_both_apis_streamed_and_plain(
    server: LiveServer, tmp_path: Path, short: list[str]
) -> None:
    found = passed(server, tmp_path / "out", "mixed", "soak", 4, 6, *short)
    assert {row["users"] for row in found.account} == {4}
    apis = {f"{path}{how}" for path in ("/generate", "/v1/chat/completions") for how in ("", " (stream)")}
    assert {row["route"] for row in found.account} == {*apis, "/feedback"}
    rows = server.rows("interactions", f"response_id IN {(*found.ids('generate'), '')}")
    turns = [row["session_id"] for row in rows]
    assert None not in turns
    assert len(set(turns)) < len(turns)
    assert found.said["limits"]["errors"] == 0


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_goes_in_every_shape(
    server: LiveServer, tmp_path: Path, short: list[str], profile: str, shape: str
) -> None:
    found = passed(server, tmp_path / "out", profile, shape, 8, 10, *short)
    assert {"ramp": {1, 8}, "spike": {2, 8}}.get(shape, {8}) <= {row["users"] for row in found.account}


def test_a_file_of_prompts_that_is_not_there_is_refused_before_anything_starts(tmp_path: Path) -> None:
    command = [*RUN, "--prompts", str(tmp_path / "none"), "--out", str(tmp_path / "out")]
    refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LONGEST_S, check=False)
    assert refused.returncode == 2
    assert f"--prompts: there is no file {tmp_path / 'none'}" in refused.stderr
    assert not (tmp_path / "out").exists()
