"""What each algorithm is trained with: settings, sized so that a trial takes a minute or two on two cores."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from deploy.examples.learn.home import KV_CACHE_BYTES, MAX_MODEL_LEN, MAX_TOKENS
from train.config.algorithms import OFFLINE

ROLLOUT: Final = {"max_tokens": MAX_TOKENS, "max_model_len": MAX_MODEL_LEN, "kv_cache_bytes": KV_CACHE_BYTES}


@dataclass(frozen=True)
class Plan:
    """``items``: prompts a step; of offline algorithms, items. ``algorithm``: its settings, where not its defaults.

    ``minibatches``: updates a step. With two, the second is of a policy that the first has moved, so that what clips
    its ratio is at work.
    """

    steps: int
    items: int
    learning_rate: float
    minibatches: int = 2
    algorithm: dict[str, Any] = field(default_factory=dict)


PLANS: Final = {
    "grpo": Plan(steps=12, items=32, learning_rate=5e-4),
    "dr_grpo": Plan(steps=12, items=32, learning_rate=5e-4),
    "dapo": Plan(steps=12, items=32, learning_rate=5e-4),
    "gspo": Plan(steps=12, items=32, learning_rate=5e-4),
    "cispo": Plan(steps=12, items=32, learning_rate=5e-4),
    "rloo": Plan(steps=12, items=64, learning_rate=5e-4),
    "reinforce_pp": Plan(steps=16, items=256, learning_rate=5e-4),
    "reinforce_pp_baseline": Plan(steps=12, items=32, learning_rate=5e-4),
    "remax": Plan(steps=16, items=256, learning_rate=5e-4),
    "ppo": Plan(steps=20, items=256, learning_rate=5e-4, algorithm={"critic": {"learning_rate": 1e-3}}),
    "online_dpo": Plan(steps=16, items=48, learning_rate=5e-4),
    "best_of_n": Plan(steps=16, items=48, learning_rate=5e-4),
    "rejection_sampling": Plan(steps=16, items=48, learning_rate=5e-4),
    "dpo": Plan(steps=20, items=64, learning_rate=3e-4),
    "kto": Plan(steps=20, items=128, learning_rate=5e-4, algorithm={"beta": 1.0}),
    "sft": Plan(steps=20, items=64, learning_rate=5e-4),
    "reward_model": Plan(steps=30, items=64, learning_rate=1e-3),
}

RECIPES: Final[dict[str, dict[str, Any]]] = {
    "rlaif": {},
    "mix": {
        "judge": {"weight": 3.0},
        "rules": {"brief": {"ready": "length_penalty", "target_tokens": 0, "max_tokens": MAX_TOKENS}},
    },
}
"""Sources of a reward beside a judge (``deploy.examples.learn.judge``), by the name of the trial; ``grpo`` learns."""


PEOPLE: Final = {"rlhf_thumbs": "thumb", "rlhf_pairs": "preference"}
"""The kind of feedback that a reward model learns from, and nothing else, by the name of the trial; ``grpo`` learns."""


def settings(name: str, plan: Plan, *, steps: int | None, seed: int) -> dict[str, Any]:
    """The section ``train`` of a trial. One rank in one process, so that Ray's start is saved."""
    return {
        "launcher": "torchrun",
        "dtype": "float32",
        "seed": seed,
        "steps": steps or plan.steps,
        "minibatches": plan.minibatches,
        "micro_batch_tokens": 4096,
        "checkpoint": {"every_steps": None},
        "algorithm": {"name": name, **plan.algorithm},
        "optimizer": {"learning_rate": plan.learning_rate},
        "data": {"prompts_per_step": plan.items, "min_prompts": 1},
        **({} if name in OFFLINE else {"rollout": ROLLOUT}),
    }
