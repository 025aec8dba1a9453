"""What a run of responses learns from, and how samples become rollouts with rewards."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import pyarrow as pa
import torch

from feedback.datasets import Prompt, prompts, rollouts
from feedback.lake.tables import Lake
from serve.policies.store import MANIFEST
from train.batch.packed import Rollout
from train.config.context_length import longest_context, longest_prompt
from train.config.training import TrainConfig
from train.data.held_out import HELD_OUT, HeldOut
from train.data.prompts import Cycled, Traffic
from train.data.rewards import Rewarding, Rewards
from train.objectives.shaping import soft_overlong_punishment
from train.workers.rollout import Sample


@dataclass(frozen=True)
class TrainingData:
    """Prompts, and logged responses to the same prompt each, in the order in which a run's steps draw them."""

    prompts: Cycled
    traffic: Cycled
    said: str  # of how much there is, and what was left out and why
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
        lone: Literal["batch", "leave_out"] | None = None,
    ) -> TrainingData:
        """What the lake held at these versions.

        Args:
            policy: folder of the parent, in the policy store.
            lone: as of ``Traffic.of``.

        Raises:
            feedback.lake.tables.LakeError: it can't be read any more.
            evaluation.suites.suite.SuiteError: a suite whose prompts are to be left out can't be read.
            ValueError: train.rollout leaves no room for a prompt in the model's context.
        """
        data, held_out = config.data, HeldOut.load(config.data.exclude_suites, policy)
        asked: list[Prompt] = []
        if data.fresh_prompts_per_step:  # as many more as a suite that traffic asks could take the places of
            asked = prompts(lake, versions=versions, limit=data.max_prompts + len(held_out.items))
        kept = [p for p in asked if not held_out.asks(vars(p))]
        allowed, judged = kept[: data.max_prompts], len(asked) - len(kept)
        longest = longest_prompt(config.rollout, policy) if allowed else 0
        usable = [p for p in allowed if len(p.prompt_token_ids) <= longest]
        traffic = Traffic()
        if data.traffic_prompts_per_step:
            traffic = read_traffic(lake, versions, config, policy, lone, held_out)
        fresh = ""
        if data.fresh_prompts_per_step:
            fresh = f"{len(usable)} prompts ({len(allowed) - len(usable)} too long, {judged} {HELD_OUT})"
        content = repr([p.prompt_token_ids for p in usable]) + repr(traffic.groups)
        return cls(
            prompts=Cycled(usable, data.fresh_prompts_per_step, f"{seed}:prompts"),
            traffic=Cycled(traffic.groups, min(data.traffic_prompts_per_step, len(traffic.groups)), f"{seed}:traffic"),
            said=", ".join(part for part in (fresh, str(traffic) if data.traffic_prompts_per_step else "") if part),
            left_out=sum(traffic.left_out.values()),
            digest=hashlib.sha256(content.encode()).hexdigest(),
        )

    @property
    def usable(self) -> int:
        """Prompts that there are: to sample responses for or, if none are sampled, with logged ones."""
        return len(self.prompts.items) if self.prompts.count else len(self.traffic.items)

    def __str__(self) -> str:
        return self.said


def read_traffic(
    lake: Lake,
    versions: Mapping[str, int],
    config: TrainConfig,
    policy: Path,
    lone: Literal["batch", "leave_out"] | None,
    held_out: HeldOut,
) -> Traffic:
    """The logged responses that a run from ``policy`` can learn from."""
    return Traffic.of(
        rollouts(lake, versions=versions),
        parent=json.loads((policy / MANIFEST).read_bytes())["version"],
        max_staleness=config.algorithm.correction.max_staleness,
        longest=longest_context(config.rollout, policy),
        lone=lone,
        filter_groups=lone is not None and config.algorithm.filter_groups,
        held_out=held_out,
    )


@dataclass(frozen=True)
class Scored:
    """Responses that were sampled and rewarded.

    ``rewards``: what each was rewarded, before its length cost anything. ``components``: what each rule gave, by name,
    where it gave something. ``overlong``: what lengths cost. ``unrewarded``: responses without a reward.
    """

    rollouts: list[Rollout] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    components: dict[str, list[float]] = field(default_factory=dict)
    overlong: list[float] = field(default_factory=list)
    unrewarded: int = 0

    def __add__(self, other: Scored) -> Scored:
        names = self.components.keys() | other.components.keys()
        return Scored(
            self.rollouts + other.rollouts,
            self.rewards + other.rewards,
            {name: self.components.get(name, []) + other.components.get(name, []) for name in sorted(names)},
            self.overlong + other.overlong,
            self.unrewarded + other.unrewarded,
        )


def score(
    asked: Sequence[Prompt],
    sampled: Sequence[Sequence[Sample]],
    reward: Rewarding,
    config: TrainConfig,
    *,
    first_group: int = 0,
    greedy: bool = False,
) -> Scored:
    """Reward the samples, and shape the rewards by length; one group a prompt.

    Args:
        sampled: of each prompt. A sample that has no reward is left out.
        first_group: number of the first prompt's group.
        greedy: the last sample of each prompt is the greedy one. Its reward is the others' baseline; without it the
            others are left out too.
    """
    flat = [(group, prompt, sample) for group, prompt in enumerate(asked) for sample in sampled[group]]
    rewards = reward(table_of([(prompt, sample) for _, prompt, sample in flat]))
    overlong = soft_overlong_punishment(
        torch.tensor([len(sample.token_ids) for _, _, sample in flat]),
        max_tokens=config.rollout.max_tokens,
        overlong_buffer=config.algorithm.overlong_buffer,
        overlong_penalty=config.algorithm.overlong_penalty,
    ).tolist()
    shaped = [None if r is None else r + cost for r, cost in zip(rewards.values, overlong, strict=True)]
    ends = {group: i for i, (group, _, _) in enumerate(flat)} if greedy else {}  # where a prompt's last sample is
    baselines = {group: shaped[i] for group, i in ends.items()}
    responses = [i for i, (group, _, _) in enumerate(flat) if ends.get(group) != i]
    kept = [
        i
        for i in responses
        if shaped[i] is not None and flat[i][2].token_ids and baselines.get(flat[i][0], 0.0) is not None
    ]
    return Scored(
        rollouts=[
            Rollout(
                prompt=prompt.prompt_token_ids,
                response=sample.token_ids,
                log_probs=sample.log_probs,
                reward=shaped[i] or 0.0,
                group=first_group + group,
                temperature=config.rollout.temperature,
                truncated=sample.finish_reason == "length",
                baseline=baselines.get(group) or 0.0,
            )
            for i in kept
            for group, prompt, sample in (flat[i],)
        ],
        rewards=[rewards.values[i] or 0.0 for i in kept],
        components=picked(rewards, kept),
        overlong=[overlong[i] for i in kept],
        unrewarded=len(responses) - len(kept),
    )


def table_of(samples: Sequence[tuple[Prompt, Sample]]) -> pa.Table:
    """The rows that a reward function gets."""
    return pa.table(
        {
            "prompt": pa.array([p.prompt for p, _ in samples], pa.string()),
            "messages": pa.array([p.messages for p, _ in samples], pa.string()),
            "response": pa.array([s.text for _, s in samples], pa.string()),
            "response_token_ids": pa.array([s.token_ids for _, s in samples], pa.list_(pa.int32())),
            "metadata": pa.array([list(p.metadata.items()) for p, _ in samples], pa.map_(pa.string(), pa.string())),
        }
    )


def picked(rewards: Rewards, rows: Sequence[int]) -> dict[str, list[float]]:
    """What each component gave to these rows, where it gave something."""
    return {
        name: [value for i in rows if (value := values[i]) is not None] for name, values in rewards.components.items()
    }


def regroup(groups: list[list[Rollout]], *, first_group: int) -> list[Rollout]:
    """Logged groups as rollouts, numbered on from the fresh ones."""
    return [replace(rollout, group=first_group + i) for i, group in enumerate(groups) for rollout in group]
