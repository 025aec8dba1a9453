"""The reward component ``human``: people's feedback on a response, between 0 (bad) and 1 (good).

The rule. A **vote** is a number from 0 to 1: a thumb's value; a rating, as its place on its scale; a metric, as its
place in its range, from the other end where lower is better; a preference is a vote of 1 for the response that was
chosen and of 0 for the one that was rejected. What lies outside its scale or range counts as its end; a rating or
metric that the settings do not declare is no vote.

1. A vote counts only for a response of its own tenant. A ``feedback_id`` counts once: a seal lets it into the lake
   once, and rows that say the same come to one vote.
2. Of the votes that one source gives to one response, the last of each *item* counts, by time and then by
   ``feedback_id``. A thumb is one item; so are each rating scale, each metric, and each pair of responses whichever of
   the two was preferred.
3. A source's opinion is the mean of its votes, weighted by their kinds' weights. Who votes often weighs no more.
4. The component is the mean over the sources, each with the weight of its weightiest kind. So with a light weight for
   metrics a source of metrics alone is a light source.

Feedback on a session is a row on each response that the session had by then, with the number of responses since in its
id (``feedback.events.session_rows``). ``sessions`` says what these rows are: ``last``: the last response's is a vote,
the others are none; ``equal``: each is the vote; ``discounted``: k responses before the last it is a vote of
0.5 + discount^k (v - 0.5). Otherwise they count as any vote: a later thumb of the source on the response replaces it.

A response without a vote has no such component.
"""

from __future__ import annotations

import json
from typing import Any, Final

from feedback.config import HumanConfig, KindsConfig
from feedback.events import EARLIER_TURN, TURN
from feedback.lake.views import quoted

NAME: Final = "human"
MISSING: Final = "no vote"


def identity(config: HumanConfig, kinds: KindsConfig) -> Any:
    """All that decides the component, as JSON values."""
    scales = {name: [scale.low, scale.high] for name, scale in kinds.ratings.items()}
    metrics = {name: [metric.low, metric.high, metric.direction] for name, metric in kinds.metrics.items()}
    return [
        *(config.thumbs, config.ratings, config.preferences, config.metrics),
        json.dumps([scales, kinds.default_scale] if config.ratings else None, sort_keys=True),
        json.dumps(metrics if config.metrics else None, sort_keys=True),
        # Not with the default, so that what was scored before there were sessions stays scored.
        *([] if config.sessions == "last" else [config.sessions, config.session_discount]),
    ]


def counts_sql(config: HumanConfig, kinds: KindsConfig) -> str:
    """SQL condition: the feedback row is a vote."""
    return f"(({_vote(config, kinds)}) IS NOT NULL)"


def votes_sql(
    feedback: str, config: HumanConfig, kinds: KindsConfig, *, among: str | None = None, weighed: bool = False
) -> str:
    """SQL for (tenant, response_id, human), one row for each response that has a vote, from a feedback relation.

    ``among``: a relation with tenant and response_id; votes on other responses are left out. ``weighed``: with a
    further column ``weight``, the mean of the sources' weights.
    """
    return f"""
        SELECT tenant, response_id, sum(weight * opinion) / sum(weight) AS {NAME} {", avg(weight) AS weight" * weighed}
        FROM ({opinions_sql(feedback, config, kinds, among=among)})
        GROUP BY tenant, response_id
    """


def opinions_sql(feedback: str, config: HumanConfig, kinds: KindsConfig, *, among: str | None = None) -> str:
    """SQL for (tenant, response_id, source, opinion, weight), one row for each source's opinion of a response."""
    weights = " ".join(f"WHEN '{kind}' THEN {weight!r}" for kind, weight in _weights(config).items())
    item = (
        f"CASE kind WHEN 'rating' THEN coalesce(name, {quoted(kinds.default_scale or '')}) WHEN 'metric' THEN name "
        "WHEN 'preference' THEN least(response_id, rejected_response_id) || ' ' || "
        "greatest(response_id, rejected_response_id) END"
    )
    swapped = "rejected_response_id AS response_id, response_id AS rejected_response_id"
    about_the_other = f"(SELECT * REPLACE ({swapped}) FROM {feedback})"
    columns = f"tenant, response_id, source, kind, {item} AS item, created_at, feedback_id"
    vote, counts = _vote(config, kinds), counts_sql(config, kinds)
    only = f"SEMI JOIN {among} USING (tenant, response_id)" if among else ""
    # Each branch filters its own scan: what both shared would be computed of all feedback first.
    return f"""
        WITH votes AS (
            SELECT {columns}, {vote} AS vote FROM {feedback} {only} WHERE {counts}
            UNION ALL
            SELECT {columns}, 1 - {vote} AS vote FROM {about_the_other} {only} WHERE kind = 'preference' AND {counts}
        ),
        last_votes AS (
            SELECT tenant, response_id, source, CASE kind {weights} END AS weight,
                   max_by(vote, (created_at, feedback_id)) AS vote
            FROM votes
            GROUP BY tenant, response_id, source, kind, item
        )
        SELECT tenant, response_id, source, sum(weight * vote) / sum(weight) AS opinion, max(weight) AS weight
        FROM last_votes
        GROUP BY tenant, response_id, source
    """


def _weights(config: HumanConfig) -> dict[str, float]:
    weights = {
        "thumb": config.thumbs,
        "rating": config.ratings,
        "preference": config.preferences,
        "metric": config.metrics,
    }
    return {kind: weight for kind, weight in weights.items() if weight > 0}


def _vote(config: HumanConfig, kinds: KindsConfig) -> str:
    """SQL for the vote of a feedback row, for the response that it is about; NULL if it is none."""
    weights = _weights(config)
    cases = []
    if "thumb" in weights:
        cases.append(f"WHEN kind = 'thumb' THEN {_place(0, 1)}")
    if "preference" in weights:
        cases.append("WHEN kind = 'preference' AND rejected_response_id <> response_id THEN 1.0::DOUBLE")
    if "rating" in weights:
        for name, scale in kinds.ratings.items():
            unnamed = " OR name IS NULL" if name == kinds.default_scale else ""
            cases.append(
                f"WHEN kind = 'rating' AND (name = {quoted(name)}{unnamed}) THEN {_place(scale.low, scale.high)}"
            )
    if "metric" in weights:
        for name, metric in kinds.metrics.items():
            place = _place(metric.low, metric.high)
            lower = metric.direction == "lower"
            cases.append(f"WHEN kind = 'metric' AND name = {quoted(name)} THEN {f'1 - {place}' if lower else place}")
    if config.sessions == "last":
        cases.insert(0, f"WHEN feedback_id LIKE '{EARLIER_TURN}' THEN NULL")
    vote = f"CASE {' '.join(cases)} END" if cases else "NULL::DOUBLE"
    if config.sessions != "discounted":
        return vote
    turns = f"regexp_extract(feedback_id, '{TURN}([0-9]+)', 1)::INTEGER"
    shared = f"0.5 + pow({config.session_discount!r}::DOUBLE, {turns}) * ({vote} - 0.5)"
    return f"CASE WHEN feedback_id LIKE '{EARLIER_TURN}' THEN {shared} ELSE {vote} END"


def _place(low: float, high: float) -> str:
    """SQL for where ``value`` lies from low (0) to high (1)."""
    low, high = float(low), float(high)
    return (
        "CASE WHEN isfinite(value) "
        f"THEN greatest(0.0, least(1.0, (value - {low!r}::DOUBLE) / {high - low!r}::DOUBLE))::DOUBLE END"
    )
