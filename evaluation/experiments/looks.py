"""One look at an experiment: commit, hold or roll back, and what it says so by."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from evaluation.experiments.blocks import Observed
from evaluation.experiments.plan import ExperimentPlan
from evaluation.statistics.experiment import Decision, decide


def look(plan: ExperimentPlan, observed: Observed, *, watched_from: int | None = None) -> Decision:
    """What the closed blocks, or users, say. The same ones give the same decision, however often one looks.

    watched_from: the block since which a committed candidate is watched. Only what came since counts then, of users
    those who first came since, as all that spoke for it before would keep harm from being seen. Of alpha_rollback each
    of the two parts has one half.
    """
    blocks = [block for block in observed.blocks if watched_from is None or block.block >= watched_from]
    rows = observed.model_copy(update={"blocks": tuple(blocks)}).rows(plan)
    levels = replace(plan.for_statistics, alpha_rollback=plan.alpha_rollback / 2)
    return decide(rows, [outcome.for_statistics for outcome in plan.outcomes], levels)


def sequence(
    plan: ExperimentPlan, observed: Observed, *, watched_from: int | None = None, points: int = 40
) -> list[tuple[int, Decision]]:
    """What looks after the first block, after all of them, and at times between would have said: (blocks, decision).

    ``points`` of them at most, evenly spaced. Of a committed candidate, blocks are counted from ``watched_from`` on.
    """
    blocks = [block for block in observed.blocks if watched_from is None or block.block >= watched_from]
    after = sorted({round(at) for at in np.linspace(1, len(blocks), points)}) if blocks else []
    return [(n, look(plan, Observed(blocks=tuple(blocks[:n])), watched_from=watched_from)) for n in after]


def adjustments(plan: ExperimentPlan, decision: Decision) -> list[str]:
    """What each outcome was adjusted by, and what for want of data it was not; a sentence each."""
    compared = [one for one in decision.differences if one.candidates + one.controls]
    found = []
    for one in compared:
        rows = one.candidates + one.controls
        earlier = f"{one.earlier} of {rows} rows are compared less what their people did before"
        predicted = f"{one.predicted} of {rows} rows are corrected by the scores that {plan.predicted_by} gave"
        parts = [earlier] * (one.earlier > 0) + [predicted] * (one.predicted > 0)
        if parts:
            found.append(f"{one.name}: {' and '.join(parts)}, which leaves {one.variance_ratio:.0%} of the variance")
        if plan.predicted_by is not None and one.name == "feedback" and not one.predicted:
            found.append(
                f"{one.name}: not corrected by the scores of {plan.predicted_by}, as no row had one of every response "
                "in time (millrace score)"
            )
    if plan.before_s and (new := [one.name for one in compared if not one.earlier]):
        found.append(
            f"{', '.join(new)}: not adjusted by what was before, as nobody had been there in the "
            f"{plan.before_s / 86400:g} days before the experiment"
        )
    return found


def to_json(plan: ExperimentPlan, decision: Decision, observed: Observed) -> dict[str, Any]:
    """A decision as records keep it; what is not known is null."""
    return {
        "decision": decision.decision,
        "reasons": list(decision.reasons),
        "holds": list(decision.holds),
        "adjustments": adjustments(plan, decision),
        "differences": [
            {name: _finite(value) for name, value in asdict(difference).items()} for difference in decision.differences
        ],
        "sample_ratio": decision.sample_ratio,
        "response_rates": decision.response_rates,
        "blocks": {
            "candidate": sum(block.candidate for block in observed.blocks),
            "control": sum(not block.candidate for block in observed.blocks),
            "pending": observed.pending,
        },
        "requests": sum(block.requests for block in observed.blocks),
        "few_voices": sum(
            block.responded > 0 and block.values.get("feedback", 0.0) is None for block in observed.blocks
        ),
        "late": observed.late,
        "mislabelled": observed.mislabelled,
        "fallbacks": observed.fallbacks,
    }


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
