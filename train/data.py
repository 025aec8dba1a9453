"""What a run learns from: prompts that traffic brought, and groups of logged responses."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from train.batch import Rollout


@dataclass(frozen=True)
class TrafficGroups:
    """Logged responses to the same prompt, with the rewards that scoring gave them."""

    groups: list[list[Rollout]]
    refused: int  # rows that sampling with top-p, top-k, min-p, penalties … or at temperature 0 made unusable

    @classmethod
    def of(cls, rows: pa.Table) -> TrafficGroups:
        """Group the rows of ``feedback.datasets.rollouts``; a group needs two different rewards to teach anything."""
        by_prompt: dict[tuple[int, ...], list[Rollout]] = defaultdict(list)
        refused = 0
        for row in rows.to_pylist():
            if row["reward"] is None or not row["response_token_ids"]:
                continue
            if not full_support(row["sampling"]) or not _as_trained(dict(row["metadata"] or ())):
                refused += 1
                continue
            by_prompt[tuple(row["prompt_token_ids"])].append(
                Rollout(
                    prompt=list(row["prompt_token_ids"]),
                    response=list(row["response_token_ids"]),
                    log_probs=list(row["logprobs"]),
                    reward=float(row["reward"]),
                    group=0,
                    temperature=float(row["sampling"]["temperature"]),
                )
            )
        return cls([g for g in by_prompt.values() if len({r.reward for r in g}) > 1], refused)


def full_support(sampling: dict[str, Any]) -> bool:
    """Whether the logprobs of this sampling are those of the whole softmax, so that a ratio to them is unbiased."""
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
        if not self.items:
            return []
        size = len(self.items)
        first = step * self.count
        orders = {turn: self._order(turn) for turn in range(first // size, (first + self.count - 1) // size + 1)}
        return [self.items[orders[i // size][i % size]] for i in range(first, first + self.count)]

    def _order(self, turn: int) -> list[int]:
        return random.Random(f"{self.seed}:{turn}").sample(range(len(self.items)), len(self.items))
