"""Samples with their rewards, and those of them that an algorithm learns from."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import pyarrow as pa
import torch

from feedback.datasets import Prompt
from train.batch.packed import Rollout, Sample
from train.config.training import TrainConfig
from train.data.logged.traffic import differ
from train.data.rewards import RewardFunction
from train.objectives.shaping import soft_overlong_punishment


@dataclass(frozen=True)
class Scored:
    """Responses that were sampled and rewarded.

    ``rewards``: of each, before its length cost anything. ``components``: the values of each rule, by name,
    where it has one. ``overlong``: what lengths cost. ``unrewarded``: responses without a reward. ``dropped``: episodes
    with an environment that can't be learned from, by reason.
    ``missing``: the share of the responses for which a component has no value, by name; of the last ones, where several
    were added.
    """

    rollouts: list[Rollout] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    components: dict[str, list[float]] = field(default_factory=dict)
    overlong: list[float] = field(default_factory=list)
    unrewarded: int = 0
    missing: dict[str, float] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)

    def __add__(self, other: Scored) -> Scored:
        names = self.components.keys() | other.components.keys()
        return Scored(
            self.rollouts + other.rollouts,
            self.rewards + other.rewards,
            {name: self.components.get(name, []) + other.components.get(name, []) for name in sorted(names)},
            self.overlong + other.overlong,
            self.unrewarded + other.unrewarded,
            other.missing or self.missing,
            dict(Counter(self.dropped) + Counter(other.dropped)),
        )


def score(
    prompts: Sequence[Prompt],
    sampled: Sequence[Sequence[Sample]],
    reward: RewardFunction,
    config: TrainConfig,
    *,
    first_group: int = 0,
    greedy: bool = False,
) -> Scored:
    """Reward the samples, and shape the rewards by length; one group per prompt.

    Args:
        sampled: of each prompt. A sample that has no reward is left out.
        first_group: number of the first prompt's group.
        greedy: the last sample of each prompt is the greedy one. Its reward is the others' baseline; without it the
            others are left out too.
    """
    flat = [(group, prompt, sample) for group, prompt in enumerate(prompts) for sample in sampled[group]]
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
                token_rewards=_shaped(rewards.tokens, i, overlong[i]),
                prompt=prompt.prompt_token_ids,
                response=sample.token_ids,
                log_probs=sample.log_probs,
                reward=shaped[i] or 0.0,
                group=first_group + group,
                temperature=config.rollout.temperature,
                truncated=sample.finish_reason == "length",
                policies=sample.policies,
                baseline=baselines.get(group) or 0.0,
            )
            for i in kept
            for group, prompt, sample in (flat[i],)
        ],
        rewards=[rewards.values[i] or 0.0 for i in kept],
        components={
            name: [value for i in kept if (value := values[i]) is not None]
            for name, values in rewards.components.items()
            if ":" not in name  # train.reward is the whole reward
        },
        missing={name: sum(why is not None for why in whys) / len(flat) for name, whys in rewards.reasons.items()},
        overlong=[overlong[i] for i in kept],
        unrewarded=len(responses) - len(kept),
    )


def _shaped(tokens: Sequence[list[float] | None] | None, row: int, cost: float) -> list[float] | None:
    """The rewards of a response's tokens, of which the last one costs its length; None if there are none."""
    if tokens is None or (own := tokens[row]) is None:
        return None
    return [*own[:-1], own[-1] + cost]


def table_of(samples: Sequence[tuple[Prompt, Sample]]) -> pa.Table:
    """The rows that a reward gets; functions see those of ``feedback.scoring.sources.rules.COLUMNS`` of it."""
    return pa.table(
        {
            "prompt": pa.array([p.prompt for p, _ in samples], pa.string()),
            "prompt_token_ids": pa.array([p.prompt_token_ids for p, _ in samples], pa.list_(pa.int32())),
            "messages": pa.array([p.messages for p, _ in samples], pa.string()),
            "response": pa.array([s.text for _, s in samples], pa.string()),
            "response_token_ids": pa.array([s.token_ids for _, s in samples], pa.list_(pa.int32())),
            "metadata": pa.array([list(p.metadata.items()) for p, _ in samples], pa.map_(pa.string(), pa.string())),
        }
    )


@dataclass(frozen=True)
class Informative:
    """What an algorithm that compares a group learns from, of some rollouts, and how many teach it nothing.

    Nothing is learned from if no group, and no two lone responses, have different rewards.
    """

    rollouts: list[Rollout]
    groups: int  # with different rewards, that are in ``rollouts``
    uninformative: int  # groups whose rewards are all equal
    left_alone: int  # responses left out for want of any to compare them with

    @classmethod
    def of(
        cls,
        rollouts: list[Rollout],
        singleton_baseline: Literal["batch", "leave_out"],
        *,
        filter_groups: bool = False,
        by_turn: bool = False,
    ) -> Informative:
        """Pick them.

        Logged responses that are alone in their group are compared with each other, or left out. A fresh one is alone
        only because the others of its group got no reward; it is left out: the mean reward of other prompts is no
        baseline for it. With ``filter_groups``, groups with equal rewards are left out; ``by_turn``:
        those of each turn count, and not their sum.
        """
        by_group: dict[int, list[Rollout]] = defaultdict(list)
        for rollout in rollouts:
            by_group[rollout.group].append(rollout)
        several = [group for group in by_group.values() if len(group) > 1]
        different = [group for group in several if differ(group, by_turn=by_turn)]
        alone = [group[0] for group in by_group.values() if len(group) == 1]
        logged = [rollout for rollout in alone if not rollout.fresh]
        compared = logged if singleton_baseline == "batch" and logged and differ(logged, by_turn=by_turn) else []
        kept = different if filter_groups else several
        return cls(
            rollouts=[r for group in kept for r in group] + compared if different or compared else [],
            groups=len(different),
            uninformative=len(several) - len(different),
            left_alone=len(alone) - len(compared),
        )
