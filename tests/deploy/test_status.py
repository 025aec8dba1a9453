"""`millrace status`: in an empty folder, beside a cycle, and where things are wrong. The server is test_up.py's."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from deploy import cli, status
from deploy.config import root
from deploy.config.root import Settings
from deploy.loop import records
from deploy.loop.records import CycleRecord, Stage
from deploy.loop.schedule import next_cycle
from feedback.files import is_locked, locked
from feedback.journal.writer import Journal
from tests.feedback.feedback_rows import interaction, put, said
from tests.paths import ROOT


def ended(settings: Settings, number: int, end: Any, **columns: Any) -> None:
    settings.path("cycles").mkdir(exist_ok=True)
    times = {"started_at": records.now(), "finished_at": records.now()}
    records.write(settings, CycleRecord(number=number, status=end, **times, **columns))


def trained(ok: bool | None = True) -> Stage:
    return Stage(name="train", started_at=records.now(), ok=ok)


def test_an_empty_folder_is_one_clear_line_and_stays_empty(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.run(["status"]) == 1
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.split("\n", 1)[0].endswith(f"no policy serves in {tmp_path / 'home'}")
    assert "millrace up NAME_OR_FOLDER" in printed.out
    assert cli.run(["status", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["policy"] is None
    assert list(tmp_path.iterdir()) == []


def test_a_home_in_which_nothing_runs_says_what_serves_and_is_not_wrong(
    home_with_policy: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["status", "--config", str(home_with_policy.snapshot())]
    assert cli.run([*line, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["policy"]["version"], found["policy"]["who"]) == (1, "tests")
    assert found["runs"] == {"serve": False, "up": False, "schedule": False, "cycle": False}
    assert (found["server"], found["cycle"], found["next_cycle"], found["problems"]) == (None, None, None, [])
    assert cli.run(line) == 0
    printed = capsys.readouterr().out
    assert "policy 1 since" in printed
    assert "init from" in printed
    assert "no schedule runs here" in printed


def test_a_server_that_is_not_where_the_settings_say_is_wrong(home_with_policy: Settings) -> None:
    folder = home_with_policy.path(home_with_policy.feedback.journal.folder)
    journal = Journal(folder, home_with_policy.feedback.journal, "replica-0")
    journal.open()
    try:
        asyncio.run(journal.append("feedback", said("f", "r", "thumb", value=1)))
        found = status.look(home_with_policy)
    finally:
        journal.close()
    assert found.runs["serve"]
    assert [problem.what.partition(", and")[0] for problem in found.problems] == ["`millrace serve` runs"]
    assert not status.look(home_with_policy).runs["serve"]


def test_it_counts_what_is_new_since_the_last_training(home_with_policy: Settings) -> None:
    lake = home_with_policy.lake()
    put(lake, "interactions", [interaction(f"r{i}") for i in range(3)])
    put(lake, "feedback", [said(f"f{i}", f"r{i}", "thumb", value=1) for i in range(3)])
    assert (status.look(home_with_policy).data or {})["new_feedback"] == 3
    ended(home_with_policy, 1, "refused", feedback=2, rewards=0, stages=[trained()], candidate=2)
    ended(home_with_policy, 2, "skipped", feedback=3, rewards=0, recipe="rlhf", reason="nothing new")
    found = status.look(home_with_policy)
    assert found.data == {"interactions": 3, "feedback": 3, "rewards": 0, "new_feedback": 1, "new_rewards": 0}
    assert [(cycle["number"], cycle["status"]) for cycle in found.cycles] == [(2, "skipped"), (1, "refused")]
    assert found.cycles[0]["reason"] == "nothing new"
    assert [(stage["name"], stage["work"]) for stage in found.cycles[1]["stages"]] == [("train", {})]
    assert found.problems == []


def test_the_cycle_that_runs_is_shown_with_its_stage_and_one_that_died_is_wrong(home_with_policy: Settings) -> None:
    settings = home_with_policy
    settings.path("cycles").mkdir()
    record = CycleRecord(number=7, started_at=records.now(), stages=[trained(ok=None)])
    records.write(settings, record)
    with locked(settings.path("cycles") / ".lock", 0.0):
        found = status.look(settings)
        assert found.problems == []
        assert found.cycle is not None
        assert (found.cycle["number"], found.cycle["stage"]) == (7, "train")
        assert any("cycle 7 since" in text and "train since" in text for _, text in status.lines(found))
    found = status.look(settings)
    assert found.cycle is None
    assert [problem.what for problem in found.problems] == ["cycle 7 died in train"]


def test_failed_cycles_idle_ones_and_broken_files_are_wrong_with_what_to_do(home_with_policy: Settings) -> None:
    settings = home_with_policy
    for number in (1, 2, 3):
        ended(settings, number, "skipped", reason="rewards do not differ", stages=[trained()])
    for number in (4, 5):
        ended(settings, number, "failed", reason="train ended with code 1: no memory")
    damaged = settings.path("journal") / "damaged"
    damaged.mkdir(parents=True)
    (damaged / "segment").write_bytes(b"x")
    found = status.look(settings)
    what = [problem.what for problem in found.problems]
    assert what[0] == "cycle 5 failed (2 in a row): train ended with code 1: no memory"
    assert what[1] == "the last 3 cycles that trained published nothing: rewards do not differ"
    assert what[2].startswith("1 damaged segments of the journal are in ")
    assert len(what) == 3
    assert all(problem.advice for problem in found.problems)
    (settings.path("policies") / "v000001" / "policy.json").write_text("not JSON")
    found = status.look(settings)
    assert "policy.json is not JSON" in found.problems[0].what
    assert [problem.what for problem in found.problems[1:]] == what  # and all else is read


def test_what_an_erasure_has_marked_is_wrong_and_a_reward_model_has_its_agreement(
    home_with_policy: Settings, model: Path
) -> None:
    store = home_with_policy.stores().reward_models
    agreement = {"value": 0.8, "low": 0.7, "high": 0.9, "judgements": 50}
    store.publish(model, parent=None, lineage={}, metrics={"agreement": agreement})
    store.promote(1, expected=None, who="test", why="test")
    found = status.look(home_with_policy)
    assert found.problems == []
    assert ("reward model", "agrees with 80% of 50") in [
        (t, text.split(": ")[-1][:21]) for t, text in status.lines(found)
    ]
    store.record_erasure(1, certainty="yes", why="w", retrain=True)
    home_with_policy.policy_store().record_erasure(1, certainty="yes", why="w", retrain=True)
    assert [problem.what.split(":")[0] for problem in status.look(home_with_policy).problems] == [
        "policy 1 serves, and an erasure has marked it for retraining",
        "an erasure has marked training's reward model 1 for retraining",
    ]


def test_an_up_whose_server_does_not_answer_is_wrong(home_with_policy: Settings) -> None:
    with locked(home_with_policy.path(".up.lock"), 0.0):
        (problem,) = status.look(home_with_policy).problems
    assert problem.what.startswith(f"`millrace up` runs, and no server answers at {home_with_policy.server_url}")
    assert "serve.log" in problem.advice


def test_the_next_cycle_is_due_after_the_last_one_of_this_scheduler_or_after_its_beginning(
    home_with_policy: Settings,
) -> None:
    settings = root.load(home_with_policy.snapshot(), [("schedule.interval_seconds", "600")], {})
    began = records.now()
    assert next_cycle(settings, began) == began + timedelta(seconds=600)
    soon = root.load(settings.snapshot(), [("schedule.first_after_seconds", "5")], {})
    assert next_cycle(soon, began) == began + timedelta(seconds=5)
    ended(soon, 1, "skipped")
    (last,) = records.load_all(soon)
    assert next_cycle(soon, began) == last.started_at + timedelta(seconds=600)
    assert next_cycle(settings, began + timedelta(days=1)) == began + timedelta(days=1)  # missed: at once


def test_looking_whether_a_lock_is_held_sees_shares_too_and_makes_no_file(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    assert not is_locked(lock)
    assert not lock.exists()
    with locked(lock, 0.0, shared=True), locked(lock, 0.0, shared=True):
        assert is_locked(lock)
    assert not is_locked(lock)


def test_it_imports_neither_torch_nor_vllm(home_with_policy: Settings) -> None:
    code = (
        "import sys; from deploy import cli; code = cli.run(sys.argv[1:]);"
        "loaded = {'torch', 'vllm', 'ray', 'transformers'} & sys.modules.keys();"
        "sys.exit(str(loaded) if loaded else code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "status", "--config", str(home_with_policy.snapshot())],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_segments_that_wait_for_long_are_wrong_while_a_server_is_there_to_seal_them(home_with_policy: Settings) -> None:
    journal = home_with_policy.path("journal")
    journal.mkdir()
    segment = journal / "old.arrows"
    segment.touch()
    os.utime(segment, (time.time() - 600, time.time() - 600))
    found = status.Status("home")
    status._journal(home_with_policy, found)
    assert found.problems == []
    found.server = {"url": home_with_policy.server_url}
    status._journal(home_with_policy, found)
    assert "1 segments wait to be sealed, the oldest for 600 s" in found.problems[0].what
