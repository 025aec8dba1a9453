"""The commands that keep the lake in order, and their place in the schedule."""

from __future__ import annotations

import fcntl
import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from feedback_rows import append

from deploy import cli
from deploy.config import root
from deploy.config.root import Settings, child_environment
from deploy.loop.cycle import training_parent
from deploy.loop.schedule import Scheduler
from deploy.supervise.children import millrace
from feedback.config import JournalConfig
from feedback.events import FeedbackIn
from feedback.journal.codec import to_batch
from feedback.journal.writer import Journal
from feedback.lake import tables
from feedback.lake.erasure_registry import register
from feedback.lake.tables import Lake
from feedback.maintenance import erasure
from feedback.schema import TABLES
from serve.observability.audit import AuditLog
from serve.policies import records as policy_records
from serve.policies.store import Policy, PolicyStore
from tests.paths import ROOT


def interaction(response_id: str, **columns: object) -> dict[str, object]:
    now = datetime.now(UTC)
    return {
        "response_id": response_id,
        "request_id": "request",
        "tenant": "default",
        "endpoint": "generate",
        "replica": "replica-0",
        "created_at": now,
        "completed_at": now,
        "prompt_token_ids": [1],
        "response": "four",
        "response_token_ids": [4],
        "logprobs": [-0.5],
        "policy_spans": [],
        "sampling": {},
        "status": "complete",
        "timings": {},
        "metadata": {},
    } | columns


def put(lake: Lake, table: str, *rows: dict[str, object]) -> None:
    lake.append(table, pa.Table.from_batches([to_batch(list(rows), TABLES[table])]))


def ids(lake: Lake, table: str = "interactions") -> list[str]:
    with lake.connect() as connection:
        return sorted(row for [row] in connection.sql(f"SELECT response_id FROM {table}").fetchall())


@pytest.fixture
def lake(settings: Settings) -> Lake:
    resolved = settings.resolved().feedback.lake
    made = Lake(resolved.uri, resolved)
    made.create()
    return made


@pytest.fixture
def run(settings: Settings, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run_lake(*arguments: str) -> tuple[int, str, str]:
        code = cli.run(["--config", str(settings.snapshot()), "lake", *arguments])
        output = capsys.readouterr()
        return code, output.out, output.err

    return run_lake


@pytest.mark.parametrize("command", ["compact", "vacuum", "retain", "erase", "maintain", "upgrade"])
def test_every_command_has_help(command: str, run: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0
    assert len(out.splitlines()) > 4


def test_compact_says_what_it_merged(lake: Lake, run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    for name in "ab":
        put(lake, "interactions", interaction(name))
    file = tmp_path / "done.json"
    code, out, _ = run("compact", "--json-out", str(file))
    assert code == 0
    assert "interactions: 2 small files became 1 (2 rows" in out
    assert json.loads(file.read_text())["interactions"]["rows"] == 2
    assert "interactions: 0 small files became 0" in run("compact")[1]


def test_upgrade_says_what_it_does_and_other_commands_name_it(
    settings: Settings, run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "the server makes it when it starts" in run("upgrade")[1]
    with monkeypatch.context() as patch:
        patch.setattr(tables, "SCHEMA_VERSION", 0)
        settings.lake().create()
    code, _, err = run("stats")
    assert code == 1
    assert "made by an older Millrace" in err
    assert "`millrace lake upgrade`" in err
    assert run("upgrade", "--dry-run")[1].splitlines()[0] == "interactions: would be taken to schema version 1"
    code, out, _ = run("upgrade")
    assert code == 0
    assert out.splitlines() == [f"{table}: taken to schema version 1" for table in TABLES]
    [entry] = AuditLog(settings.path(settings.serve.audit)).entries()
    assert entry.action == "lake.upgrade"
    assert run("upgrade")[1] == "the lake has this Millrace's schema already\n"
    assert run("stats")[0] == 0


def test_upgrade_puts_aside_a_torn_commit_as_containers_run_it_before_the_server_which_would(
    settings: Settings, run: Callable[..., tuple[int, str, str]]
) -> None:
    lake = settings.lake()
    lake.create()
    torn = Path(lake.table_uri("interactions")) / "_delta_log" / f"{1:020}.json"
    torn.write_bytes(b'{"commitInfo":{"ti')
    assert run("upgrade", "--dry-run")[0] == 1  # which changes nothing
    assert torn.exists()
    assert run("upgrade")[0] == 0
    assert not torn.exists()
    assert run("stats")[0] == 0


def test_dry_runs_remove_nothing(lake: Lake, run: Callable[..., tuple[int, str, str]]) -> None:
    now = datetime.now(UTC)
    for name, days in (("old", 9), ("kept", 2), ("new", 0)):
        put(lake, "interactions", interaction(name, created_at=now - timedelta(days=days)))
    code, out, _ = run("retain", "--dry-run", "--feedback.lake.retain_days", "2")
    assert (code, "would drop 1 dates" in out, "1 interactions" in out) == (0, True, True)
    assert "would remove 0 replaced files" in run("vacuum", "--dry-run")[1]
    assert ids(lake) == ["kept", "new", "old"]
    assert "dropped 1 dates" in run("retain", "--feedback.lake.retain_days", "2")[1]
    assert "no date is due" in run("retain", "--feedback.lake.retain_days", "2")[1]
    assert ids(lake) == ["kept", "new"]


@pytest.mark.parametrize("command", ["retain", "maintain"])
def test_what_is_not_dropped_by_a_clock_that_is_far_ahead_is_dropped_when_the_operator_says_so(
    command: str, lake: Lake, run: Callable[..., tuple[int, str, str]]
) -> None:
    put(lake, "interactions", interaction("last", created_at=datetime.now(UTC) - timedelta(days=40)))
    code, _, err = run(command, "--feedback.lake.retain_days", "30")
    assert (code, ids(lake)) == (1, ["last"])
    assert "40 days back" in err
    assert "--feedback.lake.retain_gap_days null" in err
    code, out, _ = run(command, "--feedback.lake.retain_days", "30", "--feedback.lake.retain_gap_days", "null")
    assert (code, "dropped 1 dates" in out, ids(lake)) == (0, True, [])


def test_a_lake_that_is_not_there_is_named(run: Callable[..., tuple[int, str, str]], settings: Settings) -> None:
    code, _, err = run("compact")
    assert code == 1
    assert f"no lake at {settings.path('lake')}" in err


def test_erase_asks_a_terminal_and_refuses_without_one(
    lake: Lake, run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(lake, "interactions", interaction("a", user="zaphod"))
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    code, _, err = run("erase", "--user", "zaphod")
    assert (code, "give --yes" in err) == (2, True)
    for answer, left in (("n\n", ["a"]), ("y\n", [])):
        terminal = io.StringIO(answer)
        terminal.isatty = lambda: True  # type: ignore[method-assign]
        monkeypatch.setattr(sys, "stdin", terminal)
        run("erase", "--user", "zaphod")
        assert ids(lake) == left


@pytest.mark.parametrize("arguments", [[], ["--user", "a", "--response-id", "b"]])
def test_erase_needs_to_know_what(arguments: list[str], run: Callable[..., tuple[int, str, str]], lake: Lake) -> None:
    code, _, err = run("erase", "--yes", *arguments)
    assert code == 2
    assert "nothing to erase" in err or "by its id alone" in err


def test_erase_names_all_that_may_hold_prompts_of_a_suite_that_was_drawn_from_traffic(
    lake: Lake, home_with_policy: Settings, run: Callable[..., tuple[int, str, str]]
) -> None:
    put(lake, "interactions", interaction("his", user="zaphod"))
    code, out, err = run("erase", "--user", "zaphod", "--yes", "--evaluation.holdout", "0.1")
    assert code == 0, err
    (line,) = [line for line in out.splitlines() if "may hold prompts that were theirs" in line]
    for kept in (home_with_policy.evaluation.suite, home_with_policy.evaluation.folder):
        assert str(home_with_policy.path(kept)) in line
    assert "cache" in line
    assert "reports" in line


def test_erase_lists_the_policies_that_the_rows_went_into(
    lake: Lake,
    home_with_policy: Settings,
    model: Path,
    run: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
) -> None:
    resolved = home_with_policy.resolved()
    store = PolicyStore(Path(resolved.serve.policies))

    def publish(parent: int) -> int:
        return store.publish(model, parent=parent, lineage={"lake_versions": lake.versions()}, metrics={}).version

    put(lake, "interactions", interaction("ann's", user="ann"))
    before = publish(1)
    put(lake, "interactions", interaction("his", user="zaphod"), interaction("bob's", user="bob"))
    trained = publish(before)
    child = store.publish(model, parent=trained, lineage={}, metrics={}).version
    sibling = publish(1)
    journal = Journal(Path(resolved.feedback.journal.folder), JournalConfig(), "replica-0")
    journal.open()
    append(journal, "feedback", FeedbackIn(response_id="his", kind="thumb", value=1).to_row("default"))
    journal.close()

    file = tmp_path / "erased.json"
    code, out, err = run("erase", "--user", "zaphod", "--yes", "--json-out", str(file))
    assert code == 0, err
    assert "to be erased: 1 interactions, 1 feedback, 0 rewards" in out
    result = json.loads(file.read_text())
    assert result["rows"] == {"interactions": 1, "feedback": 1, "rewards": 0}
    policies = {policy["version"]: (policy["certainty"], policy["why"]) for policy in result["policies"]}
    assert policies == {
        trained: ("yes", "they were in interactions at version 2"),
        child: ("yes", f"it descends from policy {trained}"),
        sibling: ("yes", "they were in interactions at version 2"),
    }
    assert (ids(lake), ids(lake, "feedback")) == (["ann's", "bob's"], [])

    # The file that held both users is gone: whether bob's row was in it can't be read any more, and the time decides.
    code, out, _ = run("erase", "--user", "bob", "--yes", "--json-out", str(file))
    assert code == 0
    result = json.loads(file.read_text())
    assert {policy["version"]: policy["certainty"] for policy in result["policies"]} == dict.fromkeys(
        (trained, child, sibling), "possibly"
    )
    assert "interactions at version 2 can't be read, and it was trained after them" in out

    log = AuditLog(resolved.serve.audit)
    assert [(one.action, one.outcome, one.subject["by"]) for one in log.entries()] == [
        ("lake.erase", "done", ["user"])
    ] * 2
    assert log.entries()[0].result["rows"] == {"interactions": 1, "feedback": 1, "rewards": 0}
    assert not any(name in log.path.read_text() for name in ("zaphod", "bob"))


def test_maintain_makes_a_lake_and_does_all_of_it(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    file = tmp_path / "done.json"
    code, out, _ = run("maintain", "--json-out", str(file))
    assert code == 0
    assert out.splitlines()[0] == "no date is due to be dropped"
    assert set(json.loads(file.read_text())) == {"erased", "retained", "compacted", "vacuumed", "seconds"}


def start(settings: Settings, log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            millrace("--config", settings.snapshot(), "schedule"),
            stdout=output,
            stderr=output,
            env=child_environment({"PYTHONPATH": str(ROOT)}),
        )


def until(condition: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 180
    while not condition():
        assert time.monotonic() < deadline, log.read_text()
        assert process.poll() is None, log.read_text()
        time.sleep(0.1)


def test_the_schedule_maintains_the_lake_again_and_again_one_at_a_time(
    settings: Settings, lake: Lake, tmp_path: Path, nothing_left: Callable[[], list[str]]
) -> None:
    for name in "ab":
        put(lake, "interactions", interaction(name))
    often = root.load(settings.snapshot(), [("schedule.maintenance_seconds", "0.2")], {})
    log = tmp_path / "schedule.log"
    process = start(often, log)
    until(lambda: log.read_text().count("interactions: 0 small files became 0") >= 1, process, log)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 0, log.read_text()
    text = log.read_text()
    assert "interactions: 2 small files became 1" in text
    assert "a maintenance is due and one is running: they become one" in text
    assert nothing_left() == []
    assert ids(lake) == ["a", "b"]


def test_a_maintenance_that_fails_is_reported_and_the_schedule_goes_on(
    settings: Settings, lake: Lake, tmp_path: Path, nothing_left: Callable[[], list[str]]
) -> None:
    (Path(lake.table_uri("feedback")) / "_delta_log" / f"{0:020d}.json").write_text("{}")
    often = root.load(settings.snapshot(), [("schedule.maintenance_seconds", "0.5")], {})
    log = tmp_path / "schedule.log"
    process = start(often, log)
    until(lambda: log.read_text().count("maintenance of the lake ended with code 1") >= 2, process, log)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 0, log.read_text()
    assert "maintenance.log; the next run tries again" in log.read_text()


def test_the_schedules_maintenance_prunes_policies_reward_models_and_runs(
    home_with_policy: Settings, model: Path
) -> None:
    options = {
        "serve.retention": "{keep_last: 1, served_days: 0}",
        "train.reward_model.retention": "{keep_last: 1, served_days: 0}",
        "train.retention": "{keep_last: 1, days: 0}",
    }
    settings = root.load(home_with_policy.snapshot(), list(options.items()), {})
    stores = settings.stores()
    for number in (1, 2, 3):
        policy = stores.policies.publish(model, parent=1, lineage={}, metrics={})
        stores.policies.record_gate(policy.version, {"verdict": "fail"})
        for store in (stores.reward_models, stores.evaluation_reward_models):
            store.publish(model, parent=None, lineage={}, metrics={})
        checkpoint = settings.path("runs") / f"run-{number}" / "checkpoints" / "step-1"
        checkpoint.mkdir(parents=True)
        (settings.path("runs") / f"run-{number}" / "job.json").write_text("{}")
    Scheduler(settings)._maintenance()
    log = (settings.path("logs") / "maintenance.log").read_text()
    for line in (
        "removed the weights of policies: 2, 3 ",
        "removed the weights of reward models of train: 1, 2 ",
        "removed the weights of reward models of evaluate: 1, 2 ",
        "removed the checkpoints of runs: run-1, run-2 ",
    ):
        assert line in log


def test_without_an_interval_there_is_no_maintenance(settings: Settings, tmp_path: Path) -> None:
    # Without a policy a cycle fails at once, which counts.
    never = root.load(
        settings.snapshot(),
        [
            ("schedule.maintenance_seconds", "null"),
            ("schedule.first_after_seconds", "0"),
            ("schedule.max_cycles", "1"),
        ],
        {},
    )
    log = tmp_path / "schedule.log"
    assert start(never, log).wait(180) == 0, log.read_text()
    assert not never.path("logs/maintenance.log").exists()


# ------------------------------------------------------------------------ what was trained, or is, on erased rows


def a_run(settings: Settings, name: str, lake: Lake, *, checkpoint: bool = True) -> Path:
    """What a run that has read the lake as it is leaves on the disk."""
    folder = settings.path("runs") / name
    (folder / "checkpoints").mkdir(parents=True)
    start = {"lake_versions": lake.versions(), "config": {"algorithm": {"name": "grpo"}}}
    (folder / "start.json").write_text(json.dumps(start))
    (folder / ".lock").write_text("pid 7 on elsewhere\n")
    if checkpoint:
        (folder / "checkpoints" / "step-00000002").mkdir()
        (folder / "checkpoints" / "step-00000002" / "driver.json").write_text("what zaphod was answered")
    return folder


def a_reward_model(settings: Settings, model: Path, lineage: dict[str, object], policy: int = 1) -> Policy:
    store = settings.stores().reward_models
    return store.publish(model, parent=None, lineage={**lineage, "policy": policy}, metrics={})


def erasures_of(settings: Settings, model: Policy) -> list[dict[str, str]]:
    return list(settings.stores().reward_models.get(model.version).erasures)


def test_erase_lists_runs_at_work_killed_runs_and_reward_models_and_removes_what_killed_ones_kept(
    lake: Lake, home_with_policy: Settings, model: Path, run: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    before = a_run(home_with_policy, "before", lake)
    put(lake, "interactions", interaction("his", user="zaphod"))
    store = PolicyStore(Path(home_with_policy.resolved().serve.policies))
    trained = store.publish(model, parent=1, lineage={"lake_versions": lake.versions()}, metrics={}).version
    killed, working = (a_run(home_with_policy, name, lake) for name in ("killed", "working"))
    a_run(home_with_policy, "finished", lake, checkpoint=False)
    of_rows = a_reward_model(home_with_policy, model, {"lake_versions": lake.versions()})
    of_policy = a_reward_model(home_with_policy, model, {"lake_versions": {}}, policy=trained)
    a_reward_model(home_with_policy, model, {"lake_versions": {"interactions": 0}})
    judge = home_with_policy.stores().evaluation_reward_models
    judge.publish(model, parent=None, lineage={"lake_versions": lake.versions(), "policy": 1}, metrics={})

    file = tmp_path / "erased.json"
    with (working / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, out, err = run("erase", "--user", "zaphod", "--yes", "--json-out", str(file))
    assert code == 0, err
    result = json.loads(file.read_text())
    here = "they were in interactions at version 1"
    assert result["runs"] == [
        {"name": "killed", "holder": None, "certainty": "yes", "why": here},
        {"name": "working", "holder": "pid 7 on elsewhere", "certainty": "yes", "why": here},
    ]
    assert result["evaluation_reward_models"] == [{"version": 1, "certainty": "yes", "why": here}]
    assert len(judge.get(1).erasures) == 1
    assert result["reward_models"] == [
        {"version": of_rows.version, "certainty": "yes", "why": here},
        {"version": of_policy.version, "certainty": "yes", "why": f"it descends from policy {trained}"},
    ]
    assert "pid 7 on elsewhere is at work on it: it will publish nothing" in out
    assert "removed what killed runs had kept of rows that are gone: killed" in out
    assert list(killed.rglob("driver.json")) == []
    assert [len(list(folder.rglob("driver.json"))) for folder in (before, working)] == [1, 1]
    assert erasures_of(home_with_policy, of_rows)[0]["why"] == here
    assert "removed what killed runs had kept of rows that are gone: working" in run("maintain")[1]
    assert list(working.rglob("driver.json")) == []


def test_the_list_of_policies_shows_those_that_an_erasure_reaches(
    lake: Lake,
    home_with_policy: Settings,
    model: Path,
    run: Callable[..., tuple[int, str, str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    put(lake, "interactions", interaction("his", user="zaphod"))
    store = PolicyStore(Path(home_with_policy.resolved().serve.policies))
    store.publish(model, parent=1, lineage={"lake_versions": lake.versions()}, metrics={})
    store.publish(model, parent=1, lineage={"erased_rows": {"feedback": 2}}, metrics={})
    assert run("erase", "--user", "zaphod", "--yes")[0] == 0
    assert cli.run(["--config", str(home_with_policy.snapshot()), "policies"]) == 0
    out = capsys.readouterr().out
    assert "policy 1: rows" not in out
    assert "policy 2: rows that it was trained on (yes) were erased at 20" in out
    assert "policy 3: rows were erased while it was trained: {'feedback': 2}" in out
    cli.run(["--config", str(home_with_policy.snapshot()), "policies", "--json"])
    assert [len(policy["erasures"]) for policy in json.loads(capsys.readouterr().out)] == [0, 1, 0]
    store.verify(2)


def test_an_erasure_marks_for_retraining_on_request_and_the_next_cycle_starts_from_an_unmarked_ancestor(
    lake: Lake,
    home_with_policy: Settings,
    model: Path,
    run: Callable[..., tuple[int, str, str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    put(lake, "interactions", interaction("his", user="zaphod"))
    put(lake, "interactions", interaction("hers", user="trillian"))
    store = PolicyStore(Path(home_with_policy.resolved().serve.policies))
    seen = store.publish(model, parent=1, lineage={"lake_versions": lake.versions()}, metrics={}).version
    heir = store.publish(model, parent=seen, lineage={"lake_versions": {}}, metrics={}).version
    judge = a_reward_model(home_with_policy, model, {"lake_versions": lake.versions()})
    store.promote(heir, expected=1, who="t", why="t")
    said: list[str] = []

    assert run("erase", "--user", "trillian", "--yes")[0] == 0
    assert training_parent(store, heir, said.append) == heir
    assert run("erase", "--user", "zaphod", "--yes", "--mark-for-retraining")[0] == 0
    assert [store.get(version).marked for version in (1, seen, heir)] == [False, True, True]
    marks = [record.get("retrain") for record in erasures_of(home_with_policy, judge)]
    assert marks == [None, True]
    assert cli.run(["--config", str(home_with_policy.snapshot()), "policies"]) == 0
    out = capsys.readouterr().out
    assert out.count("; marked for retraining") == 2
    assert [line.split()[-2:] for line in out.splitlines() if " MiB " in line] == [["MiB", "-"], *[["marked", "-"]] * 2]
    assert "it is marked for retraining: cycles train from one that is not, until a candidate passes the gate" in out

    assert training_parent(store, heir, said.append) == 1
    assert said == [
        f"policy {heir} is marked for retraining, and serves until another passes the gate: training starts from "
        "policy 1"
    ]
    store.record_erasure(1, certainty="yes", why="w", retrain=True)
    assert training_parent(store, heir, said.append) == heir
    assert "training goes on from it" in said[-1]


def test_the_same_erasure_with_a_mark_marks_what_the_one_without_has_reached(
    lake: Lake, home_with_policy: Settings, model: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    for user in ("zaphod", "trillian"):
        put(lake, "interactions", interaction(user, user=user))
    store, seen = home_with_policy.policy_store(), []
    for versions in ({"interactions": 1}, lake.versions()):
        seen.append(store.publish(model, parent=1, lineage={"lake_versions": versions}, metrics={}).version)
    judge = a_reward_model(home_with_policy, model, {"lake_versions": lake.versions()})
    for user in ("trillian", "zaphod"):
        assert run("erase", "--user", user, "--yes")[0] == 0
    code, out, err = run("erase", "--user", "trillian", "--yes", "--mark-for-retraining")
    assert code == 0, err
    reached = f"policy {seen[1]}, reward model {judge.version}"
    assert f"marked for retraining, as an earlier erasure of the same reaches it: {reached}\n" in out
    assert [store.get(version).marked for version in (1, *seen)] == [False, False, True]
    assert [bool(one.get("retrain")) for one in store.get(seen[1]).erasures] == [True, False]
    assert "as an earlier" not in run("erase", "--user", "trillian", "--yes", "--mark-for-retraining")[1]


def test_what_is_published_while_an_erasure_runs_is_on_record_before_the_erasure_is_done(
    lake: Lake,
    home_with_policy: Settings,
    model: Path,
    run: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    put(lake, "interactions", interaction("his", user="zaphod"))
    store, versions = PolicyStore(Path(home_with_policy.resolved().serve.policies)), lake.versions()
    purge, late, judges = erasure._purge_all, [], []

    def publish_meanwhile(*arguments: Any) -> list[str]:
        late.append(store.publish(model, parent=1, lineage={"lake_versions": versions}, metrics={}).version)
        late.append(store.publish(model, parent=late[0], lineage={"lake_versions": {}}, metrics={}).version)
        store.publish(model, parent=1, lineage={"lake_versions": lake.versions()}, metrics={})
        judges.append(a_reward_model(home_with_policy, model, {"lake_versions": versions}))
        return purge(*arguments)

    monkeypatch.setattr(erasure, "_purge_all", publish_meanwhile)
    file = tmp_path / "erased.json"
    assert run("erase", "--user", "zaphod", "--yes", "--json-out", str(file))[0] == 0
    result = json.loads(file.read_text())
    assert [policy["version"] for policy in result["policies"]] == late
    assert [reached["version"] for reached in result["reward_models"]] == [judges[0].version]
    assert [bool(store.get(version).erasures) for version in store.versions()] == [False, True, True, False]
    assert len(erasures_of(home_with_policy, judges[0])) == 1


@pytest.mark.parametrize("killed_at", ["_drain", "_purge_all", "mark_done"])
def test_maintenance_puts_on_record_what_an_erasure_that_was_killed_had_reached_once(
    killed_at: str,
    lake: Lake,
    home_with_policy: Settings,
    model: Path,
    run: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put(lake, "interactions", interaction("his", user="zaphod"))
    store, versions = PolicyStore(Path(home_with_policy.resolved().serve.policies)), lake.versions()
    seen = store.publish(model, parent=1, lineage={"lake_versions": versions}, metrics={}).version
    judge, made = a_reward_model(home_with_policy, model, {"lake_versions": versions}), []

    def killed(*_: Any) -> None:
        made.append(store.publish(model, parent=1, lineage={"lake_versions": versions}, metrics={}).version)
        made.append(a_reward_model(home_with_policy, model, {"lake_versions": versions}))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(erasure, killed_at, killed)
        assert run("erase", "--user", "zaphod", "--yes")[0] != 0
        if killed_at == "mark_done":
            assert run("maintain")[0] != 0, "the maintenance is killed there as well"
    for _ in range(2):
        assert run("maintain")[0] == 0
        policies = [v for v in made if isinstance(v, int)]
        assert [len(store.get(version).erasures) for version in (1, seen, *policies)] == [0, 1, *(1 for _ in policies)]
        for one in (judge, *(v for v in made if not isinstance(v, int))):
            assert len(erasures_of(home_with_policy, one)) == 1
    assert store.get(seen).erasures[0]["certainty"] == "yes"


def test_what_an_erasure_had_looked_at_is_not_suspected_when_more_of_it_is_sealed_behind_it(
    lake: Lake, home_with_policy: Settings, model: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    store = PolicyStore(Path(home_with_policy.resolved().serve.policies))
    put(lake, "interactions", interaction("hers", user="trillian"))
    before = store.publish(model, parent=1, lineage={"lake_versions": lake.versions()}, metrics={}).version
    put(lake, "interactions", interaction("his", user="zaphod"))
    late = interaction("late", user="zaphod")
    assert run("compact")[0] == 0  # one file: that rows went from it says little of who has read them
    assert run("erase", "--user", "zaphod", "--yes")[0] == 0
    put(lake, "interactions", late)
    behind = store.publish(model, parent=1, lineage={"lake_versions": lake.versions()}, metrics={}).version
    assert run("maintain")[0] == 0
    assert ids(lake) == ["hers"]
    assert [bool(store.get(version).erasures) for version in (before, behind)] == [False, True]


def test_rows_go_though_a_record_of_them_can_not_be_written_and_maintenance_writes_it(
    lake: Lake,
    home_with_policy: Settings,
    model: Path,
    run: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put(lake, "interactions", interaction("his", user="zaphod"))
    judge = a_reward_model(home_with_policy, model, {"lake_versions": lake.versions()})

    def full(path: Path, *_: Any) -> None:
        raise OSError(28, "no space", str(path))

    with monkeypatch.context() as disk:
        disk.setattr(policy_records, "write_json", full)
        code, _, err = run("erase", "--user", "zaphod", "--yes")
        assert run("maintain")[0] != 0, "it is still to be put there"
    assert (code != 0, ids(lake)) == (True, [])
    assert f"could not be recorded with reward model {judge.version}" in err
    assert run("maintain")[0] == 0
    [record] = erasures_of(home_with_policy, judge)
    assert record["certainty"] == "possibly"


def test_maintenance_that_erases_behind_an_erasure_names_the_policies_that_may_have_read_the_rows(
    lake: Lake, home_with_policy: Settings, model: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    store = PolicyStore(Path(home_with_policy.resolved().serve.policies))
    before = store.publish(model, parent=1, lineage={"lake_versions": lake.versions()}, metrics={}).version
    put(lake, "interactions", interaction("his", user="zaphod"))
    reached = store.publish(model, parent=1, lineage={"lake_versions": lake.versions()}, metrics={}).version
    register(lake, "user", ["zaphod"], datetime.now(UTC), lake.versions())  # of an erasure that was killed
    code, out, _ = run("maintain")
    assert (code, ids(lake)) == (0, [])
    assert "1 interactions that may have been there when it was trained" in out
    assert [bool(store.get(version).erasures) for version in (before, reached)] == [False, True]
