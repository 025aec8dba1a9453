"""What is cheap of a cycle: it scores a real lake in a real process. The whole turn is in tests/loop."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from deploy import cli
from deploy.commands.loop import print_result
from deploy.config import root
from deploy.config.root import ConfigError, Settings, child_environment
from deploy.loop import records
from deploy.loop.cycle import CycleBusy, run_cycle
from deploy.loop.preflight import check
from deploy.loop.records import CycleRecord
from deploy.supervise.children import millrace
from serve.policies.store import PolicyStore
from tests.paths import ROOT
from train.context import JobResult


def changed(settings: Settings, *options: tuple[str, str]) -> Settings:
    return root.load(settings.snapshot(), options, {})


def test_an_empty_lake_is_nothing_to_learn_from_and_the_cycle_is_skipped(
    home_with_policy: Settings, nothing_left: Callable[[], list[str]]
) -> None:
    printed: list[str] = []
    record = run_cycle(home_with_policy, say=printed.append)
    assert (record.number, record.status, record.incumbent, record.candidate) == (1, "skipped", 1, None)
    assert record.reason == "0 new rewards since the last training, cycle.min_new_rewards is 1"
    assert [(stage.name, stage.ok) for stage in record.stages] == [("score", True)]
    assert record.seconds["score"] > 0
    assert any(line.startswith("scored 0 responses") for line in printed)  # the stage's own words come through
    assert records.load_all(home_with_policy) == [record]
    offline = run_cycle(changed(home_with_policy, ("train.algorithm.name", "dpo")), say=printed.append)
    assert (offline.number, offline.status) == (2, "skipped")
    assert offline.reason == "0 new feedback since the last training, cycle.min_new_rewards is 1"


@pytest.mark.parametrize(
    ("came", "code", "printed"),
    [
        ({"candidate": 5, "reason": None}, 0, "r: policy 5, from 4, 3 steps, 9 s"),
        (
            {"reward_model": 2, "reason": "reward model 2: the first one"},
            0,
            "r: reward model 2: the first one (from policy 4",
        ),
        ({"reason": "2 usable prompts"}, 3, "r: no candidate: 2 usable prompts"),
        ({"reason": "step 3: loss is nan", "stopped": True}, 1, "error: r was stopped: step 3: loss is nan"),
    ],
)
def test_what_came_of_training_is_its_exit_code(
    came: dict[str, Any], code: int, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = JobResult.model_validate(
        {"run": "r", "candidate": None, "parent": 4, "steps": 3, "metrics": {}, "seconds": 9, **came}
    )
    assert print_result(result) == code
    output = capsys.readouterr()
    assert (output.err if code == 1 else output.out).startswith(printed)


def test_a_training_that_finds_nothing_to_learn_from_is_skipped_and_counted(home_with_policy: Settings) -> None:
    """By a real training, on an empty lake; one cycle before it trained and published nothing."""
    trained = [records.Stage(name="train", started_at=datetime.now(UTC), ok=True)]
    home_with_policy.path("cycles").mkdir()
    for number, fields in ((1, {"candidate": 2, "stages": trained}), (2, {"stages": trained}), (3, {"stages": []})):
        before = CycleRecord(number=number, status="skipped", started_at=datetime.now(UTC), **fields)  # type: ignore[arg-type]
        records.write(home_with_policy, before)
    record = run_cycle(changed(home_with_policy, ("cycle.min_new_rewards", "0")))
    assert (record.number, record.status, record.candidate) == (4, "skipped", None)
    assert str(record.reason).startswith("0 usable prompts, fewer than train.data.min_prompts=")
    assert str(record.reason).endswith(" (2 cycles in a row have trained and published nothing)")
    assert [stage.ok for stage in record.stages] == [True, True]
    assert [r.number for r in records.without_candidate(home_with_policy)] == [2, 4]


def test_without_a_policy_the_cycle_fails_and_says_what_to_do(settings: Settings) -> None:
    record = run_cycle(settings)
    assert record.status == "failed"
    assert "millrace init" in str(record.reason)


def test_settings_that_can_not_work_are_refused_before_anything_starts(settings: Settings) -> None:
    broken = changed(settings, ("evaluation.suite", "nowhere.jsonl"), ("feedback.scoring.rules.exact.weight", "0"))
    with pytest.raises(ConfigError) as error:
        run_cycle(broken)
    assert "nowhere.jsonl" in str(error.value)
    assert "train.reward" in str(error.value)
    assert records.load_all(broken) == []


@pytest.mark.parametrize(
    "options",
    [
        [("evaluation.engine.dtype", "bfloat16")],
        [("serve.engine.dtype", "bfloat16"), ("evaluation.engine.dtype", "float32")],
    ],
)
def test_a_gate_that_would_compute_in_another_type_than_the_server_is_refused_before_anything_starts(
    home_with_policy: Settings, options: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    other = changed(home_with_policy, *options)
    judged, served = (dict(options).get(f"{part}.engine.dtype", "float32") for part in ("evaluation", "serve"))
    refusal = rf"evaluation\.engine\.dtype={judged}, and the server computes policy 1 in {served}"
    with pytest.raises(ConfigError, match=refusal):
        run_cycle(other)
    store = PolicyStore(other.path(other.serve.policies))
    store.publish(store.get(1).path, parent=1, lineage={}, metrics={})
    assert cli.run(["--config", str(other.snapshot()), "evaluate", "2"]) != 0
    assert re.search(refusal, capsys.readouterr().err)
    assert store.get(2).gate is None
    check(changed(home_with_policy, ("serve.engine.dtype", "bfloat16")))


def test_a_reward_function_that_does_not_exist_is_refused_before_anything_starts(settings: Settings) -> None:
    with pytest.raises(ConfigError, match="no_such_module"):
        run_cycle(changed(settings, ("feedback.scoring.rules.mine.function", "no_such_module:f")))


def test_a_cycle_that_would_train_a_reward_model_is_refused_with_what_would_do(settings: Settings) -> None:
    with pytest.raises(ConfigError, match=r"train\.algorithm\.name=reward_model .*cycle\.recipe to rlhf"):
        run_cycle(changed(settings, ("train.algorithm.name", "reward_model")))


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        (
            "train.algorithm.name",
            "no_such_module:Mine",
            "train.algorithm.name='no_such_module:Mine': the module can't be",
        ),
        (
            "train.dataflow",
            "train.objectives.losses:Mine",
            "train.dataflow='train.objectives.losses:Mine': the module train.objectives.losses has no",
        ),
        (
            "train.reward_weights",
            "{exakt: 2}",
            "train.reward_weights.exakt: feedback.scoring has no such source for fresh responses",
        ),
    ],
)
def test_what_training_names_and_is_not_there_is_refused_before_anything_starts(
    settings: Settings, setting: str, value: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run_cycle(changed(settings, (setting, value)))


def test_responses_longer_than_the_serving_policys_context_are_refused_before_anything_starts(
    home_with_policy: Settings,
) -> None:
    long = changed(home_with_policy, ("train.rollout.max_tokens", "100000"))
    with pytest.raises(
        ConfigError, match=r"train\.rollout\.max_tokens=100000 leaves no room for a prompt in \d+ tokens"
    ):
        run_cycle(long)


def test_a_stage_that_takes_too_long_is_stopped_and_the_cycle_failed(
    home_with_policy: Settings, nothing_left: Callable[[], list[str]]
) -> None:
    record = run_cycle(changed(home_with_policy, ("cycle.score_timeout_s", "0.05")))
    assert record.status == "failed"
    assert "cycle.score_timeout_s=0.05" in str(record.reason)
    assert record.stages[0].ok is False
    assert nothing_left() == []


def test_a_stage_that_fails_is_named_with_its_last_words_and_its_log(home_with_policy: Settings) -> None:
    home_with_policy.path("file").touch()
    record = run_cycle(changed(home_with_policy, ("feedback.lake.uri", "file/lake")))
    assert record.status == "failed"
    assert "score ended with code 1: " in str(record.reason)
    assert "cycle-000001-score.log" in str(record.reason)


def test_a_cycle_that_died_is_closed_as_failed_by_the_next(home_with_policy: Settings) -> None:
    folder = home_with_policy.path("cycles")
    folder.mkdir()
    stage = records.Stage(name="train", started_at=datetime.now(UTC))
    dead = CycleRecord(number=4, started_at=datetime.now(UTC), stages=[stage])
    (folder / "000004.json").write_text(dead.model_dump_json())
    assert run_cycle(home_with_policy).number == 5
    closed = records.load_all(home_with_policy)[0]
    assert (closed.status, closed.reason) == ("failed", "its process died in train")


def test_a_training_that_did_not_come_to_a_verdict_is_gone_on_with_where_that_is_safe(
    home_with_policy: Settings, model: Path
) -> None:
    settings = home_with_policy
    run = settings.path("runs") / "cycle-000001"
    (run / "checkpoints" / "step-00000010").mkdir(parents=True)
    (run / "start.json").write_text(json.dumps({"config": settings.training().model_dump(mode="json"), "parent": 1}))
    settings.path("cycles").mkdir()
    store = settings.policy_store()
    store.publish(model, parent=1, lineage={}, metrics={})

    def killed(number: int, **columns: Any) -> None:
        how = {"ok": columns.pop("ok", False), "killed": columns.pop("killed", True)}
        stage = records.Stage(name="train", started_at=datetime.now(UTC), run="cycle-000001", **how)
        if stage.ok:
            stage.result = {"candidate": 2}
        fields = {"incumbent": 1, "run": "cycle-000001", "status": "failed", "rewards": 7, **columns}
        record = CycleRecord(number=number, started_at=datetime.now(UTC), stages=[stage], **fields)
        (settings.path("cycles") / f"{number:06d}.json").write_text(record.model_dump_json())

    def found(number: int, incumbent: int = 1, parent: int = 1, with_: Settings = settings) -> CycleRecord | None:
        return records.unfinished_training(with_, with_.cycle.stages, number, incumbent, parent)

    assert found(1) is None
    killed(1)
    last = found(2)
    assert last is not None
    assert (last.run, last.rewards, [stage.run for stage in last.stages]) == ("cycle-000001", 7, ["cycle-000001"])
    assert found(2, incumbent=3) is None, "another policy serves"
    assert found(2, parent=2) is None, "it started from another policy"
    assert found(2, with_=changed(settings, ("train.optimizer.learning_rate", "0.5"))) is None, "other settings"
    killed(2)
    assert found(3) is not None
    killed(3)
    assert found(4) is None, "three attempts"
    killed(1, killed=False)
    assert found(2) is None, "it failed by itself"
    killed(1, ok=True, killed=False)
    assert found(2) is not None, "it had trained, and was not judged"
    assert found(2, with_=changed(settings, ("train.steps", "21"))) is None, "it would be trained longer now"
    killed(1, ok=True, killed=False, verdict={"verdict": "refuse"})
    assert found(2) is None, "it was judged"
    killed(1, ok=True, killed=False)
    store.record_erasure(2, certainty="yes", why="w", retrain=True)
    assert found(2) is None, "an erasure has reached what it trained"
    killed(1)
    (run / "checkpoints" / "step-00000010").rmdir()
    assert found(2) is None, "no checkpoint"


def test_two_cycles_never_run_at_once(home_with_policy: Settings) -> None:
    folder = home_with_policy.path("cycles")
    folder.mkdir()
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(CycleBusy):
            run_cycle(home_with_policy)
    assert run_cycle(home_with_policy).status == "skipped"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_cycle_that_is_stopped_says_so_in_its_record_and_leaves_nothing(
    number: signal.Signals, home_with_policy: Settings, nothing_left: Callable[[], list[str]], tmp_path: Path
) -> None:
    process = _start_cycle(home_with_policy, tmp_path)
    process.send_signal(number)
    assert process.wait(30) == 128 + number
    (record,) = records.load_all(home_with_policy)
    assert (record.status, record.reason) == ("failed", f"stopped by {number.name}")
    assert record.finished_at is not None
    assert nothing_left() == []


def test_a_cycle_that_is_killed_leaves_no_process_and_the_next_one_runs(
    home_with_policy: Settings, nothing_left: Callable[[], list[str]], tmp_path: Path
) -> None:
    process = _start_cycle(home_with_policy, tmp_path)
    process.kill()
    process.wait(10)
    deadline = time.monotonic() + 10
    while nothing_left() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert nothing_left() == []
    assert run_cycle(home_with_policy).status == "skipped"
    assert [record.status for record in records.load_all(home_with_policy)] == ["failed", "skipped"]


def _start_cycle(settings: Settings, folder: Path) -> subprocess.Popen[bytes]:
    """`millrace cycle` as a process, in the middle of its first stage."""
    with (folder / "cycle.log").open("wb") as log:
        process = subprocess.Popen(
            millrace("--config", settings.snapshot(), "cycle"),
            stdout=log,
            stderr=log,
            env=child_environment({"PYTHONPATH": str(ROOT)}),
        )
    record = settings.path("cycles") / "000001.json"
    deadline = time.monotonic() + 20
    while not (record.exists() and json.loads(record.read_bytes())["stages"]):
        assert time.monotonic() < deadline
        assert process.poll() is None, (folder / "cycle.log").read_text()
        time.sleep(0.02)
    os.sched_yield()
    return process
