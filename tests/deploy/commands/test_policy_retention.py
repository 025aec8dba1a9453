"""``millrace policies``, ``reward-models``, ``runs``: listing, pinning and pruning from the command line."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
import time
from pathlib import Path

import pytest

from deploy.cli import run
from serve.policies.store import PolicyStore
from tests.serve.policies.test_store import publish
from train.run.retention import run_folders

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
    assert run(["policies", "prune", "--dry-run", *KEEP_ONE, "--evaluation.gate.guardrails.kl_v1", "0.5"]) == 0
    assert "policy 1: kept (evaluation.gate.guardrails.kl_v1 measures KL to it)" in capsys.readouterr().out
    tenants = ["--serve.engine.adapters.tenants", "{mill: 4}"]
    assert run(["policies", "prune", "--dry-run", *KEEP_ONE, *tenants]) == 0
    assert "policy 4: kept (serve.engine.adapters.tenants: it answers mill)" in capsys.readouterr().out
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


KEEP_ONE_MODEL = [
    *("--train.reward_model.retention.keep_last", "1"),
    *("--train.reward_model.retention.served_days", "0"),
]


@pytest.fixture
def models(store: PolicyStore, tmp_path: Path) -> PolicyStore:
    """Six reward models: 1, 2 and 4 rewarded in turn, 5 was found worse, 6 is to reward as soon as its run goes on.

    Run ``killed`` is rewarded by 1.
    """
    made = PolicyStore(tmp_path / "home" / "reward_models")
    for version in range(1, 7):
        agreement = {"value": 0.7, "low": 0.6, "high": 0.8, "judgements": 90}
        metrics = {"keep": version != 5, "agreement": agreement, "why": "w"}
        lineage = {"policy": 5, "lake_versions": {"interactions": 0}}
        made.publish(store.get(1).path, parent=None, lineage=lineage, metrics=metrics)
    for before, version in ((None, 1), (1, 2), (2, 4)):
        made.promote(version, expected=before, who="train", why="agrees")
    start = {"parent": 3, "lake_versions": {}, "reward": {"human": {"model": {"name": str(made.get(1).path)}}}}
    (tmp_path / "home" / "runs" / "killed" / "start.json").write_text(json.dumps(start))
    return made


def test_reward_models_are_listed_pinned_and_pruned_as_policies_are(
    models: PolicyStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["reward-models", "prune", "--dry-run"]) == 0
    assert "would remove the weights of reward models of train: none" in capsys.readouterr().out
    assert run(["reward-models", "pin", "3", "--why", "for the report"]) == 0
    assert run(["reward-models", "prune", *KEEP_ONE_MODEL]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[1:] == [
        "reward model 1 of train: kept (run killed is rewarded by it)",
        "reward model 2 of train: kept (it rewarded before what rewards now)",
        "reward model 3 of train: kept (pinned: for the report)",
        "reward model 4 of train: kept (it rewards)",
        "reward model 6 of train: kept (a candidate)",
        "removed the weights of reward models of train: 5 (0.0 MiB)",
        "removed the weights of reward models of evaluate: none (0.0 MiB)",
    ]
    assert run(["reward-models", "unpin", "3"]) == 0
    shutil.rmtree("home/runs/killed")
    assert run(["reward-models", "prune", *KEEP_ONE_MODEL, "--json-out", "result.json"]) == 0
    result = json.loads(Path("result.json").read_text())["train"]
    assert (result["removed"], sorted(result["kept"])) == ([1, 3], ["2", "4", "6"])
    for version in (2, 4, 6):
        models.verify(version)
    assert models.get(1).metrics["agreement"]["judgements"] == 90, "a manifest stays"
    capsys.readouterr()
    assert run(["reward-models"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "MiB" in line]
    assert [line[-6] for line in lines] == ["pruned", "MiB", "pruned", "MiB", "pruned", "MiB"]
    assert [line[0] for line in lines].index("*") == 3
    assert all(line[-5:] == ["70.0%", "[60.0%,", "80.0%]", "of", "90"] for line in lines)
    assert run(["reward-models", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [model["version"] for model in listed if model["serves"]] == [4]
    assert run(["reward-models", "pin", "3", "--why", "late"]) == 1
    assert run(["reward-models", "pin", "4", "--why", "w", "--of", "nobody"]) == 2
    assert "--of nobody: there is no such store; there are: train, evaluate" in capsys.readouterr().err
    assert run(["reward-models", "prune", "--train.reward_model.retention.keep_last", "0"]) == 2


def test_checkpoints_of_old_runs_go_and_their_records_stay(
    store: PolicyStore, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = Path("home/runs")
    for days, name in ((60, "old"), (50, "cycle-000001"), (40, "busy"), (3, "new")):
        (runs / name / "checkpoints" / "step-1").mkdir(parents=True)
        (runs / name / "checkpoints" / "step-1" / "part").write_bytes(b"x" * 2**20)
        (runs / name / "start.json").write_text('{"parent": 1, "lake_versions": {}}')
        (runs / name / "metrics.jsonl").write_text("{}")
        for file in (runs / name).rglob("*"):
            os.utime(file, (time.time() - days * 86400,) * 2)
    (runs / "done").mkdir()
    result = {"run": "done", "candidate": 2, "parent": 1, "steps": 3, "reason": None, "metrics": {}, "seconds": 9.0}
    (runs / "done" / "result.json").write_text(json.dumps(result))
    (runs / "done" / "job.json").write_text("{}")
    cycles = Path("home/cycles")
    cycles.mkdir()
    record = {"number": 1, "status": "failed", "run": "cycle-000001", "started_at": "2026-01-01T00:00:00Z"}
    (cycles / "000001.json").write_text(json.dumps(record))
    keep = ["--train.retention.keep_last", "1", "--train.retention.days", "7"]
    with (runs / "busy" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert run(["runs", "prune"]) == 0
        assert "removed the checkpoints of runs: none" in capsys.readouterr().out  # by default all are kept
        assert run(["runs", "prune", "--dry-run", *keep]) == 0
        assert "would remove the checkpoints of runs: old (1.0 MiB)" in capsys.readouterr().out
        assert (runs / "old" / "checkpoints" / "step-1").exists()
        assert run(["runs", "prune", *keep]) == 0
        assert capsys.readouterr().out.splitlines() == [
            "run busy: kept (it is at work)",
            "run cycle-000001: kept (a cycle may go on with it)",
            "run killed: kept (one of the last 1)",
            "run new: kept (it was at work in the last 7 days)",
            "removed the checkpoints of runs: old (1.0 MiB)",
        ]
        assert run(["runs"]) == 0
    listed = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()[1:]}
    assert sorted(path.name for path in (runs / "old").iterdir()) == [
        ".lock",
        "checkpoints",
        "metrics.jsonl",
        "start.json",
    ]
    assert not any((runs / "old" / "checkpoints").iterdir())
    for name, words in {"old": "ended", "busy": "at work", "new": "unfinished", "done": "policy 2"}.items():
        assert words in listed[name]
    assert run(["runs", "prune", *keep]) == 0
    assert "removed the checkpoints of runs: busy (1.0 MiB)" in capsys.readouterr().out
    assert run(["runs", "--json"]) == 0
    assert [one["run"] for one in json.loads(capsys.readouterr().out) if one["checkpoints"] == "1.0 MiB"] == [
        "cycle-000001",
        "new",
    ]


def test_runs_are_listed_while_one_of_them_removes_its_checkpoints(store: PolicyStore) -> None:
    step = Path("home/runs/killed/checkpoints/step-1")
    (step / "shards").mkdir()
    removing = True

    def remove(event: str, arguments: tuple[object, ...]) -> None:
        """What is looked into is there no more."""
        if removing and event == "os.scandir" and str(arguments[0]).endswith("shards"):
            step.joinpath("shards").rmdir()

    sys.addaudithook(remove)
    try:
        [found] = run_folders(Path("home/runs"))
    finally:
        removing = False
    assert (found.name, found.state) == ("killed", "unfinished")
    assert not step.joinpath("shards").exists()


def test_what_a_setting_names_by_its_folder_is_kept_whichever_way_it_is_named(
    models: PolicyStore, store: PolicyStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for version in (4, 5, 6):
        models.promote(version, expected=models.serving(), who="t", why="t")
    (tmp_path / "link").symlink_to(tmp_path / "home")
    stage = "{stage: train, set: {algorithm: {name: ppo, critic: {model: policies/v000001}}}}"
    named = [
        *("--feedback.scoring.human.model.name", "reward_models/v000002"),
        *("--feedback.scoring.model.name", str(tmp_path / "link" / "reward_models" / "v000003")),
        *("--train.algorithm.name", "ppo", "--train.algorithm.critic.model", "reward_models/../reward_models/v000004"),
    ]
    assert run(["reward-models", "prune", *KEEP_ONE_MODEL, *named, "--json-out", "result.json"]) == 0
    result = json.loads(Path("result.json").read_text())["train"]
    assert result["removed"] == []
    assert {version: result["kept"][version] for version in "1234"} == {
        "1": "run killed is rewarded by it",
        "2": "feedback.scoring.human.model.name names it",
        "3": "feedback.scoring.model.name names it",
        "4": "train.algorithm.critic.model names it",
    }
    assert run(["policies", "prune", *KEEP_ONE, "--cycle.recipe", f"[{stage}]"]) == 0
    said = capsys.readouterr().out
    assert "policy 1: kept (train.algorithm.critic.model names it)" in said
    assert "removed the weights of policies: 2, 4" in said


def test_what_a_run_that_may_go_on_was_started_with_is_kept_though_its_home_is_named_otherwise_now(
    models: PolicyStore, store: PolicyStore, tmp_path: Path
) -> None:
    start = tmp_path / "home" / "runs" / "killed" / "start.json"
    (tmp_path / "link").symlink_to(tmp_path / "home")
    started = json.loads(start.read_text().replace(str(tmp_path / "home"), str(tmp_path / "link")))
    critic = {"config": {"algorithm": {"critic": {"model": str(store.get(1).path)}}}}
    start.write_text(json.dumps(started | critic))
    assert run(["reward-models", "prune", *KEEP_ONE_MODEL, "--json-out", "result.json"]) == 0
    assert json.loads(Path("result.json").read_text())["train"]["kept"]["1"] == "run killed is rewarded by it"
    assert run(["policies", "prune", *KEEP_ONE, "--json-out", "result.json"]) == 0
    assert json.loads(Path("result.json").read_text())["kept"]["1"] == "run killed was started with it"
