"""What an estimate from traffic finds, as it is kept on disk."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from evaluation.results import Interval
from evaluation.statistics.off_policy import Estimate
from feedback.files import replace_file


class TrafficEstimate(BaseModel):
    """What policy ``candidate`` would earn on traffic that policy ``incumbent`` answered.

    ``reasons``: why the verdict is "can't tell". ``estimate`` is the doubly robust one, else SNIPS;
    ``incumbent_reward`` the mean of the same responses' rewards; ``gain`` the first less the second. ``lower`` is what
    the candidate's mean reward exceeds with ``confidence``, from weights clipped at ``clip``. All of them are None
    where nothing was computed, an interval also where it would have no end. ``doubly_robust_missing``: why there is
    none.

    ``responses`` were used, in ``clusters``: the users, sessions and requests that ``clustered_by`` counts; ``ess`` is
    the effective number of clusters. ``considered`` responses of traffic were looked at, those made ``since`` then, at
    most ``limit``; ``left_out`` says how many of them were not used, by reason. ``mean_weight`` should be 1.
    ``baseline`` names the reward model, which read ``samples`` responses of the candidate to each prompt.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    candidate: int
    candidate_sha256: str
    incumbent: int
    incumbent_sha256: str
    verdict: Literal["estimated", "can't tell"]
    reasons: tuple[str, ...]
    estimate: Interval | None = None
    incumbent_reward: Interval | None = None
    gain: Interval | None = None
    ips: Interval | None = None
    snips: Interval | None = None
    doubly_robust: Interval | None = None
    doubly_robust_missing: str | None = None
    lower: float | None = None
    clip: float | None = None
    ess: float | None = None
    mean_weight: Interval | None = None
    largest_share: float | None = None
    responses: int
    clusters: int
    clustered_by: dict[str, int]
    considered: int
    left_out: dict[str, int]
    since: str | None
    limit: int
    bounds: tuple[float, float]
    confidence: float
    baseline: str | None = None
    samples: int
    seed: int
    dtype: str | None = None
    lake_versions: dict[str, int]
    created_at: str
    seconds: float

    def save(self, folder: Path) -> Path:
        """Write ``estimate-<candidate>-on-<incumbent>.json`` in ``folder``, whole or not at all; returns its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"estimate-{self.candidate}-on-{self.incumbent}.json"
        replace_file(path, self.model_dump_json(indent=2).encode() + b"\n")
        return path

    @classmethod
    def load(cls, path: Path) -> TrafficEstimate:
        """Read what ``save`` wrote. Raises FileNotFoundError, ValueError naming the file."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValueError as error:
            raise ValueError(f"{path} is no estimate from traffic: {error}") from error


def interval(estimate: Estimate) -> Interval | None:
    """As it is kept; None if it has no end."""
    ends = (estimate.value, estimate.low, estimate.high)
    return Interval.of(ends) if all(map(math.isfinite, ends)) else None
