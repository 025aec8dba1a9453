"""What is cheap of a cycle: it scores a real lake in a real process. The whole turn is in tests/loop."""

from __future__ import annotations

import fcntl
import json
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from deploy import cli, devices
from deploy.commands.loop import print_result
from deploy.config import root
from deploy.config.root import ConfigError, Settings, child_environment
from deploy.loop import recipes, records
from deploy.loop.cycle import CycleBusy, _Cycle, run_cycle
from deploy.loop.preflight import check
from deploy.loop.records import CycleRecord
from deploy.loop.recovery.killed_runs import passed_before, unfinished_training
from deploy.supervise.children import millrace
from evaluation.decisions.history import History
from evaluation.decisions.ledger import MOVES
from evaluation.suites.held_out import position
from evaluation.suites.suite import Suite
from feedback.config import ScoringConfig
from feedback.processes.signals import Stopped
from serve.gpus import Gpu
from serve.policies.store import PolicyStore
from tests.deploy.conftest import scoring_waits
from tests.evaluation.decisions.worlds import items, judged
from tests.feedback.feedback_rows import interaction, put, said
from tests.paths import ROOT
from train.context import JobResult
from train.data.rewards import Reward


def changed(settings: Settings, *options: tuple[str, str]) -> Settings:
    return root.load(settings.snapshot(), options, {})


def test_an_empty_lake_is_nothing_to_learn_from_and_the_cycle_is_skipped(
    home_with_policy: Settings, nothing_left: Callable[[], list[str]]
) -> None:
    printed: list[str] = []
    record = run_cycle(home_with_policy, say=printed.append)
    assert (record.number, record.status, record.incumbent, record.candidate) == (1, "skipped", 1, None)
    assert record.reason == "0 new rewards since the last cycle that trained, cycle.min_new_rewards is 1"
    assert [(stage.name, stage.ok) for stage in record.stages] == [("score", True)]
    assert record.seconds["score"] > 0
    assert any(line.startswith("scored 0 responses") for line in printed)  # the stage's own words come through
    assert records.load_all(home_with_policy) == [record]
    offline = run_cycle(changed(home_with_policy, ("train.algorithm.name", "dpo")), say=printed.append)
    assert (offline.number, offline.status) == (2, "skipped")
    assert offline.reason == "0 new feedback since the last cycle that trained, cycle.min_new_rewards is 1"


def test_a_cycle_that_is_stopped_after_it_has_ended_has_come_to_what_it_had(home_with_policy: Settings) -> None:
    def stop() -> None:
        raise Stopped(128 + signal.SIGTERM)

    home_with_policy.path(home_with_policy.cycle.folder).mkdir()
    cycle = _Cycle(home_with_policy, print)
    cycle._beside.callback(stop)  # as where it waits for what it scores ahead
    with pytest.raises(Stopped):
        cycle.run(None)
    [record] = records.load_all(home_with_policy)
    assert (record.status, record.reason) == ("skipped", cycle.record.reason)
    assert str(record.reason).startswith("0 new rewards")


@pytest.mark.parametrize(("device", "ahead"), [("auto", False), ("cpu", True)])
def test_nothing_is_scored_ahead_by_a_model_on_a_gpu_which_the_evaluation_beside_it_has(
    device: str, ahead: bool, home_with_policy: Settings, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (devices.VISIBLE, devices.SEEN):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(devices, "installed", lambda _: {"vllm": "1"})  # the build for GPUs
    monkeypatch.setattr(devices, "gpus", lambda: [Gpu(0, 0, 80 * 2**30, 0.0)])
    scores = {"feedback.scoring.model.name": str(model), "feedback.scoring.model.device": device}
    settings = changed(home_with_policy, *scores.items())
    settings.path(settings.cycle.folder).mkdir()
    with _Cycle(settings, print)._scoring_ahead():
        pass
    log = settings.path("logs") / "cycle-000001-score-ahead.log"
    assert log.exists() is ahead
    assert not ahead or "scored 0 responses" in log.read_text()


def test_too_little_feedback_on_the_policy_that_serves_is_not_trained_on(home_with_policy: Settings) -> None:
    settings = changed(
        home_with_policy,
        ("cycle.min_new_rewards", "0"),
        ("cycle.min_on_policy_feedback", "2"),
        ("train.data.min_prompts", "1000"),
    )
    lake = settings.lake()
    lake.create()
    of_another = interaction("of 7", policy_spans=[{"start": 0, "policy_version": 7}])
    put(lake, "interactions", [interaction("of 1"), of_another])
    put(lake, "feedback", [said(str(i), "of 7", "thumb", value=1.0) for i in range(5)])
    put(lake, "feedback", [said("a", "of 1", "thumb", value=1.0)])
    record = run_cycle(settings)
    assert (record.status, [stage.name for stage in record.stages]) == ("skipped", ["score"])
    assert record.reason == "1 of the 2 feedbacks on policy 1 that cycle.min_on_policy_feedback asks for"
    put(lake, "feedback", [said("b", "of 1", "thumb", value=1.0)])
    assert [stage.name for stage in run_cycle(settings).stages] == ["score", "train"]


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


@pytest.mark.long
def test_a_cycle_without_a_suite_draws_one_of_the_held_out_slice_as_soon_as_there_are_enough_prompts(
    home_with_policy: Settings, nothing_left: Callable[[], list[str]]
) -> None:
    """And then trains, which finds too few prompts beside those."""
    home_with_policy.path("suite.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"there is no file .*suite\.jsonl.*set evaluation\.holdout"):
        check(home_with_policy)
    settings = changed(
        home_with_policy,
        ("evaluation.holdout", "0.5"),
        ("evaluation.scorer", "repetition_penalty"),
        ("evaluation.suite_items", "70"),
        ("cycle.min_new_rewards", "0"),
        ("train.data.min_prompts", "1000"),
    )
    asked = [f"{a}{b}=" for a in "abcdefghijklmnopqrst" for b in "0123456789"]
    tokenizer = AutoTokenizer.from_pretrained(settings.policy_store().get(1).path)
    rows = [interaction(p, prompt=p, prompt_token_ids=tokenizer(p).input_ids) for p in asked]
    lake = settings.lake()
    lake.create()
    put(lake, "interactions", rows[:20])
    record = run_cycle(settings)
    assert (record.status, [stage.name for stage in record.stages]) == ("skipped", ["score", "suite"])
    assert re.match(r"there is no suite yet: \d+ conversations .*, and a suite needs 50$", str(record.reason))
    assert not settings.path("suite.jsonl").exists()

    put(lake, "interactions", rows[20:])
    record = run_cycle(settings)
    assert [(stage.name, stage.ok) for stage in record.stages] == [("score", True), ("suite", True), ("train", True)]
    items = Suite.load(settings.path("suite.jsonl")).items
    held_out = [prompt for prompt in asked if position(prompt) < 0.5]
    assert len(items) == 70
    assert {item.prompt for item in items} < set(held_out)
    left_out = f"0 too long, 70 of a held-out suite, {len(held_out) - 70} of the held-out"
    counted = f"{200 - len(held_out)} prompts (left out: {left_out}"
    assert counted in str(record.reason)
    drawn = settings.path("suite.jsonl").read_bytes()
    assert [stage.name for stage in run_cycle(settings).stages] == ["score", "train"]
    assert settings.path("suite.jsonl").read_bytes() == drawn
    larger = changed(settings, ("evaluation.suite_items", "200"))
    assert [stage.name for stage in run_cycle(larger).stages] == ["score", "suite", "train"]  # though too few are left
    assert settings.path("suite.jsonl").read_bytes() == drawn
    more = [interaction(p, prompt=p, prompt_token_ids=tokenizer(p).input_ids) for p in (f"{p}{p}" for p in asked)]
    put(lake, "interactions", more)
    assert [(stage.name, stage.ok) for stage in run_cycle(larger).stages][1] == ("suite", True)
    assert settings.path("suite.jsonl").read_bytes().startswith(drawn)
    assert len(Suite.load(settings.path("suite.jsonl")).items) > 105


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
    home_with_policy.policy_store().announce(1)
    assert run_cycle(home_with_policy).number == 5
    assert home_with_policy.policy_store().announced() is None
    closed = records.load_all(home_with_policy)[0]
    assert (closed.status, closed.reason) == ("failed", "its process died in train")


def begun(settings: Settings, name: str, config: dict[str, Any], **fields: Any) -> Path:
    """A run with a checkpoint that was started with this configuration."""
    run = settings.path("runs") / name
    (run / "checkpoints" / "step-00000010").mkdir(parents=True)
    suites = {str(path): Suite.load(path).sha256 for path in [settings.path("suite.jsonl")] if path.exists()}
    (run / "start.json").write_text(json.dumps({"config": config, "parent": 1, "suites": suites, **fields}))
    return run


def another_policy(store: PolicyStore, model: Path) -> None:
    """One with the same weights, and another file beside them: not the same candidate."""
    folder = Path(shutil.copytree(model, store.root.parent / f"model-{len(store.versions())}"))
    (folder / "generation_config.json").write_text(json.dumps({"number": len(store.versions())}))
    store.publish(folder, parent=1, lineage={}, metrics={})


def killed(settings: Settings, number: int, **columns: Any) -> None:
    """A cycle whose training was killed."""
    fields = {"incumbent": 1, "run": "cycle-000001", "status": "failed", "rewards": 7}
    how = {"ok": columns.pop("ok", False), "killed": columns.pop("killed", True), "result": columns.pop("result", None)}
    fields |= columns
    stage = records.Stage(name="train", started_at=datetime.now(UTC), run=str(fields["run"]), **how)
    settings.path("cycles").mkdir(exist_ok=True)
    records.write(settings, CycleRecord(number=number, started_at=datetime.now(UTC), stages=[stage], **fields))


def test_a_killed_training_is_gone_on_with_where_that_is_safe(settings: Settings) -> None:
    run = begun(settings, "cycle-000001", settings.training().model_dump(mode="json"))

    def goes_on(settings: Settings, *place: int) -> str | None:
        """The run, or else why not."""
        found, left = unfinished_training(settings, *place)
        assert found is None or (left, found.record.rewards) == ({}, 7)
        return found.stages[0].run if found else left.get("cycle-000001")

    assert goes_on(settings, 1, 1, 1) == "no cycle goes on with it"
    killed(settings, 1)
    assert goes_on(settings, 2, 1, 1) == "cycle-000001"
    assert goes_on(settings, 2, 3, 1) == "policy 3 serves, it was 1"
    assert goes_on(settings, 2, 1, 2) == "training starts from policy 2, it was 1"
    other = changed(settings, ("train.optimizer.learning_rate", "0.5"))
    assert str(goes_on(other, 2, 1, 1)).startswith("train.optimizer.learning_rate is 0.5, it was ")
    killed(settings, 2)
    assert goes_on(settings, 3, 1, 1) == "cycle-000001"
    killed(settings, 3)
    assert goes_on(settings, 4, 1, 1) == "it was killed 3 times"
    killed(settings, 1, killed=False)
    assert goes_on(settings, 2, 1, 1) == "it was not killed"
    killed(settings, 1)
    (run / "checkpoints" / "step-00000010").rmdir()
    assert goes_on(settings, 2, 1, 1) is None, "no checkpoint"


def test_a_killed_training_is_not_gone_on_with_once_the_reward_is_another(settings: Settings) -> None:
    scorer = Reward(settings.rollout_reward() or ScoringConfig(), 1800.0).scorer
    begun(settings, "cycle-000001", settings.training().model_dump(mode="json"), scorer=scorer)
    killed(settings, 1)
    assert unfinished_training(settings, 2, 1, 1)[0] is not None
    other = changed(settings, ("feedback.scoring.rules.exact.weight", "0.5"))
    found, left = unfinished_training(other, 2, 1, 1)
    assert found is None
    assert re.fullmatch(rf"the reward is exact@[0-9a-f]+, it was {scorer}", left["cycle-000001"])


def test_a_killed_training_of_the_recipe_offline_goes_on_by_its_own_algorithm(
    home_with_policy: Settings,
) -> None:
    settings = changed(home_with_policy, ("cycle.recipe", "offline"))
    settings.lake().create()
    config = changed(settings, ("train.algorithm.name", "kto")).training().model_dump(mode="json")
    run = begun(settings, "cycle-000001", config)
    killed(settings, 1)

    def algorithms(*of: Path) -> list[str]:
        return [stage.set["algorithm"]["name"] for stage in recipes.stages(settings, *of)]

    assert algorithms() == ["dpo"]  # by what feedback there is now: none
    assert algorithms(run) == ["kto"]
    assert unfinished_training(settings, 2, 1, 1)[0] is not None
    found, left = unfinished_training(changed(settings, ("train.seed", "9")), 2, 1, 1)
    assert (found, left) == (None, {"cycle-000001": "train.seed is 9, it was 0"})


def test_a_cycle_removes_the_checkpoints_of_runs_that_no_cycle_goes_on_with_and_says_so(
    home_with_policy: Settings,
) -> None:
    settings = changed(home_with_policy, ("cycle.min_new_rewards", "0"))
    others = [
        begun(settings, name, {}, lake_versions={}, id=name)
        for name in ("cycle-000001-reward-model", "cycle-000002", "cycles", "manual")
    ]
    killed(settings, 3, run="cycle-000002")
    said: list[str] = []
    run_cycle(settings, say=said.append)
    assert [any((run / "checkpoints").iterdir()) for run in others] == [False, False, True, True]
    assert all((run / "start.json").exists() for run in others)
    (changes,) = [line for line in said if "cycle-000002 can't go on" in line]
    assert changes.startswith("cycle 4: run cycle-000002 can't go on (train.algorithm")
    assert (
        "cycle 4: run cycle-000001-reward-model can't go on (no cycle goes on with it): its checkpoints are removed"
        in said
    )


@pytest.mark.long
def test_while_a_marked_policy_serves_what_the_gate_refuses_is_judged_against_its_own_parent_too(
    home_with_policy: Settings, model: Path
) -> None:
    """By a real training, from thumbs, and two real evaluations; the suite can't tell these policies apart."""
    options = {
        "cycle.recipe": "offline",
        "train.steps": "1",
        "train.launcher": "torchrun",
        "train.dtype": "float32",
        "train.data.prompts_per_step": "8",
        "evaluation.kl_samples": "0",
        "evaluation.engine.kv_cache_bytes": str(2**25),
        "evaluation.gate.max_items": "50",  # then it is refused
    }
    settings = changed(home_with_policy, *options.items())
    lake = settings.lake()
    lake.create()
    made = [
        interaction(f"r{i}", prompt=str(i), prompt_token_ids=[28 + i // 10, 28 + i % 10], response_token_ids=[5, 1])
        for i in range(60)
    ]
    put(lake, "interactions", made)
    put(lake, "feedback", [said(f"f{i}", f"r{i}", "thumb", value=i % 2) for i in range(60)])
    store = settings.policy_store()
    store.publish(model, parent=1, lineage={"lake_versions": lake.versions()}, metrics={})
    store.promote(2, expected=1, who="t", why="t")
    store.record_erasure(2, certainty="yes", why="w", retrain=True)
    said_lines: list[str] = []
    record = run_cycle(settings, say=said_lines.append)
    assert [(stage.name, stage.ok) for stage in record.stages] == [
        ("score", True),
        ("train", True),
        ("evaluate", True),
        ("evaluate-parent", True),
    ], said_lines
    assert (record.status, record.incumbent, record.candidate) == ("refused", 2, 3)
    assert str(record.reason).endswith("; policy 2 is marked for retraining, and serves on")
    candidate = store.get(3)
    assert (candidate.parent, record.verdict and record.verdict["incumbent"]) == (1, 2)
    assert (candidate.gate or {})["incumbent"] == 1
    pointer = store.serving()
    assert pointer is not None
    assert pointer.version == 2
    assert any("policy 2 is marked for retraining, and serves until another passes the gate" in x for x in said_lines)


def test_what_was_trained_and_not_judged_is_taken_over_where_that_is_safe(
    home_with_policy: Settings, model: Path
) -> None:
    settings = home_with_policy
    scorer = Reward(settings.rollout_reward() or ScoringConfig(), 1800.0).scorer
    run = begun(settings, "cycle-000001", settings.training().model_dump(mode="json"), scorer=scorer)
    shutil.rmtree(run / "checkpoints")  # it has published
    store = settings.policy_store()
    store.publish(model, parent=1, lineage={}, metrics={})
    trained = {"ok": True, "killed": False, "result": {"candidate": 2}}

    def found(with_: Settings = settings) -> list[records.Stage] | None:
        last, _ = unfinished_training(with_, 2, 1, 1)
        return None if last is None else last.stages

    def why(with_: Settings = settings) -> str | None:
        assert found(with_) is None
        return unfinished_training(with_, 2, 1, 1)[1].get("cycle-000001")

    killed(settings, 1, **trained)
    assert [stage.run for stage in found() or ()] == ["cycle-000001"]
    assert found(changed(settings, ("train.steps", "21"))) is None, "it would be trained longer now"
    killed(settings, 1, **trained, verdict={"verdict": "refuse"})
    assert found() is None, "it was judged"
    suite = settings.path("suite.jsonl")
    before = suite.read_text()
    suite.write_text(before + '{"id": "61", "prompt": "2+2=", "answer": "4"}\n')
    killed(settings, 1, **trained)
    assert why() == "suite.jsonl has changed, and its prompts may have been learned from"
    suite.write_text(before)
    other = changed(settings, ("feedback.scoring.rules.exact.weight", "0.5"))
    assert re.fullmatch(r"the reward is exact@[0-9a-f]+, it was exact@[0-9a-f]+", str(why(other)))
    killed(settings, 1, **trained)
    store.record_erasure(2, certainty="yes", why="w", retrain=True)
    assert found() is None, "an erasure has reached what it trained"
    shutil.rmtree(store.root / "v000002")
    assert found() is None, "it was removed"


def test_a_candidate_that_passed_in_a_cycle_that_was_killed_is_promoted_by_the_next_or_it_says_why_not(
    home_with_policy: Settings, model: Path
) -> None:
    settings = home_with_policy
    run = begun(settings, "cycle-000001", settings.training().model_dump(mode="json"))
    store, ledger = settings.policy_store(), settings.ledger()
    another_policy(store, model)
    passed = {"ok": True, "killed": False, "candidate": 2, "verdict": {"verdict": "pass"}, "result": {"candidate": 2}}
    killed(settings, 1, **passed)

    def why(number: int = 2, incumbent: int = 1) -> str | None:
        """Why it is not promoted; empty if it may be, None if there is none."""
        record, why = passed_before(settings, History.of(ledger.entries()), number, incumbent)
        assert record is None or record.candidate == 2
        return None if record is None else why

    assert why() is None, "the gate has said nothing of it"
    shas = store.get(2).sha256, store.get(1).sha256
    judged(ledger, 2, items(50, gain=0.0, name="a"), shas=shas)
    assert why() is None, "the gate is undecided"
    judged(ledger, 2, items(400, gain=0.5, differing=0.6, name="b"), shas=shas)
    assert why() == ""
    assert why(incumbent=3) == "it passed against policy 1, and policy 3 serves"
    suite = settings.path("suite.jsonl")
    before = suite.read_text()
    suite.write_text(before + '{"id": "61", "prompt": "2+2=", "answer": "4"}\n')
    assert why() == "suite.jsonl has changed, and its prompts may have been learned from"
    suite.write_text(before)
    killed(settings, 2, **passed, status="refused")
    assert why(3) is None, "the gate refused it in the end"
    killed(settings, 2, **passed)
    assert why(3) == "", "killed again, before it was promoted"
    killed(settings, 3, **passed)
    assert why(4) == "3 cycles have ended before it was"
    store.promote(2, expected=store.serving(), who="t", why="t")
    store.promote(1, expected=store.serving(), who="t", why="t")
    assert why() is None, "it has been promoted, and what serves was moved back"
    assert run.exists()


def test_a_cycle_takes_up_what_had_passed_when_one_was_killed_and_promotes_it(
    home_with_policy: Settings, model: Path, nothing_left: Callable[[], list[str]]
) -> None:
    options = {
        "evaluation.kl_samples": "0",
        "evaluation.max_tokens": "4",
        "evaluation.engine.kv_cache_bytes": str(2**25),
    }
    settings = changed(home_with_policy, *options.items())
    begun(settings, "cycle-000001", settings.training().model_dump(mode="json"))
    store = settings.policy_store()
    another_policy(store, model)
    shas = store.get(2).sha256, store.get(1).sha256
    judged(settings.ledger(), 2, items(400, gain=0.5, differing=0.6), shas=shas)
    killed(settings, 1, ok=True, killed=False, result={"candidate": 2}, candidate=2, verdict={"verdict": "pass"})
    said_lines: list[str] = []
    record = run_cycle(settings, say=said_lines.append)
    assert (record.status, record.candidate, record.run, record.rewards) == ("promoted", 2, "cycle-000001", 7), (
        said_lines
    )
    assert [stage.name for stage in record.stages] == ["score", "train", "evaluate", "promote"]
    assert any("policy 2 has passed the gate in cycle 1, which ended before it was promoted" in x for x in said_lines)
    entries = settings.ledger().entries()
    recorded = [(entry.kind, entry.body.get("version"), entry.who) for entry in entries if entry.kind in MOVES]
    assert recorded == [("promotion", 1, "tests"), ("promotion", 2, "cycle")]
    assert cli.run(["--config", str(settings.snapshot()), "decisions", "verify"]) == 0
    pointer = store.serving()
    assert pointer is not None
    assert (pointer.version, pointer.who, (pointer.verdict or {})["verdict"]) == (2, "cycle", "pass")
    assert run_cycle(settings).status == "skipped"
    assert nothing_left() == []


def test_a_suite_drawn_from_traffic_is_refused_where_the_scorer_needs_answers(home_with_policy: Settings) -> None:
    settings = changed(home_with_policy, ("evaluation.holdout", "0.2"), ("evaluation.scorer", "exact_match"))
    check(settings)
    settings.path(settings.evaluation.suite).unlink()
    with pytest.raises(ConfigError, match=r"exact_match needs each item's answer"):
        check(settings)


def test_what_rewards_a_stage_is_there_or_is_trained_before_it(home_with_policy: Settings, model: Path) -> None:
    settings = changed(home_with_policy, ("feedback.scoring.rules.exact.weight", "0"))
    sample, reward_model = "{stage: train, name: a}", "{stage: reward-model}"
    first = changed(settings, ("cycle.recipe", f"[{reward_model}, {sample}]"))
    later = changed(settings, ("cycle.recipe", f"[{sample}, {reward_model}, {{stage: train, name: b}}]"))
    check(first)
    with pytest.raises(
        ConfigError, match=r"^stage train-a: a reward model of people's .* there is none yet: put a stage"
    ):
        check(later)
    store = settings.stores().reward_models
    store.publish(model, parent=None, lineage={}, metrics={})
    store.promote(1, expected=None, who="t", why="t")
    check(later)
    store.record_erasure(1, certainty="yes", why="w", retrain=True)
    check(first)
    with pytest.raises(ConfigError, match=r"^stage train-a: .* an erasure has marked version 1 of it: put a stage"):
        check(later)
    with pytest.raises(ConfigError, match=r"^stage train-a: train\.reward is null, and feedback\.scoring has no rule"):
        check(changed(first, ("feedback.scoring.human.weight", "0")))  # what the stage before it trains does not reward


def test_what_evaluation_scores_by_is_looked_at_before_anything_starts(home_with_policy: Settings) -> None:
    by_model = changed(home_with_policy, ("evaluation.scorer", "reward_model"), ("evaluation.holdout", "0.1"))
    check(by_model)
    with pytest.raises(ConfigError, match=r"train\.reward_model\.items_per_step|train\.data\.prompts_per_step=1 "):
        check(changed(by_model, ("train.reward_model.items_per_step", "1"), ("train.ranks", "2")))
    fixed = ("feedback.scoring.model", f"{{name: {home_with_policy.home}, weight: 0}}")
    with pytest.raises(ConfigError, match=r"^evaluation\.scorer=reward_model: reward model .*the folder has no config"):
        check(changed(by_model, fixed))


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
    with scoring_waits(home_with_policy):
        process = _start_cycle(home_with_policy, tmp_path)
        process.send_signal(number)
        assert process.wait(120) == 128 + number
    (record,) = records.load_all(home_with_policy)
    assert (record.status, record.reason) == ("stopped", f"by {number.name}")
    assert record.finished_at is not None
    assert nothing_left() == []


def test_a_cycle_that_is_killed_leaves_no_process_and_the_next_one_runs(
    home_with_policy: Settings, nothing_left: Callable[[], list[str]], tmp_path: Path
) -> None:
    with scoring_waits(home_with_policy):
        process = _start_cycle(home_with_policy, tmp_path)
        process.kill()
        process.wait(120)
    deadline = time.monotonic() + 120
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
    deadline = time.monotonic() + 120
    while not (record.exists() and json.loads(record.read_bytes())["stages"]):
        assert time.monotonic() < deadline
        assert process.poll() is None, (folder / "cycle.log").read_text()
        time.sleep(0.02)
    return process


def test_of_a_recipe_of_stages_that_was_not_judged_only_the_last_policy_needs_its_weights(
    home_with_policy: Settings, model: Path
) -> None:
    recipe = "[{stage: train, name: a}, {stage: train, name: b}]"
    one = (("serve.retention.keep_last", "1"), ("serve.retention.served_days", "0"))
    settings = changed(home_with_policy, ("cycle.recipe", recipe), *one)
    store, stages = settings.policy_store(), []
    for parent, stage in enumerate(settings.cycle.stages, start=1):
        run, own = f"cycle-000001-{stage.label}", settings.of_stage(stage)
        scorer = Reward(own.rollout_reward() or ScoringConfig(), 1800.0).scorer
        config = own.training().model_dump(mode="json")
        shutil.rmtree(begun(settings, run, config, parent=parent, scorer=scorer) / "checkpoints")  # it has published
        lineage = {"lake_versions": {"interactions": 1}}
        version = store.publish(model, parent=parent, lineage=lineage, metrics={}).version
        how = {"name": stage.label, "run": run, "ok": True, "result": {"candidate": version}}
        stages.append(records.Stage(started_at=datetime.now(UTC), **how))
    settings.path("cycles").mkdir()
    last = {"incumbent": 1, "run": stages[-1].run, "candidate": 3, "status": "failed"}
    records.write(settings, CycleRecord(number=1, started_at=datetime.now(UTC), stages=stages, **last))

    def found() -> list[str]:
        going_on, _ = unfinished_training(settings, 2, 1, 1)
        return [] if going_on is None else [stage.name for stage in going_on.stages]

    assert found() == ["train-a", "train-b"]
    assert cli.run(["--config", str(settings.snapshot()), "policies", "prune"]) == 0
    assert [store.get(version).pruned is None for version in (1, 2, 3)] == [True, False, True]
    assert found() == ["train-a", "train-b"], "policy 2 is pruned, and no erasure has reached it"
    store.record_erasure(2, certainty="yes", why="w", retrain=True)
    assert found() == []
    (store.root / "v000002" / "erasures.json").unlink()
    assert store.prune(3, "w", dict) is None
    assert found() == [], "what is judged next has no weights"
