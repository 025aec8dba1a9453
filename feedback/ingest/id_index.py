"""Which feedback the lake holds: an index on disk, beside the journal, that all processes of a journal folder share.

For each feedback of the lake it has 16 bytes for its id and 16 for its content, and the Delta version up to which
the feedback table has been read; both change in one transaction. It is derived from the lake and from nothing else, so
that losing any of it loses no feedback: an index that is missing, damaged, of another table or ahead of the table is
built anew. A sealer takes in what was added, by any replica, at each turn; the server only looks ids up. The log shows
which commits took rows away (an erasure, a retention, of whatever machine): behind one of these the index is built
anew, so that feedback which was removed is new when it is sent again.

The index is ``ids/<uuid>.db`` (SQLite, in WAL mode) in the journal's folder. A new one never takes an old one's name:
a process that still has the old one open would remove the new one's log when it closes.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from deltalake import DeltaTable

from feedback.files import fsync_path, locked, make_folder
from feedback.ids import uuid7
from feedback.lake.data_files import data_files
from feedback.lake.table_changes import Commit, commits
from feedback.lake.tables import Lake, LakeError
from feedback.lake.views import is_file_gone
from feedback.schema import FEEDBACK

log = logging.getLogger(__name__)

_CONTENT: Final = tuple(name for name in FEEDBACK.names if name not in ("feedback_id", "created_at"))
COLUMNS: Final = ("feedback_id", *_CONTENT)
"""The columns that ``keys_and_contents`` needs."""
_TENANT: Final = _CONTENT.index("tenant")
_FORMAT: Final = f"2 {' '.join(_CONTENT)}"
_CACHE_KIB: Final = 4096
_COMMIT_ROWS: Final = 65_536  # what one transaction takes in, so that SQLite's log stays small
_BUSY_S: Final = 1.0
_DAMAGED: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)  # the last: a table is missing
_SHORT_READ: Final = 522  # SQLITE_IOERR_SHORT_READ, which the sqlite3 module does not name


def key_of(tenant: str, feedback_id: str) -> bytes:
    """16 bytes for a feedback id; each tenant has its own ids."""
    return hashlib.blake2b(f"{tenant}\0{feedback_id}".encode(), digest_size=16).digest()


def content_of(row: dict[str, Any]) -> bytes:
    """16 bytes for the content of a feedback row: all of it but its id and its time."""
    return _content_hash(tuple(row.get(name) for name in _CONTENT))


def _content_hash(values: tuple[Any, ...]) -> bytes:
    return hashlib.blake2b(ascii(values).encode(), digest_size=16).digest()


def keys_and_contents(rows: pa.Table | pa.RecordBatch) -> Iterator[tuple[bytes, bytes]]:
    """``key_of`` and ``content_of`` of every row of the feedback table, or of a part of it with all their columns."""
    ids = rows.column("feedback_id").to_pylist()
    contents = zip(*(rows.column(name).to_pylist() for name in _CONTENT), strict=True)
    for feedback_id, values in zip(ids, contents, strict=True):
        yield key_of(values[_TENANT], feedback_id), _content_hash(values)


class SealedIds:
    """The index, open for looking up. One thread uses it at a time."""

    def __init__(self, journal_folder: Path) -> None:
        self.journal_folder = journal_folder
        self.damaged = False
        """Whether it is missing or a look-up found damage; ``take_in`` with ``rebuild=True`` and ``reopen`` mend it."""
        self.path: Path | None = None
        """The file that is open; another one was rebuilt."""
        self._connection: sqlite3.Connection | None = None

    def reopen(self) -> None:
        """Open the newest index, if it is not open already. Raises LakeError if there is none."""
        newest = newest_index(self.journal_folder)
        if newest is None:
            self.damaged = True
            raise LakeError(f"there is no index of feedback ids in {self.journal_folder}")
        if newest != self.path or self._connection is None:
            self.close()
            try:
                self._connection = _connect(newest)
            except sqlite3.Error as error:
                raise self._error(newest, error) from error
            self.path, self.damaged = newest, False

    def get(self, key: bytes) -> bytes | None:
        """``content_of`` the feedback that is sealed under a key, or None. Raises LakeError."""
        found = self._select("SELECT content FROM ids WHERE key = ?", key)
        return found[0][0] if found else None

    def version(self) -> int:
        """The Delta version up to which the feedback table has been taken in. Raises LakeError."""
        return int(self._select("SELECT version FROM read_until")[0][0])

    def close(self) -> None:
        """Let go of the file."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _select(self, sql: str, *values: bytes) -> list[Any]:
        if self._connection is None:
            raise LakeError(f"the index of feedback ids in {self.journal_folder} is not open")
        try:
            return self._connection.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise self._error(self.path, error) from error

    def _error(self, path: Path | None, error: sqlite3.Error) -> LakeError:
        self.damaged = self.damaged or _is_damage(error)
        return LakeError(f"the index of feedback ids {path} can't be read: {error}")


def take_in(lake: Lake, journal_folder: Path, snapshot: DeltaTable | None = None, *, rebuild: bool = False) -> int:
    """Bring the index up to the feedback table; returns the Delta version up to which it has been read.

    ``snapshot``: the table as the caller read it. An index that can't be brought up to it, or any index if ``rebuild``,
    is rebuilt. Raises LakeError, LockTimeoutError or OSError.
    """
    folder = journal_folder / "ids"
    make_folder(folder)
    with locked(folder / ".lock", lake.config.lock_timeout_s):
        snapshot = snapshot or lake.table("feedback")
        path = newest_index(journal_folder)
        if path is not None and not rebuild:
            try:
                version = _update(path, lake, snapshot)
            except sqlite3.Error as error:
                if not _is_damage(error):
                    raise LakeError(f"the index of feedback ids {path} can't be written: {error}") from error
                log.warning("the index of feedback ids %s is damaged (%s): rebuilding it", path, error)
            else:
                if version is not None:
                    return version
        try:
            return _build(folder, lake, lake.table("feedback"))
        except (sqlite3.Error, pa.ArrowException, OSError) as error:
            raise LakeError(f"the index of feedback ids can't be built in {folder}: {error}") from error


def take_in_if_used(lake: Lake, journal_folder: Path) -> None:
    """``take_in`` where a server or a sealer has needed an index before."""
    if newest_index(journal_folder) is not None:
        take_in(lake, journal_folder)


def newest_index(journal_folder: Path) -> Path | None:
    """The file of the index that was built last; None if there is none."""
    return max((journal_folder / "ids").glob("*.db"), default=None)  # a UUIDv7 grows with time


def _connect(path: Path) -> sqlite3.Connection:
    # mode=rw: a file that is not there is not made.
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
    )
    connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
    connection.execute("PRAGMA synchronous = NORMAL")
    return connection


def _update(path: Path, lake: Lake, snapshot: DeltaTable) -> int | None:
    """Take in the changes since the index was last written; None if it can't be brought up to the table."""
    with closing(_connect(path)) as connection:
        ((form, table, since),) = connection.execute("SELECT form, table_id, version FROM read_until").fetchall() or [
            (None, None, 0)
        ]
        if since > snapshot.version():  # another process has seen more of the table than the caller
            snapshot = lake.table("feedback")
        if form != _FORMAT or table != snapshot.metadata().id or since > snapshot.version():
            log.warning("the index of feedback ids %s is not of the table %s: rebuilding it", path, lake.uri)
            return None
        if since == snapshot.version():
            return since
        lake.make_durable("feedback", snapshot)  # what a power loss could take back is not taken in
        try:
            new = commits(lake, "feedback", since, snapshot.version())
            if any(commit.rows_gone for commit in new):
                log.info("rows left %s: rebuilding the index of feedback ids", lake.table_uri("feedback"))
                return None
            _take_in_changes(connection, lake, new)
        except (pa.ArrowException, OSError) as error:
            if not is_file_gone(error):
                raise LakeError(f"the changes of feedback since version {since} can't be read: {error}") from error
            log.warning(
                "the changes of feedback since version %d are cleaned up (%s): rebuilding the index of feedback ids",
                since,
                str(error).splitlines()[0],
            )
            return None
        return snapshot.version()


def _take_in_changes(connection: sqlite3.Connection, lake: Lake, new: list[Commit]) -> None:
    files = [path for commit in new for path in commit.fresh]
    connection.execute("BEGIN IMMEDIATE")
    pending = 0
    for batch in _rows_of(lake, files):
        # The lake decides, also against a row that was taken in before.
        connection.executemany("INSERT OR REPLACE INTO ids VALUES (?, ?)", keys_and_contents(batch))
        pending += batch.num_rows
        if pending >= _COMMIT_ROWS:
            connection.execute("COMMIT")
            connection.execute("BEGIN IMMEDIATE")
            pending = 0
    connection.execute("UPDATE read_until SET version = ?", (new[-1].version,))
    connection.execute("COMMIT")


def _build(folder: Path, lake: Lake, snapshot: DeltaTable) -> int:
    """A new index of the whole table, renamed when it is whole; older ones are removed."""
    for left in folder.glob("*.building*"):
        left.unlink()
    lake.make_durable("feedback", snapshot)
    path = folder / f"{uuid7()}.db"
    building = path.with_suffix(".building")
    with closing(sqlite3.connect(building, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = OFF")
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        connection.execute("CREATE TABLE ids (key BLOB PRIMARY KEY, content BLOB NOT NULL) WITHOUT ROWID")
        connection.execute("CREATE TABLE read_until (form TEXT, table_id TEXT, version INTEGER)")
        # Sorted before they are put in: in any other order each id would be a page read and written.
        connection.execute("CREATE TEMP TABLE unsorted (key BLOB, content BLOB)")
        connection.execute("BEGIN")
        for batch in _rows_of(lake, [file.path for file in data_files(snapshot)]):
            connection.executemany("INSERT INTO unsorted VALUES (?, ?)", keys_and_contents(batch))
        connection.execute("INSERT OR REPLACE INTO ids SELECT key, content FROM unsorted ORDER BY key")
        connection.execute(
            "INSERT INTO read_until VALUES (?, ?, ?)", (_FORMAT, snapshot.metadata().id, snapshot.version())
        )
        connection.execute("COMMIT")
        connection.execute("PRAGMA journal_mode = WAL")
    fsync_path(building)
    os.rename(building, path)
    for old in folder.glob("*.db*"):
        if not old.name.startswith(path.name):
            old.unlink(missing_ok=True)
    fsync_path(folder)
    return snapshot.version()


def _rows_of(lake: Lake, paths: Iterable[str]) -> Iterator[pa.RecordBatch]:
    files = lake.files("feedback")
    for path in paths:
        yield from files.batches("feedback", path, COLUMNS)


def _is_damage(error: sqlite3.Error) -> bool:
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and (code == _SHORT_READ or code & 0xFF in _DAMAGED)
