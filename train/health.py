"""Numbers to watch in each step, and when they end a run."""

from __future__ import annotations

import math

from train.advantages import uninformative
from train.batch import PackedBatch
from train.config import TrainConfig
from train.context import TrainingStopped
from train.kl import k1, k3


def health(batch: PackedBatch, updates: list[dict[str, float]]) -> dict[str, float]:
    """What to watch: rewards of the fresh rollouts; KL and logprob differences by token, nats; means of the updates."""
    assert batch.old_log_probs is not None
    fresh = batch.fresh
    mask = batch.response_mask & batch.per_token(fresh)
    old, behaviour = batch.old_log_probs[mask], batch.behaviour_log_probs[mask]
    ref = None if batch.ref_log_probs is None else batch.ref_log_probs[mask]
    rewards = batch.rewards[fresh]
    return {
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std()) if len(rewards) > 1 else 0.0,
        **({} if ref is None else {"kl_ref": float(k3(old, ref).mean())}),
        "kl_behaviour": float(k1(behaviour, old).mean()),
        "logprob_difference_mean": float((old - behaviour).abs().mean()),
        "logprob_difference_max": float((old - behaviour).abs().max()),
        "response_length": float((batch.lengths - batch.prompt_lengths)[fresh].float().mean()),
        "uninformative_fraction": float(uninformative(rewards, batch.groups[fresh]).float().mean()),
        "responses": float(fresh.sum()),
        "traffic_responses": float((~fresh).sum()),
        "tokens": float(len(batch.tokens)),
        **{name: sum(u[name] for u in updates) / len(updates) for name in updates[0]},
    }


def check_health(config: TrainConfig, step: int, metrics: dict[str, float]) -> None:
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise TrainingStopped(f"step {step}: {name} is {value}; nothing is published")
    if config.max_kl is not None and metrics["kl_ref"] > config.max_kl:
        raise TrainingStopped(
            f"step {step}: KL to the parent policy {metrics['kl_ref']:.4f} passed "
            f"train.max_kl={config.max_kl}; nothing is published"
        )
