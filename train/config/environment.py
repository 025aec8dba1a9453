"""Settings of environments: what rollouts of several turns are played with. Imports no torch."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import Field, model_validator

from feedback.settings_base import FUNCTION, Section

ENVIRONMENTS: Final = {
    "maths": "train.environments.ready.maths:Maths",
    "json_schema": "train.environments.ready.json_schema:JsonSchema",
    "unit_tests": "train.environments.ready.unit_tests:UnitTests",
    "tools": "train.environments.ready.tools:ToolEnvironment",
}
"""Millrace's own, by name."""
LARGEST_REWARD: Final = 1e30
"""Of an episode or a turn: sums of them, in float32, stay finite."""


class EnvironmentConfig(Section):
    """What answers the policy's turns, and rewards them. As text: its name alone."""

    name: str = Field(
        description=f"The environment: {', '.join(ENVIRONMENTS)}, or module:class, a subclass of "
        "train.environments.environment.Environment.",
    )
    arguments: dict[str, Any] = Field({}, description="Arguments of its constructor.")
    max_turns: int = Field(8, ge=1, description="Turns of the policy in an episode, at most.")
    max_tokens: int | None = Field(
        None,
        ge=1,
        description="Tokens that the policy samples in an episode, at most; if unset, max_turns times "
        "train.rollout.max_tokens, which is the longest turn.",
    )
    step_seconds: float = Field(
        30.0, gt=0, description="Seconds that a call of the environment may take; after them the episode is dropped."
    )
    episodes_at_once: int = Field(
        128, ge=1, description="Episodes that an engine plays at once; each has a thread and an environment."
    )
    tool_parser: str | None = Field(
        None,
        description="vLLM's name of the parser that finds tool calls in a turn, as serve.openai.tool_parser; none: the "
        "environment gets text alone.",
    )
    unknown_tool: Literal["drop", "step"] = Field(
        "drop",
        description="A call of a tool that does not exist. drop: the episode is dropped and counted. step: the "
        "environment gets the call, and the policy learns from what comes of it.",
    )
    rewritten_turns: Literal["split", "drop"] = Field(
        "split",
        description="A chat template that renders earlier turns otherwise than they were sampled. split: the next turn "
        "begins a training sequence of its own, with the context that a server would send. drop: the episode is "
        "dropped and counted.",
    )
    unfinished_reward: float = Field(
        0.0,
        ge=-LARGEST_REWARD,
        le=LARGEST_REWARD,
        description="Reward of an episode that a limit of turns or tokens ended before it had any.",
    )
    max_dropped: float = Field(
        0.2,
        ge=0,
        le=1,
        description="Stop, and publish nothing, when a larger share of a step's episodes is dropped.",
    )

    @model_validator(mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _is_one(self) -> EnvironmentConfig:
        if self.name not in ENVIRONMENTS and FUNCTION.fullmatch(self.name) is None:
            raise ValueError(
                f"train.environment.name={self.name!r} is not an environment; use 'module:class', or one of "
                f"{', '.join(ENVIRONMENTS)}"
            )
        return self

    @property
    def target(self) -> str:
        """``module:class``."""
        return ENVIRONMENTS.get(self.name, self.name)

    def longest(self, turn: int) -> int:
        """Tokens that the policy samples in an episode, at most, with turns of at most ``turn``."""
        return min(self.max_turns * turn, self.max_tokens or self.max_turns * turn)
