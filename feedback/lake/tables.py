"""The Delta tables: create, append, replace files, read them with DuckDB."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final, TypeVar

import duckdb
import pyarrow as pa
from deltalake import DeltaTable, Schema
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, CommitProperties, PostCommitHookProperties, RemoveAction, Transaction

from feedback.config import LakeConfig
from feedback.files import fsync_path, locked, make_folder
from feedback.journal.recovery import load_all
from feedback.journal.segment import Segment
from feedback.lake.data_files import Store, TableFiles, data_files, dates
from feedback.lake.delta_log import drop_torn_commits, make_log_durable
from feedback.lake.views import CURRENT_REWARDS, connect, create_view, is_file_gone, unreadable_features
from feedback.processes.exit import skip_teardown
from feedback.schema import SCHEMA_VERSION, TABLES, TIME_COLUMN

log = logging.getLogger(__name__)

_PARTITION: Final = pa.field("date", pa.date32(), nullable=False)
_REPLACEMENT: Final = "lake.replacement"  # the application id that every replacement of files moves on

VERSION_PROPERTY: Final = "millrace.schemaVersion"
"""The Delta property with a table's schema version, which its commits take along."""

COMMIT_HOOKS: Final = PostCommitHookProperties(cleanup_expired_logs=False)
"""A commit must not remove log entries behind a checkpoint that is not durable yet; ``vacuum`` does, when it is."""

_READ_ATTEMPTS: Final = 3

_OPEN_ATTEMPTS: Final = 3
_OPEN_PAUSE_S: Final = 0.1

_T = TypeVar("_T")


class LakeError(RuntimeError):
    """The lake can't do what was requested."""


class NoLakeError(LakeError):
    """There is no lake yet."""


class LakeVersionError(LakeError):
    """Another release of Millrace made the tables, or their columns, as they are."""


class LakeFileGoneError(LakeError):
    """A vacuum removed a file of the tables as they were when they were opened for reading."""


class LakeConflictError(LakeError):
    """Another process has made a conflicting commit since the table was read; nothing was written."""


class Lake:
    """Three Delta tables below one folder or object-store address."""

    def __init__(self, uri: str, config: LakeConfig) -> None:
        """``uri`` is an absolute folder or an object store's address. Raises LakeError for one that can't work."""
        self.uri = uri.removeprefix("file://").rstrip("/")
        self.config = config
        self.local = "://" not in self.uri
        if not self.local:
            skip_teardown("Arrow reads ahead from an object store")
        if self.local and "%" in self.uri:
            raise LakeError(f"lake folder {self.uri!r}: deltalake can't use a path with '%' in it; choose another")

    def create(self) -> None:
        """Make the tables that are missing; on a local disk, repair a torn log.

        An object store writes an object whole or not at all, so that nothing is torn there; of several that make a
        table at once the store lets one do it. Raises LakeError, and LakeVersionError for tables of another schema.
        """
        for table, schema in TABLES.items():
            folder = Path(self.table_uri(table))
            if self.local:
                make_folder(folder)
            with self.committing(table):
                self._drop_torn(folder)
                try:
                    self._create_table(table, schema)
                except (DeltaError, OSError) as error:
                    try:
                        self.open(table)  # another replica may have created it at this moment
                    except LakeError:
                        text = self.error_text(error)
                        raise LakeError(f"table {self.table_uri(table)} can't be created: {text}") from error
                if self.local:
                    make_log_durable(folder, -1, 0)
                    fsync_path(folder)
                self.table(table, readable=False)

    def repair(self) -> None:
        """On a local disk, put aside what a power loss tore at the end of the tables' logs, as ``create`` does."""
        for table in TABLES:
            folder = Path(self.table_uri(table))
            if self.local and folder.exists():
                with self.committing(table):
                    self._drop_torn(folder)

    def _drop_torn(self, folder: Path) -> None:
        """The caller holds the table's lock."""
        if self.local and (folder / "_delta_log").exists():
            for path in drop_torn_commits(folder):
                log.warning("%s was torn by a power loss and is put aside; the journal holds its rows", path)

    def _create_table(self, table: str, schema: pa.Schema) -> None:
        DeltaTable.create(
            self.table_uri(table),
            Schema.from_arrow(schema.append(_PARTITION)),
            mode="ignore",
            partition_by=["date"],
            configuration={**self.properties(), VERSION_PROPERTY: str(SCHEMA_VERSION)},
            raise_if_key_not_exists=False,  # a property of ours is none that deltalake knows
            storage_options=self.config.store_options or None,
            # Of two that make the table at once the second would otherwise give it another identity, as version 1.
            commit_properties=CommitProperties(max_commit_retries=0),
        )

    def properties(self) -> dict[str, str]:
        """The properties of the tables that Delta knows."""
        kept = f"interval {self.config.vacuum_hours} hours"
        return {
            "delta.enableChangeDataFeed": "true",  # other readers can follow what is new by it
            "delta.checkpointInterval": "20",  # the most commits to be replayed when a table is opened
            "delta.logRetentionDuration": kept,
            "delta.deletedFileRetentionDuration": kept,
        }

    def table_uri(self, table: str) -> str:
        """The address of one table, readable by any Delta reader."""
        return f"{self.uri}/{table}"

    def files(self, table: str) -> TableFiles:
        """The files of one table."""
        return TableFiles(self.table_uri(table), self.config.store_options, local=self.local)

    def store(self) -> Store:
        """What lies beside the tables."""
        return Store(self.uri, self.config.store_options, local=self.local)

    def table(self, table: str, version: int | None = None, *, readable: bool = True) -> DeltaTable:
        """One table as it is, or as it was at a version.

        Raises LakeError if there is none, LakeVersionError if it is to be upgraded or another Millrace is needed (at a
        ``version`` it may be older than the schema: columns that came later are null), or, unless ``readable`` is False
        (it is only appended to), LakeError if another writer switched on what makes its files alone not its rows.
        """
        snapshot = self.open(table, version)
        found = schema_version(snapshot)
        if found > SCHEMA_VERSION:
            raise LakeVersionError(
                f"table {self.table_uri(table)} was made by a newer Millrace: it has schema version {found}, and this "
                f"Millrace knows {SCHEMA_VERSION}; install the newer one here too"
            )
        if found < SCHEMA_VERSION and version is None:
            raise LakeVersionError(
                f"table {self.table_uri(table)} was made by an older Millrace: it has schema version {found}, and this "
                f"Millrace needs {SCHEMA_VERSION}; run `millrace lake upgrade`"
            )
        if readable and (features := unreadable_features(snapshot)):
            raise LakeError(
                f"table {self.table_uri(table)} uses {', '.join(features)}, which another writer switched on and "
                "Millrace can't read; rewrite the table without it"
            )
        return snapshot

    def open(self, table: str, version: int | None = None) -> DeltaTable:
        """A table whatever its schema version, for ``upgrade``; others use ``table``. Raises LakeError."""
        if table not in TABLES:
            raise LakeError(f"no table {table!r}; there are {', '.join(TABLES)}")
        for attempt in itertools.count(1):
            try:
                return DeltaTable(
                    self.table_uri(table), version=version, storage_options=self.config.store_options or None
                )
            except TableNotFoundError as error:
                raise NoLakeError(f"no lake at {self.uri}: {error}; Lake.create makes one") from error
            except OSError as error:  # deltalake has tried several times
                raise LakeError(f"table {self.table_uri(table)} can't be read: {self.error_text(error)}") from error
            except DeltaError as error:
                # The log may have been tidied up between the listing and the reading of it.
                if version is None and attempt < _OPEN_ATTEMPTS:
                    time.sleep(_OPEN_PAUSE_S)
                    continue
                at = "" if version is None else f" at version {version}"
                text = self.config.redact(str(error))
                raise LakeError(f"table {self.table_uri(table)}{at} can't be read: {text}") from error
        raise AssertionError("unreachable")

    def versions(self) -> dict[str, int]:
        """The Delta version of every table."""
        return {table: self.table(table, readable=False).version() for table in TABLES}

    def counts(self) -> dict[str, int]:
        """The number of sealed rows of every table, from the log alone."""
        return {table: self.table(table, readable=False).count() for table in TABLES}

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
        snapshot = snapshot or self.table(table, readable=False)
        if transactions and all(_is_committed(app, number, snapshot) for app, number in transactions.items()):
            return None
        with self._writing(table):
            added = self.files(table).write(table, data)
            with self.committing(table):
                return self._commit(table, snapshot, added, [], transactions, metadata or {})

    def replace(
        self,
        table: str,
        paths: Collection[str],
        data: pa.Table | pa.RecordBatchReader | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
    ) -> list[AddAction]:
        """Put rows in the place of data files, or nothing, in one commit, durable on return; returns the files written.

        The change feed does not show it: a reader of what is new sees none of the rows again. It holds only if all of
        ``paths`` are still the table's: if another replacement (a compaction, an erasure) took one of them meanwhile,
        LakeConflictError is raised and nothing is written, so that no row comes back or is doubled. Appends meanwhile
        do no harm.
        """
        with self._writing(table):
            try:
                written = [] if data is None else self.files(table).write(table, data)
            except (OSError, pa.ArrowException, duckdb.Error) as error:
                if is_file_gone(error):
                    raise LakeConflictError(f"{self.table_uri(table)}: a file was removed while it was read") from error
                raise
            added = [dataclasses.replace(action, data_change=False) for action in written]
            with self.committing(table):
                # deltalake finds no conflict between two commits that remove the same file without a change of data.
                # So the files are looked for here, and for the moment from here to the commit there is the application
                # id that every replacement moves on: of two from the same version, deltalake lets one pass.
                current = self.table(table)
                known = {file.path: file for file in data_files(current)}
                if gone := [path for path in paths if path not in known]:
                    self.files(table).delete(action.path for action in added)
                    raise LakeConflictError(
                        f"{self.table_uri(table)}: {gone[0]} and {len(gone) - 1} others of {len(paths)} files were "
                        "replaced by another process meanwhile"
                    )
                now = time.time_ns() // 1_000_000
                removed = [
                    RemoveAction(path, False, now, known[path].size, {"date": known[path].day.isoformat()})
                    for path in paths
                ]
                turn = {_REPLACEMENT: (current.transaction_version(_REPLACEMENT) or 0) + 1}
                self._commit(table, current, added, removed, turn, metadata or {})
        return added

    def _commit(
        self,
        table: str,
        snapshot: DeltaTable,
        added: list[AddAction],
        removed: list[RemoveAction],
        transactions: Mapping[str, int],
        metadata: Mapping[str, Any],
    ) -> int:
        properties = CommitProperties(
            custom_metadata=dict(metadata),
            app_transactions=[Transaction(app, version) for app, version in transactions.items()],
        )
        before = snapshot.version()
        try:
            snapshot.create_write_transaction(
                [*removed, *added],
                "append",
                snapshot.schema(),
                ["date"],
                commit_properties=properties,
                post_commithook_properties=COMMIT_HOOKS,
            )
        except CommitFailedError as error:
            # A commit may have been made before something behind it failed: its files must not go then.
            after = {file.path for file in data_files(self.table(table))}
            if added and after.issuperset(action.path for action in added):
                raise LakeError(f"{self.table_uri(table)}: the commit was made, but {error}") from error
            self.files(table).delete(action.path for action in added)
            raise LakeConflictError(f"{self.table_uri(table)}: {error}") from error
        snapshot.update_incremental()
        self.make_durable(table, snapshot, since=before)  # with the commit before it, whose writer may have been killed
        return snapshot.version()

    def make_durable(self, table: str, snapshot: DeltaTable, *, since: int | None = None) -> None:
        """Make the commits from ``since`` (the last) to ``snapshot``'s durable: who made them may have been killed.

        An object store's commits are durable. Raises OSError.
        """
        if self.local:
            first = snapshot.version() if since is None else since
            make_log_durable(Path(self.table_uri(table)), first - 1, snapshot.version())

    def committing(self, table: str) -> AbstractContextManager[None]:
        """One commit at a time, so that on a local disk a commit is durable before the next one builds on it.

        An object store has no such lock and needs none: what it has written is durable.
        """
        return self._locked(f".{table}.lock", self.config.lock_timeout_s)

    def _writing(self, table: str) -> AbstractContextManager[None]:
        """While this is held, files that no version names may be about to be committed (local disk only)."""
        return self._locked(f".{table}.writing.lock", self.config.lock_timeout_s, shared=True)

    @contextmanager
    def alone(self, table: str, *, wait_s: float | None = None) -> Iterator[None]:
        """Keep other writers on this machine from writing files and committing (local disk only).

        Raises LockTimeoutError if a writer is still at work after ``wait_s`` (``LakeConfig.lock_timeout_s``) seconds.
        """
        wait_s = self.config.lock_timeout_s if wait_s is None else wait_s
        with self._locked(f".{table}.writing.lock", wait_s), self.committing(table):
            yield

    def _locked(self, name: str, wait_s: float, *, shared: bool = False) -> AbstractContextManager[None]:
        return locked(Path(self.uri) / name, wait_s, shared=shared) if self.local else nullcontext()

    def connect(
        self,
        journal_folder: Path | None = None,
        *,
        versions: Mapping[str, int] | None = None,
        tables: Iterable[str] = tuple(TABLES),
    ) -> duckdb.DuckDBPyConnection:
        """A DuckDB connection with views ``interactions``, ``feedback``, ``rewards`` and ``current_rewards``.

        ``versions`` pins tables to Delta versions. With a ``journal_folder`` the views of the others have the rows that
        are not sealed yet too, each row once even while a seal is under way; responses that are still going out are
        left out. The views show the moment of this call. ``tables`` are those to have a view; the variable
        ``versions`` maps them to their Delta versions.

        The files are read when a query runs: where a vacuum may take them meanwhile, use ``read``. Raises LakeError
        if a table can't be read.
        """
        # The journal is read before the tables: a row that is sealed in between is seen twice, and dropped here, never
        # missed. The application's transaction version in the table says which segments to drop.
        versions = versions or {}
        tables = [table for table in TABLES if table in set(tables)]
        with_journal = [table for table in tables if table not in versions] if journal_folder is not None else []
        unsealed = load_all(journal_folder, with_journal) if journal_folder is not None and with_journal else []
        snapshots = {table: self.table(table, versions.get(table)) for table in tables}
        connection = connect(self.config.memory_limit, self.config.threads)
        try:
            for table, snapshot in snapshots.items():
                rows = unsealed_rows(table, unsealed, snapshot) if table in with_journal else None
                create_view(connection, table, snapshot, rows, self.config.store_options, local=self.local)
            if "rewards" in snapshots:
                connection.execute(CURRENT_REWARDS)
            shown = ", ".join(f"'{table}': {snapshot.version()}" for table, snapshot in snapshots.items())
            connection.execute(f"SET VARIABLE versions = MAP {{{shown}}}")
        except BaseException as error:
            connection.close()
            if is_file_gone(error):
                raise self._file_gone(versions, error) from error
            raise
        return connection

    def read(
        self,
        work: Callable[[duckdb.DuckDBPyConnection], _T],
        journal_folder: Path | None = None,
        *,
        versions: Mapping[str, int] | None = None,
        tables: Iterable[str] = tuple(TABLES),
    ) -> _T:
        """What ``work`` returns of the views; it is done over if a vacuum takes files from under it.

        Raises LakeError if the files are gone for good, and what ``connect`` and ``work`` raise.
        """
        for attempt in range(1, _READ_ATTEMPTS + 1):
            try:
                with self.connect(journal_folder, versions=versions, tables=tables) as connection:
                    return work(connection)
            except (duckdb.Error, OSError, pa.ArrowException) as error:
                if not is_file_gone(error):
                    raise
                gone = self._file_gone(versions or {}, error)
            except LakeFileGoneError as error:
                gone = error
            if versions or attempt == _READ_ATTEMPTS:
                raise gone
            log.info("%s; reading the tables as they are now", gone)
        raise AssertionError("unreachable")

    def _file_gone(self, versions: Mapping[str, int], error: BaseException) -> LakeFileGoneError:
        which = ", ".join(f"{table} at version {version}" for table, version in versions.items())
        advice = f"{which} can't be read any more; take a later version" if which else "read again"
        return LakeFileGoneError(f"{self.uri}: a file was removed by a vacuum ({str(error).splitlines()[0]}): {advice}")

    def error_text(self, error: Exception) -> str:
        """An object store's error in one line: it comes as a coloured tree."""
        lines = (re.sub(r"\x1b\[[0-9;]*m|↳", "", line).strip() for line in str(error).splitlines())
        return self.config.redact("; ".join(itertools.islice(filter(None, lines), 5)))


def schema_version(snapshot: DeltaTable) -> int:
    """The schema version of a table; 0 for one that is older than these versions. Raises LakeVersionError."""
    text = snapshot.metadata().configuration.get(VERSION_PROPERTY) or "0"
    if not text.isdecimal():
        raise LakeVersionError(f"{snapshot.table_uri}: {VERSION_PROPERTY} is {text!r}, which is no number")
    return int(text)


def unsealed_rows(table: str, segments: list[tuple[Segment, pa.Table]], snapshot: DeltaTable) -> pa.Table:
    """The rows of a table that the journal holds and the snapshot does not, with their partition's column."""
    fresh = [rows for segment, rows in segments if segment.name.table == table and not is_sealed(segment, snapshot)]
    rows = pa.concat_tables([TABLES[table].empty_table(), *fresh])
    return rows.append_column(_PARTITION, dates(rows, TIME_COLUMN[table]))


def _is_committed(application: str, number: int, snapshot: DeltaTable) -> bool:
    committed = snapshot.transaction_version(application)
    return committed is not None and number <= committed


def is_sealed(segment: Segment, snapshot: DeltaTable) -> bool:
    return _is_committed(segment.name.application, segment.name.number, snapshot)
