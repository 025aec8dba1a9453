"""Settings of the algorithms. Imports no torch, so that a config is checked before anything is loaded."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import Field, model_validator

from feedback.section import Section

ONLINE: Final = (
    *("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "remax", "ppo"),
)
"""Algorithms that learn from responses and their rewards."""

OFFLINE: Final = ("dpo", "kto", "sft", "reward_model")
"""Algorithms that learn from what people said of responses; nothing is sampled."""


class KlConfig(Section):
    """The KL to the parent policy, as a part of what is optimised."""

    coefficient: float = Field(0.0, ge=0, description="Its weight; 0: none.")
    placement: Literal["loss", "reward"] = Field(
        "loss", description="loss: added to each token's loss. reward: taken from the reward before advantages are."
    )
    estimator: Literal["k1", "k2", "k3", "k3_unbiased"] = Field(
        "k3",
        description="Estimator of it, by sampled tokens. k3_unbiased: k3, with an unbiased gradient.",
    )
    target: float | None = Field(
        None, gt=0, description="Nats a token that the coefficient is adapted to hold; fixed if unset."
    )
    horizon: int = Field(
        10, ge=1, description="Steps in which the adapted coefficient can change by a factor of e^0.2."
    )
    min_coefficient: float = Field(1e-4, gt=0, description="Least value of the adapted coefficient.")
    max_coefficient: float = Field(10.0, gt=0, description="Largest value of the adapted coefficient.")


class CorrectionConfig(Section):
    """How tokens that another policy, or another engine, sampled are corrected for."""

    form: Literal["none", "truncate", "mask"] = Field(
        "truncate",
        description="What is done with the ratio of the trainer's policy at the start of the step to the behaviour "
        "policy. truncate: weighs the loss, capped. mask: weighs it within floor and cap; outside, nothing is learned.",
    )
    level: Literal["token", "sequence"] = Field(
        "token", description="token: a ratio for each token. sequence: the product over the response."
    )
    cap: float = Field(2.0, gt=0, description="The largest ratio.")
    floor: float = Field(0.0, ge=0, description="The least ratio (form mask).")
    geometric_low: float | None = Field(
        None, gt=0, description="Responses whose geometric mean ratio is below it teach nothing."
    )
    geometric_high: float | None = Field(
        None, gt=0, description="Responses whose geometric mean ratio is above it teach nothing."
    )
    proximal: Literal["old", "behaviour"] = Field(
        "old",
        description="The policy that the clip is centred on. old: the trainer's at the start of the step, so that "
        "there are three (decoupled). behaviour: the one that sampled; the clip is then the only correction.",
    )
    max_staleness: int | None = Field(
        None, ge=0, description="Logged responses of policies more versions older than the parent are left out."
    )


class CriticConfig(Section):
    """The critic, which says how good each token's position is (PPO)."""

    learning_rate: float = Field(1e-5, gt=0, description="Peak learning rate.")
    warmup_steps: int = Field(0, ge=0, description="First steps in which the critic alone learns.")
    gamma: float = Field(1.0, gt=0, le=1, description="Discount a token.")
    lam: float = Field(0.95, ge=0, le=1, description="Lambda of GAE.")
    value_clip: float | None = Field(0.2, gt=0, description="A value moves by no more from the old one; null: no clip.")


class AlgorithmConfig(Section):
    """What is learned from scored responses, or from feedback. What is unset is as the algorithm's paper has it."""

    name: str = Field(
        "grpo",
        description=f"The algorithm: {', '.join((*ONLINE, *OFFLINE))}, or module:class, a subclass of "
        "train.algorithms.base.Algorithm.",
    )
    group_size: int = Field(8, ge=1, description="Responses sampled for each prompt.")
    aggregation: Literal["token_mean", "sequence_mean", "constant_length"] = Field(
        "sequence_mean",
        description="What the loss is the mean of. token_mean: all tokens of the batch. sequence_mean: each response's "
        "mean. constant_length: each response's sum over train.rollout.max_tokens.",
    )
    clip_low: float = Field(0.2, gt=0, description="The policy ratio is clipped below 1 - clip_low.")
    clip_high: float = Field(0.2, gt=0, description="The policy ratio is clipped above 1 + clip_high.")
    dual_clip: float | None = Field(
        None, gt=1, description="Where the advantage is negative, the loss is at most this times its size."
    )
    kl: KlConfig = Field(default_factory=KlConfig, description="The KL to the parent policy.")
    correction: CorrectionConfig = Field(
        default_factory=CorrectionConfig, description="Correction for other policies' samples."
    )
    critic: CriticConfig = Field(default_factory=CriticConfig, description="The critic (ppo).")
    lone_baseline: Literal["batch", "leave_out"] = Field(
        "batch",
        description="What a response is compared with that has no group, as traffic brings them. batch: the mean "
        "reward of the batch's lone responses. leave_out: nothing, it is left out and counted.",
    )
    resample_rounds: int = Field(
        0,
        ge=0,
        description="Times that more prompts are sampled in place of those whose responses all have one reward "
        "(dynamic sampling).",
    )
    overlong_buffer: int = Field(
        0, ge=0, description="Tokens before train.rollout.max_tokens from which on length costs reward; 0: none."
    )
    overlong_penalty: float = Field(1.0, ge=0, description="What the longest response costs (overlong_buffer).")
    beta: float = Field(0.1, gt=0, description="How strongly the policy is held to its parent (dpo, kto).")
    preference_loss: Literal["sigmoid", "ipo"] = Field("sigmoid", description="Loss of a pair (dpo).")
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="Share of pairs thought to be mislabelled (dpo: cDPO)."
    )
    desirable_weight: float = Field(1.0, gt=0, description="Weight of responses with a thumb up (kto).")
    undesirable_weight: float = Field(1.0, gt=0, description="Weight of responses with a thumb down (kto).")
    options: dict[str, Any] = Field({}, description="Settings of an algorithm of your own.")

    @model_validator(mode="before")
    @classmethod
    def _as_the_algorithm_has_it(cls, given: Any) -> Any:
        return {**DEFAULTS.get(given.get("name", "grpo"), {}), **given} if isinstance(given, dict) else given

    @property
    def is_offline(self) -> bool:
        """Whether it learns from feedback, and nothing is sampled."""
        return self.name in OFFLINE


DEFAULTS: Final[dict[str, dict[str, Any]]] = {
    "dr_grpo": {"aggregation": "constant_length"},
    "dapo": {
        "aggregation": "token_mean",
        "clip_high": 0.28,
        "resample_rounds": 2,
    },
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {"aggregation": "token_mean", "clip_low": 1.0, "clip_high": 4.0},
    "rloo": {"group_size": 4},
    "reinforce_pp": {"group_size": 1, "aggregation": "token_mean"},
    "reinforce_pp_baseline": {"aggregation": "token_mean"},
    "remax": {"group_size": 1, "aggregation": "token_mean"},
    "ppo": {"group_size": 1, "aggregation": "token_mean"},
}
"""What differs from the fields' own defaults, by algorithm."""
