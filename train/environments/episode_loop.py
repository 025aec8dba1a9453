"""One episode, from its first messages to its last turn: what a thread of its own runs.

The policy's turns come from whoever plays many episodes at once (``train.environments.engine_loop``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from serve.generation.tokenizer import Text
from train.batch.packed import Sample
from train.config.environment import EnvironmentConfig
from train.environments.calls import Caller, guarded
from train.environments.conversation import Conversation, assistant_message
from train.environments.environment import Environment, EpisodePrompt, ToolCall
from train.environments.episode import Episode, EpisodeDropped

if TYPE_CHECKING:
    from serve.vllm.tool_calls import ToolCallParser


@dataclass(frozen=True)
class Limits:
    """Tokens that an episode may have. ``turn``, ``episode``: sampled ones; ``context``: all of a sequence.

    ``vocabulary``: the ids of all are below it.
    """

    turn: int
    episode: int
    context: int
    vocabulary: int


Sampler = Callable[[list[int], int, int], Sample]
"""Of a context, the most tokens, and the number of the turn: the turn, with the token that ended it."""


def run_episode(
    make: Callable[[], Environment],
    prompt: EpisodePrompt,
    sample: Sampler,
    text: Text,
    config: EnvironmentConfig,
    limits: Limits,
) -> Episode:
    """Play one episode; what it is dropped for is its outcome.

    Raises what ``sample`` raises, which is not the environment's fault.
    """
    with asyncio.Runner() as runner:
        call: Caller | None = None
        try:
            call = Caller(runner, guarded("the constructor", make), config.step_seconds)
            return _play(call, prompt, sample, text, config, limits)
        except EpisodeDropped as dropped:
            return Episode(dropped=dropped.reason, detail=str(dropped))
        finally:
            if call is not None:
                call.close()


def _play(
    call: Caller, prompt: EpisodePrompt, sample: Sampler, text: Text, config: EnvironmentConfig, limits: Limits
) -> Episode:
    messages = call.reset(prompt)
    tools, names = call.tools()
    parser = _parser(config, text, tools)
    split = config.rewritten_turns == "split"
    conversation = Conversation(text, messages, tools, split=split, vocabulary=limits.vocabulary)
    rewards: list[float | None] = []
    sampled, done, ended = 0, False, True
    while not done:
        context = conversation.context
        room = min(limits.turn, limits.episode - sampled, limits.context - len(context))
        if len(rewards) == config.max_turns or room < 1:
            break
        turn = sample(context, room, len(rewards))
        sampled += len(turn.token_ids)
        conversation.add_turn(turn.token_ids, turn.log_probs, turn.policies)
        ended = turn.finish_reason == "stop"
        said, calls = _read(turn, ended, context, text, parser, len(rewards))
        if config.unknown_tool == "drop" and (unknown := [c.name for c in calls if c.name not in names]):
            raise EpisodeDropped("unknown_tool", f"the policy called {unknown[0]!r}; tools are {sorted(names)}")
        observation, reward, done = call.step(said, calls)
        rewards.append(reward)
        if not ended:  # cut off within a turn: the environment has judged what there is of it
            break
        if not done:
            answer = assistant_message(said, calls)
            conversation.add_observation(answer, turn.token_ids, observation, ended=ended)
    if not rewards:
        raise EpisodeDropped("too_long", f"{len(conversation.context)} tokens of context leave no room for a turn")
    truncated = not (done and ended)
    if all(reward is None for reward in rewards):
        if done:
            raise EpisodeDropped("no_reward", f"the episode ended after {len(rewards)} turns without a reward")
        rewards[-1] = config.unfinished_reward
    return Episode(conversation.finished(), [reward or 0.0 for reward in rewards], truncated)


def _parser(config: EnvironmentConfig, text: Text, tools: Sequence[Any]) -> ToolCallParser | None:
    if config.tool_parser is None or not tools:
        return None
    from serve.vllm.tool_calls import ToolCallParser  # it loads vLLM, which only who samples needs

    try:
        return ToolCallParser(config.tool_parser, text.tokenizer, tools)
    except ValueError as error:
        raise EpisodeDropped("nonsense", f"the tools can't be parsed for: {error}") from error


def _read(
    turn: Sample, ended: bool, context: list[int], text: Text, parser: ToolCallParser | None, number: int
) -> tuple[str, list[ToolCall]]:
    """(what the policy said, its calls)."""
    if parser is None:
        return turn.text, []
    said = turn.text
    if not parser.skip_special_tokens:
        spoken = turn.token_ids[:-1] if ended else turn.token_ids
        said = str(text.tokenizer.decode(spoken, skip_special_tokens=False))
    try:
        said, found = parser.parse(said)
    except Exception as error:  # vLLM has parsers of many kinds, and the policy may say anything
        raise EpisodeDropped("tool_parser", f"the tool parser raised {type(error).__name__}: {error}") from error
    return said, [ToolCall(f"call_{number}_{i}", name, arguments) for i, (name, arguments) in enumerate(found)]
