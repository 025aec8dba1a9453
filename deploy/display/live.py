"""Shadows, and experiments on live traffic, for the report: what each came to, and the bounds that its looks had."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from deploy.loop.experiments import blocks_file, blocks_seen
from evaluation.experiments import looks
from evaluation.experiments.blocks import Block, Observed
from evaluation.experiments.plan import ExperimentPlan
from evaluation.report.rows import ExperimentRow, LivePath, ShadowMeasure, ShadowRow
from evaluation.shadow.comparison import Pair, path
from evaluation.shadow.kept import Result
from evaluation.shadow.kept import shadows as kept_shadows
from serve.policies.experiments import Experiment, Experiments

_POINTS: Final = 60
"""Of a path, at most."""


def shadows(folder: Path) -> list[ShadowRow]:
    """A row for each shadow in a folder that somebody has looked at, oldest first."""
    found = ((kept, kept.result()) for kept in kept_shadows(folder))
    return [_shadow(result, kept.pairs(result.scorer)) for kept, result in found if result is not None]


def _shadow(result: Result, pairs: Sequence[Pair]) -> ShadowRow:
    comparison = result.comparison
    return ShadowRow(
        candidate=result.candidate.version,
        incumbent=result.incumbent.version,
        began=result.began,
        decision=comparison.decision,
        requests=comparison.requests,
        ended=result.ended,
        why="; ".join(comparison.reasons),
        compared=tuple(ShadowMeasure.model_validate(one.model_dump()) for one in comparison.compared),
        paths=tuple(_shadow_paths(result, pairs)),
    )


def _shadow_paths(result: Result, pairs: Sequence[Pair]) -> list[LivePath]:
    """One for each measure that any request has: what looks after so many requests would have said of it."""
    found = []
    for measure, margin in result.plan.margins.items():
        value, low, high = path(result.plan, measure, pairs)
        if len(value):
            at = np.unique(np.linspace(0, len(value) - 1, _POINTS).round().astype(int))
            shown = {"value": value, "low": low, "high": high}
            bar = -margin if measure == "reward" else margin
            points = {name: tuple(map(float, of[at])) for name, of in shown.items()}
            blocks = tuple(int(i) + 1 for i in at)
            found.append(LivePath(outcome=measure, bar=bar, watched=False, blocks=blocks, **points))
    return found


def experiments(store: Experiments) -> list[ExperimentRow]:
    """A row for each experiment, oldest first. Raises PolicyError for a record that can't be read."""
    return [_row(store.get(number), blocks_seen(blocks_file(store, number))) for number in store.numbers()]


def _row(experiment: Experiment, blocks: Sequence[Block]) -> ExperimentRow:
    end: dict[str, Any] = experiment.end or {}
    counted = blocks[: end["blocks"]] if "blocks" in end else blocks
    watched = experiment.watched_from
    before = [block for block in counted if watched is None or block.block < watched]
    after = [block for block in counted if watched is not None and block.block >= watched]
    problem = None
    paths: tuple[LivePath, ...] = ()
    try:
        plan = ExperimentPlan.model_validate(experiment.plan)
        paths = (*_paths(plan, before, None), *_paths(plan, after, watched, from_row=len(before)))
    except ValueError as error:  # such rows, or such a plan, ended the experiment
        problem = str(error)
    latest = experiment.latest or {}
    return ExperimentRow(
        number=experiment.number,
        candidate=experiment.candidate,
        control=experiment.control,
        started_at=experiment.started_at,
        state=experiment.state,
        decision=end.get("decision"),
        why=end.get("why") or "; ".join([*latest.get("holds", ()), *latest.get("reasons", ())]) or problem,
        committed=watched is not None,
        requests=sum(block.requests for block in counted),
        candidate_blocks=sum(block.candidate for block in counted),
        control_blocks=sum(not block.candidate for block in counted),
        paths=paths,
    )


def _paths(
    plan: ExperimentPlan, blocks: Sequence[Block], watched_from: int | None, from_row: int = 0
) -> list[LivePath]:
    """One for each outcome: what looks after so many closed blocks would have said of it."""
    seen = looks.sequence(plan, Observed(blocks=tuple(blocks)), watched_from=watched_from)
    if not seen:
        return []
    found = []
    for i, outcome in enumerate(plan.outcomes):
        differences = [decision.differences[i] for _, decision in seen]
        sign = -1 if outcome.for_statistics.higher_is_better else 1
        path = LivePath(
            outcome=outcome.name,
            bar=sign * outcome.margin if outcome.role == "guardrail" else None,
            watched=watched_from is not None,
            blocks=tuple(from_row + n for n, _ in seen),
            value=tuple(math.nan if one.observed is None else one.observed for one in differences),
            low=tuple(one.low for one in differences),
            high=tuple(one.high for one in differences),
        )
        found.append(path)
    return found
