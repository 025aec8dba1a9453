"""Worlds of the offline test: many cycles without any improvement, and one candidate that is better.

In the null worlds every cycle brings a candidate that is no better, each is looked at in three cycles, with fresh items
each time, and nothing but the statistics refuses it: no guardrail, no futility. That is the worst that can be done.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from deploy.examples.simulate.world import Outcome, World
from evaluation.statistics import betting
from evaluation.statistics.error_budget import ErrorBudget, Look, level, levels
from evaluation.statistics.guardrails import Evidence, Metric, observe
from evaluation.statistics.intervals import Floats
from evaluation.statistics.verdict import decide

CYCLES = 1000
ITEMS = 1400  # fresh ones a cycle
LOOKS = 3  # cycles that a candidate stays in the race
REWARD = Metric("reward", "success", low=-1, high=1)
FIXED, E_LOND = ErrorBudget(rule="fixed_horizon", horizon=CYCLES), ErrorBudget(rule="e_lond")

_BATCH = 1000  # candidates drawn at once
_CLUSTERS = np.random.default_rng(15).permutation(np.repeat(np.arange(140), np.arange(140) % 19 + 1))

Draw = Callable[[np.random.Generator, int], Floats]
"""(generator, candidates) -> observations [candidates, n] of one cycle."""


def binary(rng: np.random.Generator, candidates: int) -> Floats:
    """A tenth of the items differs, by +1 or -1 alike."""
    drawn = rng.random((candidates, ITEMS), np.float32)
    return (drawn < 0.05).astype(np.float64) - (drawn > 0.95)


def graded(rng: np.random.Generator, candidates: int) -> Floats:
    """Rewards anywhere in [0, 1]: an item's own level, and two policies as far below it by chance."""
    item, one, other = rng.random((3, candidates, ITEMS), np.float32)
    return (item * (one - other)).astype(np.float64)


def skewed(rng: np.random.Generator, candidates: int) -> Floats:
    """The candidate loses 1 on 2 % of items and gains 0.0204 elsewhere: -0.000008 in the mean."""
    return np.where(rng.random((candidates, ITEMS), np.float32) < 0.02, -1.0, 0.0204)


def clustered(rng: np.random.Generator, candidates: int) -> Floats:
    """1,400 items or so in 140 clusters of 1 to 19, that mostly agree among themselves."""
    of_cluster = rng.choice([-1.0, 0.0, 1.0], (candidates, 140), p=[0.15, 0.7, 0.15])
    agrees = rng.random((candidates, len(_CLUSTERS)), np.float32) < 0.9
    means, _ = betting.cluster_means(of_cluster[:, _CLUSTERS] * agrees, _CLUSTERS.tolist())
    return means


def null(name: str, draw: Draw, histories: int, seed: int) -> Outcome:
    """The share of histories of ``CYCLES`` cycles in which any candidate is promoted, for either rule of the budget."""
    refused = _refused(CYCLES)
    budgets = {"null": FIXED, "null_e_lond": E_LOND}
    given = {key: np.array(list(levels(budget, refused).values())) for key, budget in budgets.items()}
    promoted = dict.fromkeys(budgets, 0)
    for history in range(histories):
        rng = np.random.default_rng([seed, history])
        passed = {key: np.zeros(CYCLES, bool) for key in budgets}
        for at in range(0, CYCLES, _BATCH):
            batch = min(_BATCH, CYCLES - at)
            wealth = betting.start((batch,))
            for _ in range(LOOKS):
                wealth = betting.bet(wealth, draw(rng, batch), REWARD.shown)
            for key in budgets:
                passed[key][at : at + batch] = betting.rejects(wealth, given[key][at : at + batch])
        for key in budgets:
            promoted[key] += bool(passed[key].any())
    shares = {key: count / histories for key, count in promoted.items()}
    said = ", ".join(f"{budgets[key].rule} {share:.3f}" for key, share in shares.items())
    return Outcome(
        {f"{key}.{name}": share for key, share in shares.items()},
        max(shares.values()) <= FIXED.alpha,
        f"any promotion in {CYCLES} cycles: {said} of {histories} histories (bar: {FIXED.alpha:g})",
    )


def power_3_points(histories: int, seed: int) -> Outcome:
    """The share of candidates with +3 points, 10 % of items differing, that are promoted within 3 cycles."""
    rng = np.random.default_rng(seed)
    alpha = level(FIXED, [], "candidate")
    others = {f"e-LOND's candidate {k}": level(E_LOND, _refused(k - 1), "candidate") for k in (1, 10, 100, 1000)}
    promoted, by_other = np.zeros(LOOKS), dict.fromkeys(others, 0)
    runs = 5 * histories
    for _ in range(runs):
        evidence = {"reward": Evidence.none()}
        for look in range(LOOKS):
            drawn = rng.choice([-1.0, 0.0, 1.0], ITEMS, p=[0.035, 0.9, 0.065])
            evidence["reward"] = observe(REWARD, evidence["reward"], drawn)
            decision = decide([REWARD], evidence, alpha=alpha, max_items=LOOKS * ITEMS)
            if decision.verdict == "pass":
                promoted[look:] += 1
            if decision.verdict != "undecided":
                break
        for name, other in others.items():
            by_other[name] += bool(betting.rejects(evidence["reward"].shown, other))
    shares = promoted / runs
    said = ", ".join(f"{share:.3f} by cycle {look}" for look, share in enumerate(shares, 1))
    also = ", ".join(f"{name} {count / runs:.3f}" for name, count in by_other.items())
    return Outcome(
        {"power_3_points": float(shares[-1])},
        bool(shares[-1] >= 0.9),
        f"promoted at level {alpha:.2g}: {said} of {runs} (bar: 0.9); at the levels of {also}",
    )


def _refused(count: int) -> list[Look]:
    return [Look(str(number), 1.0, "refuse") for number in range(count)]


WORLDS: dict[str, World] = {
    **{f"null.{draw.__name__}": partial(null, draw.__name__, draw) for draw in (binary, graded, skewed, clustered)},
    "power_3_points": power_3_points,
}
