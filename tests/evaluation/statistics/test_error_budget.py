"""The error budget against levels worked out by hand, and its sums."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.special
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluation.statistics import error_budget
from evaluation.statistics.error_budget import ErrorBudget, Look, level, levels

FIXED = ErrorBudget(alpha=0.05, rule="fixed_horizon", horizon=4)
E_LOND = ErrorBudget(alpha=0.05, rule="e_lond")


def total(budget, history):
    return sum(levels(budget, history).values())


def looks(*verdicts):
    return [Look(f"v{number}", 1.0, verdict) for number, verdict in enumerate(verdicts, 1)]


def test_a_fixed_horizon_gives_each_candidate_the_same_and_then_nothing():
    history = looks("refuse", "pass", "undecided")
    assert level(FIXED, history, "v4") == 0.0125
    history = looks("refuse", "pass", "undecided", "refuse")
    assert level(FIXED, history, "v5") == 0.0
    assert total(FIXED, [*history, Look("v5", 1.0, "refuse")]) == pytest.approx(0.05)


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
    assert total(budget, once) == total(budget, often)


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
    assert total(ErrorBudget(rule="e_lond"), history) < 0.05
    assert total(ErrorBudget(rule="fixed_horizon", horizon=250), history) == pytest.approx(0.05)


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


def declared_before_each(budgets, verdict="refuse"):
    """A history in which a budget is declared before each candidate."""
    return [event for i, budget in enumerate(budgets) for event in (budget, Look(f"v{i}", 1.0, verdict))]


def test_a_horizon_that_is_raised_by_one_before_each_candidate_spends_no_more_than_alpha():
    raised = [ErrorBudget(0.05, "fixed_horizon", horizon) for horizon in range(1, 201)]
    assert sum(budget.alpha / budget.horizon for budget in raised) == pytest.approx(0.294, abs=1e-3)
    assert total(FIXED, declared_before_each(raised)) == pytest.approx(0.05)
    slowly = [ErrorBudget(0.05, "fixed_horizon", horizon) for horizon in range(100, 400)]
    given = list(levels(FIXED, declared_before_each(slowly)).values())
    assert given[:3] == pytest.approx([0.05 / 100, 0.05 / 101, 0.05 / 102])
    assert sum(given) == pytest.approx(0.05)
    assert given[-1] == 0.0


def test_what_is_declared_anew_spends_what_is_left_as_worked_out_by_hand():
    zeta = scipy.special.zeta(1.6)
    first = 0.05 / zeta
    # e-LOND of another alpha: what is left of it, over t = 2, 3, ... in proportion to t^-1.6.
    history = [E_LOND, *looks("refuse"), ErrorBudget(0.1, "e_lond")]
    assert level(E_LOND, [*history, Look("b", 1.0, "refuse")], "b") == pytest.approx(
        (0.1 - first) * 2**-1.6 / (zeta - 1)
    )
    # A fixed horizon counts what passes have earned, e-LOND does not.
    passed = [E_LOND, *looks("pass", "refuse")]
    earned = first + 2 * 0.05 * 2**-1.6 / zeta
    assert level(ErrorBudget(0.05, "fixed_horizon", 1), passed, "b") == pytest.approx(0.05 - earned)
    back = level(ErrorBudget(0.08, "e_lond"), [*passed, FIXED, Look("c", 1.0, "refuse")], "b")
    weights = first + 0.05 * 2**-1.6 / zeta + min(0.05 / 4, 0.05 - earned)
    assert back == pytest.approx(2 * (0.08 - weights) * 4**-1.6 / (zeta - 1 - 2**-1.6 - 3**-1.6))
    # Less than was given already: nothing.
    assert level(ErrorBudget(0.01, "e_lond"), passed, "b") == 0.0
    assert level(ErrorBudget(0.01, "fixed_horizon", 1000), passed, "b") == 0.0


@pytest.mark.parametrize("budget", [FIXED, E_LOND])
def test_the_same_declared_again_and_again_changes_nothing(budget):
    often = declared_before_each([budget] * 6)
    there_and_back = (
        declared_before_each([budget, ErrorBudget(0.05, budget.rule, 7)] * 3) if budget is E_LOND else often
    )
    once = levels(budget, [event for event in often if isinstance(event, Look)])
    assert levels(budget, often) == pytest.approx(once)
    assert levels(budget, there_and_back) == pytest.approx(once)


BUDGETS = st.builds(
    ErrorBudget, st.sampled_from([0.01, 0.05, 0.2]), st.sampled_from(["fixed_horizon", "e_lond"]), st.integers(1, 9)
)


@given(st.lists(st.tuples(BUDGETS, st.sampled_from(["pass", "refuse"])), max_size=40))
@settings(max_examples=200, deadline=None)
def test_whatever_is_declared_how_often_the_sum_that_its_rule_bounds_stays_within_alpha(steps):
    history, weights, given = [], 0.0, 0.0
    for i, (budget, verdict) in enumerate(steps):
        passes = len({event.candidate for event in history if isinstance(event, Look) and event.verdict == "pass"})
        mine = level(budget, history, f"v{i}")
        given += mine
        weights += mine / (passes + 1) if budget.rule == "e_lond" else mine
        if mine > 0:
            assert (weights if budget.rule == "e_lond" else given) <= budget.alpha * (1 + 1e-9)
        history += [budget, Look(f"v{i}", 1.0, verdict)]


def test_who_declares_anew_after_each_refusal_passes_no_more_false_candidates_than_alpha_says():
    # No candidate is better. Whoever wants a pass takes all of what is left at once, again and again.
    rng = np.random.default_rng(1)
    passed = 0
    for _ in range(4000):
        history = []
        for number in range(12):
            horizon = int(rng.integers(1, 4))
            budget = ErrorBudget(0.05, "fixed_horizon" if rng.random() < 0.5 else "e_lond", horizon)
            mine = level(budget, history, str(number))
            if mine > 0 and np.exp(3 * rng.normal() - 4.5) >= 1 / mine:
                passed += 1
                break
            history += [budget, Look(str(number), 1.0, "refuse")]
    assert passed / 4000 <= 0.05


def test_what_was_spent_is_the_sum_that_the_rule_in_force_bounds():
    weight = 0.05 / scipy.special.zeta(1.6)
    history = [E_LOND, *looks("pass", "refuse"), ErrorBudget(0.06, "fixed_horizon", 10), Look("v3", 1.0, "refuse")]
    first, second, third = error_budget.given(history)
    assert (first.level, first.spent) == pytest.approx((weight, weight))
    assert second.level == pytest.approx(2 * weight * 2**-1.6)  # raised by the pass
    assert second.spent == pytest.approx(weight * (1 + 2**-1.6))  # as if it were not
    assert third.level == pytest.approx(0.006)
    assert third.spent == pytest.approx(first.level + second.level + third.level)
    assert (second.budget.rule, third.budget.rule) == ("e_lond", "fixed_horizon")
    assert {one.candidate: one.level for one in error_budget.given(history)} == levels(E_LOND, history)


def test_a_level_before_any_budget_is_refused():
    with pytest.raises(ValueError, match="'v1' has a level, and no budget was declared"):
        error_budget.given(looks("pass"))
    assert error_budget.given([]) == []
