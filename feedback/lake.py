"""The Delta tables: create, append, read them with DuckDB."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import duckdb
import pyarrow as pa
from deltalake import DeltaTable, Schema
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import CommitProperties, Transaction

from feedback.config import LakeConfig
from feedback.files import fsync_path, locked, make_folder
from feedback.recovery import load_all
from feedback.schema import TABLES, TIME_COLUMN
from feedback.segments import Segment
from feedback.storage import TableFiles, dates, drop_torn_commits, make_log_durable
from feedback.views import connect, create_view_between, scan_sql

log = logging.getLogger(__name__)

_PARTITION: Final = pa.field("date", pa.date32(), nullable=False)
_PROPERTIES: Final = {"delta.enableChangeDataFeed": "true"}  # scoring reads what is new by it

_CURRENT_REWARDS: Final = """
CREATE VIEW current_rewards AS
SELECT * FROM rewards
QUALIFY row_number() OVER (PARTITION BY response_id ORDER BY scored_at DESC) = 1
"""


class LakeError(RuntimeError):
    """The lake can't do what was asked."""


class LakeConflictError(LakeError):
    """Somebody else committed under the same application id since the table was read; nothing was written."""


class Lake:
    """Three Delta tables below one folder or object-store address."""

    def __init__(self, uri: str, config: LakeConfig) -> None:
        """``uri`` is an absolute folder or an object store's address. Raises LakeError for one that can't work."""
        self.uri = uri.removeprefix("file://").rstrip("/")
        self.config = config
        self.local = "://" not in self.uri
        if self.local and "%" in self.uri:
            raise LakeError(f"lake folder {self.uri!r}: deltalake can't use a path with '%' in it; choose another")

    def create(self) -> None:
        """Make the tables that are missing; on a local disk, repair a log that a power loss tore."""
        for table, schema in TABLES.items():
            if self.local:
                make_folder(Path(self.table_uri(table)))
                with self._commit_lock(table):
                    self._create_local(table, schema)
            else:
                self._create_table(table, schema)

    def _create_local(self, table: str, schema: pa.Schema) -> None:
        folder = Path(self.table_uri(table))
        if (folder / "_delta_log").exists():
            for path in drop_torn_commits(folder):
                log.warning("%s was torn by a power loss and is put aside; the journal still holds its rows", path)
        self._create_table(table, schema)
        make_log_durable(folder, -1, 0)
        fsync_path(folder)

    def _create_table(self, table: str, schema: pa.Schema) -> None:
        DeltaTable.create(
            self.table_uri(table),
            Schema.from_arrow(schema.append(_PARTITION)),
            mode="ignore",
            partition_by=["date"],
            configuration=_PROPERTIES,
            storage_options=self.config.storage_options or None,
        )

    def table_uri(self, table: str) -> str:
        """The address of one table, readable by any Delta reader."""
        return f"{self.uri}/{table}"

    def table(self, table: str, version: int | None = None) -> DeltaTable:
        """One table as it is, or as it was at a version. Raises LakeError if there is none."""
        if table not in TABLES:
            raise LakeError(f"no table {table!r}; there are {', '.join(TABLES)}")
        try:
            return DeltaTable(
                self.table_uri(table), version=version, storage_options=self.config.storage_options or None
            )
        except TableNotFoundError as error:
            raise LakeError(f"no lake at {self.uri}: {error}; Lake.create makes one") from error
        except DeltaError as error:
            at = "" if version is None else f" at version {version}"
            raise LakeError(f"table {self.table_uri(table)}{at} can't be read: {error}") from error

    def versions(self) -> dict[str, int]:
        """The Delta version of every table."""
        return {table: self.table(table).version() for table in TABLES}

    def counts(self) -> dict[str, int]:
        """The number of sealed rows of every table, from the log alone."""
        return {table: self.table(table).count() for table in TABLES}

    def append(
        self,
        table: str,
        data: pa.Table | pa.RecordBatchReader,
        *,
        transactions: Mapping[str, int] | None = None,
        metadata: Mapping[str, Any] | None = None,
        snapshot: DeltaTable | None = None,
    ) -> int | None:
        """Append rows in one commit, durable on return; returns the table's version after it.

        ``transactions`` are (application id, version) pairs that become true with the commit: if they all are already,
        nothing is written and None is returned, so that repeating an append does nothing. Rows go by ``snapshot``, the
        table as the caller read it: if any of the application ids has moved since, LakeConflictError is raised and
        nothing is written. ``metadata`` (JSON values) is kept in the commit.
        """
        transactions = transactions or {}
        snapshot = snapshot or self.table(table)
        if transactions and all(_is_committed(app, number, snapshot) for app, number in transactions.items()):
            return None
        files = TableFiles(self.table_uri(table), self.config.storage_options, local=self.local)
        actions = files.write(table, data)
        try:
            return self._commit(table, snapshot, actions, transactions, metadata or {})
        except CommitFailedError as error:
            # A commit may have been made before something behind it failed: its files must not go then.
            after = self.table(table)
            committed = set(after.get_add_actions().column("path").to_pylist())
            if actions and committed.issuperset(action.path for action in actions):
                raise LakeError(f"{self.table_uri(table)}: the commit was made, but {error}") from error
            files.delete([action.path for action in actions])
            raise LakeConflictError(f"{self.table_uri(table)}: {error}") from error

    def _commit(
        self,
        table: str,
        snapshot: DeltaTable,
        actions: list[Any],
        transactions: Mapping[str, int],
        metadata: Mapping[str, Any],
    ) -> int:
        properties = CommitProperties(
            custom_metadata=dict(metadata),
            app_transactions=[Transaction(app, version) for app, version in transactions.items()],
        )
        if not self.local:
            snapshot.create_write_transaction(
                actions, "append", snapshot.schema(), ["date"], commit_properties=properties
            )
            snapshot.update_incremental()
            return snapshot.version()
        before = snapshot.version()
        with self._commit_lock(table):
            snapshot.create_write_transaction(
                actions, "append", snapshot.schema(), ["date"], commit_properties=properties
            )
            snapshot.update_incremental()
            make_log_durable(Path(self.table_uri(table)), before, snapshot.version())
        return snapshot.version()

    def _commit_lock(self, table: str) -> Any:
        # One commit at a time, so that a commit is durable before the next one builds on it.
        return locked(Path(self.uri) / f".{table}.lock", self.config.lock_timeout_s)

    def connect(
        self,
        journal_folder: Path | None = None,
        *,
        versions: Mapping[str, int] | None = None,
        memory_limit: str | None = None,
        threads: int | None = None,
    ) -> duckdb.DuckDBPyConnection:
        """A DuckDB connection with views ``interactions``, ``feedback``, ``rewards`` and ``current_rewards``.

        ``versions`` pins tables to Delta versions. With a ``journal_folder`` the rows that are not sealed yet are
        there too, each row once even while a seal is under way. The views show the moment of this call.
        """
        # The journal is read before the tables: a row that is sealed in between is seen twice, and dropped here, never
        # missed. The application's transaction version in the table says which segments to drop.
        unsealed = load_all(journal_folder) if journal_folder is not None else []
        connection = connect(memory_limit or self.config.memory_limit, threads or self.config.threads)
        try:
            for table, schema in TABLES.items():
                snapshot = self.table(table, (versions or {}).get(table))
                rows = [
                    rows
                    for segment, rows in unsealed
                    if segment.name.table == table and not is_sealed(segment, snapshot)
                ]
                sealed = scan_sql(connection, table, snapshot, snapshot.file_uris(), local=self.local)
                unsealed_rows = pa.concat_tables([schema.empty_table(), *rows])
                unsealed_dates = dates(unsealed_rows, TIME_COLUMN[table])
                connection.register(f"unsealed_{table}", unsealed_rows.append_column(_PARTITION, unsealed_dates))
                connection.execute(f"CREATE VIEW {table} AS {sealed} UNION ALL BY NAME SELECT * FROM unsealed_{table}")
            connection.execute(_CURRENT_REWARDS)
        except BaseException:
            connection.close()
            raise
        return connection

    def add_view(
        self, connection: duckdb.DuckDBPyConnection, name: str, snapshot: DeltaTable, between: tuple[str, str, str]
    ) -> None:
        """A view of a table's sealed rows whose text column lies ``between`` (column, low, high), ends included."""
        create_view_between(connection, name, snapshot, between, local=self.local)


def _is_committed(application: str, number: int, snapshot: DeltaTable) -> bool:
    committed = snapshot.transaction_version(application)
    return committed is not None and number <= committed


def is_sealed(segment: Segment, snapshot: DeltaTable) -> bool:
    return _is_committed(segment.name.application, segment.name.number, snapshot)
