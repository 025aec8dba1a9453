"""Settings of environments that can't work are refused, with what would do."""

from __future__ import annotations

from typing import Any

import pytest

from train.config.training import TrainConfig
from train.environments.environment import EpisodePrompt


def config(**settings: Any) -> TrainConfig:
    return TrainConfig.model_validate({"environment": "players:Counting", **settings})


def test_an_environment_may_be_its_name_alone() -> None:
    environment = config().environment
    assert environment is not None
    assert environment.name == environment.target == "players:Counting"
    maths = config(environment="maths").environment
    assert maths is not None
    assert maths.target == "train.environments.ready.maths:Maths"


def test_a_prompt_without_text_begins_no_episode() -> None:
    with pytest.raises(ValueError, match="the prompt came as token ids, and has no text"):
        EpisodePrompt(None, None, {"answer": "4"}).as_messages  # noqa: B018
    assert EpisodePrompt("", None).as_messages == [{"role": "user", "content": ""}]


def test_lengths_are_of_episodes() -> None:
    rollout = {"max_tokens": 100}
    assert config(rollout=rollout).longest_response == 800
    assert config(rollout=rollout, environment={"name": "maths", "max_turns": 1}).longest_response == 100
    assert config(rollout=rollout, environment={"name": "a:B", "max_tokens": 250}).longest_response == 250
    assert config(rollout=rollout, algorithm={"name": "dr_grpo"}).algorithm.max_tokens == 800
    assert config(rollout=rollout, algorithm={"name": "dapo"}).algorithm.overlong_buffer == 160


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"environment": "no environment"}, "is not an environment; use 'module:class', or one of maths"),
        ({"environment": None, "algorithm": {"credit": "turn"}}, "train.environment is unset"),
        ({"reward": "a:b"}, "rewards its episodes by itself; take out train.reward=a:b"),
        ({"reward_weights": {"model": 1.0}}, "take out train.reward_weights"),
        ({"algorithm": {"name": "dpo"}}, "this run samples nothing"),
        ({"ranks": 2, "rollout": {"tensor_parallel_size": 2}}, "tensor_parallel_size=2"),
        ({"algorithm": {"name": "online_dpo"}}, "set train.environment.rewritten_turns to drop"),
        ({"algorithm": {"name": "remax", "credit": "turn"}}, "remax does not read it"),
        ({"environment": {"name": "tools"}}, "needs train.environment.tool_parser"),
    ],
)
def test_what_can_not_work_is_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        config(**settings)
