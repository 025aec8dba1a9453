"""What pairs of responses show, by numbers that are worked out by hand or by an independent loop."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from evaluation.config import ShadowConfig
from evaluation.shadow.comparison import Answer, Pair, ShadowPlan, compare, path
from evaluation.statistics.betting import FRACTIONS, OutOfBounds

PLAN = ShadowPlan.of(ShadowConfig(share=1.0, min_requests=20, max_requests=500))


def pair(number: int, after: float | None, before: float | None, **more: Any) -> Pair:
    own = {"tokens": 10, "cut": False} | more
    return Pair(
        unit=f"u{number}",
        draw=f"{number:032x}",
        candidate=Answer(reward=after, **own),
        incumbent=Answer(reward=before, tokens=10, cut=False),
    )


def pairs(n: int, after: float | None, before: float | None, **more: Any) -> list[Pair]:
    return [pair(i, after, before, **more) for i in range(n)]


def wealth(payoffs: list[float]) -> float:
    """The largest mean wealth of sixteen constant bettors, one observation after another."""
    bets = [1 / 16] * 16
    peak = 1.0
    for payoff in payoffs:
        bets = [bet * (1 + float(fraction) * payoff) for bet, fraction in zip(bets, FRACTIONS, strict=True)]
        peak = max(peak, sum(bets))
    return peak


def test_harm_is_shown_when_a_bettor_against_a_loss_within_the_margin_has_won_so_much() -> None:
    """Against "the mean difference is at least -0.05", of differences from -1 to 1: a loss of 0.5 pays 0.45 / 1.05."""
    alpha = 0.05 / 4
    needed = next(n for n in range(1, 200) if wealth([(-0.05 + 0.5) / 1.05] * n) * alpha >= 1)
    plan = PLAN.model_copy(update={"min_requests": 1})
    for n, decision in ((needed - 1, "no harm shown"), (needed, "harm")):
        found = compare(plan, pairs(n, 0.25, 0.75))
        assert (found.decision, found.requests) == (decision, n)
    assert found.reasons[0].startswith("reward is shown to be worse: -0.5000, [")
    assert found.reasons[0].endswith(f"over {needed} requests, where 0.05 may be lost")


def test_nothing_is_said_of_fewer_requests_than_a_result_rests_on_whatever_they_show() -> None:
    found = compare(PLAN, pairs(19, 0.0, 1.0))
    assert found.decision == "can't tell"
    assert found.reasons == ("19 requests were answered, and a result rests on 20 at least",)
    assert compare(PLAN, []).decision == "can't tell"
    assert compare(PLAN, pairs(20, 0.0, 1.0)).decision == "harm"


def test_the_same_answers_are_no_worse_as_soon_as_every_margin_is_shown_to_hold() -> None:
    """The narrowest margin is that of rewards, 0.05 of 1.05 below them, and each is shown at alpha by itself."""
    needed = next(n for n in range(1, 500) if wealth([0.05 / 0.95] * n) * 0.05 >= 1)
    assert compare(PLAN, pairs(needed - 1, 0.5, 0.5)).decision == "no harm shown"
    found = compare(PLAN, pairs(needed, 0.5, 0.5))
    assert (found.decision, [one.holds for one in found.compared]) == ("no worse", [True] * 4)


@pytest.mark.parametrize(
    ("more", "measure", "value"),
    [
        ({"tokens": 100}, "length", 0.9),
        ({"cut": True}, "truncation", 1.0),
        ({"failed": True, "tokens": 0}, "errors", 1.0),
    ],
)
def test_other_harm_than_of_rewards_is_shown_too(more: dict[str, Any], measure: str, value: float) -> None:
    found = compare(PLAN, pairs(60, 0.5, 0.5, **more))
    assert found.decision == "harm"
    (one,) = [one for one in found.compared if one.measure == measure]
    assert (one.harm, one.holds, one.n) == (True, False, 60)
    assert one.value == pytest.approx(value)
    plan = PLAN.model_copy(update={"margins": {"reward": 0.5}})
    if measure != "errors":  # what is not compared does no harm; what failed has the least reward
        assert compare(plan, pairs(60, 0.5, 0.5, **more)).decision != "harm"


def test_a_response_that_failed_has_the_least_reward_and_no_length() -> None:
    found = compare(PLAN, [pair(i, None, 1.0, failed=True, tokens=0) for i in range(40)])
    by_name = {one.measure: one for one in found.compared}
    assert by_name["reward"].value == -1.0
    assert (by_name["length"].n, by_name["length"].value, by_name["truncation"].n) == (0, None, 0)
    assert found.unscored == 0


def test_a_candidate_gains_nothing_by_responses_that_have_no_reward() -> None:
    found = compare(PLAN, [pair(i, 0.0 if i % 2 else 1.0, 1.0) for i in range(500)])
    hidden = compare(PLAN, [pair(i, None if i % 2 else 1.0, 1.0) for i in range(500)])
    assert (found.decision, hidden) == ("harm", found)
    plan = PLAN.model_copy(update={"reward_bounds": (-1.0, 1.0)})
    assert compare(plan, pairs(20, None, 1.0)).compared[0].value == -2.0


def test_what_is_withheld_has_the_least_reward_and_nothing_else_that_is_measured() -> None:
    found = compare(PLAN, pairs(60, None, 1.0, withheld=True, tokens=0))
    values = {one.measure: (one.n, one.value) for one in found.compared}
    assert values == {"reward": (60, -1.0), "length": (0, None), "truncation": (0, None), "errors": (60, 0.0)}
    assert (found.decision, found.unscored) == ("harm", 0)


def test_what_the_incumbent_has_no_reward_for_is_left_out_and_more_than_one_in_twenty_can_not_tell() -> None:
    good = pairs(200, 0.9, 0.5)
    few = [*good, *(pair(1000 + i, 0.0, None) for i in range(10))]
    found = compare(PLAN, few)
    assert (found.unscored, found.compared[0].n, found.decision) == (10, 200, "no worse")
    many = [*good, *(pair(1000 + i, 0.5, None) for i in range(11))]
    found = compare(PLAN, many)
    assert (found.decision, found.unscored) == ("can't tell", 11)
    assert found.reasons == ("11 of 211 responses that people got have no reward, and 5% may lack one",)
    assert compare(PLAN, [*many, *pairs(200, 0.0, 1.0)]).decision == "harm"  # which is shown all the same


@pytest.mark.parametrize(("missing", "decision"), [(20, "harm"), (21, "can't tell")])
def test_a_scorer_that_is_down_is_not_read_as_harm_by_the_candidate_in_its_rewards(missing: int, decision: str) -> None:
    seen = [*pairs(200 - missing, None, 1.0), *pairs(missing, None, None)]
    assert compare(PLAN, seen).decision == decision
    longer = [one.model_copy(update={"candidate": Answer(reward=None, tokens=100, cut=False)}) for one in seen]
    assert compare(PLAN, longer).decision == "harm"  # which no scorer measures


def test_a_reward_out_of_bounds_is_refused() -> None:
    with pytest.raises(OutOfBounds, match=r"has the value 1\.5, outside the bounds \[0, 1\]"):
        compare(PLAN, pairs(3, 1.5, 0.5))


def test_rewards_of_other_bounds_have_margins_as_wide() -> None:
    config = ShadowConfig(share=1.0, min_requests=1, reward_bounds=(-2.0, 2.0), reward=0.1)
    plan = ShadowPlan.of(config)
    assert plan.margins["reward"] == pytest.approx(0.4)
    found = compare(plan, pairs(60, -1.0, 1.0)).compared[0]
    assert (found.value, found.harm) == (-2.0, True)
    assert -4 <= found.low <= -2 <= found.high < -0.4


def test_a_candidate_like_the_incumbent_is_seldom_said_to_do_harm_however_often_one_looks() -> None:
    """A response is right or wrong by a coin, for both alike: at a share of 5% of shadows harm may be said."""
    rng = np.random.default_rng(7)
    plan = PLAN.model_copy(update={"margins": {"reward": 1e-6}, "min_requests": 1})
    harmed = 0
    for _ in range(200):
        coins = rng.integers(0, 2, (200, 2)).astype(float)
        harmed += compare(plan, [pair(i, a, b) for i, (a, b) in enumerate(coins.tolist())]).compared[0].harm
    assert harmed / 200 <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 200)


def test_the_path_ends_where_the_comparison_does() -> None:
    rng = np.random.default_rng(1)
    seen = [pair(i, float(rng.random()), float(rng.random())) for i in range(50)]
    value, low, high = path(PLAN, "reward", seen)
    one = compare(PLAN, seen).compared[0]
    assert (len(value), value[-1], low[-1], high[-1]) == (50, pytest.approx(one.value), one.low, one.high)
    assert np.all(np.diff(low) >= 0)
    assert np.all(np.diff(high) <= 0)
