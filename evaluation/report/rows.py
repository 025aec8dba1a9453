"""What the report shows of policies' results, promotions, experiments and training runs, a row each."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from evaluation.results import Interval


class Row(BaseModel):
    """A row may carry more than the report shows: callers pass whole records."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class PolicyRow(Row):
    """A policy and what the held-out suite says of it, if it was evaluated (a ``PolicyResult`` fits)."""

    version: int
    parent: int | None = None
    accuracy: Interval | None = None
    reward: Interval | None = None
    n: int | None = None
    distinct_1: float | None = None
    distinct_2: float | None = None
    length_mean: float | None = None
    truncated: float | None = None
    greedy: Interval | None = None
    """The gate's metric of greedy answers to the same items, where what counts is sampled."""
    proxy: float | None = None
    """What the reward model says of the same answers: the mean probability that people find one good."""


class SuiteRow(Row):
    """The policies that were evaluated on the very same items, by the same scorer and settings, by version. Results of
    two such suites are not comparable. ``role``: what of a policy they decide."""

    name: str
    items: int
    role: Literal["success", "guardrail", "watch"] = "success"
    policies: tuple[PolicyRow, ...]


Fate = Literal[
    "serves", "not served yet", "replaced", "never served", "rolled back", "refused by the server", "tried again"
]


class MoveRow(Row):
    """A move of the serving pointer, and what became of it. ``back``: it is a rollback. ``override``: it was made
    although ``objection``. ``served``: whether a server served the policy by it; None if none has said so. ``after``:
    the policy that the next move named; ``then``: who made that, and why."""

    at: str
    version: int
    previous: int | None
    who: str
    why: str
    back: bool = False
    override: bool = False
    objection: str | None = None
    experiment: int | None = None
    served: bool | None = None
    fate: Fate
    after: int | None = None
    then: str | None = None


class LivePath(Row):
    """One outcome of an experiment as its looks saw it after each number of closed ``blocks`` [n]: candidate less
    control, ``value`` as observed, with its confidence sequence. ``bar``: the difference beyond which a guardrail is
    broken. ``watched``: after the commit, of what came since."""

    outcome: str
    bar: float | None
    watched: bool
    blocks: tuple[int, ...]
    value: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


class ExperimentRow(Row):
    """An experiment on live traffic. ``decision`` is None while it has not ended; ``why`` is that of the last look
    then."""

    number: int
    candidate: int
    control: int
    started_at: float
    state: str
    decision: str | None
    why: str | None
    committed: bool
    requests: int
    candidate_blocks: int
    control_blocks: int
    paths: tuple[LivePath, ...] = ()


class ShadowMeasure(Row):
    """One measure of a shadow, candidate less incumbent; of ``errors`` the candidate's share. ``value``: None without
    any."""

    measure: str
    value: float | None
    low: float
    high: float
    margin: float
    harm: bool
    holds: bool


class ShadowRow(Row):
    """A candidate that answered a copy of requests which nobody saw. ``paths``: by requests, in place of blocks."""

    candidate: int
    incumbent: int
    began: str
    decision: str
    requests: int
    ended: str | None
    why: str
    compared: tuple[ShadowMeasure, ...] = ()
    paths: tuple[LivePath, ...] = ()


class RunRow(Row):
    """A training run. ``batch``: prompts × responses of a step, or judged responses. ``reward_first`` and
    ``reward_last`` are means over the first and the last steps, ``max_kl`` the largest step's, in nats per token.
    ``reason``: why it published no policy."""

    run: str
    candidate: int | None
    reward_model: int | None
    reason: str | None
    algorithm: str | None
    optimizer: str | None
    learning_rate: float | None
    batch: str | None
    steps: int
    reward_first: float | None
    reward_last: float | None
    max_kl: float | None
    seconds: float | None
