"""What the steps of a run draw: prompts to sample responses for, and logged responses."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from feedback.datasets import Prompt, prompts, redacted, rollouts
from feedback.lake.tables import Lake
from serve.policies.store import MANIFEST
from train.config.context_length import longest_context, longest_prompt
from train.config.training import TrainConfig
from train.data.held_out import HELD_OUT, HeldOut
from train.data.traffic import Traffic


@dataclass(frozen=True)
class TrainingData:
    """Prompts, and logged responses to the same prompt each, in the order in which a run's steps draw them."""

    prompts: Cycled
    traffic: Cycled
    summary: str  # how much there is, and what was left out and why
    left_out: int  # logged responses that can't be learned from
    digest: str  # of all of it

    @classmethod
    def of(
        cls,
        lake: Lake,
        versions: Mapping[str, int],
        config: TrainConfig,
        policy: Path,
        seed: int,
        singleton_baseline: Literal["batch", "leave_out"] | None = None,
    ) -> TrainingData:
        """What the lake held at these versions.

        Args:
            policy: folder of the parent, in the policy store.
            singleton_baseline: as of ``Traffic.of``.

        Raises:
            feedback.lake.tables.LakeError: it can't be read any more.
            evaluation.suites.suite.SuiteError: a suite whose prompts are to be left out can't be read.
            ValueError: train.rollout leaves no room for a prompt in the model's context.
        """
        data, held_out = config.data, HeldOut.load(config.data.exclude_suites, policy)
        found: list[Prompt] = []
        if data.fresh_prompts_per_step:  # more, in place of those that are items of a suite
            found = prompts(lake, versions=versions, limit=data.max_prompts + len(held_out.items))
        kept = [p for p in found if not held_out.contains(vars(p))]
        allowed, judged = kept[: data.max_prompts], len(found) - len(kept)
        longest = longest_prompt(config.rollout, policy) if allowed else 0
        usable = [p for p in allowed if len(p.prompt_token_ids) <= longest]
        traffic = Traffic()
        if data.traffic_prompts_per_step:
            traffic = Traffic.of(
                rollouts(lake, versions=versions),
                parent=json.loads((policy / MANIFEST).read_bytes())["version"],
                max_staleness=config.algorithm.correction.max_staleness,
                longest=longest_context(config.rollout, policy),
                singleton_baseline=singleton_baseline,
                filter_groups=singleton_baseline is not None and config.algorithm.filter_groups,
                held_out=held_out,
            )
        fresh = ""
        if data.fresh_prompts_per_step:
            fresh = f"{len(usable)} prompts ({len(allowed) - len(usable)} too long, {judged} {HELD_OUT})"
        out = redacted(lake, versions=versions)
        without = f"{out} redacted responses and their prompts left out" if out else ""
        content = repr([p.prompt_token_ids for p in usable]) + repr(traffic.groups)
        return cls(
            prompts=Cycled(usable, data.fresh_prompts_per_step, f"{seed}:prompts"),
            traffic=Cycled(traffic.groups, min(data.traffic_prompts_per_step, len(traffic.groups)), f"{seed}:traffic"),
            summary=", ".join(
                part for part in (fresh, str(traffic) if data.traffic_prompts_per_step else "", without) if part
            ),
            left_out=sum(traffic.left_out.values()),
            digest=hashlib.sha256(content.encode()).hexdigest(),
        )

    @property
    def usable(self) -> int:
        """Prompts that there are: to sample responses for or, if none are sampled, with logged ones."""
        return len(self.prompts.items) if self.prompts.count else len(self.traffic.items)

    def __str__(self) -> str:
        return self.summary


@dataclass(frozen=True)
class Cycled:
    """``count`` items per step, endlessly: every item once, in a new order, before any comes again.

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
