"""What a run learns from, and how samples become rollouts with rewards."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from feedback.datasets import Prompt, prompts, rollouts
from feedback.lake import Lake
from train.batch import Rollout
from train.config import RolloutConfig, TrainConfig
from train.context import TrainingStopped
from train.data import Cycled, TrafficGroups


@dataclass(frozen=True)
class TrainingData:
    """Prompts and logged groups, in the order in which a run's steps draw them."""

    prompts: Cycled
    traffic: Cycled
    too_long: int
    refused: int  # logged responses that were sampled below full support
    digest: str  # of all of it

    @classmethod
    def of(cls, lake: Lake, versions: Mapping[str, int], config: TrainConfig, policy: Path, seed: int) -> TrainingData:
        """What the lake held at these versions.

        Raises:
            feedback.lake.LakeError: it can't be read any more.
        """
        asked = prompts(lake, versions=versions, limit=config.data.max_prompts)
        longest = longest_prompt(config, policy)
        usable = [p for p in asked if len(p.prompt_token_ids) <= longest]
        count = config.data.traffic_prompts_per_step
        traffic = TrafficGroups.of(rollouts(lake, versions=versions)) if count else TrafficGroups([], 0)
        content = repr([p.prompt_token_ids for p in usable]) + repr(traffic.groups)
        return cls(
            prompts=Cycled(usable, config.data.fresh_prompts_per_step, f"{seed}:prompts"),
            traffic=Cycled(traffic.groups, min(count, len(traffic.groups)), f"{seed}:traffic"),
            too_long=len(asked) - len(usable),
            refused=traffic.refused,
            digest=hashlib.sha256(content.encode()).hexdigest(),
        )

    @property
    def usable(self) -> int:
        """Prompts that there are."""
        return len(self.prompts.items)

    def __str__(self) -> str:
        return (
            f"{len(self.prompts.items)} prompts ({self.too_long} too long), {len(self.traffic.items)} groups of "
            f"traffic ({self.refused} responses sampled below full support left out)"
        )


def longest_prompt(config: TrainConfig, policy: Path) -> int:
    """Tokens that a prompt may have beside a response of ``max_tokens``."""
    length = config.rollout.max_model_len
    if length is None:
        length = json.loads((policy / "config.json").read_text())["max_position_embeddings"]
    room = length - config.rollout.max_tokens
    if room < 1:
        raise ValueError(
            f"train.rollout.max_tokens={config.rollout.max_tokens} leaves no room for a prompt in {length} tokens "
            "of context"
        )
    return room


def score(
    asked: list[Prompt], sampled: list[list[Any]], reward: Callable[[pa.Table], Any], config: RolloutConfig
) -> list[Rollout]:
    """Reward the samples; one group a prompt. A sample that the rule has no reward for is left out."""
    flat = [(group, prompt, s) for group, prompt in enumerate(asked) for s in sampled[group]]
    rewards = reward(
        pa.table(
            {
                "prompt": pa.array([p.prompt for _, p, _ in flat], pa.string()),
                "messages": pa.array([p.messages for _, p, _ in flat], pa.string()),
                "response": pa.array([s.text for _, _, s in flat], pa.string()),
                "response_token_ids": pa.array([s.token_ids for _, _, s in flat], pa.list_(pa.int32())),
                "metadata": pa.array([list(p.metadata.items()) for _, p, _ in flat], pa.map_(pa.string(), pa.string())),
            }
        )
    )
    scored = [
        Rollout(
            prompt=p.prompt_token_ids,
            response=s.token_ids,
            log_probs=s.log_probs,
            reward=float(r),
            group=group,
            temperature=config.temperature,
            truncated=s.finish_reason == "length",
        )
        for (group, p, s), r in zip(flat, rewards, strict=True)
        if r is not None and s.token_ids
    ]
    if not scored:
        raise TrainingStopped("the reward function gave no reward to any of the sampled responses")
    return scored


def regroup(groups: list[list[Rollout]], *, first_group: int) -> list[Rollout]:
    """Logged groups as rollouts, numbered on from the fresh ones."""
    return [replace(rollout, group=first_group + i, fresh=False) for i, group in enumerate(groups) for rollout in group]
