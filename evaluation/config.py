"""Settings of evaluation."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from feedback.settings_base import Section
from serve.config import MemoryCheck, without_trust

MIB = 1024 * 1024

JUDGING: Final = ("judge", "reward_model", "pairwise")
"""Scorers that need no right answer, and that a policy is not simply right by."""

LEAST_TEMPERATURE: Final = 0.01
"""vLLM takes what lies below, and above 0, for this."""

JUDGED_MISSING: Final = 0.05
"""Of items, the share that these may leave without a score by default: a judge may time out."""

SCORER_DOWN: Final = 0.1
"""The share of a look's items that may lack the incumbent's score; more say that the scorer is at fault, not anybody's
answers. Nothing is then decided or used up."""
FEW_MISSING: Final = 5
"""So many may lack it in any look: of few items, or in one that some of them can never be scored."""


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
        "memory, on a GPU at most 30 % of it.",
    )
    tensor_parallel_size: int = Field(default=1, ge=1, description="Devices that one copy of the policy is split over.")
    enforce_eager: bool | None = Field(
        default=None,
        description="true: an engine of one's own starts at once, without compiling; false pays on long suites; null: "
        "as true, and an engine that is there already may answer whether it has compiled or not.",
    )
    extra: dict[str, Any] | None = Field(
        default=None, description="Further arguments of vLLM's engine, by their own names; null: serve.engine.extra."
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        default="ERROR", description="What vLLM logs; what fails raises an error at any level."
    )

    @field_validator("extra")
    @classmethod
    def _trusts_no_code(cls, extra: dict[str, Any] | None) -> dict[str, Any] | None:
        return extra and without_trust(extra)


class SamplingParameters(Section):
    """How a response is sampled; each default is that of a request to `/generate` which does not name the parameter."""

    temperature: float = Field(default=1.0, ge=0, description="0 is greedy; else 0.01 or more.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="The likeliest tokens that make up this much.")
    top_k: int = Field(default=0, ge=0, description="This many of the likeliest tokens; 0: all.")
    min_p: float = Field(
        default=0.0, ge=0, le=1, description="No tokens that are less likely than this times the likeliest."
    )
    presence_penalty: float = Field(default=0.0, ge=-2, le=2, description="As of `/v1`.")
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2, description="As of `/v1`.")
    repetition_penalty: float = Field(default=1.0, gt=0, description="As of `/v1`.")

    @field_validator("temperature")
    @classmethod
    def _greedy_or_warm(cls, temperature: float) -> float:
        if 0 < temperature < LEAST_TEMPERATURE:
            raise ValueError(f"it is 0 (greedy) or at least {LEAST_TEMPERATURE}, not {temperature:g}")
        return temperature

    @property
    def greedy(self) -> bool:
        """Whether the response is that of a greedy answer: no penalty changes which token is the likeliest."""
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty
        return self.temperature == 0 and penalties == (0, 0, 1)


class SamplingConfig(SamplingParameters):
    """How the items of suites are answered. Greedy answers stand beside, and never decide."""

    source: Literal["traffic", "settings", "greedy"] = Field(
        default="traffic",
        description="traffic: as users ask; each item by the sampling parameters of a request, drawn by a hash of its "
        "id, and by those below while there is no traffic. settings: by those below. greedy: greedily. A candidate "
        "keeps what its first look found.",
    )


class BudgetConfig(Section):
    """How much error the gate may make over all candidates, and how it is spread over them.

    Another rule, alpha or horizon is declared on record with the next new candidate, and gives what is left.
    """

    rule: Literal["e_lond", "fixed_horizon"] = Field(
        default="e_lond",
        description="e_lond: of the candidates that pass, the expected share that is no better is at most alpha, over "
        "any number of candidates; most is spent on the first ones, and each pass earns some. fixed_horizon: the "
        "chance that any candidate that is no better ever passes is at most alpha, over horizon candidates; those that "
        "follow are refused.",
    )
    alpha: float = Field(default=0.05, gt=0, lt=1, description="The error that is allowed in all.")
    horizon: int = Field(default=1000, ge=1, description="fixed_horizon: over how many candidates alpha is spread.")


class GuardrailsConfig(Section):
    """What a candidate may lose at most, each as a mean over the items; null leaves a guardrail out.

    A pass needs each of them shown to be not worse than its margin. Where there are too few items to show it (a rare
    segment, few regression items), harm that is shown still refuses.
    """

    length: float | None = Field(
        default=0.5, gt=0, lt=1, description="How much longer responses may be, as a share of the longer one's tokens."
    )
    truncation: float | None = Field(
        default=0.1, gt=0, lt=1, description="How much more of the responses may be cut at max_tokens."
    )
    distinct_n: float | None = Field(
        default=0.1, gt=0, lt=1, description="How much less of a response's pairs of tokens may be distinct."
    )
    repetition: float | None = Field(
        default=0.1, gt=0, lt=1, description="How much more of a response may repeat four tokens that it had before."
    )
    segments: float | None = Field(
        default=0.1,
        gt=0,
        lt=1,
        description="How much reward any segment (an item's field of that name) may lose, as a share of the width of "
        "reward_bounds.",
    )
    regression: float | None = Field(
        default=0.1,
        gt=0,
        lt=1,
        description="How much reward may be lost on items that decided on earlier candidates, as such a share.",
    )
    latency: float | None = Field(
        default=0.5,
        gt=0,
        lt=1,
        description="How much longer a token may take, as a share of the longer one's time. It decides where the "
        "candidate has another shape or type, such as a larger model: a few responses of both are then timed in turns. "
        "Else a token takes the same time, and length says how long a response takes.",
    )
    holdout_reward: float | None = Field(
        default=0.1,
        gt=0,
        lt=1,
        description="How much the reward of a reward model of feedback on held-out prompts may fall, as a share of its "
        "width, while training's reward rises. It decides where training has a reward, also one that evaluation can't "
        "load, and there is such a reward model, which cycles train where training is rewarded by people's feedback "
        "and evaluation.holdout is set, and which `millrace train --reward-model --held-out` trains.",
    )
    kl_v1: float | None = Field(
        default=None,
        gt=0,
        description="Largest KL(v1 || candidate), in nats per token, as the mean over items; v1 is the policy that the "
        "candidate's lineage began with. It costs v1's answers to the items, and one more start of the candidate.",
    )


class GateConfig(Section):
    """What a candidate must prove on fresh held-out items before it may serve."""

    metric: Literal["reward", "accuracy"] = Field(
        default="reward", description="What is compared: the mean reward, or the share of items with reward 1."
    )
    reward_bounds: tuple[float, float] = Field(
        default=(0.0, 1.0),
        description="The least and the greatest reward that the scorer may give; a value outside is refused. The test "
        "is valid for any rewards within them, and the closer they are, the fewer items it needs.",
    )
    min_difference: float = Field(
        default=0.0, ge=0, description="The candidate's mean less the incumbent's must be shown to lie above this."
    )
    worthwhile: float | None = Field(
        default=0.02,
        gt=0,
        description="The smallest gain that is worth waiting for: a candidate that is shown to gain less is refused "
        "early. null: it may use up max_items.",
    )
    budget: BudgetConfig = Field(default_factory=BudgetConfig, description=BudgetConfig.__doc__)
    guardrails: GuardrailsConfig = Field(default_factory=GuardrailsConfig, description=GuardrailsConfig.__doc__)
    max_kl: float | None = Field(
        default=None,
        gt=0,
        description="A guardrail too: largest KL(incumbent || candidate), in nats per token, as the mean over items; "
        "null sets no bound.",
    )
    look_items: int = Field(default=50, ge=1, description="Fresh items between two looks at the evidence.")
    min_items: int = Field(
        default=50, ge=1, description="Fewest items that a pass rests on, and that a suite drawn from traffic has."
    )
    max_items: int = Field(
        default=1000,
        ge=1,
        description="Most fresh items that one candidate may use; one that has not passed by then is refused.",
    )
    max_missing: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="Largest share of items that the scorer may leave without a score; null: none, and with scorer "
        f"judge, pairwise or reward_model {JUDGED_MISSING:g}. With these three a missing score counts as 0 for the "
        "candidate and as 1 for the incumbent; a function's or a rule's leaves the item out.",
    )
    confidence: float = Field(
        default=0.95, gt=0.5, lt=1, description="Level of the intervals that reports show (two-sided); none decides."
    )

    @model_validator(mode="after")
    def _bounds_leave_room(self) -> Self:
        low, high = self.reward_bounds
        if not -math.inf < low < high < math.inf:
            raise ValueError(f"gate.reward_bounds are the least and the greatest reward, and {low:g} >= {high:g}")
        width = 1.0 if self.metric == "accuracy" else high - low
        for name in ("min_difference", "worthwhile"):
            if (value := getattr(self, name)) is not None and value >= width:
                raise ValueError(f"gate.{name}={value:g} can't be reached: rewards differ by {width:g} at most")
        if self.min_items > self.max_items:
            raise ValueError(f"gate.min_items={self.min_items} is more than gate.max_items={self.max_items}")
        return self

    def missing_allowed(self, scorer: str) -> float:
        """The share of items that this scorer may leave without a score."""
        if self.max_missing is not None:
            return self.max_missing
        return JUDGED_MISSING if scorer in JUDGING else 0.0


OutcomeName = Literal["feedback", "reward", "errors", "latency_s", "length", "session_end"]


class OutcomeConfig(Section):
    """One outcome of an experiment, compared as the mean over blocks."""

    role: Literal["success", "guardrail"] = Field(
        default="success",
        description="success: one of these must be shown better for a commit. guardrail: each of these must be shown "
        "to be worse by less than its margin.",
    )
    margin: float = Field(
        default=0.0,
        ge=0,
        description="success: by how much it must be better, at least. guardrail: how much worse it may be.",
    )
    rollback_margin: float = Field(
        default=0.0, ge=0, description="A success outcome that is shown to be worse by more than this rolls back."
    )
    bounds: tuple[float, float] = Field(
        default=(0.0, 1.0),
        description="The least and the greatest value. A reward outside is refused; a latency or a length counts as "
        "the bound.",
    )

    @model_validator(mode="after")
    def _can_decide(self) -> Self:
        if not -math.inf < self.bounds[0] < self.bounds[1] < math.inf:
            raise ValueError(f"bounds are the least and the greatest value, and {self.bounds} are not")
        if self.role == "guardrail" and self.margin == 0:
            raise ValueError("a guardrail needs a margin above 0: no evidence shows that nothing at all is lost")
        return self


class FeedbackOutcomeConfig(OutcomeConfig):
    """The outcome ``feedback``, from 0 to 1."""

    predicted_by: str | None = Field(
        default=None,
        description="Component of the reward (model, judge, or a rule's name) that scores every response from 0 to 1, "
        "by which feedback is corrected where few responses have some (prediction-powered); null: none.",
    )

    @field_validator("predicted_by")
    @classmethod
    def _without_the_feedback(cls, name: str | None) -> str | None:
        if name == "human":
            raise ValueError("human is the feedback itself: take model, judge, or a rule's name")
        return name


class ErrorsConfig(OutcomeConfig):
    """The outcome ``errors``: by default a guardrail."""

    role: Literal["success", "guardrail"] = Field(
        default="guardrail", description="As of feedback; a guardrail by default."
    )
    margin: float = Field(default=0.05, ge=0, description="How much larger the share may be.")


class SessionEndConfig(OutcomeConfig):
    """The outcome ``session_end``: by default a guardrail."""

    role: Literal["success", "guardrail"] = Field(
        default="guardrail", description="As of feedback; a guardrail by default."
    )
    margin: float = Field(default=0.05, ge=0, description="How much larger the share may be.")
    after_seconds: float = Field(
        default=1800.0,
        gt=0,
        description="A session that has no further request for so long after a response has ended with it. At most "
        "experiment.feedback_window_seconds, less the time that a response takes.",
    )


class OutcomesConfig(Section):
    """What is compared; null leaves an outcome out."""

    feedback: FeedbackOutcomeConfig | None = Field(
        default_factory=FeedbackOutcomeConfig, description="People's, from 0 to 1 as feedback.scoring.human has it."
    )
    reward: OutcomeConfig | None = Field(default=None, description="What scoring gave, if that came in time.")
    errors: ErrorsConfig | None = Field(
        default_factory=ErrorsConfig, description="The share of requests that the engine failed."
    )
    latency_s: OutcomeConfig | None = Field(default=None, description="Seconds to the whole response.")
    length: OutcomeConfig | None = Field(default=None, description="Tokens of the response.")
    session_end: SessionEndConfig | None = Field(
        default=None,
        description="The share of sessions that end in the block, or the user's: {} watches for people who leave.",
    )

    @property
    def compared(self) -> dict[OutcomeName, OutcomeConfig]:
        """Those that are not left out."""
        names: tuple[OutcomeName, ...] = ("feedback", "reward", "errors", "latency_s", "length", "session_end")
        found = {name: getattr(self, name) for name in names}
        return {name: outcome for name, outcome in found.items() if outcome is not None}

    @model_validator(mode="after")
    def _can_decide(self) -> Self:
        if all(outcome.role != "success" for outcome in self.compared.values()):
            raise ValueError("no outcome has the role success, so nothing could ever be shown to be better")
        for name in ("feedback", "errors", "session_end"):
            outcome = getattr(self, name)
            if outcome is not None and outcome.bounds != (0.0, 1.0):
                raise ValueError(f"{name} lies between 0 and 1: take its bounds out")
        return self


class PhaseConfig(Section):
    """A part of an experiment."""

    share: float = Field(gt=0, lt=1, description="The candidate's share of the blocks, or users, drawn at random.")
    blocks: int | None = Field(
        default=None, ge=1, description="Blocks until the next phase; null: until the experiment ends."
    )


class ShadowConfig(Section):
    """Shadow mode: before anybody meets a candidate, it answers a copy of a share of the requests and is scored."""

    enabled: bool = Field(
        default=False,
        description="A candidate that passes the gate is shadowed, and neither tried on live traffic nor promoted if "
        "that shows harm. Cycles do so; `millrace experiment shadow` does it by hand.",
    )
    share: float = Field(
        default=0.1,
        gt=0,
        le=1,
        description="Of traffic's responses the share whose requests are copied, by hash.",
    )
    min_requests: int = Field(
        default=100, ge=1, description="Fewest requests that a result rests on; so many are answered at a time."
    )
    max_requests: int = Field(default=500, ge=1, description="Most requests that a candidate answers.")
    seconds: float = Field(default=3600.0, ge=0, description="How long to wait for so many, in seconds.")
    before_seconds: float = Field(
        default=86400.0,
        ge=0,
        description="How old a request may be when the shadow begins, in seconds. What the candidate may have learned "
        "from is left out whatever its age.",
    )
    poll_seconds: float = Field(default=5.0, gt=0, description="Seconds between two looks for new requests.")
    alpha: float = Field(
        default=0.05, gt=0, le=0.5, description="The chance that a candidate that does no harm is shown to do some."
    )
    reward_bounds: tuple[float, float] = Field(
        default=(0.0, 1.0), description="The least and the greatest reward of feedback.scoring; one outside is refused."
    )
    reward: float = Field(
        default=0.05, gt=0, lt=1, description="How much reward may be lost, as a share of the width of reward_bounds."
    )
    length: float | None = Field(
        default=0.5,
        gt=0,
        lt=1,
        description="How much longer responses may be, as a share of the longer one's tokens; null: not compared.",
    )
    truncation: float | None = Field(
        default=0.1,
        gt=0,
        lt=1,
        description="How much more of the responses may be cut at the request's max_tokens; null: not compared.",
    )
    errors: float | None = Field(
        default=0.05,
        gt=0,
        lt=1,
        description="The share of requests that it may fail on; null: not compared.",
    )

    @model_validator(mode="after")
    def _can_decide(self) -> Self:
        if not -math.inf < self.reward_bounds[0] < self.reward_bounds[1] < math.inf:
            raise ValueError(
                f"shadow.reward_bounds are the least and the greatest reward, and {self.reward_bounds} are not"
            )
        if self.min_requests > self.max_requests:
            raise ValueError(
                f"shadow.min_requests={self.min_requests} is more than shadow.max_requests={self.max_requests}"
            )
        return self


class ExperimentConfig(Section):
    """The experiment on live traffic: candidate and incumbent share it, and what people say decides."""

    enabled: bool = Field(
        default=False,
        description="A candidate that passes the gate is tried on live traffic, and promoted only if that shows it "
        "better. False: it is promoted.",
    )
    block_seconds: float = Field(
        default=60.0,
        ge=0.1,
        description="Length of a block: one of the two policies answers everything in it. Long against a response, "
        "short against a day. In a fleet, which draws for users, it is what phases are counted in.",
    )
    feedback_window_seconds: float = Field(
        default=3600.0,
        ge=0,
        description="How long after its end a block waits for feedback, and a user after the first request; what comes "
        "later is left out.",
    )
    phases: list[PhaseConfig] = Field(
        default_factory=lambda: [PhaseConfig(share=0.1, blocks=20), PhaseConfig(share=0.5)],
        min_length=1,
        description="The candidate's share of traffic, phase by phase.",
    )
    watch_seconds: float = Field(
        default=86400.0, ge=0, description="How long a committed candidate is watched beside the one before it."
    )
    watch_share: float = Field(default=0.9, gt=0, lt=1, description="Its share of the blocks, or users, then.")
    max_seconds: float = Field(
        default=604800.0,
        gt=0,
        description="An experiment that has shown nothing by then ends, and nothing is promoted.",
    )
    before_seconds: float = Field(
        default=1209600.0,
        ge=0,
        description="How much of what went before an experiment is read, so that outcomes are compared less what the "
        "same people did then (CUPED), in seconds; 0: nothing.",
    )
    look_seconds: float = Field(default=30.0, gt=0, description="Seconds between two looks at the evidence.")
    look_timeout_seconds: float = Field(
        default=600.0,
        gt=0,
        description="A look that takes longer is stopped; the next one comes to what it would have.",
    )
    alpha_commit: float = Field(
        default=0.05, gt=0, le=0.5, description="The chance that a candidate that is no better is committed."
    )
    alpha_rollback: float = Field(
        default=0.05, gt=0, le=0.5, description="The chance that one that does no harm is rolled back."
    )
    alpha_checks: float = Field(
        default=0.01, gt=0, le=0.5, description="The chance that a sound experiment is held by a check of its traffic."
    )
    response_margin: float = Field(
        default=0.05,
        ge=0,
        lt=1,
        description="How far the shares of responses with feedback may differ between the arms, before it is held.",
    )
    min_voices: int = Field(
        default=2,
        ge=1,
        description="A block's feedback counts if so many sources gave some; however many thumbs one gives, it is one "
        "voice of its block.",
    )
    outcomes: OutcomesConfig = Field(default_factory=OutcomesConfig, description=OutcomesConfig.__doc__)
    shadow: ShadowConfig = Field(default_factory=ShadowConfig, description=ShadowConfig.__doc__)

    @model_validator(mode="after")
    def _can_end(self) -> Self:
        if any(phase.blocks is None for phase in self.phases[:-1]) or self.phases[-1].blocks is not None:
            raise ValueError("experiment.phases: all but the last need blocks, and the last has none")
        session_end = self.outcomes.session_end
        if session_end is not None and session_end.after_seconds > self.feedback_window_seconds:
            raise ValueError(
                f"experiment.outcomes.session_end.after_seconds={session_end.after_seconds:g}: a block waits only "
                f"experiment.feedback_window_seconds={self.feedback_window_seconds:g} after its end"
            )
        return self


class SuiteConfig(Section):
    """A further suite. Its items are answered for every candidate, and are never used up."""

    path: Path = Field(description="Its items, as of evaluation.suite; no prompt of that suite may be among them.")
    role: Literal["guardrail", "watch"] = Field(
        description="guardrail: a pass needs the candidate shown to be worse than the incumbent by less than margin. "
        "watch: the results are shown and decide nothing."
    )
    scorer: str | None = Field(None, description="What scores its responses; null: as evaluation.scorer.")
    reward_bounds: tuple[float, float] = Field(
        (0.0, 1.0), description="guardrail: the least and the greatest reward; a value outside is refused."
    )
    margin: float = Field(
        0.1,
        gt=0,
        lt=1,
        description="guardrail: how much mean reward may be lost, as a share of the width of reward_bounds. The "
        "smaller it is, the more items the suite needs.",
    )

    @model_validator(mode="after")
    def _bounds_leave_room(self) -> Self:
        low, high = self.reward_bounds
        if not -math.inf < low < high < math.inf:
            raise ValueError(f"reward_bounds are the least and the greatest reward, and {low:g} >= {high:g}")
        return self


class HarnessConfig(Section):
    """Other people's harnesses, each in an environment of its own, for `millrace evaluate --harness`."""

    lm_eval: Path = Field(
        Path("harnesses/lm-eval"), description="Environment that has lm-eval: a folder that venv made, or its Python."
    )
    inspect: Path = Field(Path("harnesses/inspect"), description="Environment that has Inspect, likewise.")
    timeout_s: float = Field(86400.0, gt=0, description="A harness that takes longer is stopped, and has no results.")


class EvaluationConfig(Section):
    """Is this policy better than that one?"""

    suite: Path = Field(
        Path("suite.jsonl"),
        description="Held-out items, one JSON object a line: id, prompt or messages, answer, metadata, cluster (items "
        "that depend on each other name the same one), segment (a kind of prompt or user).",
    )
    suites: dict[str, SuiteConfig] = Field(
        default_factory=dict,
        description="Further suites by name, each with its role, path, and scorer. Their results are shown suite by "
        "suite and never averaged.",
    )
    suite_items: int = Field(
        200,
        ge=1,
        description="Fresh items that a suite drawn from traffic has, or fewer, as many as gate.min_items, while there "
        "are no more prompts. An item decides on one candidate and is not fresh then; cycles add to the suite until it "
        "has so many again.",
    )
    holdout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share of all prompts, by hash, that no policy ever learns from: a conversation is held out whole, "
        "by how it opens. A cycle that finds no suite draws one from them.",
    )
    plan: MemoryCheck = Field(
        "refuse",
        description="What is done before a cycle or an evaluation where the engine's weights and KV cache are planned "
        "not to fit. refuse: end with an error where they are far beyond the memory (on a GPU 1.1 times, on a CPU 1.25 "
        "times), and warn of what is closer. warn: warn, and start. off: plan nothing.",
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
    sampling: SamplingConfig = Field(default_factory=SamplingConfig, description=SamplingConfig.__doc__)
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
    seed: int = Field(0, ge=0, description="Seed of the bootstrap and of all sampling.")
    folder: Path = Field(Path("evaluations"), description="Where evaluations and cached responses are kept.")
    samples: int = Field(20, ge=0, description="Items kept with both responses in an evaluation, for people to read.")
    decisions: Path = Field(
        Path("decisions"), description="Folder of the ledger: every verdict and promotion, with its evidence."
    )
    decisions_key: Path | None = Field(
        None,
        description="File with the key that signs the ledger, 64 hexadecimal digits: who can't read it can rewrite no "
        "decision unseen. null: the ledger is not signed, and a hash chain and what refers to it must do.",
    )
    score_unused: bool = Field(
        False,
        description="Answer and score the whole suite at each evaluation, so that reports show every policy on the "
        "same items. Whoever then chooses among candidates by scores of items that did not decide yet breaks the level "
        "of the gate: for demonstrations, and suites that nobody looks at.",
    )
    engine: EngineConfig = Field(default_factory=EngineConfig, description=EngineConfig.__doc__)
    gate: GateConfig = Field(default_factory=GateConfig, description=GateConfig.__doc__)
    harness: HarnessConfig = Field(default_factory=HarnessConfig, description=HarnessConfig.__doc__)
    experiment: ExperimentConfig = Field(default_factory=ExperimentConfig, description=ExperimentConfig.__doc__)

    @property
    def harness_folder(self) -> Path:
        """Where runs of other people's harnesses are kept, a folder each."""
        return self.folder / "harness"

    def of_suite(self, name: str) -> EvaluationConfig:
        """The settings by which a further suite is answered and scored."""
        own = self.suites[name]
        return self.model_copy(
            update={
                "suite": own.path,
                "suites": {},
                "scorer": own.scorer or self.scorer,
                "kl_samples": 0,
                "best_of": 0,
                "score_unused": False,
            }
        )

    @field_validator("suites")
    @classmethod
    def _names_can_name_files(cls, value: dict[str, SuiteConfig]) -> dict[str, SuiteConfig]:
        if bad := next((name for name in value if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name)), None):
            raise ValueError(f"{bad!r} is no name of a suite: letters, digits, '_' and '-', at most 64")
        return value

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
        for name, bound in (("max_kl", self.gate.max_kl), ("guardrails.kl_v1", self.gate.guardrails.kl_v1)):
            if bound is not None and self.kl_samples == 0:
                raise ValueError(f"gate.{name} needs kl_samples of 1 or more: without samples no KL is measured")
        return self
