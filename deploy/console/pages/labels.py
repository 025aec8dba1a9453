"""Label queue: which response a person should judge next."""

from __future__ import annotations

import math
import time
from typing import Any, Final

import duckdb

from deploy.config.root import Settings
from deploy.console.pages import rows, traffic
from deploy.console.pages.rows import Search
from deploy.console.pages.visit import Answer, Visit
from deploy.console.pages.visit import page as shown

ORDERS: Final = {
    "new": ("Newest without a judgement", Search(feedback="without"), ""),
    "low": ("Lowest reward first", Search(feedback="without", reward_below=float("inf")), ""),
    "random": ("At random", Search(feedback="without"), "hash(response_id || $tenant)"),
}


_COUNTS_S: Final = 30.0
_counted: dict[str, tuple[float, dict[str, int]]] = {}
"""By tenant, when its responses were counted, and what that gave."""


def page(settings: Settings, visit: Visit) -> Answer:
    """The queue with its first response."""
    return _shown("labels", settings, visit)


def following(settings: Settings, visit: Visit) -> Answer:
    """The next response, as a part of the page."""
    return _shown("labels/next", settings, visit)


def _shown(template: str, settings: Settings, visit: Visit) -> Answer:
    order = visit.query.get("order", "new")
    order = order if order in ORDERS else "new"
    skipped = [one for one in visit.query.get("skipped", "").split(",") if one][-200:]
    row, counts = rows.read(settings, lambda connection: _next(connection, visit.tenant, order, skipped))
    values: dict[str, Any] = {"row": row, "order": order, "orders": ORDERS, "counts": counts}
    values["messages"] = traffic.messages_of(row) if row else []
    return shown(template, visit, here="labels", **values)


def _next(
    connection: duckdb.DuckDBPyConnection, tenant: str, order: str, skipped: list[str]
) -> tuple[dict[str, Any] | None, dict[str, int]]:
    """The next response of an order, and how many there are and have a judgement."""
    _, search, by = ORDERS[order]
    where, values = search.where(tenant)
    if order == "low":
        by = "(SELECT min(reward) FROM current_rewards r WHERE r.response_id = interactions.response_id), response_id"
    query = f"""
        SELECT response_id, date FROM interactions
        WHERE {where} AND status = 'complete' AND NOT list_contains($skipped::VARCHAR[], response_id)
        ORDER BY {by or "created_at DESC"} LIMIT 1
    """
    ids = connection.execute(query, values | {"skipped": skipped}).fetchall()
    found = rows.whole(connection, tenant, ids)
    return found[0] if found else None, _counts(connection, tenant)


def _counts(connection: duckdb.DuckDBPyConnection, tenant: str) -> dict[str, int]:
    """How many responses there are, and how many have a judgement, up to ``_COUNTS_S`` ago."""
    at, counts = _counted.get(tenant, (-math.inf, {}))
    if time.monotonic() - at < _COUNTS_S:
        return counts
    [(judged, total)] = connection.execute(
        "SELECT (SELECT count(DISTINCT response_id) FROM feedback WHERE tenant = $tenant), "
        "(SELECT count(*) FROM interactions WHERE tenant = $tenant AND status = 'complete')",
        {"tenant": tenant},
    ).fetchall()
    _counted[tenant] = time.monotonic(), {"judged": judged, "total": total}
    return _counted[tenant][1]
