"""All policies that a judge has compared, on one scale: Bradley-Terry over every verdict's evidence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from evaluation.decisions.history import History, looks_of
from evaluation.decisions.ledger import Ledger
from evaluation.decisions.observations import Observation
from evaluation.statistics.pairwise import Strengths, bradley_terry, linked


@dataclass(frozen=True)
class Ranking:
    """Policies that comparisons by one judge link, best first.

    ``strengths`` names them by their sha256, for which ``versions`` has the version numbers; None for the reason in
    ``missing``. ``scorer`` identifies all that decides a comparison: those of another judge are on another scale.
    """

    scorer: str
    versions: dict[str, int]
    strengths: Strengths | None
    missing: str | None = None

    def to_json(self, confidence: float) -> dict[str, Any]:
        """As JSON has it; the baseline is the oldest policy on the scale."""
        of: dict[str, Any] = {"scorer": self.scorer}
        if (strengths := self.strengths) is None:
            return of | {"versions": list(self.versions.values()), "missing": self.missing}
        baseline = min(self.versions, key=lambda policy: self.versions[policy])
        counts = dict(zip(strengths.policies, strengths.comparisons.tolist(), strict=True))
        rows = [
            {
                "policy": version,
                "sha256": policy,
                "log_odds": strengths.strength(policy, confidence=confidence),
                "win_rate": (0.5, 0.5, 0.5)
                if policy == baseline
                else strengths.win_rate(policy, baseline, confidence=confidence),
                "comparisons": counts[policy],
            }
            for policy, version in self.versions.items()
        ]
        habits = {"longer": strengths.longer, "first": strengths.first}
        return of | {"baseline": self.versions[baseline], "confidence": confidence, "policies": rows, **habits}


@dataclass(frozen=True)
class _Compared:
    first: str
    second: str
    preference: float
    prompt: str
    lengths: tuple[float, float]
    identical: bool


def rankings(ledger: Ledger, history: History) -> list[Ranking]:
    """The policies on each scale that there is, newest scale first. Raises LedgerDamaged."""
    compared: dict[str, list[_Compared]] = {}
    versions: dict[str, int] = {}
    latest: dict[str, int] = {}
    for entry, found in (one for race in history.races.values() for one in race):
        if not found.plan.compared:
            continue
        parties = found.candidate, found.incumbent
        versions |= {party.sha256: party.version for party in parties}
        latest[found.plan.scorer] = max(entry.number, latest.get(found.plan.scorer, 0))
        seen = [one for look in looks_of(ledger, found) for one in (*look.fresh, *look.regression)]
        compared.setdefault(found.plan.scorer, []).extend(_pairs(parties[0].sha256, parties[1].sha256, seen))
    scales = sorted(compared, key=lambda scorer: -latest[scorer])
    return [one for scorer in scales for one in _of_scorer(scorer, compared[scorer], versions)]


def _pairs(candidate: str, incumbent: str, seen: Iterable[Observation]) -> Iterable[_Compared]:
    """Each pair as it was judged in either order; one that has no verdict says nothing of who is better."""
    for one in seen:
        ours, theirs = one.length
        if one.verdicts is None and one.candidate != 0.5:
            continue
        as_first, as_second = one.verdicts or (0.5, 0.5)
        same = one.verdicts is None
        yield _Compared(candidate, incumbent, as_first, one.prompt, (ours, theirs), same)
        yield _Compared(incumbent, candidate, 1 - as_second, one.prompt, (theirs, ours), same)


def _of_scorer(scorer: str, compared: list[_Compared], versions: dict[str, int]) -> Iterable[Ranking]:
    for group in linked([one.first for one in compared], [one.second for one in compared]):
        mine = [one for one in compared if one.first in group]
        named = {policy: versions[policy] for policy in group}
        lengths = np.array([one.lengths for one in mine])
        try:
            strengths = bradley_terry(
                [one.first for one in mine],
                [one.second for one in mine],
                [one.preference for one in mine],
                items=[one.prompt for one in mine],
                first_lengths=lengths[:, 0],
                second_lengths=lengths[:, 1],
                identical=[one.identical for one in mine],
            )
        except ValueError as error:
            yield Ranking(scorer, dict(sorted(named.items(), key=lambda one: one[1])), None, str(error))
            continue
        order = [strengths.policies[at] for at in np.argsort(-strengths.strengths, kind="stable")]
        yield Ranking(scorer, {policy: named[policy] for policy in order}, strengths)
