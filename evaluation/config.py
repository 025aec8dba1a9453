"""Settings of evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from feedback.settings_base import Section

MIB = 1024 * 1024

JUDGING: Final = ("judge", "reward_model", "pairwise")
"""Scorers that need no right answer, and that a policy is not simply right by."""

JUDGED_MISSING: Final = 0.05
"""Of items, the share that these may leave without a score by default: a judge may time out."""


class EngineConfig(Section):
    """The vLLM engine that answers the suite, inside the evaluating process."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Type that the engine computes in; auto: what the server computes in (serve.engine.dtype, or the "
        "policy's own). Another type than the server's is refused: it answers otherwise.",
    )
    max_model_len: int | None = Field(
        default=None,
        ge=2,
        description="Longest prompt and answer together, in tokens; null fits the model and the KV cache.",
    )
    max_num_seqs: int = Field(default=256, ge=1, description="Most responses generated at once.")
    max_batched_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Most tokens in one engine step; null is as vLLM has it. On a CPU at least the longest context.",
    )
    kv_cache_bytes: int | None = Field(
        default=None,
        ge=MIB,
        description="Size of the KV cache, in bytes; null: what can be of use, at most a twentieth of the machine's "
        "memory.",
    )
    tensor_parallel_size: int = Field(default=1, ge=1, description="Devices that one copy of the policy is split over.")
    enforce_eager: bool = Field(
        default=True, description="Start at once, without compiling; false pays on long suites."
    )
    extra: dict[str, Any] | None = Field(
        default=None, description="Further arguments of vLLM's engine, by their own names; null: serve.engine.extra."
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        default="ERROR", description="What vLLM logs; what fails raises an error at any level."
    )


class GateConfig(Section):
    """What a candidate must prove on the held-out suite before it may serve."""

    metric: Literal["reward", "accuracy"] = Field(
        default="reward", description="What is compared: the mean reward, or the share of items with reward 1."
    )
    confidence: float = Field(default=0.95, gt=0.5, lt=1, description="Level of every interval (two-sided).")
    min_difference: float = Field(
        default=0.0, description="The lower end of the interval of candidate less incumbent must lie above this."
    )
    min_items: int = Field(default=50, ge=1, description="Fewest items with a score for both policies.")
    max_missing: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="Largest share of items that the scorer may leave without a score; null: none, and with scorer "
        f"judge, pairwise or reward_model {JUDGED_MISSING:g}. With these three a missing score counts as 0 for the "
        "candidate and as 1 for the incumbent; a function's or a rule's leaves the item out.",
    )
    max_kl: float | None = Field(
        default=None, gt=0, description="Largest KL(incumbent || candidate), in nats per token; null sets no bound."
    )


class EvaluationConfig(Section):
    """Is this policy better than that one?"""

    suite: Path = Field(
        Path("suite.jsonl"),
        description="Held-out items, one JSON object a line: id, prompt or messages, answer, metadata.",
    )
    suite_items: int = Field(
        200,
        ge=1,
        description="Items that a suite drawn from traffic has, or fewer, as many as gate.min_items, while there are "
        "no more prompts. Cycles add to it until it has so many.",
    )
    holdout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share of all prompts, by hash, that no policy ever learns from: a conversation is held out whole, "
        "by how it opens. A cycle that finds no suite draws one from them.",
    )
    scorer: str = Field(
        "exact_match",
        description="What scores responses: a function, as module:name; a built-in rule (exact_match or "
        "numeric_equality with each item's answer, repetition_penalty); judge: feedback.scoring.judge scores each; "
        "pairwise: that judge compares both policies' answers, in both orders; reward_model: feedback.scoring.model, "
        "or else a reward model of feedback on held-out prompts.",
    )
    comparison: str | None = Field(
        None,
        description="scorer pairwise: the question to the judge, in which {prompt}, {first} and {second} stand for the "
        "item's; null: which answer helps better.",
    )
    reward_model_folder: Path = Field(
        Path("evaluation_reward_models"),
        description="scorer reward_model: folder of the reward models that are trained on feedback on held-out prompts "
        "alone, so that they are not what training optimises.",
    )
    max_tokens: int = Field(256, ge=1, description="Longest response, in tokens.")
    kl_samples: int = Field(
        1, ge=0, description="Responses sampled from the incumbent for each item, to measure KL on; 0 measures none."
    )
    best_of: int = Field(
        0,
        ge=0,
        description="Responses sampled to each item, of which the best by training's reward is scored: best-of-n of "
        "the incumbent, as a baseline in the report; 0: none.",
    )
    resamples: int = Field(2000, ge=100, description="Bootstrap resamples.")
    seed: int = Field(0, ge=0, description="Seed of the bootstrap and of the KL samples.")
    folder: Path = Field(Path("evaluations"), description="Where evaluations and cached responses are kept.")
    samples: int = Field(20, ge=0, description="Items kept with both responses in an evaluation, for people to read.")
    engine: EngineConfig = Field(default_factory=EngineConfig, description=EngineConfig.__doc__)
    gate: GateConfig = Field(default_factory=GateConfig, description=GateConfig.__doc__)

    @field_validator("comparison")
    @classmethod
    def _asks_about_both(cls, value: str | None) -> str | None:
        if missing := [name for name in ("first", "second") if value is not None and f"{{{name}}}" not in value]:
            raise ValueError(f"a comparison needs {{{missing[0]}}} where that answer is to stand")
        return value

    @model_validator(mode="after")
    def _a_judge_says_nothing_of_accuracy(self) -> Self:
        if self.scorer in JUDGING and self.gate.metric == "accuracy":
            raise ValueError(
                f"gate.metric=accuracy is the share of answers that are right, which scorer={self.scorer} can't say: "
                "set gate.metric to reward"
            )
        return self

    @model_validator(mode="after")
    def _a_bound_on_kl_needs_samples(self) -> Self:
        if self.gate.max_kl is not None and self.kl_samples == 0:
            raise ValueError("gate.max_kl needs kl_samples of 1 or more: without samples no KL is measured")
        return self
