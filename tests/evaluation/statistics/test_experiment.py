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
    one_row_per_source,
    prediction_powered,
    pseudo_outcomes,
    sample_ratio,
)
from evaluation.statistics.wealth import POWERED_FRACTIONS, first_crossing, wealth_path

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
    np.testing.assert_array_equal(found.labelled_predictions["thumbs"], [0.5, nan])
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
    rng = np.random.default_rng(32)
    n = 6000
    before = rng.random(n) - 0.5
    arm = rng.random(n) < 0.5
    y = np.clip(0.4 + 0.6 * before + 0.05 * arm + 0.08 * rng.normal(size=n), 0, 1)
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


def test_what_nobody_has_seen_is_shown_as_no_difference():
    arm = np.array([False, False, True, False, False, False])
    errors = Outcome("errors", higher_is_better=False, role="guardrail", margin=0.05)
    seen = Rows(arm, np.full(6, 0.1), {"thumbs": np.array([1.0, 0, 1, 1, 0, 1]), "errors": np.zeros(6)})
    found = decided(seen, THUMBS, errors)
    thumbs, none = found.differences
    assert none.value != 0.0  # what is expected of the first rows
    assert (none.observed, thumbs.observed) == (0.0, pytest.approx(1 - 3 / 5))
    assert "margin: no difference seen yet, observed +0.0000, [" in found.reasons[0]


def test_phases_of_different_shares_are_observed_alike():
    arm, share = np.array([True, False, False, True, True, False]), np.array([0.25, 0.25, 0.25, 0.5, 0.5, 0.5])
    thumbs = np.array([1.0, 0.0, 1.0, 0.0, 1.0, 1.0])
    (found,) = decided(Rows(arm, share, {"thumbs": thumbs})).differences
    assert found.observed == pytest.approx((4 + 0 + 2) / (4 + 2 + 2) - (0 + 4 / 3 + 2) / (4 / 3 + 4 / 3 + 2))


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


# Coefficients that are fitted on the rows before


def blocks(
    rng: np.random.Generator,
    shape: tuple[int, ...],
    *,
    effect: float = 0.0,
    share: Any = 0.5,
    labels: int = 2,
    responses: int = 40,
    reliance: float = 0.0,
) -> dict[str, np.ndarray]:
    """Rows [shape] of ``responses`` each, of which the first ``labels`` have a thumb and all a noisy, biased score.

    ``reliance``: how much of a row's level its covariate explains, per standard deviation of it.
    """
    arm = rng.random(shape) < share
    covariate = rng.normal(size=shape)
    level = 0.5 + reliance * covariate + effect * arm
    chance = np.clip(level[..., None] + rng.choice([-0.4, 0.4], (*shape, responses)), 0, 1)
    score = np.clip(0.1 + 0.7 * chance + 0.1 * rng.normal(size=chance.shape), 0, 1)
    thumbs = rng.random((*shape, labels)) < chance[..., :labels]
    return {
        "arm": arm,
        "covariate": covariate,
        "y": thumbs.mean(axis=-1),
        "f": score.mean(axis=-1),
        "g": score[..., :labels].mean(axis=-1),
    }


def adjusted(made: dict[str, np.ndarray], share: float = 0.5) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    powered, power = prediction_powered(made["y"], made["f"], made["g"])
    return pseudo_outcomes(powered, made["arm"], share, made["covariate"], power=power)


def test_a_prediction_powered_row_is_that_of_ppi_python():
    rng = np.random.default_rng(15)
    chance = rng.random((400, 40))
    y = (rng.random((400, 40)) < chance).astype(float)
    score = np.clip(0.1 + 0.7 * chance + 0.2 * rng.normal(size=(400, 40)), 0, 1)
    labelled, f, g = y[:, :8].mean(axis=1), score.mean(axis=1), score[:, :8].mean(axis=1)
    found, power = prediction_powered(labelled, f, g)
    # ppi_mean_pointestimate of ppi-python 0.2.3 on the first two rows, with lam of 0.3 and of 1.
    for row, expected in enumerate(([0.62717952, 0.63226507], [0.38254681, 0.40015602])):
        assert labelled[row] + np.array([0.3, 1.0]) * (f - g)[row] == pytest.approx(expected, abs=1e-8)
    np.testing.assert_allclose(found, labelled + power * (f - g))
    # Its tuning on all rows together is 0.64075 for scores of the unlabelled, so 0.64075 (1 + n / N) for those of all.
    assert (power[:10] == 0).all()
    assert power[-1] == pytest.approx(0.80094, abs=0.1)
    assert found[100:].var() < 0.9 * labelled[100:].var()


def test_the_coefficient_of_what_was_before_is_that_of_least_squares():
    rng = np.random.default_rng(23)
    before = rng.normal(size=300)
    y = np.clip(0.5 + 0.1 * before + 0.1 * rng.normal(size=300), 0, 1)
    # OLS of statsmodels 0.15: slope 0.10277, and 0.46046 of the variance is left.
    ends = [
        pseudo_outcomes(np.append(y, 0.5), True, 0.5, None if x is None else np.append(before, x))[0][-1]
        for x in (-1.0, 1.0)
    ]
    assert (ends[0] - ends[1]) * 0.5 == pytest.approx(2 * 0.10277, abs=0.02)
    left = [pseudo_outcomes(y, True, 0.5, used)[0][50:].var() for used in (before, None)]
    assert left[0] / left[1] == pytest.approx(0.46046, rel=0.1)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(*[st.floats(0, 1)] * 3, st.booleans(), st.floats(0.01, 0.99), st.floats(-5, 5)),
        min_size=1,
        max_size=60,
    )
)
def test_no_prediction_powered_row_leaves_its_bounds(drawn: list[tuple[float, float, float, bool, float, float]]):
    y, f, g, arm, share, before = (np.array(column) for column in zip(*drawn, strict=True))
    found, power = prediction_powered(y, f, g)
    psi, low, high = pseudo_outcomes(found, arm.astype(bool), share, before, power=power)
    assert (low - 1e-9 <= psi).all()
    assert (psi <= high + 1e-9).all()


def test_a_coefficient_is_known_before_its_row():
    made = blocks(np.random.default_rng(24), (60,), reliance=0.1)
    power, low = prediction_powered(made["y"], made["f"], made["g"])[1], adjusted(made)[1]
    other = {name: np.append(column[:40], 1 - column[40:]) for name, column in made.items() if name != "arm"}
    other |= {"arm": ~made["arm"], "covariate": np.append(made["covariate"][:41], np.zeros(19))}
    assert power[40] > 0
    assert np.array_equal(prediction_powered(other["y"], other["f"], other["g"])[1][:41], power[:41])
    assert np.array_equal(adjusted(other)[1][:41], low[:41])


@pytest.mark.parametrize(("share", "labels"), [(0.5, 2), (0.1, 1)])
def test_adjusted_evidence_errs_no_more_than_alpha_at_any_time(share: float, labels: int):
    made = blocks(np.random.default_rng(16), (400, 1000), share=share, labels=labels, responses=10, reliance=0.1)
    psi, low, high = adjusted(made, share)
    assert psi[:, 100:].mean() == pytest.approx(0.0, abs=0.01)
    for values, least in ((-psi, -high), (psi, low)):
        assert (first_crossing(wealth_path(values, least, 0.0, POWERED_FRACTIONS), 0.05) > 0).mean() <= 0.055


def test_useless_predictions_change_next_to_nothing():
    made = blocks(np.random.default_rng(18), (2000,))
    noise = np.random.default_rng(19).random((2, 2000))
    found, power = prediction_powered(made["y"], noise[0], noise[1])
    assert power[200:].max() < 0.1
    assert found[200:].var() == pytest.approx(made["y"][200:].var(), rel=0.03)
    nothing = np.full(2000, np.nan)
    assert np.array_equal(prediction_powered(made["y"], nothing, nothing)[0], made["y"])


def test_the_adjusted_interval_is_narrower_and_covers_the_difference_through_phases():
    rng = np.random.default_rng(5)
    share = np.repeat([0.1, 0.5], [200, 1300])
    covered, widths = 0, []
    for _ in range(40):
        made = blocks(rng, (1500,), effect=-0.05, share=share, reliance=0.1)
        scores = {"predictions": {"thumbs": made["f"]}, "labelled_predictions": {"thumbs": made["g"]}}
        plain = decided(Rows(made["arm"], share, {"thumbs": made["y"]})).differences[0]
        both = Rows(made["arm"], share, {"thumbs": made["y"]}, {"thumbs": made["covariate"]}, **scores)
        found = decided(both, Outcome("thumbs", predicted=True)).differences[0]
        widths.append((found.high - found.low, plain.high - plain.low))
        covered += found.low <= -0.045 <= found.high  # a level that is clipped loses a tenth of the effect
    assert covered >= 38
    narrower, wider = np.mean(widths, axis=0)
    assert narrower < 0.8 * wider
    assert (found.earlier, found.predicted, plain.variance_ratio) == (1500, 1500, 1.0)
    assert found.variance_ratio < 0.7


def test_predictions_show_harm_that_few_thumbs_alone_do_not():
    made = blocks(np.random.default_rng(17), (900,), effect=-0.12, labels=1)
    plain = Rows(made["arm"], np.full(900, 0.5), {"thumbs": made["y"]})
    assert decided(plain).decision == "hold"
    powered = Rows(
        made["arm"],
        np.full(900, 0.5),
        {"thumbs": made["y"]},
        predictions={"thumbs": made["f"]},
        labelled_predictions={"thumbs": made["g"]},
    )
    found = decided(powered, Outcome("thumbs", predicted=True))
    assert found.decision == "roll back"
    assert found.differences[0].value == pytest.approx(-0.12, abs=0.05)


@pytest.mark.parametrize(
    ("change", "outcomes", "words"),
    [
        ({"values": {"thumbs": np.array([0.5, 2.0])}}, (THUMBS,), r"thumbs is 2 in row 1, outside \[0, 1\]"),
        ({"values": {"thumbs": np.zeros(3)}}, (THUMBS,), "values of shape"),
        ({"propensities": np.array([0.5, 1.0])}, (THUMBS,), "propensities must lie between 0 and 1"),
        ({}, (Outcome("thumbs", role="guardrail", margin=0.1),), "no outcome has the role success"),
        ({}, (THUMBS, Outcome("thumbs", role="guardrail")), "guardrail thumbs needs a margin above 0"),
        ({}, (Outcome("thumbs", predicted=True),), "has no predictions"),
        ({"predictions": {"thumbs": np.array([0.5, -0.1])}}, (THUMBS,), "a prediction of outcome thumbs is outside"),
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
