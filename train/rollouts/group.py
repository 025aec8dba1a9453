"""The responses, or episodes, to one prompt: those that have ended, while others are under way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import TypeAdapter

from feedback.datasets import Prompt
from train.batch.packed import Sample
from train.data.rewards import Rewards
from train.environments.episode import Episode

_SAMPLE: Final = TypeAdapter(Sample)
_EPISODE: Final = TypeAdapter(Episode)
_REWARDS: Final = TypeAdapter(Rewards)


@dataclass
class Group:
    """``began``: the version of the policy that none of its tokens is older than.

    ``ended``: by their number, of ``size`` in all. ``rewards``: one row each, of those that have been rewarded.
    """

    number: int
    prompt: Prompt
    began: int
    size: int
    ended: dict[int, Any] = field(default_factory=dict)
    rewards: dict[int, Rewards] = field(default_factory=dict)

    @property
    def sampled(self) -> list[Any]:
        """All of them, in order."""
        return [self.ended[index] for index in range(self.size)]

    @property
    def rewarded(self) -> list[Rewards]:
        """Likewise."""
        return [self.rewards[index] for index in range(self.size)]

    def kept(self) -> dict[str, Any]:
        """What JSON can hold of it: all that has ended."""
        episodes = any(isinstance(one, Episode) for one in self.ended.values())
        adapter: TypeAdapter[Any] = _EPISODE if episodes else _SAMPLE
        return {
            "number": self.number,
            "began": self.began,
            "ended": {index: adapter.dump_python(one) for index, one in self.ended.items()},
            "rewards": {i: _REWARDS.dump_python(rewards) for i, rewards in self.rewards.items()},
        }

    @classmethod
    def of_kept(cls, kept: dict[str, Any], prompt: Prompt, size: int, *, version: int, episodes: bool) -> Group:
        """From ``kept``; one of which nothing had ended begins anew, with ``version``."""
        adapter: TypeAdapter[Any] = _EPISODE if episodes else _SAMPLE
        ended = {int(index): adapter.validate_python(one) for index, one in kept["ended"].items()}
        rewards = {int(index): _REWARDS.validate_python(row) for index, row in kept["rewards"].items()}
        return cls(kept["number"], prompt, kept["began"] if ended else version, size, ended, rewards)
