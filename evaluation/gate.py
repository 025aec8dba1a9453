"""The gate: what a candidate must prove before it may serve.

It passes only what is shown to be better. One gate lets a candidate that is no better through in at most
(1 - confidence) / 2 of cases; over many cycles, and over repeated use of one suite, such cases add up, so a
suite should be large, and renewed from time to time.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from evaluation.config import JUDGED_MISSING, GateConfig
from evaluation.results import Evaluation


class Verdict(BaseModel):
    """``reasons`` says why: each requirement that was missed, or, for a pass, what was shown. n items were paired."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    verdict: Literal["pass", "refuse"]
    reasons: tuple[str, ...]
    candidate: int
    incumbent: int
    metric: str
    difference: float
    ci_low: float
    ci_high: float
    confidence: float
    min_difference: float
    n: int
    kl: float | None


def decide(evaluation: Evaluation, config: GateConfig) -> Verdict:
    """The verdict on ``evaluation.candidate``. Raises ValueError if its intervals are of another confidence."""
    if evaluation.confidence != config.confidence:
        raise ValueError(
            f"the gate wants intervals at {config.confidence:g} and the evaluation of policy "
            f"{evaluation.candidate.version} has them at {evaluation.confidence:g}: evaluate again"
        )
    difference = evaluation.reward if config.metric == "reward" else evaluation.accuracy
    if difference is None:
        raise ValueError(f"gate.metric is accuracy, which {evaluation.scorer} can't say: set it to reward")
    kl = evaluation.kl.incumbent_candidate.value if evaluation.kl else None
    refusals = list(_refusals(evaluation, config, difference.low, kl))
    shown = (
        f"{config.metric} is {difference.value:+.4f} against policy {evaluation.incumbent.version}, "
        f"{config.confidence:.0%} interval [{difference.low:+.4f}, {difference.high:+.4f}] on {evaluation.n} items"
        f"{_lost(evaluation)}"
    )
    return Verdict(
        verdict="refuse" if refusals else "pass",
        reasons=tuple(refusals) or (shown,),
        candidate=evaluation.candidate.version,
        incumbent=evaluation.incumbent.version,
        metric=config.metric,
        difference=difference.value,
        ci_low=difference.low,
        ci_high=difference.high,
        confidence=config.confidence,
        min_difference=config.min_difference,
        n=evaluation.n,
        kl=kl,
    )


def _refusals(evaluation: Evaluation, config: GateConfig, low: float, kl: float | None) -> list[str]:
    found = []
    if evaluation.n < config.min_items:
        found.append(f"{evaluation.n} items have a score for both policies, gate.min_items is {config.min_items}")
    allowed = config.max_missing
    if allowed is None:
        allowed = JUDGED_MISSING if evaluation.judged else 0.0
    if (share := evaluation.missing / evaluation.suite_items) > allowed:
        found.append(
            f"{evaluation.missing} of {evaluation.suite_items} items ({share:.1%}) have no score, "
            f"gate.max_missing allows {allowed:.1%}"
        )
    if not low > config.min_difference:
        found.append(
            f"{config.metric}: the {config.confidence:.0%} interval of the difference begins at {low:+.4f}, "
            f"it must begin above {config.min_difference:+.4f}{_lost(evaluation)}"
        )
    if config.max_kl is not None and kl is None:
        found.append(f"gate.max_kl is set, and KL was not measured: {evaluation.kl_missing}")
    elif config.max_kl is not None and kl is not None and not kl <= config.max_kl:
        found.append(f"KL to the incumbent is {kl:.4f} nats per token, gate.max_kl allows {config.max_kl:g}")
    return found


def _lost(evaluation: Evaluation) -> str:
    """What the difference makes of items without a score; see ``Evaluation``."""
    if not evaluation.judged or not evaluation.missing:
        return ""
    return f"; {evaluation.missing} more, without a score for both, count against the candidate"
