"""Packed batches with all that a policy loss reads, in float64, and the same as lists a response for plain loops."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from train.batch.packed import PackedBatch, Rollout

PER_TOKEN = ("behaviour_log_probs", "old_log_probs", "ref_log_probs", "advantages", "values")


@dataclass(frozen=True)
class Response:
    """What a batch has of one response; lists are one number a response token."""

    reward: float
    group: int
    baseline: float
    behaviour: list[float]
    old: list[float]
    ref: list[float]
    advantages: list[float]
    values: list[float]


def some_responses(seed: int, *, groups: int = 3, size: int = 3, most: int = 5) -> PackedBatch:
    """``groups`` groups of ``size`` responses of 1 to ``most`` tokens; the policies differ by a few tenths of a nat."""
    draw = random.Random(seed)
    rollouts = []
    for i in range(groups * size):
        response = [draw.randrange(100) for _ in range(draw.randint(1, most))]
        behaviour = [draw.uniform(-3, -0.5) for _ in response]
        reward, baseline = draw.uniform(-2, 2), draw.uniform(-1, 1)
        prompt = [1] * draw.randint(1, 4)
        rollouts.append(Rollout(prompt, response, behaviour, reward, i // size, baseline=baseline))
    batch = PackedBatch.pack(rollouts)
    mask = batch.response_mask

    def noise(width: float) -> torch.Tensor:
        return torch.tensor([draw.uniform(-width, width) for _ in mask], dtype=torch.float64) * mask

    behaviour = batch.behaviour_log_probs.double()
    old = behaviour + noise(0.4)
    return batch.with_(
        rewards=batch.rewards.double(),
        baselines=batch.baselines.double(),
        behaviour_log_probs=behaviour,
        old_log_probs=old,
        ref_log_probs=old + noise(0.4),
        advantages=noise(2.0),
        values=noise(1.0),
    )


def batches() -> st.SearchStrategy[PackedBatch]:
    """Batches of ``some_responses``, of any shape; their groups may be of one."""
    return st.builds(some_responses, st.integers(0, 10_000), groups=st.integers(1, 4), size=st.integers(1, 3))


def moved(batch: PackedBatch, seed: int, width: float = 0.5) -> torch.Tensor:
    """float64 [T]: logprobs of a policy that has moved from the old one."""
    draw = random.Random(seed)
    away = torch.tensor([draw.uniform(-width, width) for _ in batch.response_mask], dtype=torch.float64)
    return batch.old_log_probs + away * batch.response_mask  # type: ignore[operator]


def responses_of(batch: PackedBatch) -> list[Response]:
    """The batch, a response at a time."""
    fields = {name: by_response(batch, getattr(batch, name)) for name in PER_TOKEN}
    return [
        Response(
            reward=float(batch.rewards[s]),
            group=int(batch.groups[s]),
            baseline=float(batch.baselines[s]),
            behaviour=fields["behaviour_log_probs"][s],
            old=fields["old_log_probs"][s],
            ref=fields["ref_log_probs"][s],
            advantages=fields["advantages"][s],
            values=fields["values"][s],
        )
        for s in range(len(batch))
    ]


def by_response(batch: PackedBatch, per_token: Any) -> list[list[float]]:
    """[T] → the numbers of each response's tokens."""
    starts = (batch.cu_seqlens[:-1] + batch.prompt_lengths).tolist()
    return [per_token[a:b].tolist() for a, b in zip(starts, batch.cu_seqlens[1:].tolist(), strict=True)]


def flat(lists: list[list[float]]) -> list[float]:
    return [x for numbers in lists for x in numbers]
