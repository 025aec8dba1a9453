"""Which feedback is recorded already, so that a repeated request is recorded once.

What the lake holds is looked up in the index of ``feedback.ingest.id_index``, which the sealer keeps up to date for all
replicas' feedback. What this process acknowledged and the lake may not hold yet is in a private SQLite file without a
name: it needs no durability, because a start reads it from the journal. Both are on disk but for a small cache, so that
memory does not grow with history, nor with a lake that can't be reached. The index and the lake are read in a thread
each: a disk that hangs must not hold up what else a server does.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeVar

from feedback.ingest.disk_thread import DiskThread
from feedback.ingest.id_index import SealedIds, content_of, key_of, keys_and_contents, newest_index, take_in
from feedback.journal.codec import to_batch
from feedback.journal.recovery import load
from feedback.journal.segment import list_segments
from feedback.journal.writer import Journal, JournalUnsure
from feedback.lake.erasure_registry import is_being_erased, registered, without_erased
from feedback.lake.table_changes import rows_left
from feedback.lake.tables import Lake, LakeError, is_sealed
from feedback.schema import FEEDBACK

log = logging.getLogger(__name__)

Verdict = Literal["new", "same", "conflict"]
_T = TypeVar("_T")

_CACHE_KIB: Final = 4096
_FORGET_ROWS: Final = 200  # looked up at a time: about a millisecond
_FORGET_S: Final = 0.1
"""Longest that look-ups wait for those of ids that may be forgotten, where a disk is slow."""
_READ_S: Final = 10.0
"""Longest wait for the index, other requests' look-ups before this one included."""
_CLOSE_S: Final = 5.0

_Erased = tuple[Path | None, frozenset[str]]
"""An index, and the erasures that there were."""


class _State(NamedTuple):
    """Which index was open, and the version of the feedback table up to which it had been read."""

    path: Path | None
    version: int


class SeenFeedbackError(RuntimeError):
    """An id can't be looked up; nothing was recorded."""


class SeenFeedback:
    """Every feedback id that this server knows. One event loop uses it; it is not for several threads."""

    def __init__(self, lake: Lake, journal_folder: Path) -> None:
        self.lake = lake
        self.journal_folder = journal_folder
        self.error: str | None = None
        """Why ids can't be looked up, or the last one not be remembered; None if all is well."""
        self._sealed = SealedIds(journal_folder)  # once opened, for ``_index`` alone
        self._index, self._tables = DiskThread("the index of feedback ids"), DiskThread("the lake's feedback")
        self._unsealed = _private_file()
        self._unsealed_rows = 0
        self._dropped: dict[object, set[bytes]] = {}  # of each look-up: what left the private file since it began
        self._forgotten_until = -1
        self._erased_until: _Erased | None = None  # what was forgotten by
        self._turn = 0  # an id that came in a later turn than this is younger than what was read in it
        self._forgetting = asyncio.Lock()
        self._pending: dict[bytes, tuple[bytes, asyncio.Future[bool]]] = {}
        self._doubtful: dict[bytes, bytes] = {}  # content that may be recorded, of ids that nobody was told about

    def open(self) -> None:
        """Learn what the journal and the lake hold. Blocks while it reads; call it before serving.

        Raises LakeError, LockTimeoutError or OSError.
        """
        index, erasures = newest_index(self.journal_folder), registered(self.lake)
        # The journal is read before the lake: what is sealed in between is known twice, never missed.
        for key, content in self._in_journal().items():
            self._remember(key, content)
        take_in(self.lake, self.journal_folder)
        self._sealed.reopen()
        self._erased_until = (index, erasures)

    def close(self) -> None:
        """Let go of the files; of an index on a disk that hangs with the process. Blocks for some seconds at most."""
        self._index.end(self._sealed.close, _CLOSE_S)
        self._tables.end(lambda: None, _CLOSE_S)
        self._unsealed.close()

    async def check(self, row: dict[str, Any]) -> Verdict:
        """What recording ``row`` would be: new, the same again, or another content under a known id.

        Raises SeenFeedbackError if that can't be looked up.
        """
        return (await self.check_all([row]))[0]

    async def check_all(self, rows: Sequence[dict[str, Any]]) -> list[Verdict]:
        """``check`` of each."""
        return (await self._check(rows))[0]

    async def _check(self, rows: Sequence[dict[str, Any]]) -> tuple[list[Verdict], list[_State]]:
        """(``check`` of each, the states of the index by which)."""
        keys = [key_of(row["tenant"], row["feedback_id"]) for row in rows]
        known: dict[bytes, bytes | None] = dict.fromkeys(keys)
        states, look_up = list[_State](), object()
        self._dropped[look_up] = set(keys)
        with self._comparing("what is recorded"):
            try:
                while unknown := [key for key in self._dropped[look_up] if known[key] is None]:
                    self._dropped[look_up] = set()
                    state, sealed = await self._read(partial(_look_up, unknown))
                    states.append(state)
                    # Nothing else runs from here to the verdict: what is recorded by now is seen, unless it was sealed
                    # and forgotten since the index was read, which is looked up again.
                    known |= {key: sealed[key] or self._recorded(key) for key in unknown}
                    self._dropped[look_up] &= known.keys()
            finally:
                del self._dropped[look_up]
        verdicts: list[Verdict] = []
        for row, key in zip(rows, keys, strict=True):
            content = known[key]
            verdicts.append("new" if content is None else "same" if content == content_of(row) else "conflict")
        return verdicts, states

    async def compare(self, row: dict[str, Any]) -> Verdict:
        """As ``check``, once what was removed meanwhile is forgotten: what is known will stay recorded.

        Raises SeenFeedbackError too while an erasure may remove it.
        """
        erased_until = self._erased_until  # what is removed from here on is looked for below
        (verdict,), states = await self._check([row])
        # Looked at before what was removed: an erasure that ends in between is seen there.
        being_erased = verdict == "same" and await self._is_being_erased(row)
        if verdict != "new" and await self._forget_removed(states, erased_until):
            return await self.compare(row)
        if being_erased:
            raise SeenFeedbackError(
                f"feedback {row['feedback_id']!r} is known, but an erasure that has begun may remove it: repeat it "
                "when the erasure is done (`millrace lake maintain` finishes one that was killed)"
            )
        return verdict

    async def record(self, row: dict[str, Any], journal: Journal, *, generated_id: bool = False) -> Verdict:
        """Append ``row`` to the journal unless its id is known; return when the verdict is durable.

        ``generated_id``: the id is a UUID that this server has just generated, which needs no look-up. Of several
        requests at once with the same id one appends, the others wait for it. Raises SeenFeedbackError, and what
        ``Journal.append`` raises; the row's id is then free again.
        """
        key, content = key_of(row["tenant"], row["feedback_id"]), content_of(row)
        while True:
            while key in self._pending:
                other, done = self._pending[key]
                if await asyncio.shield(done):
                    return "same" if other == content else "conflict"
            if not generated_id and (verdict := await self.compare(row)) != "new":
                return verdict
            if key not in self._pending:  # nobody came with the id meanwhile
                break
        if self._doubtful.get(key, content) != content:
            raise SeenFeedbackError(
                f"feedback {row['feedback_id']!r} may be recorded with another content, as the disk hung: send that "
                "again, or take another id"
            )
        done = asyncio.get_running_loop().create_future()
        self._pending[key] = (content, done)
        append = asyncio.ensure_future(journal.append("feedback", row))
        # The append outlives a caller that goes away, so that its outcome is always noted.
        append.add_done_callback(self._on_appended(key, content, done))
        await asyncio.shield(append)
        return "new"

    async def follow(self) -> None:
        """Until cancelled, gradually forget what the index has, and mend an index that is damaged."""
        while True:
            await asyncio.sleep(self.lake.config.seal_seconds)
            try:
                if self._sealed.damaged:
                    rebuild = partial(take_in, self.lake, self.journal_folder, rebuild=True)
                    await self._tables.run(rebuild, None)
                await self._forget_erased()
                await self._forget_sealed()
                self.error = None
            except Exception as error:  # noqa: BLE001 - whatever it was, erasures after it are to be heard of
                self.error = str(error) or repr(error)
                log.error("the feedback ledger does not follow the lake: %s", self.error)

    def stats(self) -> dict[str, float]:
        """Gauges for monitoring."""
        return {"healthy": float(self.error is None), "unsealed": self._unsealed_rows, "pending": len(self._pending)}

    async def _read(self, work: Callable[[SealedIds], _T]) -> _T:
        """What ``work`` finds in the index. Raises what it raises, and OSError."""
        return await self._index.run(partial(work, self._sealed), _READ_S)

    async def _of_lake(self, work: Callable[..., _T], *arguments: Any) -> _T:
        """What ``work`` returns of the lake, or the journal. Raises what it raises, and OSError."""
        return await self._tables.run(partial(work, *arguments), self.lake.config.lock_timeout_s)

    def _recorded(self, key: bytes) -> bytes | None:
        found = self._unsealed.execute("SELECT content FROM ids WHERE key = ?", (key,)).fetchall()
        return found[0][0] if found else None

    def _remember(self, key: bytes, content: bytes) -> None:
        self._unsealed_rows += self._unsealed.execute(
            "INSERT OR IGNORE INTO ids VALUES (?, ?, ?)", (key, content, self._turn)
        ).rowcount

    def _on_appended(
        self, key: bytes, content: bytes, done: asyncio.Future[bool]
    ) -> Callable[[asyncio.Future[None]], None]:
        def settle(append: asyncio.Future[None]) -> None:
            recorded = not append.cancelled() and append.exception() is None
            if recorded:
                try:
                    self._remember(key, content)
                except sqlite3.Error as error:
                    # The row is durable, and sealing leaves out what is recorded twice.
                    self.error = f"a recorded id can't be remembered: {error}"
                    log.error("%s", self.error)
                self._doubtful.pop(key, None)
            elif not append.cancelled() and isinstance(append.exception(), JournalUnsure):
                self._doubtful[key] = content
            del self._pending[key]
            done.set_result(recorded)

        return settle

    def _in_journal(self) -> dict[bytes, bytes]:
        """Key -> content of what the journal holds and a seal will not drop."""
        segments = list_segments(self.journal_folder) if self.journal_folder.exists() else []
        of_feedback = [segment for segment in segments if segment.name.table == "feedback"]
        held = [(segment, loaded[0]) for segment in of_feedback if (loaded := load(segment)) is not None]
        found: dict[bytes, bytes] = {}
        if not held:
            return found
        # Read behind the segments: what is sealed by then is in the index that is read next, or has left the lake.
        table = self.lake.table("feedback", readable=False)
        for rows in (rows for segment, rows in held if not is_sealed(segment, table)):
            for key, content in keys_and_contents(without_erased(self.lake, self.journal_folder, "feedback", rows)):
                found.setdefault(key, content)
        return found

    async def _is_being_erased(self, row: dict[str, Any]) -> bool:
        """Whether an unfinished erasure means such feedback; of a local lake only, as for ``_forget_removed``."""
        if not self.lake.local:
            return False
        with self._comparing("what is being erased"):
            return await self._of_lake(is_being_erased, self.lake, "feedback", to_batch([row], FEEDBACK))

    async def _forget_removed(self, states: Sequence[_State], erased_until: _Erased | None) -> bool:
        """Whether feedback left the lake or the journal that was still known here; it is forgotten then.

        ``states``: of the index by which it was known, ``erased_until``: what had been forgotten by before that.

        Checked before an id is answered as known: else the feedback would be acknowledged and recorded nowhere. A lake
        on an object store is not read, as one that can't be reached would hold up every repeated request: there an id
        is known until ``follow`` notices the erasure, a few ``seal_seconds`` later.
        """
        if not self.lake.local or erased_until is None:
            return False
        with self._comparing("what is recorded"):
            path, erasures = erased_until
            known = all(state.path == path for state in states)  # nothing was forgotten yet by a newer index
            known = known and await self._of_lake(registered, self.lake) == erasures
            since = min(state.version for state in states)
            if known and not await self._of_lake(rows_left, self.lake, "feedback", since):
                return False
            await self._of_lake(take_in, self.lake, self.journal_folder)
            await self._forget_erased()
        return True

    @contextmanager
    def _comparing(self, what: str) -> Iterator[None]:
        """Raise SeenFeedbackError, and note the error, where feedback can't be compared."""
        try:
            yield
        except (LakeError, OSError, sqlite3.Error) as error:
            self.error = str(error)
            raise SeenFeedbackError(f"feedback can't be compared with {what}: {error}") from error

    async def _forget_erased(self) -> None:
        """Open the newest index, and forget what left the lake, or will never come to it: sent again, it is new.

        There is such feedback after an erasure, which is in the registry, and after rows left the lake, when the index
        is rebuilt.
        """
        async with self._forgetting:
            erasures = await self._of_lake(registered, self.lake)
            path = await self._read(_reopened)
            if (path, erasures) == self._erased_until:
                return
            self._turn = turn = self._turn + 1
            # The journal is read before the lake here too, so that nothing is taken for gone that is sealed in between.
            kept = await self._of_lake(self._in_journal)
            await self._of_lake(take_in, self.lake, self.journal_folder)
            await self._read(_reopened)

            async def in_neither(keys: list[bytes]) -> tuple[int, list[bytes]]:
                return len(keys), [key for key in keys if key not in kept]

            last: bytes | None = b""
            while last is not None:
                last = await self._forget(last, in_neither, before_turn=turn)
            # Not by the newest: what was sealed and left since the journal was read is forgotten the next time.
            self._erased_until = (path, erasures)

    async def _forget_sealed(self) -> None:
        """Drop from the private file what the index has."""

        def sealed(keys: list[bytes], index: SealedIds) -> tuple[int, list[bytes]]:
            found, until = [], time.monotonic() + _FORGET_S
            for looked_at, key in enumerate(keys, start=1):
                if index.get(key) is not None:
                    found.append(key)
                if time.monotonic() > until:
                    return looked_at, found
            return len(keys), found

        version, turn = await self._read(SealedIds.version), self._turn + 1
        if version == self._forgotten_until:
            return
        last: bytes | None = b""
        while last is not None:
            async with self._forgetting:  # of what is erased meanwhile nothing comes anew in between
                last = await self._forget(last, lambda keys: self._read(partial(sealed, keys)), before_turn=turn)
        self._forgotten_until = version

    async def _forget(
        self, last: bytes, which: Callable[[list[bytes]], Awaitable[tuple[int, list[bytes]]]], *, before_turn: int
    ) -> bytes | None:
        """Drop ids of earlier turns behind ``last`` from the private file, a few; the last one looked at, if any is.

        ``which``: (how many it has looked at, one at least; those to be dropped).
        """
        rows = self._unsealed.execute(
            "SELECT key FROM ids WHERE key > ? AND turn < ? ORDER BY key LIMIT ?", (last, before_turn, _FORGET_ROWS)
        ).fetchall()
        if not rows:
            return None
        keys = [key for (key,) in rows]
        looked_at, gone = await which(keys)
        self._unsealed_rows -= self._unsealed.executemany(
            "DELETE FROM ids WHERE key = ? AND turn < ?", [(key, before_turn) for key in gone]
        ).rowcount
        for dropped in self._dropped.values():
            dropped.update(gone)
        await asyncio.sleep(0)  # to requests
        return keys[looked_at - 1]


def _reopened(index: SealedIds) -> Path | None:
    """The file that is the newest, and open."""
    index.reopen()
    return index.path


def _look_up(keys: list[bytes], index: SealedIds) -> tuple[_State, dict[bytes, bytes | None]]:
    """(the state of the index, what it has of each key)."""
    return _State(index.path, index.version()), {key: index.get(key) for key in keys}


def _private_file() -> sqlite3.Connection:
    """A database that only this connection sees, in memory until it outgrows its cache, and gone with it."""
    connection = sqlite3.connect("", isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA journal_mode = OFF")
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
    columns = "key BLOB PRIMARY KEY, content BLOB NOT NULL, turn INTEGER NOT NULL"
    connection.execute(f"CREATE TABLE ids ({columns}) WITHOUT ROWID")
    return connection
