"""Episodes that begin with the prompt; of them, those of one response. A verifier of your own has ``verdict``."""

from __future__ import annotations

from collections.abc import Sequence

from train.environments.environment import Environment, EpisodePrompt, Message, Step, ToolCall


class FromPrompt(Environment):
    """Base of environments whose episodes begin with the prompt as it is."""

    def __init__(self, system: str | None = None) -> None:
        """``system``: a system message before the prompt's own."""
        self.system = system
        self.prompt = EpisodePrompt(None, None)

    async def reset(self, prompt: EpisodePrompt) -> Sequence[Message]:
        self.prompt = prompt
        before: list[Message] = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*before, *prompt.as_messages]


class SingleTurn(FromPrompt):
    """Base of environments whose episodes end with the first turn."""

    async def step(self, text: str, tool_calls: Sequence[ToolCall]) -> Step:
        return [], await self.verdict(text), True

    async def verdict(self, text: str) -> float:
        """The reward of a response to ``prompt``."""
        raise NotImplementedError

    def metadata(self, key: str) -> str:
        """What the prompt's metadata have under a key. Raises KeyError, which drops the episode."""
        if key not in self.prompt.metadata:
            raise KeyError(f"the prompt has no metadata {key!r}; it has {sorted(self.prompt.metadata)}")
        return self.prompt.metadata[key]
