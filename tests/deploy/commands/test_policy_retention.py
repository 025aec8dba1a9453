"""``millrace policies``: listing, pinning and pruning from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy.cli import run
from serve.policies.store import PolicyStore
from tests.serve.policies.test_store import publish

KEEP_ONE = ["--serve.retention.keep_last", "1", "--serve.retention.served_days", "0"]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PolicyStore:
    """Five policies in ``home``, of which 5 serves and 3 is the parent of a run that was killed."""
    monkeypatch.chdir(tmp_path)
    made = PolicyStore(tmp_path / "home" / "policies")
    for number in range(1, 6):
        made.record_gate(publish(made, float(number), parent=number - 1 or None), {"verdict": "fail"})
    made.promote(5, expected=None, who="t", why="t")
    run_folder = tmp_path / "home" / "runs" / "killed"
    (run_folder / "checkpoints" / "step-1").mkdir(parents=True)
    (run_folder / "start.json").write_text(json.dumps({"parent": 3, "lake_versions": {}}))
    return made


def test_pruning_says_what_goes_and_what_stays_and_why(store: PolicyStore, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["policies", "pin", "2", "--why", "for the report"]) == 0
    assert run(["policies", "prune"]) == 0
    assert "removed the weights of policies: none" in capsys.readouterr().out  # by default all are kept
    assert run(["policies", "prune", "--dry-run", *KEEP_ONE]) == 0
    said = capsys.readouterr().out
    for line in (
        "policy 2: kept (pinned: for the report)",
        "policy 3: kept (the parent of run killed)",
        "policy 5: kept (it serves)",
        "would remove the weights of policies: 1, 4",
    ):
        assert line in said
    assert store.get(1).pruned is None
    assert run(["policies", "prune", *KEEP_ONE, "--json-out", "result.json"]) == 0
    result = json.loads(Path("result.json").read_text())
    assert (result["removed"], sorted(result["kept"])) == ([1, 4], ["2", "3", "5"])
    capsys.readouterr()
    assert run(["policies"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if " MiB " in line]
    assert [word for line in lines for word in ("pruned", "pinned") if word in line] == ["pruned", "pinned", "pruned"]
    assert run(["policies", "--json"]) == 0
    listed = {policy["version"]: policy for policy in json.loads(capsys.readouterr().out)}
    assert [version for version, policy in listed.items() if policy["pruned"]] == [1, 4]
    assert listed[2]["pinned"]["why"] == "for the report"


@pytest.mark.parametrize(
    "command",
    [
        ["promote", "1", "--override", "--why", "it was good"],
        ["rollback", "--to", "1", "--override", "--why", "it was good"],
        ["policies", "pin", "1", "--why", "late"],
    ],
)
def test_what_would_use_a_pruned_policy_is_refused_in_one_line(
    store: PolicyStore, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    assert run(["policies", "prune", *KEEP_ONE]) == 0
    capsys.readouterr()
    assert run(command) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: policy 1: its weights were removed at ")
    assert run(["policies", "unpin", "1"]) == 0


def test_a_number_below_one_is_refused(store: PolicyStore, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["policies", "prune", "--serve.retention.keep_last", "0"]) == 2
    assert "serve.retention.keep_last" in capsys.readouterr().err
