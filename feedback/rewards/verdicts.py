"""Verdicts that were paid for: a small database in a folder, safe for several processes and after a kill."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from feedback.files import make_folder

_FILE: Final = "verdicts.sqlite"
_LOCK_TIMEOUT_S: Final = 30.0
_MOST_PARAMETERS: Final = 500


class VerdictsError(RuntimeError):
    """Verdicts can't be kept. The message names the file."""


class Verdicts:
    """Scores by the hash of what was asked."""

    def __init__(self, folder: str) -> None:
        """Raises VerdictsError if the folder can't be written to, or holds something else."""
        self.path = Path(folder) / _FILE
        try:
            make_folder(self.path.parent)
            self._database = sqlite3.connect(self.path, timeout=_LOCK_TIMEOUT_S, isolation_level=None)
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = FULL")  # a verdict that was kept survives a power loss
            self._database.execute("CREATE TABLE IF NOT EXISTS verdicts (key TEXT PRIMARY KEY, score REAL NOT NULL)")
        except (OSError, sqlite3.Error) as error:
            raise VerdictsError(f"verdicts can't be kept in {self.path}: {error}") from error

    def known(self, keys: Iterable[str]) -> dict[str, float]:
        """The scores of those that are there."""
        wanted = list(keys)
        found: dict[str, float] = {}
        try:
            for start in range(0, len(wanted), _MOST_PARAMETERS):
                some = wanted[start : start + _MOST_PARAMETERS]
                marks = ", ".join("?" * len(some))
                found.update(self._database.execute(f"SELECT key, score FROM verdicts WHERE key IN ({marks})", some))
        except sqlite3.Error as error:
            raise VerdictsError(f"verdicts can't be read from {self.path}: {error}") from error
        return found

    def keep(self, key: str, score: float) -> None:
        """Durable on return."""
        try:
            self._database.execute("INSERT OR REPLACE INTO verdicts VALUES (?, ?)", (key, score))
        except sqlite3.Error as error:
            raise VerdictsError(f"a verdict can't be kept in {self.path}: {error}") from error
