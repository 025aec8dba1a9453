"""The loop, end to end: the demo with one cycle, its figures counted again from what it left."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import duckdb
import psutil
import pytest
from deltalake import DeltaTable

from serve.policies.store import PolicyStore


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loop") / "demo"
    command = [sys.executable, "-m", "deploy.cli", "demo", "--folder", str(folder)]
    command += ["--recipe", "rlvr", "--cycles", "1", "--users", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    return folder


@pytest.fixture(scope="module")
def summary(demo: Path) -> dict[str, Any]:
    return json.loads((demo / "summary.json").read_text())


@pytest.mark.timeout(2000)
def test_users_make_the_policy_better_and_a_ruined_candidate_is_refused(demo: Path, summary: dict[str, Any]) -> None:
    accuracy = {p["version"]: p["heldout_accuracy"] for p in summary["policies"]}
    assert summary["promoted"] == [1, 2]
    assert 0.3 <= accuracy[1] <= 0.65
    assert accuracy[2] >= accuracy[1] + 0.1
    assert summary["refused"] == [3]
    assert accuracy[3] < accuracy[2]
    store = PolicyStore(demo / "home" / "policies")
    pointer = store.serving()
    assert pointer is not None
    assert pointer.version == 2
    assert [store.verify(version).parent for version in store.versions()] == [None, 1, 2]


def test_servers_prepared_each_candidate_while_it_was_judged_and_the_next_cycles_rows_were_scored(demo: Path) -> None:
    logs, policies = demo / "home" / "logs", demo / "home" / "policies"
    served = (logs / "serve.log").read_text()
    assert all(f"candidate {version} is prepared" in served for version in (2, 3))
    assert not (policies / "candidate.json").exists()
    first, _ = sorted(logs.glob("cycle-*-score-ahead.log"))  # of the cycles that trained, whichever those were
    assert "scored " in first.read_text()


def test_the_candidate_of_each_cycle_was_judged_by_the_engine_that_had_sampled_for_it(demo: Path) -> None:
    found = [json.loads(file.read_text()) for file in sorted((demo / "home" / "evaluations").glob("*.json"))]
    engines = {each["candidate"]["version"]: each["engines"]["candidate"] for each in found}
    assert engines == {2: "resident", 3: "resident"}
    assert "anew" not in (demo / "home" / "logs" / "resident.log").read_text()


def test_what_users_were_acknowledged_is_in_the_lake_once_and_nothing_else(demo: Path, summary: dict[str, Any]) -> None:
    account = [json.loads(line) for line in (demo / "account.jsonl").read_text().splitlines()]
    assert len(account) == summary["requests"] > 100
    assert all(entry["ok"] for entry in account)
    for table, kind, key in (("interactions", "generate", "response_id"), ("feedback", "feedback", "feedback_id")):
        acknowledged = sorted(i for entry in account if entry["kind"] == kind for i in entry["ids"])
        kept = DeltaTable(str(demo / "home" / "lake" / table)).to_pyarrow_table(columns=[key])[key].to_pylist()
        assert sorted(kept) == acknowledged
        assert summary[f"{table}_acknowledged"] == summary[f"{table}_in_lake"] == len(kept)


def test_every_row_names_the_policy_that_the_answer_named(demo: Path) -> None:
    account = [json.loads(line) for line in (demo / "account.jsonl").read_text().splitlines()]
    named = {i: entry["policy_version"] for entry in account if entry["kind"] == "generate" for i in entry["ids"]}
    rows = duckdb.from_arrow(DeltaTable(str(demo / "home" / "lake" / "interactions")).to_pyarrow_table())
    last = rows.select("response_id, policy_spans[-1].policy_version").fetchall()
    assert dict(last) == named
    assert set(named.values()) == {1, 2}
    assert not rows.filter("len(logprobs) <> len(response_token_ids)").fetchall()


def test_the_report_names_every_policy_and_nothing_of_the_demo_runs_on(demo: Path) -> None:
    page = (demo / "report.html").read_text()
    assert all(f"v{version}" in page for version in (1, 2, 3))
    assert page.count("<svg") >= 4
    assert "n = 2: " in page
    left = [
        p.info["cmdline"]
        for p in psutil.process_iter(["cmdline"])
        if any(str(demo) in a for a in p.info["cmdline"] or ())
    ]
    assert not left
