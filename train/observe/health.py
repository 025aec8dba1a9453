"""Numbers to watch in each step, and when they end a run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from train.batch.packed import PackedBatch, Rollout
from train.config.training import TrainConfig
from train.context import NothingToLearn, TrainingStopped
from train.data.samples import Scored
from train.objectives.kl import LARGEST_LOG_RATIO, k1
from train.objectives.losses import token_ratio
from train.objectives.values import explained_variance

FIRST_STEPS: Final = 3
"""Steps whose mean response length is what later ones are compared with."""

BOUND_BY_MAX_KL: Final = {
    "kl_ref": "KL to the parent policy",
    "kl_ref_at_end": "after the last update, KL to the parent policy",
    "k2_ref": "half the squared log ratio to the parent policy, of the tokens learned from,",
    "k2_ref_at_end": "after the last update, half the squared log ratio to the parent policy, of tokens learned from,",
}
"""Metrics, and what they are. ``k2_ref`` is of feedback (train/dataflows/offline.py)."""


@dataclass(frozen=True)
class Drawn:
    """What a step drew: fresh and logged responses, those of them that it learns from, and why not from the others."""

    fresh: Scored
    logged: list[Rollout]
    rollouts: list[Rollout]
    uninformative_groups: int = 0
    lone_left_out: int = 0

    @property
    def groups(self) -> int:
        return len({rollout.group for rollout in self.fresh.rollouts + self.logged})

    def __str__(self) -> str:
        return (
            f"of {self.groups} groups, {self.uninformative_groups} have equal rewards; {self.lone_left_out} lone "
            f"responses have none to be compared with; {len(self.rollouts)} responses are left"
        )


def health(drawn: Drawn, batch: PackedBatch | None, updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """The metrics to watch of a step.

    Rewards and lengths are those of all fresh responses or, if nothing is sampled, the logged ones. ``batch`` is what
    the ``updates`` learned from; without any, what they would give is not there.
    """
    return {**of_responses(drawn), **(of_updates(batch, updates) if batch is not None and updates else {"tokens": 0.0})}


def of_responses(drawn: Drawn) -> dict[str, float]:
    """What was drawn, whether it is learned from or not."""
    fresh, logged = drawn.fresh, drawn.logged
    of_logged = [rollout.reward for rollout in logged]
    seen = fresh.rollouts or logged
    reward = torch.tensor(fresh.rewards or of_logged, dtype=torch.float32)
    return {
        "reward": float(reward.mean()),
        "reward_std": float(reward.std()) if len(reward) > 1 else 0.0,
        **{f"reward/{name}": sum(values) / len(values) for name, values in fresh.components.items() if values},
        **{f"missing/{name}": share for name, share in fresh.missing.items() if share},
        **({"reward_traffic": sum(of_logged) / len(logged)} if fresh.rollouts and logged else {}),
        **({"overlong": sum(fresh.overlong) / len(fresh.overlong)} if any(fresh.overlong) else {}),
        ("response_length" if fresh.rollouts else "learned_length"): sum(r.sampled_tokens for r in seen) / len(seen),
        **({"truncated_fraction": sum(r.truncated for r in seen) / len(seen)} if fresh.rollouts else {}),
        **({"turns": sum(r.turns for r in seen) / len(seen)} if any(r.sampled for r in seen) else {}),
        **({"episodes_dropped": float(sum(fresh.dropped.values()))} if fresh.dropped else {}),
        **{f"episodes_dropped/{reason}": float(count) for reason, count in sorted(fresh.dropped.items())},
        "responses": float(len(fresh.rollouts)),
        "learned_responses": float(len(drawn.rollouts)),
        "traffic_responses": float(len(logged)),
        "unrewarded_responses": float(fresh.unrewarded),
        "uninformative_groups": float(drawn.uninformative_groups),
        "uninformative_fraction": drawn.uninformative_groups / drawn.groups,
        "lone_left_out": float(drawn.lone_left_out),
    }


def of_updates(batch: PackedBatch, updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """What was learned from, and the means of the updates. KL and differences of logprobs are nats per token.

    ``kl_ref`` is KL(policy before the updates || reference), as ``kl_to_reference`` has it. ``kl_behaviour`` is
    KL(behaviour || policy before the updates), from tokens that the behaviour sampled.
    ``logprob_difference`` is between training and sampling, of the same tokens under what should be the same weights.
    """
    assert batch.old_log_probs is not None
    mask, fresh = batch.response_mask, batch.response_mask & batch.per_token(batch.fresh)
    old, behaviour = batch.old_log_probs, batch.behaviour_log_probs
    difference = (old - behaviour)[fresh].abs()
    of_critic = {}
    if batch.values is not None and batch.returns is not None:
        of_critic["explained_variance"] = explained_variance(batch.values[mask], batch.returns[mask])
    return {
        **({} if batch.ref_log_probs is None else {"kl_ref": kl_to_reference(batch, old)}),
        "kl_behaviour": float(k1(behaviour, old)[mask].mean()),
        **({"logprob_difference_mean": float(difference.mean())} if len(difference) else {}),
        **({"logprob_difference_max": float(difference.max())} if len(difference) else {}),
        **of_critic,
        "learned_responses": float(len(batch)),
        "tokens": float(len(batch.tokens)),
        "updates": float(len(updates)),
        **means(updates),
    }


def of_policies(step: int, rollouts: Sequence[Rollout]) -> dict[str, float]:
    """How many steps the policies that sampled the tokens of fresh responses are behind the one that learns from them.

    ``partial_fraction``: the share of the responses that several policies sampled.
    """
    by_response = [found for r in rollouts if (found := r.tokens_by_policy)]
    tokens = sum(by_response, Counter[int]())
    if not tokens:
        return {}
    return {
        "staleness_mean": sum((step - version) * count for version, count in tokens.items()) / tokens.total(),
        "staleness_max": float(step - min(tokens)),
        "partial_fraction": sum(len(found) > 1 for found in by_response) / len(by_response),
    }


def means(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric over the updates that have it: a batch need not have thumbs of both kinds, say."""
    found: dict[str, list[float]] = {}
    for update in updates:
        for name, value in update.items():
            found.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in found.items()}


def at_end(batch: PackedBatch, log_probs: Tensor) -> dict[str, float]:
    """What of the policy that would be published no later step can measure. ``log_probs``: its own, float32 [T]."""
    kl = {} if batch.ref_log_probs is None else {"kl_ref_at_end": kl_to_reference(batch, log_probs)}
    return {"log_prob_at_end": float(log_probs[batch.response_mask].mean()), **kl}


def kl_to_reference(batch: PackedBatch, log_probs: Tensor) -> float:
    """KL(policy || reference) of the next token, nats: its mean over the prefixes that were sampled.

    Of fresh tokens alone, if there are any. Each token's k3 is weighed by policy / behaviour (ratios are at most e^20),
    so that the expectation is the policy's KL also where another policy sampled, or this one a step earlier. A term is
    at most reference / behaviour where the policy finds unlikely what was sampled, however unlikely; where it finds it
    much likelier than who sampled it, single terms are large. ``log_probs``: float [T], nats, of the policy.
    """
    assert batch.ref_log_probs is not None
    fresh = batch.response_mask & batch.per_token(batch.fresh)
    tokens = fresh if fresh.any() else batch.response_mask
    policy, ref, behaviour = (x[tokens].double() for x in (log_probs, batch.ref_log_probs, batch.behaviour_log_probs))
    # k3, multiplied out; both ratios are brought down by the same factor where one would pass the bound, so that no
    # term is negative.
    behaviour = torch.maximum(behaviour, torch.maximum(policy, ref) - LARGEST_LOG_RATIO)
    weighed = token_ratio(ref, behaviour) + token_ratio(policy, behaviour) * (policy - ref - 1)
    return float(weighed.mean())


def check_health(config: TrainConfig, history: Sequence[dict[str, float]]) -> None:
    """End a run whose last step was not well.

    Args:
        history: the metrics of all its steps; of each bound that the config sets, the last step may lack the number.

    Raises:
        TrainingStopped: what it was, and the setting that bounds it; NothingToLearn if no step makes an update.
    """
    step, metrics = len(history) - 1, history[-1]
    problems = [f"{name} is {value}" for name, value in metrics.items() if not math.isfinite(value)]
    entropy, length = metrics.get("entropy"), metrics.get("response_length")
    for name, what in BOUND_BY_MAX_KL.items():
        if config.max_kl is not None and metrics.get(name, 0.0) > config.max_kl:
            problems.append(f"{what} {metrics[name]:.4f} passed train.max_kl={config.max_kl:g}")
    if config.min_entropy is not None and entropy is not None and entropy < config.min_entropy:
        problems.append(f"the policy's entropy {entropy:.4g} fell below train.min_entropy={config.min_entropy:g} nats")
    first = [m["response_length"] for m in history[:FIRST_STEPS] if "response_length" in m]
    if config.max_length_growth is not None and length is not None and len(history) > FIRST_STEPS and first:
        before = sum(first) / len(first)
        if length > config.max_length_growth * before:
            problems.append(
                f"responses of {length:.1f} tokens are {length / before:.1f} times as long as at first, above "
                f"train.max_length_growth={config.max_length_growth:g}"
            )
    if problems:
        raise TrainingStopped(f"step {step + 1}: {'; '.join(problems)}; nothing is published")
    idle = 0
    while idle < len(history) and history[-1 - idle]["tokens"] == 0:
        idle += 1
    if idle >= config.max_idle_steps or (idle == len(history) == config.steps):
        raise NothingToLearn(
            f"step {step + 1}: {idle} steps in a row made no update (train.max_idle_steps={config.max_idle_steps}): "
            "all responses to a prompt get the same reward. Have a reward that tells them apart, more responses to a "
            "prompt (train.algorithm.group_size), a higher train.rollout.temperature, or other prompts; nothing is "
            "published"
        )
