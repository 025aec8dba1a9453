"""What is in the lake and the journal: sizes, how much feedback there is, rewards by policy, lag, and what is amiss.

Everything is a set operation in DuckDB, over narrow columns, and spills past the lake's memory limit. Quantiles are
exact, by nearest rank, from counts of each value, not from all values in memory. Rows, files and bytes are in
deltalake's ``get_add_actions``; all else is about values, which no log has.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import duckdb
import pyarrow as pa

from feedback.journal.segment import list_segments
from feedback.journal.streams import STARTED
from feedback.lake.tables import Lake
from feedback.schema import TABLES, TIME_COLUMN

QUANTILES: Final = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)

_ID: Final = {
    "interactions": "response_id",
    "feedback": "tenant, feedback_id",
    "rewards": "response_id, scored_at",
}

# Temporary tables of the few columns that the queries share: ``responses``, ``streams`` and ``scored``.

_RESPONSES: Final = """
CREATE TEMP TABLE responses AS
SELECT tenant, response_id, completed_at, status = 'complete' AS complete, policy_spans[-1].policy_version AS policy
FROM interactions
"""

_STREAMS: Final = f"""
CREATE TEMP TABLE streams AS
SELECT DISTINCT tenant, response_id FROM unsealed_interactions WHERE status = '{STARTED}'
EXCEPT SELECT tenant, response_id FROM responses
"""

_NO_STREAMS: Final = "CREATE TEMP TABLE streams (tenant VARCHAR, response_id VARCHAR)"

_KINDS: Final = """
SELECT kind, count(DISTINCT (tenant, feedback_id)), count(DISTINCT response_id) FILTER (complete)
FROM feedback LEFT JOIN responses USING (tenant, response_id)
GROUP BY kind
"""


_SCORED: Final = """
CREATE TEMP TABLE scored AS
SELECT policy, reward, components
FROM current_rewards JOIN responses USING (response_id)
WHERE complete
"""

_REWARDS: Final = """
SELECT policy, count(*), count(reward), avg(reward), stddev_samp(reward)
FROM scored
GROUP BY policy
ORDER BY policy
"""

_REWARD_QUANTILES: Final = """
SELECT policy, {quantiles}
FROM (
    SELECT policy, reward AS value,
           sum(n) OVER (PARTITION BY policy ORDER BY reward) AS upto, sum(n) OVER (PARTITION BY policy) AS total
    FROM (SELECT policy, reward, count(*) AS n FROM scored WHERE reward IS NOT NULL GROUP BY policy, reward)
)
GROUP BY policy
"""

_COMPONENTS: Final = """
SELECT policy, component.key, count(*), avg(component.value)
FROM (SELECT policy, unnest(map_entries(components)) AS component FROM scored)
GROUP BY policy, component.key
ORDER BY policy, component.key
"""

_LAG: Final = """
SELECT max(total), {quantiles}
FROM (
    SELECT lag AS value, sum(n) OVER (ORDER BY lag) AS upto, sum(n) OVER () AS total
    FROM (
        SELECT first - epoch_us(completed_at) AS lag, count(*) AS n
        FROM (SELECT response_id, epoch_us(min(scored_at)) AS first FROM rewards GROUP BY response_id)
        JOIN responses USING (response_id)
        WHERE complete
        GROUP BY lag
    )
)
"""

_UNSCORED: Final = """
SELECT count(*)
FROM responses ANTI JOIN (SELECT response_id FROM rewards WHERE scorer = ?) USING (response_id)
WHERE complete
"""

# Feedback that two servers took under one id is twice in their journals, until it is sealed.
_ORPHANS: Final = """
CREATE TEMP VIEW orphans AS
SELECT DISTINCT ON (tenant, feedback_id, response_id) feedback_id, response_id, tenant, kind, created_at
FROM (
    SELECT feedback_id, tenant, kind, created_at, response_id FROM feedback
    UNION ALL
    SELECT feedback_id, tenant, kind, created_at, rejected_response_id FROM feedback
    WHERE rejected_response_id IS NOT NULL
)
ANTI JOIN (SELECT tenant, response_id FROM responses UNION ALL FROM streams) USING (tenant, response_id)
"""


@dataclass(frozen=True)
class TableStatistics:
    """One table. Sizes are those of its current version's data files; times are of sealed and unsealed rows."""

    version: int
    rows: int  # sealed
    files: int
    bytes: int
    unsealed_rows: int
    duplicates: int  # sealed rows beyond the first of the same id; anything but 0 is a fault
    oldest: datetime | None
    newest: datetime | None

    @property
    def bytes_a_row(self) -> float | None:
        return self.bytes / self.rows if self.rows else None


@dataclass(frozen=True)
class JournalStatistics:
    """The journal's folder. ``streams`` are responses that are still going out, or whose writer was killed."""

    open_segments: int
    closed_segments: int
    damaged_segments: int  # kept in a folder of their own, their whole rows in the lake
    bytes: int
    streams: int


@dataclass(frozen=True)
class KindStatistics:
    """Feedback of one kind: how much, and on how many complete responses."""

    feedback: int
    responses: int


@dataclass(frozen=True)
class FeedbackRate:
    """How many complete responses have feedback of their tenant, by kind."""

    complete_responses: int
    responses_with_feedback: int
    kinds: dict[str, KindStatistics]

    @property
    def rate(self) -> float | None:
        return self.responses_with_feedback / self.complete_responses if self.complete_responses else None


@dataclass(frozen=True)
class RewardStatistics:
    """Current rewards of the complete responses whose last token a policy sampled. No reward is no zero."""

    policy: int | None
    responses: int  # that were scored
    rewarded: int  # of these, that have a reward
    mean: float | None
    sd: float | None  # of the sample; null below two
    quantiles: dict[float, float]
    components: dict[str, tuple[int, float]]  # name -> (responses that have it, its mean)

    @property
    def missing_share(self) -> float | None:
        return 1 - self.rewarded / self.responses if self.responses else None


@dataclass(frozen=True)
class LagStatistics:
    """Seconds from a complete response's end to its first reward."""

    scorer: str | None
    scored: int  # complete responses that any scorer has scored
    unscored: int  # complete responses that ``scorer`` has not scored
    p50_s: float | None
    p90_s: float | None
    max_s: float | None


@dataclass(frozen=True)
class Orphan:
    """Feedback that waits for a response of its tenant that neither lake nor journal has."""

    feedback_id: str
    response_id: str  # the one that is not there; it may be the rejected one
    tenant: str
    kind: str
    created_at: datetime


@dataclass(frozen=True)
class OrphanStatistics:
    count: int
    oldest: datetime | None


@dataclass(frozen=True)
class LakeStatistics:
    """All of it, at one moment."""

    at: datetime
    tables: dict[str, TableStatistics]
    journal: JournalStatistics
    feedback: FeedbackRate
    rewards: list[RewardStatistics]
    lag: LagStatistics
    orphans: OrphanStatistics


def gather(lake: Lake, journal_folder: Path | None, *, scorer: str | None = None) -> LakeStatistics:
    """The statistics of a lake and, if it is given, of the journal that is sealed into it.

    ``scorer`` is the one to count unscored responses for; by default the one that scored last. Raises LakeError.
    """
    return lake.read(lambda connection: _gather(connection, lake, journal_folder, scorer), journal_folder)


def orphans(lake: Lake, journal_folder: Path | None, *, limit: int) -> list[Orphan]:
    """The orphans, oldest first, at most ``limit`` of them. Raises LakeError."""

    def read(connection: duckdb.DuckDBPyConnection) -> list[Orphan]:
        _find_responses(connection, with_journal=journal_folder is not None)
        rows = connection.sql(f"FROM orphans ORDER BY created_at, feedback_id LIMIT {int(limit)}").to_arrow_table()
        return [Orphan(**row) for row in rows.to_pylist()]

    return lake.read(read, journal_folder, tables=("interactions", "feedback"))


def _gather(
    connection: duckdb.DuckDBPyConnection, lake: Lake, journal_folder: Path | None, scorer: str | None
) -> LakeStatistics:
    _find_responses(connection, with_journal=journal_folder is not None)
    connection.execute(_SCORED)
    return LakeStatistics(
        at=datetime.now(UTC),
        tables={table: _table(connection, lake, table, journal_folder) for table in TABLES},
        journal=_journal(connection, journal_folder),
        feedback=_feedback_rate(connection),
        rewards=_rewards(connection),
        lag=_lag(connection, scorer),
        orphans=OrphanStatistics(
            **_one(connection, "SELECT count(*) AS count, min(created_at) AS oldest FROM orphans")
        ),
    )


def _find_responses(connection: duckdb.DuckDBPyConnection, *, with_journal: bool) -> None:
    """Tables ``responses`` and ``streams``, and view ``orphans``."""
    connection.execute(_RESPONSES)
    connection.execute(_STREAMS if with_journal else _NO_STREAMS)
    connection.execute(_ORPHANS)


def _table(
    connection: duckdb.DuckDBPyConnection, lake: Lake, table: str, journal_folder: Path | None
) -> TableStatistics:
    [[version]] = connection.execute("SELECT getvariable('versions')[?]", [table]).fetchall()
    files = pa.table(lake.table(table, version).get_add_actions(flatten=True))
    unsealed = 0
    if journal_folder is not None:
        ended = f"WHERE status <> '{STARTED}'" if table == "interactions" else ""
        [[unsealed]] = connection.execute(f"SELECT count(*) FROM unsealed_{table} {ended}").fetchall()
    sealed = f"SELECT count(*) AS rows, count(*) - count(DISTINCT ({_ID[table]})) AS duplicates FROM sealed_{table}"
    times = f"SELECT min({TIME_COLUMN[table]}) AS oldest, max({TIME_COLUMN[table]}) AS newest FROM {table}"
    return TableStatistics(
        version=version,
        files=files.num_rows,
        bytes=sum(files["size_bytes"].to_pylist()),
        unsealed_rows=unsealed,
        **_one(connection, sealed),
        **_one(connection, times),
    )


def _journal(connection: duckdb.DuckDBPyConnection, folder: Path | None) -> JournalStatistics:
    segments = list_segments(folder) if folder is not None and folder.exists() else []
    damaged = list((folder / "damaged").iterdir()) if folder is not None and (folder / "damaged").exists() else []
    return JournalStatistics(
        open_segments=sum(segment.is_open for segment in segments),
        closed_segments=sum(not segment.is_open for segment in segments),
        damaged_segments=len(damaged),
        bytes=sum(_size(segment.path) for segment in segments),
        streams=_count(connection, "streams"),
    )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # sealed meanwhile
        return 0


def feedback_rate_sql(responses: str, complete: str) -> str:
    """SQL for (complete responses, those of them with feedback) of a table with tenant and response_id.

    ``complete``: SQL for whether a row counts.
    """
    return f"""
        SELECT (SELECT count(*) FROM {responses} WHERE {complete}),
               (SELECT count(*) FROM {responses} SEMI JOIN feedback USING (tenant, response_id) WHERE {complete})
    """


def _feedback_rate(connection: duckdb.DuckDBPyConnection) -> FeedbackRate:
    [[complete, answered]] = connection.execute(feedback_rate_sql("responses", "complete")).fetchall()
    kinds = {kind: KindStatistics(count, responses) for kind, count, responses in connection.execute(_KINDS).fetchall()}
    return FeedbackRate(complete, answered, kinds)


def _rewards(connection: duckdb.DuckDBPyConnection) -> list[RewardStatistics]:
    query = _REWARD_QUANTILES.format(quantiles=_quantiles(QUANTILES))
    quantiles = {
        policy: dict(zip(QUANTILES, values, strict=True)) for policy, *values in connection.execute(query).fetchall()
    }
    components: dict[int | None, dict[str, tuple[int, float]]] = {}
    for policy, name, count, mean in connection.execute(_COMPONENTS).fetchall():
        components.setdefault(policy, {})[name] = (count, mean)
    return [
        RewardStatistics(policy, scored, rewarded, mean, sd, quantiles.get(policy, {}), components.get(policy, {}))
        for policy, scored, rewarded, mean, sd in connection.execute(_REWARDS).fetchall()
    ]


def _lag(connection: duckdb.DuckDBPyConnection, scorer: str | None) -> LagStatistics:
    if scorer is None:
        [[scorer]] = connection.execute("SELECT arg_max(scorer, scored_at) FROM rewards").fetchall()
    [[unscored]] = connection.execute(_UNSCORED, [scorer]).fetchall()
    [[scored, *lags]] = connection.execute(_LAG.format(quantiles=_quantiles((0.5, 0.9, 1.0)))).fetchall()
    return LagStatistics(scorer, int(scored or 0), unscored, *(None if lag is None else lag / 1e6 for lag in lags))


def _count(connection: duckdb.DuckDBPyConnection, table: str) -> int:
    return int(connection.execute(f"SELECT count(*) FROM {table}").fetchall()[0][0])


def _one(connection: duckdb.DuckDBPyConnection, query: str) -> dict[str, Any]:
    """The one row of a query, by column. By Arrow: DuckDB hands out times with a zone by another library."""
    return dict(connection.sql(query).to_arrow_table().to_pylist()[0])


def _quantiles(shares: tuple[float, ...]) -> str:
    """SQL for quantiles by nearest rank, of ``value`` with ``upto`` of ``total`` values at most as great."""
    return ", ".join(f"min(value) FILTER (upto >= {share!r} * total)" for share in shares)
