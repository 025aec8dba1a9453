"""`millrace evaluate --environment`: episodes with a policy that serves."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from deploy import cli
from deploy.commands.gate import environment
from deploy.config.root import ConfigError, Settings
from deploy.examples.agent.seed import make_seed
from deploy.examples.agent.task import keys
from train.config.environment import EnvironmentConfig

TOOLS: dict[str, Any] = {
    "name": "tools",
    "arguments": {"tools": ["deploy.examples.agent.task:look"], "verifier": "deploy.examples.agent.task:verify"},
    "tool_parser": "pythonic",
    "unknown_tool": "step",
    "max_turns": 3,
}


@pytest.fixture
def played(settings: Settings) -> Settings:
    """A home whose policy has half learned to use a tool, and a suite of keys."""
    make_seed(settings.home / "seed", steps=120, batch=32)
    settings.policy_store().publish(settings.home / "seed", parent=None, lineage={}, metrics={})
    items = [{"id": key, "prompt": None, "messages": [{"role": "user", "content": f"{key}?"}]} for key in keys()[:24]]
    items.append({"id": "long", "prompt": None, "messages": [{"role": "user", "content": "a?" * 2000}]})
    (settings.home / "suite.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    rollout = settings.train.rollout.model_copy(update={"max_tokens": 18})
    config = EnvironmentConfig.model_validate(TOOLS)
    return settings.model_copy(
        update={"train": settings.train.model_copy(update={"environment": config, "rollout": rollout})}
    )


def test_episodes_are_played_with_a_server_of_the_policy_alone(
    played: Settings, capsys: pytest.CaptureFixture[str], nothing_left: Callable[[], list[str]]
) -> None:
    found = environment.run(played, "tools", None, endpoint=False)
    assert (found["policy"], found["episodes"], found["dropped"]) == (1, 25, {"too_long": 1})
    assert len(found["items"]) == 25
    assert "maximum context length is 64 tokens" in found["items"][-1]["detail"]
    assert found["turns"] > 1, "no turn called the tool"
    assert found["reward"] == sum(item["reward"] for item in found["items"][:24]) / 24
    assert f"tools with policy 1: reward {found['reward']:.3f} in 25 episodes" in capsys.readouterr().out
    again = environment.run(played, "tools", 1, endpoint=False)
    assert again == found, "greedy episodes are the same"
    assert nothing_left() == []


def test_an_environment_without_settings_of_its_own_has_the_usual_ones(settings: Settings) -> None:
    assert environment.config_of(settings, "maths") == EnvironmentConfig(name="maths")


def test_an_environment_that_can_not_be_made_is_refused(settings: Settings) -> None:
    with pytest.raises(ConfigError, match="its constructor raised TypeError"):
        environment.run(settings, "tools", None, endpoint=False)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--environment", "maths", "--incumbent", "1"], "leave --incumbent out"),
        (["--environment", "maths", "--tasks", "a"], "--tasks is of --harness"),
        (["--environment", "maths", "--harness", "lm-eval", "--tasks", "a"], "--environment is not of --harness"),
    ],
)
def test_options_of_others_are_refused(
    options: list[str], says: str, settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["evaluate", "--home", str(settings.home), *options]) == 2
    assert says in capsys.readouterr().err
