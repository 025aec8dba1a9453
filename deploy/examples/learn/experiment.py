"""Learning from another policy's traffic alone, with correction for it and without.

A policy is trained online for some cycles. Then it learns from logged responses only: those of the policy one cycle
before it (low staleness), and those of the seed policy, which all cycles lie between (high). Their rewards give
something for the habit, so that it looks better than the older policy's average. Without correction each response
counts as often as the older policy gave it, and the habit comes back; with it, as often as the policy itself would.
The correction that does this is of whole responses, which is what rewards are of. By tokens it is done too, for
comparison: each token is weighed by its own ratio, as if those before it had come from the policy itself.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from deploy.examples.learn import home as homes
from deploy.examples.learn import plans, traffic, trial
from deploy.examples.learn.home import Home, Say
from deploy.examples.learn.pairs import interval
from deploy.examples.learn.plans import Plan
from deploy.examples.learn.trial import Outcome
from evaluation.evaluate import compare_samples
from evaluation.results import Interval
from evaluation.suites.suite import Suite
from serve.policies.store import Policy

GRADED: Final = "deploy.examples.learn.task:graded"
CYCLES: Final = 2
SEEDS: Final = 2
CYCLE: Final = Plan(steps=3, items=32, learning_rate=5e-4)
FROM_TRAFFIC: Final = Plan(steps=24, items=64, learning_rate=5e-4, minibatches=1)
FORMS: Final[dict[str, dict[str, Any]]] = {
    "corrected": {"form": "truncate", "level": "sequence", "cap": 5.0},
    "by_token": {"form": "truncate", "level": "token", "cap": 5.0},
    "uncorrected": {"form": "none", "proximal": "old"},
}

Scores = NDArray[np.float64]


@dataclass(frozen=True)
class OffPolicy(Outcome):
    """``before``, ``after`` and ``ci_low`` are of learning with correction of whole responses, at high staleness.

    ``accuracy``: by staleness and form. ``difference``: of corrected less uncorrected, by staleness, with its 95 %
    interval as (value, low, high).
    """

    accuracy: dict[str, dict[str, float]] = field(default_factory=dict)
    difference: dict[str, tuple[float, float, float]] = field(default_factory=dict)


def run(home: Home, *, seed: int, longest_s: float, say: Say) -> Outcome:
    """The experiment; what fails is an outcome too, with its reason."""
    started = time.monotonic()
    try:
        found = experiment(home, seed=seed, longest_s=longest_s, say=say)
    except (RuntimeError, ValueError, OSError) as error:
        return Outcome(seconds=time.monotonic() - started, reason=f"{type(error).__name__}: {error}")
    return replace(found, seconds=time.monotonic() - started)


def experiment(home: Home, *, seed: int, longest_s: float, say: Say) -> OffPolicy:
    policies = [home.first()]
    for cycle in range(CYCLES):
        settings = plans.settings("grpo", CYCLE, steps=None, seed=seed)
        policies.append(learn(home, f"cycle-{cycle + 1}", settings, policies[-1], longest_s, say))
    start = policies[-1]
    before = scores(home, start)
    accuracy: dict[str, dict[str, float]] = {}
    after: dict[tuple[str, str], Scores] = {}
    for staleness, behaviour in {"low": policies[-2], "high": policies[0]}.items():
        lake = home.work / f"traffic-{staleness}"
        logged = traffic.log(lake, behaviour, homes.engine_config(), reward=GRADED, max_tokens=homes.MAX_TOKENS)
        say(f"{staleness} staleness: {logged}")
        for form, correction in FORMS.items():
            runs = []
            for number in range(SEEDS):
                settings = traffic_alone(correction, seed=seed + number)
                name = f"{staleness}-{form}-{number}"
                learned = learn(home, name, settings, start, longest_s, say, lake_uri=str(lake))
                runs.append(scores(home, learned))
            after[staleness, form] = np.mean(runs, axis=0)
            accuracy.setdefault(staleness, {})[form] = float(after[staleness, form].mean())
            say(f"{staleness} staleness, {form}: {before.mean():.3f} to {accuracy[staleness][form]:.3f}")
    gain = interval(after["high", "corrected"], before)
    difference = {s: interval(after[s, "corrected"], after[s, "uncorrected"]) for s in accuracy}
    return OffPolicy(
        before=float(before.mean()),
        after=accuracy["high"]["corrected"],
        ci_low=gain.low,
        steps=FROM_TRAFFIC.steps,
        reason=why_not(gain, difference["high"]),
        accuracy=accuracy,
        difference={s: (d.value, d.low, d.high) for s, d in difference.items()},
    )


def why_not(gain: Interval, difference: Interval) -> str | None:
    """Why the figures, at high staleness, are no proof; None if they are one."""
    if gain.low <= 0:
        return f"with correction, the interval of the gain, {gain.low:+.3f} to {gain.high:+.3f}, holds zero"
    if difference.low <= 0:
        return f"what correction brings, {difference.low:+.3f} to {difference.high:+.3f}, may be nothing"
    return None


def traffic_alone(correction: dict[str, Any], *, seed: int) -> dict[str, Any]:
    plan = replace(FROM_TRAFFIC, algorithm={"correction": correction})
    settings = plans.settings("grpo", plan, steps=None, seed=seed)
    settings["data"]["traffic_share"] = 1.0
    return settings


def learn(
    home: Home, name: str, settings: dict[str, Any], parent: Policy, longest_s: float, say: Say, **context: Any
) -> Policy:
    """The policy that the run publishes."""
    version = parent.version
    result = trial.train(home, name, settings, longest_s=longest_s, say=say, parent=version, **context)
    return trial.candidate(home, result)


def scores(home: Home, policy: Policy) -> Scores:
    """float64 [items]: 1 where the greedy answer is right, else 0."""
    suite, config = Suite.load(home.suite), homes.evaluation_config()
    trial.compare(home, policy, home.first())
    samples = compare_samples(policy, home.first(), suite, config, home.evaluations)
    return np.array([sample.candidate_score for sample in samples], dtype=np.float64)
