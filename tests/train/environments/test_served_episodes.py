"""Episodes of an evaluation end where those of training do, whatever an environment or a policy does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from train.config.environment import EnvironmentConfig
from train.environments import maker
from train.environments.environment import EpisodePrompt
from train.environments.served import NoRoom, ServedEpisode, Turn, play, play_one


def episode(turns: list[Turn | NoRoom], *, wrong: str = "", **settings: Any) -> tuple[ServedEpisode, list[int]]:
    """An episode whose policy takes these turns, and the most tokens that were asked for at each."""
    config = EnvironmentConfig.model_validate({"name": "players:Bad", "arguments": {"turns": 3}, **settings})
    asked: list[int] = []

    def ask(request: Mapping[str, Any]) -> Turn:
        turn = turns[len(asked)]
        asked.append(request["max_tokens"])
        if isinstance(turn, NoRoom):
            raise turn
        return turn

    return play_one(maker(config), EpisodePrompt("?", None, {"wrong": wrong}), config, ask, longest_turn=10), asked


def turn(text: str, tokens: int = 4, **message: Any) -> Turn:
    return Turn({"content": text, **message}, "stop", tokens)


def test_the_tokens_of_an_episode_are_bounded_as_in_training() -> None:
    found, asked = episode([turn("a", 4), turn("b", 8), turn("a", 1)], max_tokens=13)
    assert (found, asked) == (ServedEpisode(2.0, 3), [10, 9, 1])
    found, asked = episode([turn("a", 4), turn("b", 8)], max_tokens=12)
    assert (found, asked) == (ServedEpisode(1.0, 2, truncated=True), [10, 8])


def test_a_context_that_is_full_ends_an_episode_as_in_training() -> None:
    full = NoRoom("64 tokens leave no room")
    assert episode([turn("a"), full])[0] == ServedEpisode(1.0, 1, truncated=True)
    assert episode([full])[0] == ServedEpisode(None, 0, dropped="too_long", detail="64 tokens leave no room")


def test_arguments_of_a_call_that_nest_too_deeply_are_text() -> None:
    deep = [{"id": "1", "function": {"name": "look", "arguments": "[" * 10**6}}]
    found, _ = episode([turn("a", tool_calls=deep)], unknown_tool="step", max_turns=1)
    assert found == ServedEpisode(1.0, 1, truncated=True)


@pytest.mark.parametrize(
    ("wrong", "dropped"),
    [
        ("exits", "raised"),
        ("cancels", "raised"),
        ("no tools", "raised"),
        ("larger than any float", "reward_not_finite"),
    ],
)
def test_what_an_environment_does_wrong_drops_its_episode(wrong: str, dropped: str) -> None:
    assert episode([turn("a")], wrong=wrong)[0].dropped == dropped


def test_an_environment_that_holds_its_thread_is_given_up_in_an_evaluation_too() -> None:
    config = EnvironmentConfig.model_validate({"name": "players:Bad", "step_seconds": 0.1, "episodes_at_once": 1})
    prompts = [EpisodePrompt("?", None, {"wrong": wrong}) for wrong in ("blocks at once", "no messages")]
    body = {"max_tokens": 1}
    found = play(prompts, config, maker(config), url="http://127.0.0.1:9", headers={}, body=body, timeout_s=1)
    assert [of.dropped for of in found] == ["timeout", "nonsense"]
    assert "holds its thread" in found[0].detail
