"""What there is to score: responses that are new, and old ones about which something new is known.

The answer is two views for the queries that follow. ``responses`` are the rows to score, each once; ``feedback_on`` is
the feedback that can be about them. Which files they read is decided here, from the log.

A file of interactions that was added since the last run and is still there is read whole: all its rows are to be
scored. Other responses, and the feedback on them, are looked for by their ids: in the files whose bounds hold one of
these, and there in the row groups whose bounds do. So votes on old responses cost a look into those row groups.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Final
from urllib.parse import unquote

import duckdb
import pyarrow as pa
import pyarrow.dataset as pa_ds
from deltalake import DeltaTable

from feedback.lake.data_files import Spans, data_files
from feedback.lake.table_changes import commits
from feedback.lake.tables import Lake
from feedback.lake.views import is_file_gone, quoted_files
from feedback.schema import TABLES

log = logging.getLogger(__name__)

_FEW: Final = 10_000
"""So many responses are looked for in row groups, by Arrow and in memory; more in whole files, by DuckDB."""
_KEY: Final = ("tenant", "response_id", "status")
_FEEDBACK: Final = (
    *("tenant", "response_id", "rejected_response_id", "source", "kind", "name", "value", "created_at", "feedback_id"),
)

_ABOUT: Final = ("response_id", "rejected_response_id")
"""The columns of feedback by which it is on a response."""
_BOUNDS: Final = {"interactions": ("response_id",), "feedback": _ABOUT, "rewards": ()}


class Search:
    """Makes the views ``responses`` (tenant, response_id and ``columns``) and ``feedback_on``.

    When it has run, ``count`` is the number of responses. ``some``: they are less than the whole lake, and table
    ``touched`` lists them. ``repeats``: there may be some of which nothing new is known; table ``former`` has their
    last rewards.
    """

    def __init__(
        self,
        connection: duckdb.DuckDBPyConnection,
        lake: Lake,
        snapshots: dict[str, DeltaTable],
        scorer: str,
        columns: Sequence[str],
    ) -> None:
        """snapshots: of the three tables, as they are to be read."""
        self.connection = connection
        self.lake = lake
        self.snapshots = snapshots
        self.scorer = scorer
        self.columns = (*_KEY, *columns)
        self.count = 0
        self.some = self.repeats = False
        self.registered = 0
        self.ids: list[str] = []
        self.files = {table: data_files(snapshot, _BOUNDS[table]) for table, snapshot in snapshots.items()}
        connection.execute("CREATE TABLE candidates (response_id VARCHAR)")

    def run(self, since: dict[str, int | None], is_vote: str, retry: pa.Table) -> None:
        """Look for what there is to score.

        since: the versions of interactions and feedback that are scored already; None if the scorer has never run.
        is_vote: SQL condition of feedback that counts.
        retry: column response_id; responses whose last reward is to be computed again.
        """
        if since["interactions"] is None:
            self._see_responses(self._paths("interactions"), [])
            self._see_feedback(self._paths("feedback"), [])
            self.count = self._count("responses")
            return
        whole = self._new_interactions(since["interactions"])
        self._new_feedback(since["feedback"] or 0, is_vote)
        if len(retry):
            self.connection.register("retry", retry)
            self.connection.execute("INSERT INTO candidates SELECT response_id FROM retry")
        interactions = self.files["interactions"]
        fresh = [file for file in interactions if file.path in whole]
        self.ids = self._named([file.path for file in fresh])
        spans = Spans.of(self.ids)
        holding = [file for file in interactions if file.path not in whole and file.may_hold("response_id", spans)]
        self._see_responses([file.path for file in fresh], [file.path for file in holding])
        about_fresh = Spans(file.bounds.get("response_id", (None, None)) for file in fresh)
        whole_feedback, some_feedback = [], []
        for file in self.files["feedback"]:
            if any(file.may_hold(name, about_fresh) for name in _ABOUT):
                whole_feedback.append(file.path)
            elif any(file.may_hold(name, spans) for name in _ABOUT):
                some_feedback.append(file.path)
        self._see_feedback(whole_feedback, some_feedback)
        self.connection.execute("CREATE TABLE touched AS SELECT tenant, response_id FROM responses")
        self.some, self.count = True, self._count("touched")
        if self.repeats:
            self._see_former()

    def _paths(self, table: str) -> list[str]:
        return [file.path for file in self.files[table]]

    def _new_interactions(self, since: int) -> set[str]:
        """The files to read whole. Of files that were rewritten meanwhile the ids become candidates.

        If the log does not reach back, the candidates are all that have no reward of this scorer: the same
        responses, by a search through all there is.
        """
        try:
            added, there = self._added("interactions", since), {*self._paths("interactions")}
            self._add_candidates("interactions", [path for path in added if path not in there], "status = 'complete'")
        except (duckdb.Error, OSError) as error:
            if not is_file_gone(error):
                raise
            log.warning("what is new in interactions since version %d is cleaned up: reading all (%s)", since, error)
            self.connection.execute("DELETE FROM candidates")
            rewards = self._rows("rewards", self._paths("rewards"), ("response_id", "scorer"))
            everything = (
                f"status = 'complete' AND response_id NOT IN (SELECT response_id FROM ({rewards}) WHERE scorer = ?)"
            )
            self._add_candidates("interactions", self._paths("interactions"), everything, [self.scorer])
            return set()
        return there.intersection(added)

    def _new_feedback(self, since: int, is_vote: str) -> None:
        """Responses with new votes become candidates; all with any, if the log does not reach back."""
        try:
            self._add_candidates("feedback", self._added("feedback", since), is_vote)
        except (duckdb.Error, OSError) as error:
            if not is_file_gone(error):
                raise
            log.warning("what is new in feedback since version %d is cleaned up: reading all (%s)", since, error)
            self.repeats = True
            self._add_candidates("feedback", self._paths("feedback"), is_vote)

    def _added(self, table: str, since: int) -> list[str]:
        changes = commits(self.lake, table, since, self.snapshots[table].version())
        return [path for commit in changes for path in commit.fresh]

    def _add_candidates(
        self, table: str, paths: list[str], condition: str, parameters: list[str] | None = None
    ) -> None:
        if not paths:
            return
        columns = {"interactions": ("response_id", "status"), "feedback": _FEEDBACK}[table]
        rows = self._rows(table, paths, columns)
        for column in _BOUNDS[table]:
            self.connection.execute(
                f"INSERT INTO candidates SELECT DISTINCT {column} FROM ({rows}) "
                f"WHERE ({condition}) AND {column} IS NOT NULL",
                parameters or [],
            )

    def _named(self, whole: list[str]) -> list[str]:
        """The candidates but those in the files of interactions that are read whole: who is to be looked for."""
        there = self._rows("interactions", whole, ("response_id",))
        ids = self.connection.execute(
            f"SELECT DISTINCT response_id FROM candidates ANTI JOIN ({there}) USING (response_id)"
        ).fetchall()
        return [response_id for (response_id,) in ids]

    def _see_responses(self, whole: list[str], some: list[str]) -> None:
        self._find("found", "interactions", some, self.columns, ("response_id",))
        self.connection.execute(
            "CREATE VIEW responses AS SELECT * EXCLUDE (status) "
            f"FROM ({self._rows('interactions', whole, self.columns)} UNION ALL SELECT * FROM found) "
            "WHERE status = 'complete'"
        )

    def _see_feedback(self, whole: list[str], some: list[str]) -> None:
        self._find("found_feedback", "feedback", some, _FEEDBACK, _ABOUT)
        every = self._rows("feedback", whole, _FEEDBACK)
        self.connection.execute(f"CREATE VIEW feedback_on AS {every} UNION ALL SELECT * FROM found_feedback")

    def _find(self, name: str, table: str, paths: list[str], columns: Sequence[str], keys: Sequence[str]) -> None:
        """Make table ``name``: the rows of some files in which one of the ``keys`` is a candidate's id.

        Found once and kept: through a view DuckDB would decode these files anew, and wholly, for every query.
        """
        if len(self.ids) <= _FEW:
            rows = f"files_{name}"
            self.connection.register(rows, self.lake.files(table).search(table, paths, columns, keys, self.ids))
            self.connection.execute(f"CREATE TABLE {name} AS SELECT * FROM {rows}")
            self.connection.unregister(rows)
            return
        among = " OR ".join(f"{key} IN (FROM candidates)" for key in keys)
        self.connection.execute(
            f"CREATE TABLE {name} AS SELECT * FROM ({self._rows(table, paths, columns)}) WHERE {among}"
        )

    def _see_former(self) -> None:
        columns = ("response_id", "scorer", "scored_at", "reward", "components", "missing")
        rewards = self._rows("rewards", self._paths("rewards"), columns)
        self.connection.execute(
            f"CREATE TABLE former AS SELECT response_id, reward, components::VARCHAR AS components, "
            f"missing::VARCHAR AS missing FROM ({rewards}) WHERE scorer = ? "
            "QUALIFY row_number() OVER (PARTITION BY response_id ORDER BY scored_at DESC) = 1",
            [self.scorer],
        )

    def _rows(self, table: str, paths: Iterable[str], columns: Iterable[str]) -> str:
        """A SELECT of some columns of some of a table's data files."""
        listed, paths = ", ".join(columns), [unquote(path) for path in paths]
        if paths and self.lake.local:
            files = quoted_files(f"{self.lake.table_uri(table)}/{path}" for path in paths)
            return f"SELECT {listed} FROM read_parquet([{files}], hive_partitioning = false)"
        source, schema = TABLES[table].empty_table(), TABLES[table]
        if paths:  # the folder's date is no column of the files, and nothing here asks for it
            filesystem = self.lake.files(table).filesystem
            source = pa_ds.dataset(paths, schema=schema, format="parquet", filesystem=filesystem)
        self.registered += 1
        self.connection.register(f"files_{self.registered}", source)
        return f"SELECT {listed} FROM files_{self.registered}"

    def _count(self, relation: str) -> int:
        return int(self.connection.execute(f"SELECT count(*) FROM {relation}").fetchall()[0][0])
