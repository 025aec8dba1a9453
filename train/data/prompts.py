"""What a run learns from: prompts that traffic brought, and logged responses."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa

from train.batch.packed import Rollout
from train.data.held_out import HELD_OUT, HeldOut

BELOW_FULL_SUPPORT: Final = "sampled below full support"
STALE: Final = "of a policy too far from the parent"
UNKNOWN_POLICY: Final = "of an unknown policy"
TOO_LONG: Final = "longer than the context"
ALONE: Final = "alone for their prompt"
ALL_EQUAL: Final = "in groups with equal rewards"


@dataclass(frozen=True)
class Traffic:
    """Logged responses by prompt, with the rewards that scoring gave them.

    ``groups``: the responses to one prompt each, oldest first; a group of one is a response without company.
    ``left_out``: how many responses were, by reason.
    """

    groups: list[list[Rollout]] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        rows: pa.Table,
        *,
        parent: int | None = None,
        max_staleness: int | None = None,
        longest: int | None = None,
        lone: Literal["batch", "leave_out"] | None = None,
        filter_groups: bool = False,
        held_out: HeldOut | None = None,
    ) -> Traffic:
        """Group the rows of ``feedback.datasets.rollouts``.

        A response's policy, of several the one furthest from ``parent``, may be ``max_staleness`` versions from it.

        Args:
            longest: tokens that prompt and response may have together; any number if None.
            lone: ``algorithm.lone_baseline``, where responses are compared with their group. None: each response
                teaches by itself.
            filter_groups: ``algorithm.filter_groups``: groups of equal rewards are left out.
            held_out: the prompts that policies are judged by; responses to them are left out.
        """
        by_prompt: dict[tuple[int, ...], list[Rollout]] = defaultdict(list)
        left_out: Counter[str] = Counter()
        for row in rows.to_pylist():
            if row["reward"] is None or not row["response_token_ids"]:
                continue
            judged = held_out is not None and held_out.asks(row)
            if problem := HELD_OUT if judged else _unusable(row, parent, max_staleness, longest):
                left_out[problem] += 1
                continue
            prompt = list(row["prompt_token_ids"])
            by_prompt[tuple(prompt)].append(
                Rollout(
                    prompt=prompt,
                    response=list(row["response_token_ids"]),
                    log_probs=list(row["logprobs"]),
                    reward=float(row["reward"]),
                    group=0,
                    temperature=float(row["sampling"]["temperature"]),
                    truncated=row["finish_reason"] == "length",
                    fresh=False,
                )
            )
        kept = []
        for group in by_prompt.values():
            if lone == "leave_out" and len(group) == 1:
                left_out[ALONE] += 1
            elif filter_groups and len(group) > 1 and not differ(group):
                left_out[ALL_EQUAL] += len(group)
            else:
                kept.append(group)
        return cls(kept, dict(left_out))

    def __str__(self) -> str:
        lone = sum(len(group) == 1 for group in self.groups)
        text = f"{len(self.groups) - lone} groups and {lone} lone responses of traffic"
        if not self.left_out:
            return text
        return f"{text} (left out: {', '.join(f'{count} {why}' for why, count in sorted(self.left_out.items()))})"


def _unusable(row: dict[str, Any], parent: int | None, max_staleness: int | None, longest: int | None) -> str | None:
    """Why a logged response can't be learned from; None if it can."""
    if not full_support(row["sampling"]) or not _as_trained(dict(row["metadata"] or ())):
        return BELOW_FULL_SUPPORT
    if parent is not None and max_staleness is not None:
        versions = [span["policy_version"] for span in row["policy_spans"] or ()]
        if not versions or None in versions:
            return UNKNOWN_POLICY
        if max(abs(parent - version) for version in versions) > max_staleness:
            return STALE
    if longest is not None and len(row["prompt_token_ids"]) + len(row["response_token_ids"]) > longest:
        return TOO_LONG
    return None


def full_support(sampling: dict[str, Any]) -> bool:
    """Whether the logprobs of this sampling are those of the whole softmax, so that a ratio to them is unbiased.

    Below full support (top-p, top-k, min-p, greedy) a captured logprob is that of a distribution without the tokens
    that were cut off. Tokens that the policy would sample, and the behaviour never could, then have no weight that
    makes up for them: importance sampling needs a behaviour that is positive wherever the policy is.
    """
    return (
        sampling["temperature"] > 0
        and (sampling["top_p"] is None or sampling["top_p"] >= 1)
        and (sampling["top_k"] is None or sampling["top_k"] <= 0)
        and not sampling["min_p"]
    )


def _as_trained(metadata: dict[str, str]) -> bool:
    """Whether nothing else (penalties, biases, a grammar …) changed the distribution that was sampled from."""
    further = json.loads(metadata.get("millrace:sampling", "{}"))
    return further.keys() <= {"stop_token_ids"}


def differ(group: list[Rollout]) -> bool:
    """Whether not all rewards are equal, as a batch holds them: float32."""
    rewards = np.array([rollout.reward for rollout in group], np.float32)
    return bool((rewards != rewards[0]).any())


@dataclass(frozen=True)
class Informative:
    """What an algorithm that compares a group learns from, of some rollouts, and how many teach it nothing.

    Nothing is learned from if no group, and no two lone responses, have different rewards.
    """

    rollouts: list[Rollout]
    groups: int  # with different rewards, that are in ``rollouts``
    uninformative: int  # groups whose rewards are all equal
    lone: int  # responses left out for want of any to compare them with

    @classmethod
    def of(
        cls, rollouts: list[Rollout], lone_baseline: Literal["batch", "leave_out"], *, filter_groups: bool = False
    ) -> Informative:
        """Pick them.

        Logged responses that are alone in their group are compared with each other, or left out. A fresh one is alone
        only because the others of its group got no reward; it is left out: the mean reward of other prompts is no
        baseline for it.

        Args:
            filter_groups: groups with equal rewards are left out.
        """
        by_group: dict[int, list[Rollout]] = defaultdict(list)
        for rollout in rollouts:
            by_group[rollout.group].append(rollout)
        several = [group for group in by_group.values() if len(group) > 1]
        different = [group for group in several if differ(group)]
        alone = [group[0] for group in by_group.values() if len(group) == 1]
        logged = [rollout for rollout in alone if not rollout.fresh]
        compared = logged if lone_baseline == "batch" and logged and differ(logged) else []
        kept = different if filter_groups else several
        return cls(
            rollouts=[r for group in kept for r in group] + compared if different or compared else [],
            groups=len(different),
            uninformative=len(several) - len(different),
            lone=len(alone) - len(compared),
        )


@dataclass(frozen=True)
class Cycled:
    """``count`` items a step, for ever: every item once, in a new order, before any comes again.

    What a step gets is a function of the items, the seed and the step alone, so that a run that goes on from a step
    draws what it would have drawn.
    """

    items: list[Any]
    count: int
    seed: str

    def at(self, step: int) -> list[Any]:
        """The items of a step; none if there are none."""
        if not self.items or not self.count:
            return []
        size = len(self.items)
        first = step * self.count
        orders = {turn: self._order(turn) for turn in range(first // size, (first + self.count - 1) // size + 1)}
        return [self.items[orders[i // size][i % size]] for i in range(first, first + self.count)]

    def _order(self, turn: int) -> list[int]:
        return random.Random(f"{self.seed}:{turn}").sample(range(len(self.items)), len(self.items))
