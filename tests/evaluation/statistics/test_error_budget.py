"""The error budget against levels worked out by hand, and its sums."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.special
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluation.statistics.error_budget import ErrorBudget, Look, level, spent

FIXED = ErrorBudget(alpha=0.05, rule="fixed_horizon", horizon=4)
E_LOND = ErrorBudget(alpha=0.05, rule="e_lond")


def looks(*verdicts):
    return [Look(f"v{number}", 1.0, verdict) for number, verdict in enumerate(verdicts, 1)]


def test_a_fixed_horizon_gives_each_candidate_the_same_and_then_nothing():
    history = looks("refuse", "pass", "undecided")
    assert level(FIXED, history, "v4") == 0.0125
    history = looks("refuse", "pass", "undecided", "refuse")
    assert level(FIXED, history, "v5") == 0.0
    assert spent(FIXED, [*history, Look("v5", 1.0, "refuse")]) == pytest.approx(0.05)


def test_e_lond_gives_what_the_paper_says():
    # alpha_t = alpha * gamma_t * (passes so far + 1), gamma_t = t^-1.6 / zeta(1.6)
    zeta = scipy.special.zeta(1.6)
    assert level(E_LOND, [], "v1") == pytest.approx(0.05 / zeta)
    assert level(E_LOND, looks("refuse"), "v2") == pytest.approx(0.05 * 2**-1.6 / zeta)
    assert level(E_LOND, looks("pass", "refuse", "pass"), "v4") == pytest.approx(3 * 0.05 * 4**-1.6 / zeta)


@pytest.mark.parametrize("budget", [FIXED, E_LOND])
def test_many_looks_at_a_candidate_spend_once(budget):
    once = looks("undecided", "undecided")
    often = [*once, Look("v1", 3.0, "undecided"), Look("v2", 2.0, "undecided"), Look("v1", 5.0, "undecided")]
    assert level(budget, once, "v3") == level(budget, often, "v3")
    assert spent(budget, once) == spent(budget, often)


@given(
    st.lists(st.tuples(st.integers(0, 8), st.sampled_from(["pass", "refuse", "undecided"])), max_size=30),
    st.sampled_from(["fixed_horizon", "e_lond"]),
)
@settings(max_examples=100, deadline=None)
def test_a_candidate_keeps_its_level_whatever_follows(steps, rule):
    budget = ErrorBudget(rule=rule, horizon=5)
    history = [Look(f"v{number}", 1.0, verdict) for number, verdict in steps]
    for at, look in enumerate(history):
        assert level(budget, history[:at], look.candidate) == level(budget, history, look.candidate)


def test_without_a_pass_no_rule_spends_more_than_alpha():
    history = looks(*["refuse"] * 300)
    assert spent(ErrorBudget(rule="e_lond"), history) < 0.05
    assert spent(ErrorBudget(rule="fixed_horizon", horizon=250), history) == pytest.approx(0.05)


def test_of_those_that_pass_by_e_lond_few_are_false():
    # Half of the candidates are better. e-values: exact likelihood ratios of N(3, 1) to N(0, 1).
    rng = np.random.default_rng(0)
    shares, found = [], 0
    for _ in range(200):
        history, false = [], 0
        for number in range(40):
            better = bool(rng.random() < 0.5)
            e_value = float(np.exp(3 * rng.normal(3 * better) - 4.5))
            passes = e_value * level(E_LOND, history, str(number)) >= 1
            false += passes and not better
            found += passes and better
            history.append(Look(str(number), e_value, "pass" if passes else "refuse"))
        shares.append(false / max(1, sum(look.verdict == "pass" for look in history)))
    assert np.mean(shares) <= 0.05
    assert found > 200


@pytest.mark.parametrize(("alpha", "horizon"), [(0, 10), (1, 10), (0.05, 0)])
def test_a_budget_that_cant_be_kept_is_refused(alpha, horizon):
    with pytest.raises(ValueError, match="can't be kept"):
        ErrorBudget(alpha=alpha, horizon=horizon)
