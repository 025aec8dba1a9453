"""Compare: two answers to one prompt, unnamed, of which a person chooses the better."""

from __future__ import annotations

from typing import Any, Final

import duckdb

from deploy.config.root import Settings
from deploy.console.pages import rows, traffic
from deploy.console.pages.visit import Answer, Visit
from deploy.console.pages.visit import page as shown

_PAIR: Final = """
WITH recent AS (
    SELECT response_id, date, created_at, prompt_token_ids, response, policy_spans[1].policy_version AS policy
    FROM interactions WHERE tenant = $tenant AND status = 'complete' ORDER BY created_at DESC LIMIT $most
), of_policies AS (
    FROM recent QUALIFY row_number() OVER (PARTITION BY prompt_token_ids, policy ORDER BY created_at DESC) <= 4
), few AS (
    FROM of_policies QUALIFY row_number() OVER (PARTITION BY prompt_token_ids ORDER BY created_at DESC) <= 16
), chosen AS (
    SELECT least(response_id, rejected_response_id) AS one, greatest(response_id, rejected_response_id) AS other
    FROM feedback WHERE tenant = $tenant AND kind = 'preference'
)
SELECT a.response_id, a.date, b.response_id, b.date
FROM few a JOIN few b ON a.prompt_token_ids = b.prompt_token_ids AND a.response_id < b.response_id
    ANTI JOIN chosen ON chosen.one = a.response_id AND chosen.other = b.response_id
WHERE a.response <> b.response AND NOT list_contains($skipped::VARCHAR[], a.response_id || '~' || b.response_id)
ORDER BY a.policy = b.policy, hash(a.response_id || b.response_id) LIMIT 1
"""
"""A pair that nobody has chosen from; those of two policies come first, else in an order that tells nothing.

Of a prompt's answers only the newest few are paired: a prompt that is asked all day has millions of pairs.
"""

_MOST: Final = 5000


def page(settings: Settings, visit: Visit) -> Answer:
    """The page with its first pair."""
    return _shown("compare", settings, visit)


def following(settings: Settings, visit: Visit) -> Answer:
    """The next pair, as a part of the page."""
    return _shown("compare/next", settings, visit)


def _shown(template: str, settings: Settings, visit: Visit) -> Answer:
    skipped = [one for one in visit.query.get("skipped", "").split(",") if one][-200:]
    pair = rows.read(settings, lambda connection: _pair(connection, visit.tenant, skipped))
    messages = traffic.messages_of(pair[0]) if pair else []
    return shown(template, visit, here="compare", pair=pair, messages=messages)


def _pair(connection: duckdb.DuckDBPyConnection, tenant: str, skipped: list[str]) -> list[dict[str, Any]]:
    """Both interactions; which comes first follows from their ids, and not from their policies. None: an empty list."""
    values = {"tenant": tenant, "skipped": skipped, "most": _MOST}
    found = connection.execute(_PAIR, values).fetchall()
    if not found:
        return []
    [(a, a_day, b, b_day)] = found
    pair = {row["response_id"]: row for row in rows.whole(connection, tenant, [(a, a_day), (b, b_day)])}
    first, second = (a, b) if _coin(a, b) else (b, a)
    return [pair[first], pair[second]]


def _coin(a: str, b: str) -> bool:
    """A coin that falls the same way whenever this pair is shown."""
    return bool(sum((a + b).encode()) & 1)
