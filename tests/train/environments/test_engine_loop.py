"""Many episodes at once on a real engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import players
import pytest
from vllm.tool_parsers import ToolParser, ToolParserManager

from deploy.examples.agent.seed import make_seed
from deploy.examples.agent.task import keys
from evaluation.config import EngineConfig
from evaluation.engine import OfflineEngine
from serve.generation.tokenizer import Text
from serve.vllm.boot import sampling_params
from train.config.environment import EnvironmentConfig
from train.environments import maker
from train.environments.engine_loop import Player, Start
from train.environments.environment import EpisodePrompt
from train.environments.episode import Episode
from train.environments.episode_loop import Limits
from train.rollouts.request import Request
from train.rollouts.responses import until_ended
from train.workers.rollout import to_sample, turn_sampling

LIMITS = Limits(turn=18, episode=54, context=64, vocabulary=30)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OfflineEngine]:
    folder = tmp_path_factory.mktemp("agent") / "seed"
    make_seed(folder, steps=120, batch=32)
    with OfflineEngine(folder, EngineConfig(dtype="float32", max_model_len=64, kv_cache_bytes=2**26)) as engine:
        engine._llm.llm_engine.set_weight_version("0")
        yield engine


@pytest.fixture(autouse=True)
def nothing_closed() -> None:
    players.CLOSED.clear()


def play(
    engine: OfflineEngine, name: str, metadata: list[dict[str, str]], *, limits: Limits = LIMITS, **settings: Any
) -> list[Episode]:
    """An episode for each prompt's metadata, which its number is added to."""
    return until_ended(player_of(engine, name, limits=limits, **settings), requests_for(metadata), {})


def requests_for(metadata: list[dict[str, str]]) -> list[Request]:
    starts = [
        Start(
            EpisodePrompt(f"{key}?", None, {"number": str(i), **of}, seed=1000 + i),
            partial(turn_sampling, {"temperature": 1.0}, 1000 + i),
        )
        for i, (key, of) in enumerate(zip(keys(), metadata, strict=False))
    ]
    return [Request(f"episode-{i}", start, None) for i, start in enumerate(starts)]


def player_of(engine: OfflineEngine, name: str, *, limits: Limits = LIMITS, **settings: Any) -> Player:
    config = EnvironmentConfig.model_validate({"name": name, **settings})
    llm = engine._llm
    text = Text(llm.get_tokenizer())
    read = lambda completion, context: to_sample(completion, context, text)  # noqa: E731
    return Player(llm.llm_engine, text, config, limits, maker(config), sampling_params, read, lambda of: of.prompt)


def test_an_episode_has_its_turns_and_their_rewards(engine: OfflineEngine) -> None:
    played = play(engine, "players:Counting", [{}] * 12)
    assert {episode.dropped for episode in played} == {""}
    whole = [episode for episode in played if not episode.truncated]
    assert whole, "the policy never ends a turn"
    for episode in whole:
        [sequence] = episode.sequences
        assert len(sequence.turn_ends) == len(episode.rewards) == 3
        assert sequence.sampled[-1]
        assert all(p == 0 for p, s in zip(sequence.log_probs, sequence.sampled, strict=True) if not s)
    assert sorted(players.CLOSED) == list(range(12))


def test_logprobs_are_those_of_the_sequence_that_is_learned_from(engine: OfflineEngine) -> None:
    played = play(engine, "players:Counting", [{}] * 12)
    sequences = [sequence for episode in played for sequence in episode.sequences]
    scored = engine.score([(s.prompt, s.token_ids) for s in sequences], temperature=1.0)
    for sequence, log_probs in zip(sequences, scored, strict=True):
        sampled = np.array(sequence.sampled)
        np.testing.assert_allclose(log_probs[sampled], np.array(sequence.log_probs)[sampled], atol=1e-4)


def test_the_same_seeds_give_the_same_episodes_however_long_environments_take(engine: OfflineEngine) -> None:
    first = play(engine, "players:Counting", [{}] * 16)
    assert play(engine, "players:Counting", [{}] * 16, arguments={"jitter": 0.05}) == first
    assert play(engine, "players:Counting", [{}] * 16, episodes_at_once=3) == first
    assert len({str(episode.sequences) for episode in first}) == 16


def test_an_episode_that_waits_holds_up_no_other(engine: OfflineEngine) -> None:
    players.LastOne.others = 15
    played = play(engine, "players:LastOne", [{}] * 16, step_seconds=60)
    assert players.CLOSED[-1] == 0
    assert {episode.dropped for episode in played} == {""}


WRONG = {
    "raises": ("raised", "step raised RuntimeError: as it was told"),
    "times out itself": ("raised", "step raised TimeoutError: its own"),
    "exits": ("raised", "step raised SystemExit: 0"),
    "cancels": ("raised", "step raised CancelledError"),
    "no tools": ("raised", "tools raised TypeError"),
    "large": ("reward_not_finite", "reward 1e+39"),
    "larger than any float": ("reward_not_finite", "reward of 1329 bits"),
    "hangs": ("timeout", "step took longer than train.environment.step_seconds"),
    "nan": ("reward_not_finite", "reward nan"),
    "infinite": ("reward_not_finite", "reward inf"),
    "text reward": ("nonsense", "reward '1', which is no number"),
    "no tuple": ("nonsense", "in place of (messages, reward, done)"),
    "no done": ("nonsense", "done=None"),
    "silent": ("nonsense", "no message, and the episode has not ended"),
    "speaks for the policy": ("nonsense", "message of the assistant"),
    "no role": ("nonsense", "no message with a role"),
    "no messages": ("nonsense", "reset gave a str in place of a list of messages"),
    "no reward": ("no_reward", "without a reward"),
    "breaks the template": ("template", "the chat template fails"),
    "long": ("too_long", "leave no room for a turn"),
}


def test_what_an_environment_does_wrong_drops_its_episode_and_no_other(engine: OfflineEngine) -> None:
    good = play(engine, "players:Bad", [{}] * len(WRONG) * 2)
    wrong = [of for name in WRONG for of in ({"wrong": name}, {})]
    played = play(engine, "players:Bad", wrong, step_seconds=3)
    assert played[1::2] == good[1::2]
    for name, before, episode in zip(WRONG, good[::2], played[::2], strict=True):
        reason, detail = WRONG[name]
        if name in ("breaks the template", "silent", "no role", "speaks for the policy") and before.truncated:
            continue  # its first turn was cut off, and nothing comes after it
        assert (episode.dropped, episode.sequences) == (reason, []), (name, episode)
        assert detail in episode.detail, (name, episode.detail)


def test_an_environment_that_holds_its_thread_is_given_up(engine: OfflineEngine) -> None:
    played = play(engine, "players:Bad", [{"wrong": "blocks"}, {}, {}], step_seconds=0.5)
    assert [episode.dropped for episode in played] == ["timeout", "", ""]
    assert "holds its thread" in played[0].detail


def test_what_an_episode_that_was_given_up_comes_to_later_is_not_taken_for_another(
    engine: OfflineEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.environments.calls._GRACE_S", 0.0)
    players.Late.may_go_on.clear()
    before = threading.enumerate()  # another test's environment holds its thread for good
    player = player_of(engine, "players:Late", step_seconds=0.5)
    [given_up] = until_ended(player, requests_for([{}]), {})
    assert given_up.dropped == "timeout"
    players.Late.may_go_on.set()
    for thread in threading.enumerate():
        if thread.name == "episode-episode-0" and thread not in before:
            thread.join(60)
            assert not thread.is_alive()
    [played] = until_ended(player, requests_for([{}]), {})  # of the next step, which has requests of the same names
    assert played.dropped == ""
    assert 99.0 not in played.rewards


def test_limits_of_turns_tokens_and_context_end_an_episode(engine: OfflineEngine) -> None:
    many = {"arguments": {"turns": 50}}
    for episode in play(engine, "players:Counting", [{}] * 8, max_turns=2, **many):
        assert episode.truncated
        assert len(episode.rewards) <= 2
    for episode in play(engine, "players:Counting", [{}] * 8, limits=replace(LIMITS, episode=20), **many):
        assert episode.truncated
        assert episode.sampled_tokens <= 20
    lengths = []
    for episode in play(
        engine, "players:Counting", [{}] * 8, limits=replace(LIMITS, episode=10**6), max_turns=50, **many
    ):
        assert episode.truncated
        [sequence] = episode.sequences
        lengths.append(len(sequence.prompt) + len(sequence.token_ids))
    assert 40 < max(lengths) <= 64


def test_a_limit_that_ends_an_episode_before_a_reward_gives_it_the_settings(engine: OfflineEngine) -> None:
    arguments = {"tools": ["players:look"], "verifier": "players:half"}
    how = {"arguments": arguments, "tool_parser": "pythonic", "max_turns": 1, "unfinished_reward": -1.0}
    played = play(engine, "tools", [{}] * 16, **how)
    assert {tuple(episode.rewards) for episode in played} == {(-1.0,), (0.5,)}


def test_tools_are_called_by_what_the_policy_says(engine: OfflineEngine) -> None:
    arguments = {"tools": ["players:look"], "verifier": "players:half"}
    played = play(engine, "tools", [{}] * 16, arguments=arguments, tool_parser="pythonic")
    text = engine._llm.get_tokenizer().decode
    called = [s for e in played for s in e.sequences if "[look(key=" in text(s.token_ids)]
    answered = [s for s in called if len(s.turn_ends) > 1]
    assert answered
    for sequence in answered:
        assert "<tool>ab<assistant>" in text(sequence.token_ids)


def test_a_call_of_a_tool_that_does_not_exist_drops_the_episode_or_is_answered(engine: OfflineEngine) -> None:
    how = {"arguments": {"tools": ["players:failing"], "verifier": "players:half"}, "tool_parser": "pythonic"}
    dropped = [e for e in play(engine, "tools", [{}] * 16, **how) if e.dropped]
    assert dropped
    assert {e.dropped for e in dropped} == {"unknown_tool"}
    assert dropped[0].detail == "the policy called 'look'; tools are ['failing']"
    answered = play(engine, "tools", [{}] * 16, unknown_tool="step", **how)
    assert all(not e.dropped or e.dropped == "template" for e in answered)


def test_a_parser_that_vllm_does_not_have_drops_every_episode_with_the_reason(engine: OfflineEngine) -> None:
    arguments = {"tools": ["players:look"], "verifier": "players:half"}
    [episode] = play(engine, "tools", [{}], arguments=arguments, tool_parser="none_such")
    assert episode.dropped == "nonsense"
    assert "'none_such' is none of vLLM's tool parsers: " in episode.detail


class Fragile(ToolParser):
    """One of vLLM's kind that does not expect what a policy may say."""

    def extract_tool_calls(self, model_output: str, request: Any) -> Any:
        raise IndexError("no call")


def test_a_parser_that_fails_drops_the_episode_and_no_other(engine: OfflineEngine) -> None:
    ToolParserManager.register_module("fragile", module=Fragile)
    arguments = {"tools": ["players:look"], "verifier": "players:half"}
    [episode] = play(engine, "tools", [{}], arguments=arguments, tool_parser="fragile")
    assert (episode.dropped, episode.detail) == ("tool_parser", "the tool parser raised IndexError: no call")


def test_the_parser_is_the_one_that_serves(tmp_path: Path, engine: OfflineEngine) -> None:
    from serve.vllm.tool_calls import ToolCallParser, _parsed
    from train.environments.ready.tools import Function

    parser = ToolCallParser("hermes", engine._llm.get_tokenizer(), [Function.of(players.look).schema])
    assert not parser.skip_special_tokens
    said = 'so <tool_call>{"name": "look", "arguments": {"key": "a", "times": 2}}</tool_call>'
    assert parser.parse(said) == ("so ", [("look", {"key": "a", "times": 2})])
    assert _parsed("[" * 10**6) == "[" * 10**6
    assert parser.parse("<tool_call>{nonsense</tool_call>") == ("<tool_call>{nonsense</tool_call>", [])
