"""What an environment is. Imports neither torch nor vLLM.

One of your own is a subclass of ``Environment``, named in the config as ``train.environment: my_package.mine:Mine``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from train.config.environment import LARGEST_REWARD
from train.environments.episode import EpisodeDropped

Message = dict[str, Any]
"""A chat message, as OpenAI's API has it: ``role``, ``content``, and what goes with them."""

Tool = dict[str, Any]
"""A tool's schema, as OpenAI's API has it: ``{"type": "function", "function": {"name", "description", "parameters"}}``.
"""

Step = tuple[Sequence[Message], float | None, bool]
"""(what the policy reads next, the reward of its turn, whether the episode has ended)."""


@dataclass(frozen=True)
class EpisodePrompt:
    """What an episode begins with: a prompt of traffic or of one's own. ``seed``: for what the environment draws."""

    text: str | None
    messages: list[Message] | None
    metadata: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0

    @property
    def as_messages(self) -> list[Message]:
        """The messages, or the text as the user's. Raises ValueError for a prompt that came as token ids."""
        if self.messages is None and self.text is None:
            raise ValueError("the prompt came as token ids, and has no text to begin an episode with")
        return self.messages if self.messages is not None else [{"role": "user", "content": self.text}]


@dataclass(frozen=True)
class ToolCall:
    """A call that the policy made. ``arguments``: as its JSON says; a string if that is no JSON."""

    id: str
    name: str
    arguments: Any


class Environment:
    """Base of all environments: one object per episode, on an event loop and a thread of its own.

    What it does slowly holds up no other episode, so long as it leaves the interpreter to them: processes and sockets
    do, long computations in Python don't. ``train.environment.arguments`` are its constructor's.
    """

    tools: Sequence[Tool] = ()
    """What the policy may call; the chat template is given them. ``reset`` may set them."""

    async def reset(self, prompt: EpisodePrompt) -> Sequence[Message]:
        """Begin; the messages that the policy answers first."""
        return prompt.as_messages

    async def step(self, text: str, tool_calls: Sequence[ToolCall]) -> Step:
        """Answer a turn of the policy.

        Args:
            text: what the policy said, without the calls that the parser found in it.
            tool_calls: those, in order; none without ``train.environment.tool_parser``.

        Returns:
            What the policy reads next (messages of roles ``user``, ``tool`` or ``system``), the turn's reward or None,
            and whether the episode has ended. Rewards of turns add up; an episode that ends must have had one.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Give back what the episode has held. Called once, however it ended, unless a call hangs."""


def checked_messages(found: Any, what: str) -> list[Message]:
    """``found``, if it is a list of messages with a role. Raises EpisodeDropped."""
    if not isinstance(found, Sequence) or isinstance(found, str):
        raise EpisodeDropped("nonsense", f"{what} gave a {type(found).__name__} in place of a list of messages")
    for message in found:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise EpisodeDropped("nonsense", f"{what} gave {repr(message)[:80]}, which is no message with a role")
    return [dict(message) for message in found]


def checked_step(found: Any) -> tuple[list[Message], float | None, bool]:
    """``found``, if it is what ``Environment.step`` should return. Raises EpisodeDropped."""
    if not isinstance(found, tuple) or len(found) != 3:
        raise EpisodeDropped("nonsense", f"step gave {repr(found)[:80]} in place of (messages, reward, done)")
    messages, reward, done = found
    observation = checked_messages(messages, "step")
    if any(message["role"] == "assistant" for message in observation):
        raise EpisodeDropped("nonsense", "step gave a message of the assistant, whose turns the policy takes")
    if not isinstance(done, bool):
        raise EpisodeDropped("nonsense", f"step gave done={repr(done)[:80]}, which is neither True nor False")
    if not done and not observation:
        raise EpisodeDropped("nonsense", "step gave no message, and the episode has not ended")
    if reward is None:
        return observation, None, done
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        raise EpisodeDropped("nonsense", f"step gave the reward {repr(reward)[:80]}, which is no number")
    if not abs(reward) <= LARGEST_REWARD:
        shown = reward if isinstance(reward, float) else f"of {reward.bit_length()} bits"
        raise EpisodeDropped(
            "reward_not_finite", f"step gave the reward {shown}, which is not within {LARGEST_REWARD:g}"
        )
    return observation, float(reward), done


def tool_names(tools: Any) -> set[str]:
    """The names of tools, if they are schemas of functions. Raises EpisodeDropped."""
    try:
        return {str(tool["function"]["name"]) for tool in tools}
    except (TypeError, KeyError, IndexError) as error:
        raise EpisodeDropped("nonsense", f"tools are {repr(tools)[:80]}, and not schemas of functions") from error
