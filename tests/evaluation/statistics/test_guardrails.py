"""Metrics and their margins: which means are shown, refuted or left open."""

from __future__ import annotations

import numpy as np
import pytest

from evaluation.statistics import betting
from evaluation.statistics.guardrails import (
    GUARDRAILS,
    Evidence,
    Metric,
    observe,
    relative_difference,
    segment_guardrails,
)


def shown_and_refuted(metric, values, level=0.05):
    evidence = observe(metric, Evidence.none(), values)
    return bool(betting.rejects(evidence.shown, level)), bool(betting.rejects(evidence.refuted, level))


def around(mean, n=1500, seed=0):
    """Values of -1, 0 and 1 whose mean is ``mean``, exactly."""
    ups, downs = round(n * (0.05 + mean / 2)), round(n * (0.05 - mean / 2))
    values = np.concatenate([np.ones(ups), -np.ones(downs), np.zeros(n - ups - downs)])
    return np.random.default_rng(seed).permutation(values)


@pytest.mark.parametrize(
    ("better", "mean", "expected"),
    [
        ("higher", 0.0, (True, False)),  # no worse than -0.05
        ("higher", -0.1, (False, True)),
        ("lower", 0.0, (True, False)),
        ("lower", 0.1, (False, True)),
        ("lower", -0.1, (True, False)),
    ],
)
def test_a_guardrail_asks_for_not_worse_than_its_margin(better, mean, expected):
    metric = Metric("m", "guardrail", -1, 1, margin=0.05, better=better)
    assert shown_and_refuted(metric, around(mean)) == expected


def test_a_success_metric_asks_for_more_than_its_margin():
    assert shown_and_refuted(Metric("m", "success", -1, 1), around(0.08)) == (True, False)
    assert shown_and_refuted(Metric("m", "success", -1, 1), around(-0.08)) == (False, True)
    assert shown_and_refuted(Metric("m", "success", -1, 1, margin=0.06), around(0.08)) == (False, False)
    assert shown_and_refuted(Metric("m", "success", -1, 1, better="lower"), around(-0.08)) == (True, False)


def test_a_gain_that_is_less_than_worthwhile_is_refuted():
    metric = Metric("m", "success", -1, 1, worthwhile=0.05)
    assert shown_and_refuted(metric, around(0.0)) == (False, True)
    assert shown_and_refuted(Metric("m", "success", -1, 1), around(0.0)) == (False, False)


def test_a_value_outside_the_bounds_names_the_metric_and_the_item():
    with pytest.raises(betting.OutOfBounds, match=r"kl_v1: item 'q2' has the value 1\.4"):
        observe(GUARDRAILS["kl_v1"], Evidence.none(), [0.1, 1.4], ["q1", "q2"])


@pytest.mark.parametrize(
    "wrong",
    [
        {"role": "guardrail"},
        {"role": "success", "margin": -0.1},
        {"role": "success", "margin": 0.1, "worthwhile": 0.05},
        {"role": "guardrail", "margin": 0.1, "worthwhile": 0.2},
        {"role": "guardrail", "margin": 1.5},
    ],
)
def test_a_metric_that_nothing_could_show_is_refused(wrong):
    with pytest.raises(ValueError, match=r"margin|worthwhile|must lie within"):
        Metric("m", low=-1, high=1, **wrong)


def test_relative_differences_are_bounded_and_of_the_larger_figure():
    assert relative_difference([10, 5, 0, 0], [5, 10, 0, 4]).tolist() == [0.5, -0.5, 0.0, -1.0]
    with pytest.raises(ValueError, match="0 or more"):
        relative_difference([-1], [1])


def test_each_segment_has_a_guardrail_of_its_own():
    metrics = segment_guardrails(Metric("reward", "success", -1, 1, worthwhile=0.02), ["de", "fr"], 0.05)
    assert metrics["fr"] == Metric("reward[fr]", "guardrail", -1, 1, margin=0.05)


def test_the_standard_guardrails_pass_what_changes_nothing():
    for metric in GUARDRAILS.values():
        assert shown_and_refuted(metric, np.zeros(1500)) == (True, False), metric.name
