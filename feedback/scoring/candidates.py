"""What there is to score: responses that are new, and old ones about which something new is known.

The answer is two views for the queries that follow. ``responses`` are the rows to score, each once; ``feedback_on`` is
the feedback that can be about them. Which files they read is decided here, from the log.

A file of interactions that was added since the last run and is still there is read whole: all its rows are to be
scored. Other responses are looked for by their ids, in the files whose bounds hold one of these.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import duckdb
import pyarrow as pa
from deltalake import DeltaTable

from feedback.lake.table_changes import DataFiles, LogGoneError, Spans, commits, scan_sql
from feedback.lake.tables import Lake
from feedback.lake.views import is_file_gone

log = logging.getLogger(__name__)

_KEY: Final = ("tenant", "response_id", "status")
_FEEDBACK: Final = (
    *("tenant", "response_id", "rejected_response_id", "source", "kind", "name", "value", "created_at", "feedback_id"),
)


@dataclass(frozen=True)
class Candidates:
    """What was found. ``some``: it is less than the whole lake, and table ``touched`` lists it.

    ``repeats``: there may be responses of which nothing new is known; table ``former`` has their last rewards.
    """

    count: int
    some: bool
    repeats: bool = False


def find(
    connection: duckdb.DuckDBPyConnection,
    lake: Lake,
    snapshots: dict[str, DeltaTable],
    since: dict[str, int | None],
    *,
    scorer: str,
    is_vote: str,
    retry: pa.Table,
    columns: Sequence[str],
) -> Candidates:
    """Make the views ``responses`` (tenant, response_id and ``columns``) and ``feedback_on``.

    snapshots: of the three tables, as they are to be read.
    since: the versions of interactions and feedback that are scored already; None if the scorer has never run.
    is_vote: SQL condition of feedback that counts.
    retry: column response_id; responses whose last reward is to be computed again.
    """
    return _Search(connection, lake, snapshots, scorer, columns).run(since, is_vote, retry)


class _Search:
    def __init__(
        self,
        connection: duckdb.DuckDBPyConnection,
        lake: Lake,
        snapshots: dict[str, DeltaTable],
        scorer: str,
        columns: Sequence[str],
    ) -> None:
        self.connection = connection
        self.lake = lake
        self.snapshots = snapshots
        self.scorer = scorer
        self.columns = (*_KEY, *columns)
        self.repeats = False
        self.files = {table: DataFiles(snapshot) for table, snapshot in snapshots.items()}
        connection.execute("CREATE TABLE candidates (response_id VARCHAR)")

    def run(self, since: dict[str, int | None], is_vote: str, retry: pa.Table) -> Candidates:
        if since["interactions"] is None:
            whole = self.files["interactions"].paths
            self._see_responses(whole, [])
            self._see_feedback(self.files["feedback"].paths)
            return Candidates(self._count("responses"), some=False)
        whole = self._new_interactions(since["interactions"])
        self._new_feedback(since["feedback"] or 0, is_vote)
        if len(retry):
            self.connection.register("retry", retry)
            self.connection.execute("INSERT INTO candidates SELECT response_id FROM retry")
        named = list(self._named())
        fresh = set(whole)
        holding = self.files["interactions"].holding(Spans(named), "response_id")
        self._see_responses(whole, [path for path in holding if path not in fresh])
        bounds = self.files["interactions"].bounds("response_id")
        spans = Spans([*named, *(bounds[path] for path in whole)])
        about = set(self.files["feedback"].holding(spans, "response_id"))
        about.update(self.files["feedback"].holding(spans, "rejected_response_id", nullable=True))
        self._see_feedback([path for path in self.files["feedback"].paths if path in about])
        self.connection.execute("CREATE TABLE touched AS SELECT tenant, response_id FROM responses")
        if self.repeats:
            self._see_former()
        return Candidates(self._count("touched"), some=True, repeats=self.repeats)

    def _new_interactions(self, since: int) -> list[str]:
        """The files to read whole. Of files that were rewritten meanwhile the ids become candidates.

        If the log does not reach back, the candidates are all that have no reward of this scorer: the same
        responses, by a search through all there is.
        """
        try:
            added = self._added("interactions", since)
            there = set(self.files["interactions"].paths)
            self._add_candidates("interactions", [path for path in added if path not in there], "status = 'complete'")
        except (LogGoneError, duckdb.Error, OSError) as error:
            if not _is_cleaned_up(error):
                raise
            log.warning("what is new in interactions since version %d is cleaned up: reading all (%s)", since, error)
            self.connection.execute("DELETE FROM candidates")
            rewards = scan_sql(
                *(self.connection, self.lake, "rewards", self.files["rewards"].paths, ("response_id", "scorer")),
                name="all_rewards",
            )
            everything = (
                f"status = 'complete' AND response_id NOT IN (SELECT response_id FROM ({rewards}) WHERE scorer = ?)"
            )
            self._add_candidates("interactions", self.files["interactions"].paths, everything, [self.scorer])
            return []
        return [path for path in added if path in there]

    def _new_feedback(self, since: int, is_vote: str) -> None:
        """Responses with new votes become candidates; all with any, if the log does not reach back."""
        try:
            self._add_candidates("feedback", self._added("feedback", since), is_vote)
        except (LogGoneError, duckdb.Error, OSError) as error:
            if not _is_cleaned_up(error):
                raise
            log.warning("what is new in feedback since version %d is cleaned up: reading all (%s)", since, error)
            self.repeats = True
            self._add_candidates("feedback", self.files["feedback"].paths, is_vote)

    def _added(self, table: str, since: int) -> list[str]:
        changes = commits(self.lake, table, since, self.snapshots[table].version())
        return [path for commit in changes for path in commit.fresh]

    def _add_candidates(
        self, table: str, paths: list[str], condition: str, parameters: list[str] | None = None
    ) -> None:
        if not paths:
            return
        columns = {"interactions": ("response_id", "status"), "feedback": _FEEDBACK}[table]
        rows = scan_sql(self.connection, self.lake, table, paths, columns, name=f"added_{table}")
        ids = ["response_id"] + (["rejected_response_id"] if table == "feedback" else [])
        for column in ids:
            self.connection.execute(
                f"INSERT INTO candidates SELECT DISTINCT {column} FROM ({rows}) "
                f"WHERE ({condition}) AND {column} IS NOT NULL",
                parameters or [],
            )

    def _named(self) -> Iterator[tuple[str, str]]:
        rows = self.connection.execute("SELECT DISTINCT response_id FROM candidates")
        while batch := rows.fetchmany(65_536):
            for (response_id,) in batch:
                yield response_id, response_id

    def _see_responses(self, whole: list[str], some: list[str]) -> None:
        every = scan_sql(self.connection, self.lake, "interactions", whole, self.columns, name="whole_files")
        named = scan_sql(self.connection, self.lake, "interactions", some, self.columns, name="some_files")
        # Found once and kept: through a view DuckDB would decode these files anew, and wholly, for every query.
        self.connection.execute(
            f"CREATE TABLE found AS SELECT rows.* FROM ({named}) rows SEMI JOIN candidates USING (response_id)"
        )
        self.connection.execute(
            f"CREATE VIEW responses AS SELECT * EXCLUDE (status) FROM ({every} UNION ALL SELECT * FROM found) "
            "WHERE status = 'complete'"
        )

    def _see_feedback(self, paths: list[str]) -> None:
        rows = scan_sql(self.connection, self.lake, "feedback", paths, _FEEDBACK, name="feedback_files")
        self.connection.execute(f"CREATE VIEW feedback_on AS {rows}")

    def _see_former(self) -> None:
        rewards = scan_sql(
            *(self.connection, self.lake, "rewards", self.files["rewards"].paths),
            ("response_id", "scorer", "scored_at", "reward", "components", "missing"),
            name="former_rewards",
        )
        self.connection.execute(
            f"CREATE TABLE former AS SELECT response_id, reward, components::VARCHAR AS components, "
            f"missing::VARCHAR AS missing FROM ({rewards}) WHERE scorer = ? "
            "QUALIFY row_number() OVER (PARTITION BY response_id ORDER BY scored_at DESC) = 1",
            [self.scorer],
        )

    def _count(self, relation: str) -> int:
        return int(self.connection.execute(f"SELECT count(*) FROM {relation}").fetchall()[0][0])


def _is_cleaned_up(error: Exception) -> bool:
    return isinstance(error, LogGoneError) or is_file_gone(error)
