"""`millrace train`, as far as it comes without a worker: what it would learn from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from deploy import cli
from deploy.commands.loop import _training_reward
from deploy.config import root
from deploy.config.root import Settings
from feedback.lake.tables import Lake
from tests.feedback.feedback_rows import interaction, put
from train.config.training import TrainConfig

PROMPTS = ["1+1=", "1+2=", "2+2="]
REWARD = ["--train.reward", "deploy.examples.demo.task:reward"]
OPTIONS = ["--train.launcher", "torchrun", *REWARD, "--train.rollout.max_tokens", "8"]


@pytest.fixture
def trainable(home_with_policy: Settings) -> Settings:
    """A home whose lake has some prompts, fewer than training wants, and that has no suite."""
    home_with_policy.path(home_with_policy.evaluation.suite).unlink()
    lake = home_with_policy.resolved().feedback.lake
    there = Lake(lake.uri, lake)
    there.create()
    put(there, "interactions", [interaction(p, prompt=p, prompt_token_ids=[i + 5]) for i, p in enumerate(PROMPTS)])
    return home_with_policy


def train(settings: Settings, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    out = settings.path("result.json")
    code = cli.run(["train", "--home", str(settings.home), "--json-out", str(out), *OPTIONS, *arguments])
    shown = capsys.readouterr()
    return code, json.loads(out.read_text()) if out.exists() else {}, shown.out + shown.err


def test_the_prompts_of_the_gates_suite_are_kept_out_of_training(
    trainable: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    code, result, printed = train(trainable, capsys, "--run", "before")
    assert (code, "3 usable prompts" in result["reason"]) == (3, True), printed
    assert "no prompts are kept out of training" in printed
    suite = trainable.path(trainable.evaluation.suite)
    suite.write_text("".join(json.dumps({"id": p, "prompt": p}) + "\n" for p in PROMPTS[:2]))
    code, result, printed = train(trainable, capsys, "--run", "after")
    assert code == 3, printed
    assert "1 usable prompts" in result["reason"]
    assert "2 of a held-out suite" in result["reason"]


def test_a_step_that_can_not_fit_is_refused_before_there_is_a_run_unless_a_setting_says_otherwise(
    trainable: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    greedy = ["--train.rollout.kv_cache_bytes", str(2**50)]
    code, _, printed = train(trainable, capsys, *greedy)
    assert code == 2
    assert printed.startswith("error: train does not fit into memory: actor update needs 1048576.0 GiB on each rank")
    assert "these settings would fit: train.rollout.kv_cache_bytes=" in printed
    assert printed.endswith("or start all the same with train.plan=warn\n")
    assert not trainable.path("runs").exists()
    code, result, printed = train(trainable, capsys, *greedy, "--train.plan", "warn")
    assert (code, "3 usable prompts" in result["reason"]) == (3, True), printed
    assert "warning: train does not fit into memory: actor update needs 1048576.0 GiB on each rank" in printed


def test_a_suite_that_is_no_suite_ends_a_run_by_its_line(
    trainable: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    trainable.path(trainable.evaluation.suite).write_text('{"id": "a"}\n')
    code, _, printed = train(trainable, capsys)
    assert code == 1
    assert "suite.jsonl, line 1: an item has exactly one of prompt and messages" in printed.replace("Value error, ", "")


def test_the_suite_is_among_those_that_a_run_excludes_once(tmp_path: Path) -> None:
    suite = tmp_path / "home" / "suite.jsonl"
    for suites in ([], [("train.data.exclude_suites", "[suite.jsonl, more.jsonl]")]):
        settings = root.load(None, [("home", "home"), *suites], {})
        suite.unlink(missing_ok=True)
        assert suite not in settings.training().data.exclude_suites or suites
        suite.parent.mkdir(exist_ok=True)
        suite.touch()
        assert settings.training().data.exclude_suites.count(suite) == 1


def test_the_suite_that_chooses_the_candidate_is_not_one_that_it_is_judged_by(tmp_path: Path) -> None:
    def training(*more: tuple[str, str]) -> Any:
        return root.load(
            None, [("home", str(tmp_path)), ("train.evaluate_suite", "chosen.jsonl"), *more], {}
        ).training()

    assert training(("train.keep", "best")).evaluate_suite == tmp_path / "chosen.jsonl"
    assert tmp_path / "chosen.jsonl" in training().data.exclude_suites
    assert training(("evaluation.suite", "chosen.jsonl")).keep == "last"
    (tmp_path / "gate.jsonl").write_text('{"id": "a", "prompt": "1+1="}\n')
    (tmp_path / "chosen.jsonl").write_text('{"id": "b", "prompt": "1+1="}\n{"id": "c", "prompt": "1+2="}\n')
    for gate in ("chosen.jsonl", "gate.jsonl"):  # under another name too
        with pytest.raises(root.ConfigError, match=r"chosen\.jsonl chooses the candidate .* Name another suite"):
            training(("train.keep", "best"), ("evaluation.suite", gate))
    (tmp_path / "gate.jsonl").write_text('{"id": "a", "prompt": "2+2="}\n')
    assert training(("train.keep", "best"), ("evaluation.suite", "gate.jsonl")).keep == "best"


def test_a_best_step_needs_held_out_prompts_and_those_need_something_that_samples() -> None:
    with pytest.raises(ValueError, match=r"train\.keep=best needs train\.evaluate_suite"):
        TrainConfig.model_validate({"keep": "best"})
    with pytest.raises(ValueError, match=r"train\.evaluate_suite=a\.jsonl is answered by what samples .*name=dpo"):
        TrainConfig.model_validate({"evaluate_suite": "a.jsonl", "algorithm": {"name": "dpo"}})


def test_an_item_that_is_too_long_to_answer_ends_a_run_by_its_line(
    trainable: Settings, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    suite = tmp_path / "chosen.jsonl"
    suite.write_text('{"id": "a", "prompt": "1+1="}\n' + json.dumps({"id": "b", "prompt": "1+" * 200}) + "\n")
    code, _, printed = train(trainable, capsys, "--train.evaluate_suite", str(suite))
    assert code == 1
    assert "chosen.jsonl, line 2: item b has 400 tokens, and a prompt from 1 to 120" in printed


def test_prompts_of_ones_own_need_no_traffic_and_a_broken_line_ends_a_run_by_its_number(
    home_with_policy: Settings, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    home_with_policy.path(home_with_policy.evaluation.suite).unlink()
    own = tmp_path / "own.jsonl"
    own.write_text('{"prompt": "1+1="}\n{"prompt": "1+1="}\n{"prompt": ""}\n')
    options = ["--train.data.prompts", json.dumps([{"path": str(own)}]), "--run", "own"]
    code, result, printed = train(home_with_policy, capsys, *options)
    assert code == 3, printed
    assert "1 usable prompts" in result["reason"]
    assert "1 prompts of own.jsonl (1 duplicates, 1 empty)" in result["reason"]
    own.write_text('{"prompt": "1+1="}\n{"question": "1+1="}\n')
    code, _, printed = train(home_with_policy, capsys, *options)
    assert (code, "own.jsonl, line 2 has no column 'prompt'; it has: question" in printed) == (1, True), printed
    own.unlink()
    code, _, printed = train(home_with_policy, capsys, *options)
    assert (code, f"there is no file or folder {own}" in printed) == (2, True), printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--held-out"], "--held-out is of a reward model: no policy learns from held-out prompts"),
        (["--held-out", "--reward-model"], "evaluation.holdout is 0: there are no held-out prompts"),
    ],
)
def test_no_policy_is_trained_on_held_out_prompts_and_no_reward_model_where_there_are_none(
    arguments: list[str], words: str, home_with_policy: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["train", *arguments, "--home", str(home_with_policy.home)]) == 2
    assert words in capsys.readouterr().err
    assert not home_with_policy.path("runs").exists()


def test_a_reward_that_can_not_be_loaded_is_the_reason_why_there_is_no_best_of_n_and_no_error_before() -> None:
    training_reward = _training_reward("no_such_module:reward", 5.0)
    with pytest.raises(RuntimeError, match="no_such_module"):  # which evaluation keeps as best_of_missing
        training_reward.rewards(pa.table({}))
