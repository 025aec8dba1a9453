"""What comes of an episode, and why some are dropped. Imports neither torch nor vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class TrainedSequence:
    """A context and turns that followed it. Lists are one entry per token after ``prompt``.

    ``log_probs``: nats, of the distribution that was sampled from; 0 for tokens that were not ``sampled``.
    ``policies``: which sampled them, as of ``train.batch.packed.Sample``.
    """

    prompt: list[int]
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    policies: list[tuple[int, int]] = field(default_factory=list)

    def add(
        self,
        token_ids: Sequence[int],
        log_probs: Sequence[float],
        *,
        sampled: bool,
        policies: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.policies += [(len(self.token_ids) + start, version) for start, version in policies]
        self.token_ids += token_ids
        self.log_probs += log_probs
        self.sampled += [sampled] * len(token_ids)

    def trimmed(self) -> TrainedSequence:
        """Without what follows the last token that was sampled."""
        end = len(self.sampled) - next((i for i, sampled in enumerate(reversed(self.sampled)) if sampled), 0)
        return TrainedSequence(
            self.prompt, self.token_ids[:end], self.log_probs[:end], self.sampled[:end], self.policies
        )

    @property
    def turn_ends(self) -> list[int]:
        """Where each turn's last token is."""
        following = [*self.sampled[1:], False]
        return [i for i, (now, then) in enumerate(zip(self.sampled, following, strict=True)) if now and not then]


@dataclass(frozen=True)
class Episode:
    """``sequences``: what is learned from; none if it was dropped. ``rewards``: of each turn, 0 where it had none.

    ``truncated``: a limit of turns or tokens ended it. ``dropped``: why, one of ``REASONS``, with ``detail``; empty if
    it was not.
    """

    sequences: list[TrainedSequence] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    truncated: bool = False
    dropped: str = ""
    detail: str = ""

    @property
    def sampled_tokens(self) -> int:
        """Tokens that the policy sampled."""
        return sum(sum(sequence.sampled) for sequence in self.sequences)


class EpisodeDropped(Exception):
    """An episode that can't be learned from. ``reason``: one of ``REASONS``; the text says more."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


REASONS = {
    "raised": "the environment raised an exception",
    "timeout": "the environment took longer than train.environment.step_seconds",
    "nonsense": "the environment returned something else than it should",
    "reward_not_finite": "a reward is NaN, infinite, or too large to be added up",
    "no_reward": "the episode ended and had no reward",
    "unknown_tool": "the policy called a tool that does not exist",
    "tool_parser": "the tool parser fails on what the policy said",
    "template": "the chat template fails on the conversation",
    "tokens": "the model has no tokens for what the environment, or a call, says",
    "rewritten": "the chat template rewrites earlier turns",
    "too_long": "the first messages leave no room for a turn",
}
"""Why episodes are dropped, as metrics name it."""
