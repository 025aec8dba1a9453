"""Label queue: which response a person should judge next, and how far people agree."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any, Final

import duckdb
import numpy as np

from deploy.config.root import Settings
from deploy.console.pages import rows, traffic
from deploy.console.pages.rows import Search
from deploy.console.pages.visit import Answer, Visit
from deploy.console.pages.visit import page as shown
from evaluation.statistics.agreement import krippendorff_alpha
from feedback.events import ANYBODY

ORDERS: Final = {
    "new": "Newest without a judgement",
    "low": "Lowest reward first",
    "judge": "Judge against people",
    "random": "At random",
}

_OPEN: Final = "tenant = $tenant AND status = 'complete' AND NOT list_contains($passed::VARCHAR[], response_id)"
_UNJUDGED: Final = (
    f"{_OPEN} AND NOT EXISTS (FROM feedback f WHERE f.tenant = $tenant AND f.response_id = interactions.response_id)"
)
_LOW: Final = f"""
WITH low AS (SELECT response_id FROM rewards WHERE reward IS NOT NULL ORDER BY reward LIMIT $most), current AS (
    SELECT response_id, arg_max_null(reward, scored_at) AS reward FROM rewards SEMI JOIN low USING (response_id)
    GROUP BY response_id
)
SELECT response_id, date FROM interactions JOIN current USING (response_id)
WHERE {_UNJUDGED} AND reward IS NOT NULL ORDER BY reward, response_id LIMIT $count
"""
"""Of the lowest rewards there are, ``most`` rows: to sort all by their current one takes ten times as long."""

_JUDGE: Final = f"""
WITH people AS (
    SELECT response_id, avg(value) AS value FROM (
        SELECT response_id, arg_max(value, created_at) AS value FROM feedback
        WHERE tenant = $tenant AND kind = 'thumb' GROUP BY response_id, source
    ) GROUP BY response_id
), judged AS (
    SELECT response_id, arg_max(components['judge'], scored_at) AS value
    FROM rewards SEMI JOIN people USING (response_id) GROUP BY response_id
), own AS (SELECT DISTINCT response_id FROM feedback WHERE tenant = $tenant AND source = $who)
SELECT response_id, date FROM interactions JOIN people USING (response_id) JOIN judged USING (response_id)
    ANTI JOIN own USING (response_id)
WHERE {_OPEN} AND judged.value IS NOT NULL ORDER BY abs(judged.value - people.value) DESC, response_id LIMIT $count
"""
"""Where the judge and the people who gave thumbs differ most, and the viewer has not said anything."""

_RANDOM: Final = f"""
SELECT response_id, date FROM interactions WHERE {_UNJUDGED}
ORDER BY hash(response_id || $tenant), response_id LIMIT $count
"""
_VOTES: Final = """
SELECT judged, good, count(*) FROM (
    SELECT count(*) AS judged, count(*) FILTER (value > 0.5) AS good FROM (
        SELECT response_id, arg_max(value, created_at) AS value FROM feedback
        WHERE tenant = $tenant AND kind = 'thumb' AND source <> $anybody GROUP BY response_id, source
    ) GROUP BY response_id
) WHERE judged > 1 GROUP BY ALL
"""
"""Of the responses that several people gave a thumb, how many have how many judgements and how many good ones."""

_AHEAD: Final = 200
_LOWEST: Final = 20_000
_KEPT_S: Final = 300.0
_EMPTY_S: Final = 20.0  # of a queue in which nothing is left
_COUNTS_S: Final = 30.0


@dataclass(frozen=True)
class Scale:
    """A rating scale of whole numbers that keys have."""

    name: str
    low: int
    high: int


_queues: dict[tuple[str, str, str], tuple[float, list[tuple[str, Any]]]] = {}
"""By tenant, order and viewer, when a queue was made, and the ids and dates in it."""

_counted: dict[str, tuple[float, dict[str, Any]]] = {}
"""By tenant, when its responses were counted, and what that gave."""


def page(settings: Settings, visit: Visit) -> Answer:
    """The queue with its first response."""
    return _shown("labels", settings, visit)


def following(settings: Settings, visit: Visit) -> Answer:
    """The next response, as a part of the page."""
    return _shown("labels/next", settings, visit)


def agreement(settings: Settings, visit: Visit) -> Answer:
    """How many responses have a judgement, and how far people agree, as a part of the page, up to ``_COUNTS_S`` old."""
    at, counts = _counted.get(visit.tenant, (-math.inf, {}))
    if time.monotonic() - at > _COUNTS_S:
        counts = rows.read(settings, lambda connection: _counts(connection, visit.tenant))
        _counted[visit.tenant] = time.monotonic(), counts
    return shown("labels/agreement", visit, **counts)


def _shown(template: str, settings: Settings, visit: Visit) -> Answer:
    orders = {name: title for name, title in ORDERS.items() if name != "judge" or settings.feedback.scoring.judge}
    scales = _scales(settings)
    order, scale = visit.query.get("order", ""), scales.get(visit.query.get("scale", ""))
    order = order if order in orders else "new"
    skipped = [one for one in visit.query.get("skipped", "").split(",") if one][-200:]
    row = rows.read(settings, lambda connection: _next(connection, visit, order, skipped))
    values: dict[str, Any] = {"row": row, "order": order, "orders": orders, "scale": scale, "scales": scales}
    values["messages"] = traffic.messages_of(row) if row else []
    return shown(template, visit, here="labels", **values)


def _scales(settings: Settings) -> dict[str, Scale]:
    """The declared scales whose values are keys."""
    found = settings.feedback.kinds.ratings.items()
    return {
        name: Scale(name, int(of.low), int(of.high))
        for name, of in found
        if of.low.is_integer() and of.high.is_integer() and of.low >= 1 and of.high <= 9
    }


def _next(connection: duckdb.DuckDBPyConnection, visit: Visit, order: str, skipped: list[str]) -> dict[str, Any] | None:
    """The next response of an order that is not among those skipped."""
    tenant = visit.tenant
    if order == "new":
        more = "status = 'complete' AND NOT list_contains($skipped::VARCHAR[], response_id)"
        ids = rows.newest(connection, tenant, Search(feedback="without"), 1, more, skipped=skipped)
        return next(iter(rows.whole(connection, tenant, ids)), None)
    who, passed = str(visit.viewer["name"]), set(skipped)
    for most_s in (_KEPT_S, _EMPTY_S):
        queue = _queue(connection, tenant, order, who, skipped, most_s)
        for one in queue:
            found = rows.whole(connection, tenant, [one]) if one[0] not in passed else []
            if found and not any(order != "judge" or said["source"] == who for said in found[0]["feedback"]):
                return found[0]
            passed.add(one[0])
    return None


def _queue(
    connection: duckdb.DuckDBPyConnection, tenant: str, order: str, who: str, skipped: list[str], most_s: float
) -> list[tuple[str, Any]]:
    """The next responses of an order, as they were up to ``most_s`` ago: it takes a scan of all."""
    at, queue = _queues.get((tenant, order, who), (-math.inf, []))
    if time.monotonic() - at < most_s:
        return queue
    values: dict[str, Any] = {"tenant": tenant, "passed": skipped, "count": _AHEAD}
    if order == "low":
        for most in (_LOWEST, 1 << 62):
            queue = connection.execute(_LOW, values | {"most": most}).fetchall()
            if queue:
                break
    elif order == "judge":
        queue = connection.execute(_JUDGE, values | {"who": who}).fetchall()
    else:
        queue = connection.execute(_RANDOM, values).fetchall()
    _queues[tenant, order, who] = time.monotonic(), queue
    return queue


def _counts(connection: duckdb.DuckDBPyConnection, tenant: str) -> dict[str, Any]:
    [(judged, total)] = connection.execute(
        "SELECT (SELECT count(DISTINCT response_id) FROM feedback WHERE tenant = $tenant), "
        "(SELECT count(*) FROM interactions WHERE tenant = $tenant AND status = 'complete')",
        {"tenant": tenant},
    ).fetchall()
    votes = connection.execute(_VOTES, {"tenant": tenant, "anybody": ANYBODY}).fetchall()
    counts = np.array([(good, judgements - good) for judgements, good, _ in votes], np.int64).reshape(-1, 2)
    repeats = np.array([units for *_, units in votes], np.int64)
    alpha = krippendorff_alpha(counts, repeats)
    return {"judged": judged, "total": total, "several": int(repeats.sum()), "alpha": alpha}
