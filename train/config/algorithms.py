"""Settings of the algorithms. Imports no torch, so that a config is checked before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field, model_validator

from feedback.config import ApiConfig
from feedback.settings_base import FUNCTION, Section
from train.config.sections import AdapterConfig

ONLINE: Final = (
    *("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "remax", "ppo"),
)
"""Algorithms that learn from responses and their rewards, by a policy gradient."""

ONLINE_DPO: Final = "online_dpo"
"""The algorithm that learns from pairs of fresh responses, by their rewards."""

BEST_OF_N: Final = "best_of_n"
REJECTION_SAMPLING: Final = "rejection_sampling"
SELECTING: Final = (BEST_OF_N, REJECTION_SAMPLING)
"""Algorithms that learn the best of fresh responses, or the good ones, as if people had written them."""
DISTILL: Final = "distill"
"""The algorithm that learns from responses and what a teacher gives their tokens."""

GROUPED: Final = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp_baseline")
"""Those of ``ONLINE`` that compare a response with the others to its prompt."""

ANY_SUPPORT: Final = (ONLINE_DPO, *SELECTING)
"""Those that need no logprobs of what they sample, which may so be of the likeliest tokens alone."""

REWARD_MODEL: Final = "reward_model"
"""The algorithm that trains no policy."""

OFFLINE: Final = ("dpo", "kto", "sft", REWARD_MODEL)
"""Algorithms that learn from feedback; nothing is sampled."""

NAMES: Final = (*ONLINE, ONLINE_DPO, DISTILL, *SELECTING, *OFFLINE)
"""Millrace's own, all of them."""

_BY_GRADIENT: Final = (*ONLINE, DISTILL)


class KlConfig(Section):
    """The KL to the parent policy, as a part of what is optimised."""

    coefficient: float = Field(0.0, ge=0, description="Its weight; 0: none.")
    placement: Literal["loss", "reward"] = Field(
        "loss", description="loss: added to each token's loss. reward: taken from the reward before advantages are."
    )
    estimator: Literal["k1", "k2", "k3", "k3_unbiased"] = Field(
        "k3",
        description="Estimator of it, by sampled tokens. In the loss its gradient counts, weighed as the loss is: "
        "unbiased with k2 and with k3_unbiased (the value of k3), biased with k3, without effect with k1.",
    )
    target: float | None = Field(
        None, gt=0, description="Nats a token that the coefficient is adapted to hold; fixed if unset."
    )
    horizon: int = Field(
        10, ge=1, description="Steps in which the adapted coefficient can change by a factor of e^0.2."
    )
    min_coefficient: float = Field(1e-4, gt=0, description="Least value of the adapted coefficient.")
    max_coefficient: float = Field(10.0, gt=0, description="Largest value of the adapted coefficient.")

    @model_validator(mode="after")
    def _can_work(self) -> KlConfig:
        if self.target is not None and self.coefficient == 0:
            raise ValueError(
                f"train.algorithm.kl.target={self.target} needs a coefficient to start from; set "
                "train.algorithm.kl.coefficient, for example to 0.01, or set the target to null"
            )
        if self.coefficient > 0 and self.placement == "loss" and self.estimator == "k1":
            raise ValueError(
                "train.algorithm.kl.estimator=k1 has a gradient of mean zero in the loss, and holds the policy to "
                "nothing; use k2, k3 or k3_unbiased, or set train.algorithm.kl.placement to reward"
            )
        if self.min_coefficient > self.max_coefficient:
            raise ValueError(
                f"train.algorithm.kl.min_coefficient={self.min_coefficient} is above train.algorithm.kl."
                f"max_coefficient={self.max_coefficient}; set it to at most that"
            )
        return self


class CorrectionConfig(Section):
    """How tokens that another policy, or another engine, sampled are corrected for."""

    form: Literal["none", "truncate", "mask"] = Field(
        "truncate",
        description="What is done with the ratio of the trainer's policy at the start of the step to the behaviour "
        "policy. truncate: weighs the loss, capped. mask: weighs it within floor and cap; outside, nothing is learned.",
    )
    level: Literal["auto", "token", "sequence"] = Field(
        "auto",
        description="token: a ratio for each token. sequence: the product over the response, which is what a reward is "
        "of. auto: token for fresh samples, sequence for logged ones.",
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
        None,
        ge=0,
        description="Logged responses of policies more than this many versions from the parent are left out; of "
        "several policies the furthest counts. Unset: all are learned from.",
    )

    @model_validator(mode="after")
    def _bounds_suit(self) -> CorrectionConfig:
        for low, high in (("floor", "cap"), ("geometric_low", "geometric_high")):
            least, most = getattr(self, low), getattr(self, high)
            if least is not None and most is not None and least > most:
                raise ValueError(
                    f"train.algorithm.correction.{low}={least} is above train.algorithm.correction.{high}={most}: no "
                    "ratio is within; set it to less"
                )
        return self


class CriticConfig(Section):
    """The critic, which estimates the value of the state before each token (PPO)."""

    model: Path | None = Field(
        None,
        description="Folder of a reward model with the policy's tokens that it starts from, as InstructGPT's does; the "
        "parent policy with a head of zeros if unset.",
    )
    learning_rate: float = Field(
        1e-5, gt=0, description="Peak learning rate; how it is reached, and all else, is as train.optimizer says."
    )
    lora: AdapterConfig | None = Field(
        None, description="Train low-rank adapters and the head, in place of all of the critic's weights."
    )
    warmup_steps: int = Field(0, ge=0, description="First steps in which the critic alone learns.")
    gamma: float = Field(1.0, gt=0, le=1, description="Discount per token.")
    lam: float = Field(0.95, ge=0, le=1, description="Lambda of GAE.")
    value_clip: float | None = Field(
        0.2, gt=0, description="A value moves by no more from the old one, in the reward's unit; null: no clip."
    )


class AlgorithmConfig(Section):
    """What is learned from scored responses, or from feedback. What is unset is as the algorithm's paper has it."""

    name: str = Field(
        "grpo",
        description=f"The algorithm: {', '.join(NAMES)}, or module:class, a subclass of "
        "train.algorithms.base.Algorithm.",
    )
    group_size: int = Field(8, ge=1, description="Responses sampled for each prompt.")
    aggregation: Literal["token_mean", "sequence_mean", "constant_length"] = Field(
        "sequence_mean",
        description="What the loss is the mean of. token_mean: all tokens of the batch. sequence_mean: each response's "
        "mean. constant_length: each response's sum over train.rollout.max_tokens.",
    )
    max_tokens: int | None = Field(
        None, ge=1, description="The length of aggregation constant_length; train.rollout.max_tokens if unset."
    )
    credit: Literal["episode", "turn"] = Field(
        "episode",
        description="What an advantage is of, with train.environment or logged sessions. episode: the sum of all "
        "rewards, for all tokens of an episode. turn: the rewards from a turn on, compared with those of the turns of "
        "the same number; with ppo and reinforce_pp each reward comes with its turn's last token.",
    )
    clip_low: float = Field(0.2, gt=0, le=1, description="The policy ratio is clipped below 1 - clip_low.")
    clip_high: float = Field(0.2, gt=0, description="The policy ratio is clipped above 1 + clip_high.")
    dual_clip: float | None = Field(
        None, gt=1, description="Where the advantage is negative, the loss is at most this times its size."
    )
    kl: KlConfig = Field(default_factory=KlConfig, description="The KL to the parent policy.")
    correction: CorrectionConfig = Field(
        default_factory=CorrectionConfig, description="Correction for other policies' samples."
    )
    teacher: ApiConfig | None = Field(
        None, description="The policy to learn from, behind an OpenAI-compatible API that echoes logprobs (distill)."
    )
    critic: CriticConfig = Field(default_factory=CriticConfig, description="The critic (ppo).")
    lone_baseline: Literal["batch", "leave_out"] = Field(
        "batch",
        description="What a response is compared with that has no group, as traffic brings them. batch: the mean "
        "reward of the batch's lone responses. leave_out: nothing, it is left out and counted.",
    )
    filter_groups: bool = Field(
        False,
        description="Leave out groups whose responses all have one reward, before the loss is averaged; true for dapo, "
        "and where resample_rounds is set. Kept, they have advantage 0, and count in what the loss is the mean of.",
    )
    resample_rounds: int = Field(
        0,
        ge=0,
        description="Times that more prompts are sampled in place of those whose responses all have one reward "
        "(dynamic sampling).",
    )
    overlong_buffer: int = Field(
        0,
        ge=0,
        description="Tokens before train.rollout.max_tokens from which on length costs reward; 0: none. dapo: a fifth "
        "of train.rollout.max_tokens if unset.",
    )
    overlong_penalty: float = Field(1.0, ge=0, description="What the longest response costs (overlong_buffer).")
    mask_truncated: bool = Field(
        False,
        description="Responses that ended at the longest length are compared with the others, and not learned from "
        "(overlong filtering).",
    )
    min_reward: float | None = Field(
        None,
        description="Responses with less reward, after what their length costs, are not learned from "
        "(rejection_sampling: 1 if unset; best_of_n: if unset the best counts, however good it is).",
    )
    entropy_coefficient: float = Field(
        0.0, ge=0, description="Weight of the entropy bonus, which is taken from each token's loss; 0: none."
    )
    gamma: float = Field(
        1.0, gt=0, le=1, description="Discount per token of the return (reinforce_pp); ppo's is critic.gamma."
    )
    beta: float = Field(0.1, gt=0, description="How strongly the policy is held to its parent (dpo, kto).")
    preference_loss: Literal["sigmoid", "ipo"] = Field(
        "sigmoid",
        description="Loss of a pair (dpo). ipo: squared distance of the log ratios' difference from 1 / (2 beta).",
    )
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="Share of pairs thought to be mislabelled (dpo: cDPO)."
    )
    vote_noise: float = Field(
        0.05,
        ge=0,
        lt=0.5,
        description="Share of votes and choices that are the opposite of what was meant (reward_model).",
    )
    desirable_weight: float | None = Field(
        None,
        gt=0,
        description="Weight of responses with a thumb up (kto). If neither weight is set, the rarer kind of thumb is "
        "weighed up until the thumbs up weigh between 1 and 1.5 times as much as the thumbs down, in all.",
    )
    undesirable_weight: float | None = Field(None, gt=0, description="Weight of responses with a thumb down (kto).")
    thumbs_up: bool = Field(
        False, description="Learn from responses with a thumb up too, as if people had written them (sft)."
    )
    offline: bool = Field(
        False, description="An algorithm of your own learns from feedback (its ``dataset``), and nothing is sampled."
    )
    options: dict[str, Any] = Field({}, description="Settings of an algorithm of your own.")

    @model_validator(mode="before")
    @classmethod
    def _as_the_algorithm_has_it(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        defaults = DEFAULTS.get(str(values.get("name")), {})
        if values.get("resample_rounds") not in (None, 0, "0"):
            defaults = {**defaults, "filter_groups": True}
        return _merged(defaults, values)

    @model_validator(mode="after")
    def _can_work(self) -> AlgorithmConfig:
        own = FUNCTION.fullmatch(self.name) is not None
        if not own and self.name not in NAMES:
            raise ValueError(
                f"train.algorithm.name={self.name!r} is not an algorithm; use 'module:class', or one of "
                f"{', '.join(NAMES)}"
            )
        for name, readers in READ_BY.items():
            value, usual = getattr(self, name), type(self).model_fields[name].get_default(call_default_factory=True)
            if not own and self.name not in readers and value != usual:
                changed = _changed(name, value, usual)
                do = f"{', '.join(readers)} {'does' if len(readers) == 1 else 'do'}" if readers else "your own may"
                raise ValueError(f"{changed}: {self.name} does not read it ({do}); take it out, or set another name")
        if self.name == DISTILL and self.teacher is None:
            raise ValueError(
                "train.algorithm.name=distill needs a policy to learn from: set train.algorithm.teacher.url and "
                "train.algorithm.teacher.model"
            )
        if self.name in _BY_GRADIENT:
            self.check_proximal(clips=self.name in _CLIPPED)
        if self.resample_rounds > 0 and not self.filter_groups:
            raise ValueError(
                f"train.algorithm.resample_rounds={self.resample_rounds} samples prompts in place of groups that are "
                "left out, and train.algorithm.filter_groups=False leaves none out; set it to true, or "
                "resample_rounds to 0"
            )
        if self.name == BEST_OF_N and self.lone_baseline == "batch":
            raise ValueError(
                f"train.algorithm.lone_baseline=batch: {self.name} learns the best of several responses to one prompt, "
                "which a logged one without a group is not; take it out"
            )
        if self.name == REJECTION_SAMPLING and self.min_reward is None:
            raise ValueError(f"train.algorithm.min_reward=null: {self.name} learns what has at least that; set it")
        if self.preference_loss == "ipo" and self.label_smoothing > 0:
            raise ValueError(
                f"train.algorithm.label_smoothing={self.label_smoothing} belongs to train.algorithm.preference_loss="
                "sigmoid; set it to 0, since ipo does not take any pair for certain"
            )
        return self

    def with_lengths(self, max_tokens: int) -> AlgorithmConfig:
        """What is unset and depends on the longest response that is sampled, set."""
        lengths = self.lengths(max_tokens)
        if self.max_tokens is not None:
            lengths.pop("max_tokens", None)
        if "overlong_buffer" in self.model_fields_set:
            lengths.pop("overlong_buffer", None)
        return self.model_copy(update=lengths)

    def lengths(self, max_tokens: int) -> dict[str, int]:
        """What the longest response that is sampled makes of settings that depend on it, where they are unset."""
        lengths: dict[str, int] = {}
        if self.aggregation == "constant_length":
            lengths["max_tokens"] = max_tokens
        if self.name == "dapo":
            lengths["overlong_buffer"] = max_tokens // 5  # of the paper's 20480 tokens, 4096
        return lengths

    def following(self, max_tokens: int) -> dict[str, Any]:
        """What other settings make of those that are unset: ``max_tokens`` is the longest response sampled."""
        return {**self.lengths(max_tokens), **({"filter_groups": True} if self.resample_rounds else {})}

    def check_proximal(self, *, clips: bool) -> None:
        """Raise ValueError if a clip is all that would correct for other policies' samples, and there is none.

        Args:
            clips: whether the algorithm's surrogate is bounded.
        """
        if self.correction.proximal == "behaviour" and not clips:
            raise ValueError(
                "train.algorithm.correction.proximal=behaviour makes the clip the only correction, and "
                f"{self.name} has none: a single token could weigh e^20; set it to old"
            )

    @property
    def is_offline(self) -> bool:
        """Whether it learns from feedback, and nothing is sampled."""
        return self.name in OFFLINE or self.offline

    @property
    def trains_policy(self) -> bool:
        """Whether a policy comes of it; else it is a reward model."""
        return self.name != REWARD_MODEL


def _changed(name: str, value: Any, usual: Any) -> str:
    """The setting, or those of the section, that differs from what is usual."""
    if not isinstance(value, Section):
        return f"train.algorithm.{name}={value}"
    if usual is None:
        return f"train.algorithm.{name}"
    differ = [(inner, v) for inner, v in value if v != getattr(usual, inner)]
    return ", ".join(f"train.algorithm.{name}.{inner}={v}" for inner, v in differ)


def _merged(defaults: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """``values``, and the defaults of what they leave unset, in sections too."""
    both = {k for k, v in defaults.items() if isinstance(v, dict) and isinstance(values.get(k), dict)}
    return {**defaults, **values, **{k: _merged(defaults[k], values[k]) for k in both}}


_KL_IN_THE_REWARD: Final = {"placement": "reward", "estimator": "k1"}

DEFAULTS: Final[dict[str, dict[str, Any]]] = {
    "dr_grpo": {"aggregation": "constant_length"},
    "dapo": {
        "aggregation": "token_mean",
        "clip_high": 0.28,
        "filter_groups": True,
        "resample_rounds": 2,
    },
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {"aggregation": "token_mean", "clip_low": 1.0, "clip_high": 4.0},
    "rloo": {"group_size": 4, "aggregation": "constant_length", "kl": _KL_IN_THE_REWARD},
    "reinforce_pp": {"group_size": 1, "aggregation": "token_mean", "kl": _KL_IN_THE_REWARD},
    "reinforce_pp_baseline": {"aggregation": "token_mean", "kl": {"estimator": "k2"}},
    "remax": {"group_size": 1, "aggregation": "constant_length", "kl": _KL_IN_THE_REWARD},
    "ppo": {"group_size": 1, "aggregation": "token_mean", "kl": _KL_IN_THE_REWARD},
    ONLINE_DPO: {"filter_groups": True},
    BEST_OF_N: {"filter_groups": True, "lone_baseline": "leave_out"},
    REJECTION_SAMPLING: {"min_reward": 1.0},
    DISTILL: {"group_size": 1, "aggregation": "token_mean"},
}
"""What differs from the fields' own defaults, by algorithm: as its paper has it, but for the size of the groups and the
weight of the KL, which is 0 for all. How large that should be depends on the rewards; where it goes, and by which
estimator, is the paper's."""

_CLIPPED: Final = tuple(name for name in _BY_GRADIENT if name not in ("rloo", "remax"))

READ_BY: Final[dict[str, tuple[str, ...]]] = {
    "group_size": (*_BY_GRADIENT, ONLINE_DPO, *SELECTING),
    **dict.fromkeys(("aggregation", "max_tokens", "kl", "correction", "entropy_coefficient"), _BY_GRADIENT),
    **dict.fromkeys(("overlong_buffer", "overlong_penalty", "mask_truncated"), (*ONLINE, ONLINE_DPO, *SELECTING)),
    "min_reward": SELECTING,
    "gamma": ("reinforce_pp",),
    "credit": (*GROUPED, "reinforce_pp", "ppo"),
    **dict.fromkeys(("clip_low", "clip_high"), _CLIPPED),
    "dual_clip": tuple(name for name in _CLIPPED if name != "cispo"),
    "lone_baseline": (*GROUPED, BEST_OF_N),
    **dict.fromkeys(("resample_rounds", "filter_groups"), (*GROUPED, ONLINE_DPO, BEST_OF_N)),
    "critic": ("ppo",),
    "teacher": (DISTILL,),
    "beta": ("dpo", "kto", ONLINE_DPO),
    **dict.fromkeys(("preference_loss", "label_smoothing"), ("dpo", ONLINE_DPO)),
    "vote_noise": ("reward_model",),
    **dict.fromkeys(("desirable_weight", "undesirable_weight"), ("kto",)),
    "thumbs_up": ("sft",),
    **dict.fromkeys(("offline", "options"), ()),
}
"""Which algorithms read a setting. One that differs from its default, and isn't read, is refused: its user would
think that it does something."""
