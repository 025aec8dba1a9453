"""What is kept of an evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from evaluation.config import EvaluationConfig, GateConfig
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
