"""Live experiments: rows by hand, errors over generated histories, and everything that must not become a commit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import betaln

from evaluation.statistics.experiment import (
    Decision,
    Outcome,
    Plan,
    Rows,
    decide,
    mixture,
    one_row_per_source,
    prediction_powered,
    pseudo_outcomes,
    sample_ratio,
)
from evaluation.statistics.wealth import first_crossing, wealth_path

THUMBS = Outcome("thumbs")


def rows(rng: np.random.Generator, n: int, candidate: float, control: float, share: float = 0.5, **more: Any) -> Rows:
    arm = rng.random(n) < share
    thumbs = (rng.random(n) < np.where(arm, candidate, control)).astype(float)
    return Rows(arm, np.full(n, share), {"thumbs": thumbs}, **more)


def decided(found: Rows, *outcomes: Outcome, **plan: float) -> Decision:
    return decide(found, outcomes or (THUMBS,), Plan(**plan))


# Rows


def test_a_source_is_one_row_of_what_was_known_when_it_closed():
    nan = float("nan")
    found = one_row_per_source(
        sources=["ann", "bob", "ann", "ann", "cy", "bob"],
        candidate=[True, False, True, True, False, True],
        propensities=[0.1, 0.1, 0.1, 0.1, 0.5, 0.5],
        at=[0.0, 1.0, 5.0, 50.0, 95.0, 9.0],
        values={"thumbs": [1.0, nan, 0.0, 1.0, 1.0, 0.0]},
        known_at={"thumbs": [2.0, nan, 11.0, 51.0, 96.0, 9.0]},
        covariates={"thumbs": [0.25, nan, 0.5, 0.5, 0.5, 0.5]},
        predictions={"thumbs": [0.5, 0.3, 0.7, 0.0, 0.0, 0.0]},
        window_s=10.0,
        now=100.0,
    )
    assert found.candidate.tolist() == [True, False]  # ann, bob; cy's row closes at 105
    assert found.propensities.tolist() == [0.1, 0.1]
    np.testing.assert_array_equal(found.values["thumbs"], [1.0, nan])  # ann's second thumb came after second 10
    np.testing.assert_array_equal(found.covariates["thumbs"], [0.25, nan])
    np.testing.assert_allclose(found.predictions["thumbs"], [0.6, 0.3])
    assert (found.pending, found.late, found.crossed) == (1, 2, 1)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.integers(0, 60), st.integers(0, 30)), max_size=40))
def test_a_row_once_closed_never_changes(events: list[tuple[int, bool, int, int]]):
    events = sorted(events, key=lambda event: event[2])
    source, arm, at, delay = (np.array([event[k] for event in events]) for k in range(4))

    def seen(now: float) -> Rows:
        there = at <= now
        values = np.where((at + delay)[there] <= now, np.sin(at + source)[there], np.nan)  # no thumb before its time
        return one_row_per_source(
            source[there], arm[there], np.full(there.sum(), 0.5), at[there], {"y": values},
            known_at={"y": (at + delay)[there]}, window_s=15, now=now,
        )  # fmt: skip

    early, later = seen(40.0), seen(200.0)
    n = len(early.candidate)
    assert np.array_equal(early.candidate, later.candidate[:n])
    assert np.array_equal(early.values["y"], later.values["y"][:n], equal_nan=True)


def test_ten_thousand_thumbs_from_one_source_are_one_voice():
    rng = np.random.default_rng(0)
    sources = np.concatenate([np.arange(100), np.full(10_000, 100)])
    arm = np.concatenate([rng.random(100) < 0.5, np.ones(10_000, bool)])
    thumbs = np.concatenate([(rng.random(100) < 0.5).astype(float), np.ones(10_000)])
    found = one_row_per_source(
        sources, arm, np.full(10_100, 0.5), np.arange(10_100.0), {"thumbs": thumbs}, window_s=1e6, now=1e9
    )
    assert len(found.candidate) == 101
    assert decided(found).decision == "hold"


# Pseudo-outcomes


def test_pseudo_outcomes_are_those_worked_out_by_hand():
    psi, low, high = pseudo_outcomes([1.0, 0.0, 1.0], [True, False, False], [0.5, 0.5, 0.2])
    assert psi.tolist() == pytest.approx([(1 - 0.5) / 0.5, -(0 - 2 / 3) / 0.5, -(1 - 0.5) / 0.8])
    assert low.tolist() == pytest.approx([-1.0, -(2 / 3) / 0.5, -0.5 / 0.2])
    assert high.tolist() == pytest.approx([1.0, (2 / 3) / 0.5, 0.5 / 0.2])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 1), st.booleans(), st.floats(0.01, 0.99), st.floats(-5, 5) | st.just(float("nan"))),
        min_size=1,
        max_size=40,
    )
)
def test_no_pseudo_outcome_leaves_its_bounds(drawn: list[tuple[float, bool, float, float]]):
    psi, low, high = pseudo_outcomes(*(np.array(column) for column in zip(*drawn, strict=True)))
    assert (low - 1e-9 <= psi).all()
    assert (psi <= high + 1e-9).all()
    assert (low <= -1 + 1e-9).all()


def test_pseudo_outcomes_have_the_difference_as_their_mean_through_all_phases_and_with_drift():
    rng = np.random.default_rng(1)
    share = np.repeat([0.01, 0.1, 0.5], 100)
    level = np.linspace(0.3, 0.8, 300)
    arm = rng.random((10_000, 300)) < share
    y = (rng.random(arm.shape) < level + 0.1 * arm).astype(float)
    psi = pseudo_outcomes(y, arm, share)[0]
    assert psi[:, 100:].mean() == pytest.approx(0.1, abs=0.004)
    # Whereas the arms' plain means differ by the drift too: late rows are more often the candidate's.
    assert y[arm].mean() - y[~arm].mean() > 0.2


def test_what_a_source_did_before_narrows_the_interval_as_much_as_it_explains():
    rng = np.random.default_rng(2)
    n = 6000
    before = rng.random(n)
    arm = rng.random(n) < 0.5
    y = np.clip(0.1 + 0.6 * before + 0.05 * arm + 0.08 * rng.normal(size=n), 0, 1)
    plain, cuped = pseudo_outcomes(y, arm, 0.5)[0], pseudo_outcomes(y, arm, 0.5, before)[0]
    left = 1 - np.corrcoef(y, before)[0, 1] ** 2
    assert cuped[500:].var() / plain[500:].var() == pytest.approx(left, rel=0.15)
    found = [
        decided(Rows(arm, np.full(n, 0.5), {"thumbs": y}, covariates)).differences[0]
        for covariates in ({}, {"thumbs": before})
    ]
    assert found[1].high - found[1].low < 0.6 * (found[0].high - found[0].low)
    assert found[1].low < 0.05 < found[1].high


def test_a_useless_covariate_and_missing_ones_do_no_harm():
    rng = np.random.default_rng(3)
    found = rows(rng, 4000, 0.7, 0.7)
    noise = np.where(rng.random(4000) < 0.5, np.nan, rng.normal(size=4000))
    plain = decided(found).differences[0]
    other = decided(Rows(found.candidate, found.propensities, found.values, {"thumbs": noise})).differences[0]
    assert (other.low, other.high) == pytest.approx((plain.low, plain.high), abs=0.01)


# Errors


@pytest.mark.parametrize(("share", "level"), [(0.5, 0.7), (0.1, 0.9), (0.5, 0.02)])
def test_without_a_difference_either_error_is_rarer_than_its_alpha_at_any_time(share: float, level: float):
    rng = np.random.default_rng(4)
    arm = rng.random((400, 3000)) < share
    psi, low, high = pseudo_outcomes(rng.random(arm.shape) < level, arm, share)
    assert (first_crossing(wealth_path(-psi, -high, 0.0), 0.05) > 0).mean() <= 0.055
    assert (first_crossing(wealth_path(psi, low, 0.0), 0.05) > 0).mean() <= 0.055


def test_the_confidence_sequence_covers_the_difference():
    rng = np.random.default_rng(5)
    covered = 0
    for _ in range(60):
        found = decided(rows(rng, 1500, 0.6, 0.7, share=0.3)).differences[0]
        covered += found.low <= -0.1 <= found.high
    assert covered >= 57


def test_harm_is_rolled_back_and_a_gain_committed_with_their_evidence():
    harm = decided(rows(np.random.default_rng(6), 4000, 0.6, 0.7))
    assert harm.decision == "roll back"
    assert harm.differences[0].harm_at is not None
    assert harm.differences[0].harm_at < 3000
    assert harm.reasons[0].startswith("thumbs is shown to be worse: -0.")
    gain = decided(rows(np.random.default_rng(6), 4000, 0.8, 0.7))
    assert gain.decision == "commit"
    assert gain.differences[0].low > 0
    assert decided(rows(np.random.default_rng(6), 4000, 0.7, 0.7)).decision == "hold"


def test_a_decision_does_not_depend_on_when_somebody_looked():
    found = rows(np.random.default_rng(7), 3000, 0.6, 0.7)
    at = decided(found).differences[0].harm_at
    assert at is not None
    for n, expected in ((at - 1, "hold"), (at, "roll back"), (at + 1, "roll back")):
        part = Rows(found.candidate[:n], found.propensities[:n], {"thumbs": found.values["thumbs"][:n]})
        assert decided(part).decision == expected
    assert decided(found) == decided(found)


# Outcomes


def test_an_outcome_where_less_is_better_is_turned_round():
    rng = np.random.default_rng(8)
    n = 3000
    arm = rng.random(n) < 0.5
    latency = np.clip(rng.gamma(2.0, np.where(arm, 8.0, 4.0)), 0, 60)
    slower = Outcome("latency", (0.0, 60.0), higher_is_better=False)
    found = decided(Rows(arm, np.full(n, 0.5), {"latency": latency}), slower)
    assert found.decision == "roll back"
    truth = latency[arm].mean() - latency[~arm].mean()
    assert found.differences[0].value == pytest.approx(truth, abs=0.5)
    assert 0 < found.differences[0].low < truth < found.differences[0].high


def test_a_guardrail_must_be_shown_and_rolls_back_past_its_margin():
    rng = np.random.default_rng(9)
    good = rows(rng, 6000, 0.8, 0.7)
    for errors, margin, expected in ((0.10, 0.05, "commit"), (0.10, 0.005, "hold"), (0.30, 0.05, "roll back")):
        failed = (rng.random(6000) < np.where(good.candidate, errors, 0.10)).astype(float)
        rail = Outcome("errors", higher_is_better=False, role="guardrail", margin=margin)
        found = decided(Rows(good.candidate, good.propensities, {**good.values, "errors": failed}), THUMBS, rail)
        assert found.decision == expected, found.reasons
    assert any("errors" in reason for reason in found.reasons)


def test_a_margin_says_how_much_better_or_worse_is_meant():
    better = rows(np.random.default_rng(10), 5000, 0.76, 0.7)
    assert decided(better).decision == "commit"
    assert decided(better, Outcome("thumbs", margin=0.1)).decision == "hold"
    worse = rows(np.random.default_rng(11), 5000, 0.64, 0.7)
    assert decided(worse).decision == "roll back"
    assert decided(worse, Outcome("thumbs", rollback_margin=0.1)).decision == "hold"


# What holds


def test_zero_traffic_never_commits():
    empty = Rows(np.zeros(0, bool), np.zeros(0), {"thumbs": np.zeros(0)})
    found = decided(empty)
    assert found.decision == "hold"
    assert "0 rows of the candidate and 0 of the control" in found.reasons[0]
    one_arm = Rows(np.ones(500, bool), np.full(500, 0.5), {"thumbs": np.full(500, np.nan)})
    assert decided(one_arm).decision == "hold"


def test_a_sample_ratio_mismatch_holds_a_commit():
    rng = np.random.default_rng(11)
    gain = rows(rng, 6000, 0.8, 0.7)
    lost = ~(gain.candidate & (rng.random(6000) < 0.15))  # 15 % of the candidate's rows never arrive
    found = decided(Rows(gain.candidate[lost], gain.propensities[lost], {"thumbs": gain.values["thumbs"][lost]}))
    assert found.decision == "hold"
    assert found.holds[0].startswith(
        "sample-ratio mismatch: the candidate has 46.58% of 5534 sources instead of 50.00%"
    )


def test_response_rates_that_differ_hold_a_commit_and_not_a_rollback():
    rng = np.random.default_rng(12)
    for rate, expected in ((0.8, "hold"), (0.6, "roll back")):
        found = rows(rng, 12_000, rate, 0.7)
        answered = rng.random(12_000) < np.where(found.candidate, 0.4, 0.5)
        some = Rows(found.candidate, found.propensities, {"thumbs": np.where(answered, found.values["thumbs"], np.nan)})
        decision = decided(some)
        assert decision.decision == expected
        assert decision.holds == ("response rates differ between the arms, so those who answer are not comparable",)


def test_the_sample_ratio_test_is_lindon_and_maleks_bayes_factor():
    arm = np.random.default_rng(13).random(500) < 0.35
    x, n, a, b = arm.sum(), 500, 100 * 0.3, 100 * 0.7
    expected = np.exp(betaln(a + x, b + n - x) - betaln(a, b) - x * np.log(0.3) - (n - x) * np.log(0.7))
    assert sample_ratio(arm, np.full(500, 0.3))[-1] == pytest.approx(expected)


def test_sound_shares_are_rarely_held_through_phases_and_lost_rows_are_found():
    rng = np.random.default_rng(14)
    share = np.repeat([0.01, 0.1, 0.5], 1000)
    alarms = sum(sample_ratio(rng.random(3000) < share, share).max() >= 100 for _ in range(400))
    assert alarms / 400 <= 0.015
    found = [sample_ratio(rng.random(6000) < 0.46, np.full(6000, 0.5)).max() >= 100 for _ in range(20)]
    assert sum(found) >= 18


# Predictions


def labelled(
    rng: np.random.Generator, n: int, rate: float, level: float, noise: float
) -> tuple[np.ndarray, np.ndarray]:
    chance = np.clip(level + 0.3 * rng.choice([-1, 1], n), 0, 1)
    y = (rng.random(n) < chance).astype(float)
    f = 0.2 + 0.5 * chance + noise * rng.normal(size=n)  # biased by far
    return np.where(rng.random(n) < rate, y, np.nan), f


def test_prediction_powered_means_are_those_of_the_papers_formula():
    y, f = labelled(np.random.default_rng(15), 400, 0.3, 0.6, 0.1)
    has = ~np.isnan(y)
    n, m = has.sum(), (~has).sum()
    power = np.cov(y[has], f[has], ddof=0)[0, 1] / ((1 + n / m) * f.var())
    mean, variance = prediction_powered(y, f)
    assert mean[-1] == pytest.approx(power * f[~has].mean() + (y[has] - power * f[has]).mean())
    expected = power**2 * f[~has].var() / m + (y[has] - power * f[has]).var() / (n - 1)
    assert variance[-1] == pytest.approx(expected)
    assert variance[-1] < y[has].var() / n
    again = prediction_powered(y[:200], f[:200])
    assert (mean[199], variance[199]) == pytest.approx((again[0][-1], again[1][-1]))


def test_without_labels_or_with_useless_predictions_there_is_nothing_but_the_labels():
    y = np.array([1.0, 0.0, np.nan, 1.0, np.nan])
    mean, variance = prediction_powered(y, np.full(5, 0.7))
    np.testing.assert_allclose(mean, [np.nan, 0.5, 0.5, 2 / 3, 2 / 3])
    assert variance[-1] == pytest.approx(y[[0, 1, 3]].var() / 2)
    assert np.isnan(prediction_powered(np.full(4, np.nan), np.ones(4))[0]).all()


def test_prediction_powered_evidence_errs_no_more_than_alpha_at_any_time():
    rng = np.random.default_rng(16)
    errors = 0
    for _ in range(250):
        arm = rng.random(4000) < 0.5
        y, f = labelled(rng, 4000, 0.2, 0.6, 0.1)
        both = [prediction_powered(y, f, arm == side) for side in (True, False)]
        enough = np.minimum(np.cumsum(arm & ~np.isnan(y)), np.cumsum(~arm & ~np.isnan(y))) >= 100
        variance = np.where(enough, both[0][1] + both[1][1], np.nan)
        errors += mixture(both[1][0] - both[0][0], variance, 0.0, 0.1).max() >= 20
    assert errors / 250 <= 0.05


def test_predictions_show_harm_that_few_thumbs_alone_do_not():
    rng = np.random.default_rng(17)
    arm = rng.random(20_000) < 0.5
    chance = np.where(rng.random(20_000) < np.where(arm, 0.6, 0.7), 0.95, 0.05)
    thumbs = np.where(rng.random(20_000) < 0.03, rng.random(20_000) < chance, np.nan)
    found = Rows(arm, np.full(20_000, 0.5), {"thumbs": thumbs}, predictions={"thumbs": chance})
    assert decided(found).decision == "hold"
    powered = decided(found, Outcome("thumbs", predicted=True))
    assert powered.decision == "roll back"
    assert powered.differences[0].value == pytest.approx(-0.09, abs=0.03)


def test_the_mixture_is_the_likelihood_averaged_over_half_normal_effects():
    effects = (np.arange(200_000) + 0.5) / 200_000 * 1.0
    density = 2 * np.exp(-((effects / 0.1) ** 2) / 2) / (0.1 * np.sqrt(2 * np.pi))
    for difference, variance in ((0.08, 0.001), (-0.05, 0.0004), (0.0, 0.01)):
        ratio = np.exp((difference * effects - effects**2 / 2) / variance)
        found = mixture(np.array([difference]), np.array([variance]), 0.0, 0.1)[0]
        assert found == pytest.approx((ratio * density).mean(), rel=1e-3)


@pytest.mark.parametrize(
    ("change", "outcomes", "words"),
    [
        ({"values": {"thumbs": np.array([0.5, 2.0])}}, (THUMBS,), r"thumbs is 2 in row 1, outside \[0, 1\]"),
        ({"values": {"thumbs": np.zeros(3)}}, (THUMBS,), "values of shape"),
        ({"propensities": np.array([0.5, 1.0])}, (THUMBS,), "propensities must lie between 0 and 1"),
        ({}, (Outcome("thumbs", role="guardrail", margin=0.1),), "no outcome has the role success"),
        ({}, (THUMBS, Outcome("thumbs", role="guardrail")), "guardrail thumbs needs a margin above 0"),
        ({}, (Outcome("thumbs", predicted=True),), "has no predictions"),
        (
            {"propensities": np.array([0.1, 0.5]), "predictions": {"thumbs": np.zeros(2)}},
            (Outcome("thumbs", predicted=True),),
            "share must stay the same, and it was 0.1 to 0.5",
        ),
    ],
)
def test_what_can_not_be_decided_is_refused_with_the_reason(change: dict[str, Any], outcomes: Any, words: str):
    plain = {"candidate": np.array([True, False]), "propensities": np.full(2, 0.5), "values": {"thumbs": np.zeros(2)}}
    with pytest.raises(ValueError, match=words):
        decide(Rows(**plain | change), outcomes, Plan())


def test_a_rhythm_that_both_arms_share_is_no_effect_where_one_arm_has_more_values():
    committed = 0
    for seed in range(20):
        draw = np.random.default_rng(seed)
        candidate = draw.random(2880) < 0.5
        mean = 0.6 + 0.2 * np.sin(2 * np.pi * np.arange(2880) / 1440)
        voices = draw.poisson(60 * np.where(candidate, 0.04, 0.02))
        values = np.where(voices >= 2, draw.binomial(voices, mean) / np.maximum(voices, 1), np.nan)
        seen = Rows(candidate, np.full(2880, 0.5), {"thumbs": values}, responded={"thumbs": voices / 60})
        committed += decide(seen, [Outcome("thumbs")], Plan(response_margin=0.05)).decision != "hold"
    assert committed <= 2


def test_arms_of_which_one_has_fewer_rows_with_a_value_are_held():
    draw = np.random.default_rng(0)
    candidate = draw.random(2000) < 0.5
    has = draw.random(2000) < np.where(candidate, 0.7, 0.35)
    seen = Rows(
        candidate,
        np.full(2000, 0.5),
        {"thumbs": np.where(has, 0.7 + 0.2 * candidate, np.nan)},
        responded={"thumbs": np.full(2000, 0.03)},
    )
    found = decide(seen, [Outcome("thumbs")], Plan(response_margin=0.05))
    assert found.decision == "hold"
    assert found.holds == ("response rates differ between the arms, so those who answer are not comparable",)
