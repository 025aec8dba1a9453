"""A lake that is kept open by a process that reads it again and again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import TypeVar

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from feedback.journal.recovery import load_all
from feedback.lake.tables import Lake, schema_version, unsealed_rows
from feedback.lake.views import CURRENT_REWARDS, connect, create_view, is_file_gone, unreadable_features
from feedback.schema import SCHEMA_VERSION, TABLES

_T = TypeVar("_T")


class OpenLake:
    """Each read sees the lake and the journal as they are then. Kept are DuckDB, with what it knows of files, and the
    tables' logs as far as they were read: to open those anew takes longer than most queries do.

    For one thread at a time.
    """

    def __init__(self, lake: Lake, journal_folder: Path) -> None:
        self.lake = lake
        self.journal_folder = journal_folder
        self._connection: duckdb.DuckDBPyConnection | None = None
        self._snapshots: dict[str, DeltaTable] = {}
        self._shown: dict[str, int | None] = {}
        """By table the version that its view shows; None if the view has rows of the journal too."""
        self._dated: int | None = None
        """The version of the interactions of which the variable ``newest_sealed`` tells."""

    def read(self, work: Callable[[duckdb.DuckDBPyConnection], _T]) -> _T:
        """What ``work`` returns of the views of ``Lake.connect``; done over if a vacuum takes files from under it.

        The variable ``newest_sealed`` is when the newest response in the table was made, as far as its log tells.
        Raises LakeError, and what ``work`` raises.
        """
        try:
            return work(self._refreshed())
        except BaseException as error:
            self.close()
            if not is_file_gone(error):
                raise
        return self.lake.read(work, self.journal_folder)

    def close(self) -> None:
        """Forget all; the next read opens the lake anew."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None
        self._snapshots.clear()
        self._shown.clear()
        self._dated = None

    def _refreshed(self) -> duckdb.DuckDBPyConnection:
        # The journal comes before the tables, as in ``Lake.connect``: a row that is sealed in between is never missed.
        segments = load_all(self.journal_folder, list(TABLES))
        snapshots = {table: self._snapshot(table) for table in TABLES}
        if self._connection is None:
            self._connection = connect(self.lake.config.memory_limit, self.lake.config.threads)
            self._connection.execute("SET parquet_metadata_cache = true")  # a data file is never written again
        for table, snapshot in snapshots.items():
            unsealed = unsealed_rows(table, segments, snapshot)
            if unsealed.num_rows or self._shown.get(table) != snapshot.version():
                for view in (table, f"sealed_{table}"):
                    self._connection.execute(f"DROP VIEW IF EXISTS {view}")
                create_view(
                    self._connection, table, snapshot, unsealed, self.lake.config.store_options, local=self.lake.local
                )
                self._shown[table] = None if unsealed.num_rows else snapshot.version()
        if self._dated != (version := snapshots["interactions"].version()):
            self._connection.execute("SET VARIABLE newest_sealed = $at::TIMESTAMPTZ", {"at": _newest(snapshots)})
            self._dated = version
        self._connection.execute(CURRENT_REWARDS.replace("CREATE VIEW", "CREATE OR REPLACE VIEW"))
        return self._connection

    def _snapshot(self, table: str) -> DeltaTable:
        snapshot = self._snapshots.get(table)
        if snapshot is not None:
            try:
                snapshot.update_incremental()
            except (DeltaError, OSError):  # its log was tidied up; and what else is wrong, ``Lake.table`` says
                snapshot = None
        if snapshot is None or unreadable_features(snapshot) or schema_version(snapshot) != SCHEMA_VERSION:
            snapshot = self.lake.table(table)
        self._snapshots[table] = snapshot
        return snapshot


def _newest(snapshots: Mapping[str, DeltaTable]) -> datetime | None:
    files = pa.table(snapshots["interactions"].get_add_actions(flatten=True))
    return pc.max(files["max.created_at"]).as_py() if "max.created_at" in files.column_names else None
