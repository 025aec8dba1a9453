"""The judge's scores so far: a small database in a folder, safe for several processes and after a kill.

They are kept by keyed hashes of the questions: without the key it can't be tried whether a text was scored, nor one
found that was erased. The key is a private file beside the folder, so that a copy of the folder has no key.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from feedback.files import make_folder, make_key, make_private

_FILE: Final = "verdicts.sqlite"
_LOCK_TIMEOUT_S: Final = 30.0
_FORM: Final = 1  # SQLite's user_version of a database whose hashes are keyed


class JudgeCacheError(RuntimeError):
    """Verdicts can't be kept. The message names the file."""


class JudgeCache:
    """Scores by the hash of the question."""

    def __init__(self, folder: str) -> None:
        """Raises JudgeCacheError if the folder can't be written to, or holds something else."""
        self.path = Path(folder) / _FILE
        try:
            make_folder(self.path.parent)
            self._key = make_key(self.path.parent.with_name(f"{self.path.parent.name}.key"))
            for path in (self.path, *self.path.parent.glob(f"{_FILE}-*")):  # SQLite gives its log the database's mode
                make_private(path)
            # Used by one thread at a time, but not always by the same one.
            self._database = sqlite3.connect(
                self.path, timeout=_LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = FULL")  # a verdict that was kept survives a power loss
            self._database.execute("CREATE TABLE IF NOT EXISTS verdicts (key TEXT PRIMARY KEY, score REAL NOT NULL)")
            self._upgrade()
        except (OSError, ValueError, sqlite3.Error) as error:
            raise JudgeCacheError(f"verdicts can't be kept in {self.path}: {error}") from error

    def _upgrade(self) -> None:
        """Key the hashes that an older Millrace kept as they were, and leave nothing of them in the files."""
        if self._form() == _FORM:
            return
        self._database.execute("PRAGMA secure_delete = ON")
        self._database.execute("BEGIN IMMEDIATE")
        if self._form() != _FORM:
            keys = self._database.execute("SELECT key FROM verdicts").fetchall()
            changes = [(self._hashed(key), key) for (key,) in keys]
            self._database.executemany("UPDATE verdicts SET key = ? WHERE key = ?", changes)
            self._database.execute(f"PRAGMA user_version = {_FORM}")
        self._database.execute("COMMIT")
        self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _form(self) -> int:
        return int(self._database.execute("PRAGMA user_version").fetchall()[0][0])

    def _hashed(self, key: str) -> str:
        return hashlib.blake2b(key.encode(), digest_size=32, key=self._key).hexdigest()

    def known(self, keys: Iterable[str]) -> dict[str, float]:
        """The scores of those that are there."""
        wanted = {self._hashed(key): key for key in keys}
        try:
            marks = ", ".join("?" * len(wanted))
            rows = self._database.execute(f"SELECT key, score FROM verdicts WHERE key IN ({marks})", list(wanted))
            return {wanted[hashed]: score for hashed, score in rows}
        except sqlite3.Error as error:
            raise JudgeCacheError(f"verdicts can't be read from {self.path}: {error}") from error

    def keep(self, key: str, score: float) -> None:
        """Durable on return."""
        try:
            self._database.execute("INSERT OR REPLACE INTO verdicts VALUES (?, ?)", (self._hashed(key), score))
        except sqlite3.Error as error:
            raise JudgeCacheError(f"a verdict can't be kept in {self.path}: {error}") from error
