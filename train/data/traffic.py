"""Logged responses that a run learns from, and why others are left out."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa

from evaluation.suites.held_out import HeldOut
from feedback.sampling_parameters import altered_by
from train.batch.packed import Rollout

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
    ``left_out``: how many responses were, by reason. ``learned_prompts``: the hashes of their prompts, if ``held_out``
    was there to make them.
    """

    groups: list[list[Rollout]] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)
    learned_prompts: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        rows: pa.Table,
        *,
        parent: int | None = None,
        max_staleness: int | None = None,
        longest: int | None = None,
        singleton_baseline: Literal["batch", "leave_out"] | None = None,
        filter_groups: bool = False,
        held_out: HeldOut | None = None,
    ) -> Traffic:
        """Group the rows of ``feedback.datasets.rollouts``.

        A response's policy, of several the one furthest from ``parent``, may be ``max_staleness`` versions from it.

        Args:
            longest: tokens that prompt and response may have together; any number if None.
            singleton_baseline: ``algorithm.lone_baseline``, where responses are compared with their group. None: they
                are not compared.
            filter_groups: ``algorithm.filter_groups``: groups of equal rewards are left out.
            held_out: the prompts that policies are judged by; responses to them are left out.
        """
        by_prompt: dict[tuple[int, ...], list[Rollout]] = defaultdict(list)
        left_out: Counter[str] = Counter()
        learned = dict[tuple[int, ...], set[str]]()
        for row in rows.to_pylist():
            if row["reward"] is None or not row["response_token_ids"]:
                continue
            judged = held_out.reason(row) if held_out is not None else None
            if problem := judged or _unusable(row, parent, max_staleness, longest):
                left_out[problem] += 1
                continue
            prompt = list(row["prompt_token_ids"])
            if held_out is not None:
                learned.setdefault(tuple(prompt), set()).update(held_out.keys(row))
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
            if singleton_baseline == "leave_out" and len(group) == 1:
                left_out[ALONE] += 1
            elif filter_groups and len(group) > 1 and not differ(group):
                left_out[ALL_EQUAL] += len(group)
            else:
                kept.append(group)
        keys = (learned.get(tuple(group[0].prompt), set()) for group in kept)
        return cls(kept, dict(left_out), frozenset[str]().union(*keys))

    def __str__(self) -> str:
        singletons = sum(len(group) == 1 for group in self.groups)
        text = f"{len(self.groups) - singletons} groups and {singletons} lone responses of traffic"
        if not self.left_out:
            return text
        return f"{text} (left out: {', '.join(f'{count} {why}' for why, count in sorted(self.left_out.items()))})"


def _unusable(row: dict[str, Any], parent: int | None, max_staleness: int | None, longest: int | None) -> str | None:
    """Why a logged response can't be learned from; None if it can."""
    if altered_by(row["sampling"], row["metadata"]):
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


def differ(group: list[Rollout]) -> bool:
    """Whether not all rewards are equal, as a batch holds them: float32."""
    rewards = np.array([rollout.reward for rollout in group], np.float32)
    return bool((rewards != rewards[0]).any())
