"""The gate, case by case."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from evaluation.config import EvaluationConfig, GateConfig
from evaluation.gate import decide
from evaluation.results import Evaluation, Interval, KlEstimate, PolicyResult


def interval(value: float, low: float, high: float) -> Interval:
    return Interval(value=value, low=low, high=high)


def policy(version: int) -> PolicyResult:
    return PolicyResult(
        version=version, sha256="0" * 64, n=300, missing=0, reward=interval(0.5, 0.4, 0.6),
        accuracy=interval(0.5, 0.4, 0.6), distinct_1=0.1, distinct_2=0.2, length_mean=3, length_p95=4, truncated=0,
    )  # fmt: skip


def evaluation(**changes: Any) -> Evaluation:
    kl = KlEstimate(
        incumbent_candidate=interval(0.05, 0.04, 0.06),
        candidate_incumbent=interval(0.04, 0.03, 0.05),
        samples=300,
        tokens=900,
    )
    fields: dict[str, Any] = {
        "candidate": policy(5), "incumbent": policy(3), "n": 300, "missing": 0, "reward": interval(0.1, 0.04, 0.16),
        "accuracy": interval(0.08, -0.01, 0.17), "kl": kl, "kl_missing": None, "confidence": 0.95, "resamples": 2000,
        "seed": 0, "suite": "s.jsonl", "suite_sha256": "1" * 64, "suite_items": 300, "scorer": "exact_match",
        "settings": "2" * 64, "created_at": "2026-11-21T00:00:00.000+00:00", "seconds": {}, "samples": (),
    }  # fmt: skip
    return Evaluation(**{**fields, **changes})


def test_a_candidate_whose_whole_interval_is_above_the_bar_passes_and_the_verdict_says_what_was_shown():
    verdict = decide(evaluation(), GateConfig())
    assert verdict.verdict == "pass"
    assert (verdict.candidate, verdict.incumbent, verdict.metric) == (5, 3, "reward")
    assert (verdict.difference, verdict.ci_low, verdict.ci_high) == (0.1, 0.04, 0.16)
    assert verdict.reasons == ("reward is +0.1000 against policy 3, 95% interval [+0.0400, +0.1600] on 300 items",)


@pytest.mark.parametrize(
    ("changes", "config", "reasons"),
    [
        ({"reward": interval(0.1, 0.0, 0.2)}, {}, ["begins at +0.0000, it must begin above +0.0000"]),
        ({"reward": interval(-0.1, -0.2, -0.05)}, {}, ["begins at -0.2000"]),
        ({}, {"metric": "accuracy"}, ["accuracy: the 95% interval of the difference begins at -0.0100"]),
        ({}, {"min_difference": 0.05}, ["it must begin above +0.0500"]),
        ({"n": 49}, {}, ["49 items have a score for both policies, gate.min_items is 50"]),
        ({"missing": 3}, {}, ["3 of 300 items (1.0%) have no score, gate.max_missing allows 0.0%"]),
        ({}, {"max_kl": 0.04}, ["KL to the incumbent is 0.0500 nats per token, gate.max_kl allows 0.04"]),
        ({"kl": None, "kl_missing": "other tokens"}, {"max_kl": 1.0}, ["KL was not measured: other tokens"]),
        ({"n": 10, "reward": interval(0, -1, 1)}, {"max_kl": 0.01}, ["10 items", "begins at -1", "KL to the"]),
    ],
)
def test_every_missed_requirement_is_named(changes: dict[str, Any], config: dict[str, Any], reasons: list[str]):
    verdict = decide(evaluation(**changes), GateConfig(**config))
    assert verdict.verdict == "refuse"
    assert len(verdict.reasons) == len(reasons)
    for found, expected in zip(verdict.reasons, reasons, strict=True):
        assert expected in found


@pytest.mark.parametrize(
    ("changes", "config"),
    [({"missing": 3}, {"max_missing": 0.01}), ({}, {"max_kl": 0.05}), ({"kl": None, "kl_missing": "why"}, {})],
)
def test_what_lies_just_within_the_bounds_passes(changes: dict[str, Any], config: dict[str, Any]):
    assert decide(evaluation(**changes), GateConfig(**config)).verdict == "pass"


@pytest.mark.parametrize(
    ("missing", "config", "passes"),
    [(15, {}, True), (16, {}, False), (15, {"max_missing": 0.0}, False), (0, {}, True)],
)
def test_a_judge_may_leave_a_few_items_out_and_the_verdict_says_against_whom_they_count(
    missing: int, config: dict[str, Any], passes: bool
):
    judged = {"accuracy": None, "scorer": "judge@1", "n": 300 - missing, "missing": missing}
    verdict = decide(evaluation(**judged), GateConfig(**config))
    assert (verdict.verdict == "pass") == passes
    assert decide(evaluation(**judged | {"accuracy": interval(0, 0, 0)}), GateConfig()).verdict == (
        "refuse" if missing else "pass"
    ), "a rule leaves none out"
    told = f"{missing} more, without a score for both, count against the candidate"
    low = decide(evaluation(**judged, reward=interval(0, -1, 1)), GateConfig(**config))
    assert (told in low.reasons[-1]) == bool(missing)
    if passes:
        assert (told in verdict.reasons[0]) == bool(missing)
    with pytest.raises(ValueError, match=r"accuracy, which judge@1 can't say: set it to reward"):
        decide(evaluation(**judged), GateConfig(metric="accuracy"))


def test_intervals_of_another_confidence_are_not_judged():
    with pytest.raises(ValueError, match=r"intervals at 0.99 .* policy 5 has them at 0.95"):
        decide(evaluation(), GateConfig(confidence=0.99))


def test_a_bound_on_kl_without_samples_is_refused_before_anything_runs():
    with pytest.raises(ValidationError, match="max_kl needs kl_samples"):
        EvaluationConfig(kl_samples=0, gate=GateConfig(max_kl=0.1))


def test_an_evaluation_reads_back_as_it_was_saved(tmp_path: Path):
    path = evaluation().save(tmp_path / "evaluations")
    assert path.name == "5-vs-3.json"
    assert Evaluation.load(path) == evaluation()
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"5-vs-3.json is no evaluation"):
        Evaluation.load(path)
