"""The commands that keep the lake in order, and their place in the schedule."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest

from deploy import cli, config, schedule
from deploy.config import Settings, child_environment
from deploy.processes import millrace
from feedback.config import JournalConfig
from feedback.events import FeedbackIn
from feedback.journal import Journal
from feedback.lake import Lake
from feedback.rows import to_batch
from feedback.schema import TABLES
from serve.policies import PolicyStore


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


@pytest.mark.parametrize("command", ["compact", "vacuum", "retain", "erase", "maintain"])
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


def test_dry_runs_remove_nothing(lake: Lake, run: Callable[..., tuple[int, str, str]]) -> None:
    put(lake, "interactions", interaction("old", created_at=datetime.now(UTC) - timedelta(days=9)), interaction("new"))
    code, out, _ = run("retain", "--dry-run", "--feedback.lake.retain_days", "2")
    assert (code, "would drop 1 dates" in out, "1 interactions" in out) == (0, True, True)
    assert "would remove 0 replaced files" in run("vacuum", "--dry-run")[1]
    assert ids(lake) == ["new", "old"]
    assert "dropped 1 dates" in run("retain", "--feedback.lake.retain_days", "2")[1]
    assert "no date is due" in run("retain", "--feedback.lake.retain_days", "2")[1]
    assert ids(lake) == ["new"]


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
    journal.append_sync("feedback", FeedbackIn(response_id="his", kind="thumb", value=1).to_row("default"))
    journal.close()

    file = tmp_path / "erased.json"
    code, out, err = run("erase", "--user", "zaphod", "--yes", "--json-out", str(file))
    assert code == 0, err
    assert "to be erased: 1 interactions, 1 feedback, 0 rewards" in out
    told = json.loads(file.read_text())
    assert told["rows"] == {"interactions": 1, "feedback": 1, "rewards": 0}
    policies = {policy["version"]: (policy["certainty"], policy["why"]) for policy in told["policies"]}
    assert policies == {
        trained: ("yes", "they were in interactions at version 2"),
        child: ("yes", f"it descends from policy {trained}"),
        sibling: ("yes", "they were in interactions at version 2"),
    }
    assert (ids(lake), ids(lake, "feedback")) == (["ann's", "bob's"], [])

    # The file that held both users is gone: whether bob's row was in it can't be read any more, and the time decides.
    code, out, _ = run("erase", "--user", "bob", "--yes", "--json-out", str(file))
    assert code == 0
    told = json.loads(file.read_text())
    assert {policy["version"]: policy["certainty"] for policy in told["policies"]} == dict.fromkeys(
        (trained, child, sibling), "possibly"
    )
    assert "interactions at version 2 can't be read, and it was made after them" in out


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
            env=child_environment({"PYTHONPATH": str(Path(schedule.__file__).parents[1])}),
        )


def until(condition: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, log.read_text()
        assert process.poll() is None, log.read_text()
        time.sleep(0.1)


def test_the_schedule_maintains_the_lake_again_and_again_one_at_a_time(
    settings: Settings, lake: Lake, tmp_path: Path, nothing_left: Callable[[], list[str]]
) -> None:
    for name in "ab":
        put(lake, "interactions", interaction(name))
    often = config.load(settings.snapshot(), [("schedule.maintenance_seconds", "0.2")], {})
    log = tmp_path / "schedule.log"
    process = start(often, log)
    until(lambda: log.read_text().count("interactions: 0 small files became 0") >= 1, process, log)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0, log.read_text()
    text = log.read_text()
    assert "interactions: 2 small files became 1" in text
    assert "a maintenance is due and one is running: they become one" in text
    assert nothing_left() == []
    assert ids(lake) == ["a", "b"]


def test_a_maintenance_that_fails_is_told_and_the_schedule_goes_on(
    settings: Settings, lake: Lake, tmp_path: Path, nothing_left: Callable[[], list[str]]
) -> None:
    (Path(lake.table_uri("feedback")) / "_delta_log" / f"{0:020d}.json").write_text("{}")
    often = config.load(settings.snapshot(), [("schedule.maintenance_seconds", "0.5")], {})
    log = tmp_path / "schedule.log"
    process = start(often, log)
    until(lambda: log.read_text().count("maintenance of the lake ended with code 1") >= 2, process, log)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0, log.read_text()
    assert "maintenance.log; it is tried again" in log.read_text()


def test_without_an_interval_there_is_no_maintenance(settings: Settings, tmp_path: Path) -> None:
    # Without a policy a cycle fails at once, which counts.
    never = config.load(
        settings.snapshot(),
        [
            ("schedule.maintenance_seconds", "null"),
            ("schedule.first_after_seconds", "0"),
            ("schedule.max_cycles", "1"),
        ],
        {},
    )
    log = tmp_path / "schedule.log"
    assert start(never, log).wait(60) == 0, log.read_text()
    assert not never.path("logs/maintenance.log").exists()
