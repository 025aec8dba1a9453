"""Interactions of one tenant, from the lake and from the journal's rows that are not in it yet.

A list is found in two steps: first which responses, by a scan of narrow columns, then all of those few. The scan begins
with the newest minutes, in which most lists are full already: files and row groups without any are not read. What is
said of a response comes after it, so that feedback and rewards since then are all that it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, Final, TypeVar
from uuid import UUID

import duckdb
import pyarrow as pa

from deploy.config.root import Settings
from feedback.events import TURN
from feedback.lake.open_lake import OpenLake
from feedback.lake.tables import Lake

_T = TypeVar("_T")

PAGE: Final = 40
PERIODS: Final = {
    "1h": timedelta(hours=1),
    "24h": timedelta(days=1),
    "7d": timedelta(days=7),
    "30d": timedelta(days=30),
}
_LONG_AGO: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LAST: Final = datetime(9999, 12, 31, tzinfo=UTC)
_MEMORY: Final = "1GB"
_THREADS: Final = 1
_FIRST_WINDOW: Final = timedelta(minutes=1)  # back from the newest that can be in a list
_WINDOWS: Final = 6  # each ``_WIDER`` times as long as the one before; then all that is older
_WIDER: Final = 8
_CLOCKS_APART: Final = timedelta(minutes=5)
"""How much earlier, by its replica's clock, something may have been said of a response than it was made."""

_open: dict[tuple[str, Path], OpenLake] = {}
"""The lakes that this process keeps open, by address and journal: the one of its settings."""

_SHOWN: Final = """
SELECT response_id, request_id, session_id, "user", endpoint, replica, variant, created_at, messages, prompt, response,
    response_token_ids, logprobs, policy_spans, sampling, finish_reason, status, timings, metadata, experiment,
    len(prompt_token_ids) AS prompt_tokens
FROM interactions
WHERE tenant = $tenant AND response_id IN ({ids}) AND date BETWEEN $first AND $last
ORDER BY created_at DESC, response_id DESC
"""
_FEEDBACK: Final = """
SELECT feedback_id, response_id, kind, value, text, name, rejected_response_id, source, created_at FROM feedback
WHERE tenant = $tenant AND response_id IN ({ids}) AND date >= $first ORDER BY created_at
"""
_REWARDS: Final = """
SELECT response_id, reward, components, missing, scorer, scored_at FROM rewards
WHERE response_id IN ({ids}) AND date >= $first
QUALIFY row_number() OVER (PARTITION BY response_id ORDER BY scored_at DESC) = 1
"""


@dataclass(frozen=True)
class Search:
    """What is looked for; None is anything. ``before``: the list goes on from here, (created_at, response_id)."""

    text: str | None = None
    user: str | None = None
    session: str | None = None
    policy: int | None = None
    reward_below: float | None = None
    reward_above: float | None = None
    feedback: str | None = None  # with, without
    period: str | None = None
    before: tuple[datetime, str] | None = None

    def where(self, tenant: str, since: datetime) -> tuple[str, dict[str, Any]]:
        """The condition in SQL, and its parameters, of responses made at ``since`` or later."""
        terms = ["tenant = $tenant", "status <> 'imported'", "created_at >= $since", "date >= $first"]
        values: dict[str, Any] = {"tenant": tenant, "since": since, "first": since.date()}
        heard = max(since, _LONG_AGO + _CLOCKS_APART) - _CLOCKS_APART

        def add(term: str, **parameters: Any) -> None:
            terms.append(term)
            values.update(parameters)

        if self.text is not None:
            found = "contains(lower(response), lower($text)) OR contains(lower(coalesce(prompt, '')), lower($text))"
            add(f"({found})", text=self.text)
        if self.user is not None:
            add('"user" = $user', user=self.user)
        if self.session is not None:
            add("session_id = $session", session=self.session)
        if self.policy is not None:
            add("list_contains(list_transform(policy_spans, lambda s: s.policy_version), $policy)", policy=self.policy)
        if self.period in PERIODS:
            newest = datetime.now(UTC) - PERIODS[self.period]
            add("created_at >= $in_period AND date >= $day_of_period", in_period=newest, day_of_period=newest.date())
        if self.before is not None:
            at, response_id = self.before
            add("(created_at, response_id) < ($at, $id)", at=at, id=response_id)
        for sign, bound in (("<=", self.reward_below), (">=", self.reward_above)):
            if bound is not None:
                name = "below" if sign == "<=" else "above"
                current = "SELECT response_id FROM rewards WHERE date >= $heard_day GROUP BY response_id"
                add(
                    f"response_id IN ({current} HAVING arg_max_null(reward, scored_at) {sign} ${name})",
                    heard_day=heard.date(),
                    **{name: bound},
                )
        if self.feedback in ("with", "without"):
            sense = "" if self.feedback == "with" else "NOT "
            of_it = "f.tenant = $tenant AND f.date >= $heard_day AND f.response_id = interactions.response_id"
            of_it += " AND f.created_at >= $heard"
            add(f"{sense}EXISTS (FROM feedback f WHERE {of_it})", heard=heard, heard_day=heard.date())
        return " AND ".join(terms), values


def read(settings: Settings, work: Callable[[duckdb.DuckDBPyConnection], _T]) -> _T:
    """What ``work`` returns of the views of all tables. Raises LakeError."""
    lake, journal = sources(settings)
    return _open.setdefault((lake.uri, journal), OpenLake(lake, journal)).read(work)


def sources(settings: Settings) -> tuple[Lake, Path]:
    """The lake, within the bounds of a page, and the folder of the journal."""
    resolved = settings.resolved().feedback
    config = resolved.lake.model_copy(update={"memory_limit": _MEMORY, "threads": _THREADS})
    return Lake(config.uri, config), Path(resolved.journal.folder)


def found(connection: duckdb.DuckDBPyConnection, tenant: str, search: Search) -> list[dict[str, Any]]:
    """The newest ``PAGE`` + 1 interactions that a search finds, whole, with feedback and reward."""
    return whole(connection, tenant, newest(connection, tenant, search, PAGE + 1))


def newest(
    connection: duckdb.DuckDBPyConnection, tenant: str, search: Search, count: int, more: str = "true", **values: Any
) -> list[tuple[str, Any]]:
    """The ids and dates of the newest ``count`` interactions that a search finds and for which ``more``, SQL, holds."""
    last = search.before[0] if search.before is not None else newest_sealed(connection)
    found, until = list[tuple[str, Any]](), _LAST
    for since in windows(last):
        where, parameters = search.where(tenant, since)
        query = (
            f"SELECT response_id, date FROM interactions WHERE {where} AND created_at < $until AND date <= $last_day "
            f"AND ({more}) ORDER BY created_at DESC, response_id DESC LIMIT $count"
        )
        bounds = {"until": until, "last_day": until.date(), "count": count - len(found)}
        found += connection.execute(query, parameters | values | bounds).fetchall()
        if len(found) == count or (search.period in PERIODS and since < datetime.now(UTC) - PERIODS[search.period]):
            break
        until = since
    return found


def windows(last: datetime) -> Iterator[datetime]:
    """Where windows begin that together reach back from ``last`` to the first response there is, each a longer one."""
    last = max(_LONG_AGO, last)
    for number in range(_WINDOWS):
        yield max(_LONG_AGO, last - _FIRST_WINDOW * _WIDER**number)
    yield _LONG_AGO


def newest_sealed(connection: duckdb.DuckDBPyConnection) -> datetime:
    """When the newest response in the lake was made, whosesoever; if that is not known, now."""
    [(at,)] = connection.execute("SELECT epoch_us(getvariable('newest_sealed')::TIMESTAMPTZ)").fetchall()
    return datetime.now(UTC) if at is None else datetime.fromtimestamp(0, UTC) + timedelta(microseconds=at)


def whole(connection: duckdb.DuckDBPyConnection, tenant: str, ids: list[tuple[str, Any]]) -> list[dict[str, Any]]:
    """Interactions by (id, date), newest first, each with its ``feedback`` and its ``reward``, a row or None."""
    if not ids:
        return []
    days = [day for _, day in ids]
    named = {f"id{number}": name for number, (name, _) in enumerate(ids)}
    said: dict[str, Any] = named | {"first": min(days)}  # what is said of a response comes after it

    def told(query: str, values: dict[str, Any]) -> list[dict[str, Any]]:
        listed = ", ".join(f"${name}" for name in named)  # a filter of the scan, which an unnested list is not
        return _dicts(connection.sql(query.format(ids=listed), params=values))

    rows = told(_SHOWN, said | {"tenant": tenant, "last": max(days)})
    feedback = told(_FEEDBACK, said | {"tenant": tenant})
    rewards = {row["response_id"]: row for row in told(_REWARDS, said)}
    for row in rows:
        row["feedback"] = [
            one | {"of_session": TURN in one["feedback_id"]}
            for one in feedback
            if one["response_id"] == row["response_id"]
        ]
        row["reward"] = rewards.get(row["response_id"])
        row["policies"] = sorted({span["policy_version"] for span in row["policy_spans"]})
    return rows


def one(connection: duckdb.DuckDBPyConnection, tenant: str, response_id: str) -> dict[str, Any] | None:
    """One interaction; None if this tenant has none of that id."""
    query = "SELECT response_id, date FROM interactions WHERE tenant = $tenant AND response_id = $id"
    values: dict[str, Any] = {"tenant": tenant, "id": response_id}
    made, ids = day_of(response_id), list[tuple[str, Any]]()
    if made is not None:
        near = values | {"first": made - timedelta(days=1), "last": made + timedelta(days=1)}
        ids = connection.execute(f"{query} AND date BETWEEN $first AND $last", near).fetchall()
    rows = whole(connection, tenant, ids or connection.execute(query, values).fetchall())
    return rows[0] if rows else None


def day_of(response_id: str) -> date | None:
    """The day in a UUIDv7's first 48 bits, milliseconds since 1970; None for any other id."""
    try:
        parsed = UUID(response_id)
        return datetime.fromtimestamp((parsed.int >> 80) / 1000, UTC).date() if parsed.version == 7 else None
    except (ValueError, OverflowError, OSError):
        return None


def _dicts(relation: duckdb.DuckDBPyRelation) -> list[dict[str, Any]]:
    """Rows by column; a map is a dict."""
    table = relation.to_arrow_table()
    maps = [field.name for field in table.schema if pa.types.is_map(field.type)]
    rows: list[dict[str, Any]] = table.to_pylist()
    for row in rows:
        row |= {name: dict(row[name] or ()) for name in maps}
    return rows
