"""Rejection sampling: SFT on those of the policy's own fresh responses whose reward is high enough.

Rejection sampling fine-tuning (RFT, arXiv 2308.01825, section 3.3) and the improve step of ReST (arXiv 2308.08998,
section 3), a step at a time. Of equal responses to a prompt one is learned, as in RFT. What is measured of a batch, the
KL to the parent too, is of the responses that are learned.
"""

from __future__ import annotations

from typing import Any

from train.algorithms.selection.best_of_n import BestOfN
from train.batch.packed import Rollout


class RejectionSampling(BestOfN):
    compares_groups = False

    def kept(self, rollouts: list[Rollout]) -> list[Rollout]:
        """Those with ``min_reward`` at least; of equal ones in a group the first."""
        least = self.config.min_reward
        assert least is not None
        good: dict[Any, Rollout] = {}
        for rollout in rollouts:
            if rollout.reward >= least:
                good.setdefault(_content(rollout), rollout)
        return list(good.values())


def _content(rollout: Rollout) -> tuple[Any, ...]:
    """By which rollouts are equal: their group, and of an episode what was said in all of its sequences."""
    return rollout.group, *((tuple(part.prompt), tuple(part.response)) for part in (*rollout.earlier, rollout))
