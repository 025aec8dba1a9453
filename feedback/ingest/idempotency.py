"""Which feedback is recorded already, so that a repeated request is recorded once.

What the lake holds is looked up in the index of ``feedback.ingest.id_index``, which the sealer keeps up to date for all
replicas' feedback. What this process acknowledged and the lake may not hold yet is in a private SQLite file without a
name: it needs no durability, because a start reads it from the journal. Both are on disk but for a small cache, so that
memory does not grow with history, nor with a lake that can't be reached.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal

from feedback.ingest.id_index import SealedIds, content_of, key_of, keys_and_contents, take_in
from feedback.journal.codec import to_batch
from feedback.journal.recovery import load
from feedback.journal.segment import list_segments
from feedback.journal.writer import Journal, JournalUnsure
from feedback.lake.erasure_registry import is_being_erased, registered, without_erased
from feedback.lake.table_changes import rows_left
from feedback.lake.tables import Lake, LakeError
from feedback.schema import FEEDBACK

log = logging.getLogger(__name__)

Verdict = Literal["new", "same", "conflict"]

_CACHE_KIB: Final = 4096
_FORGET_ROWS: Final = 200  # looked up between two turns of the event loop: about a millisecond


class SeenFeedbackError(RuntimeError):
    """An id can't be looked up; nothing was recorded."""


class SeenFeedback:
    """Every feedback id that this server knows. One event loop uses it; it is not for several threads."""

    def __init__(self, lake: Lake, journal_folder: Path) -> None:
        self.lake = lake
        self.journal_folder = journal_folder
        self.error: str | None = None
        """Why ids can't be looked up, or the last one not be remembered; None if all is well."""
        self._sealed = SealedIds(journal_folder)
        self._unsealed = _private_file()
        self._unsealed_rows = 0
        self._forgotten_until = -1
        self._erased_until: tuple[Path | None, frozenset[str]] | None = None  # index and erasures seen
        self._turn = 0  # an id that came in a later turn than this is younger than what was read in it
        self._forgetting = asyncio.Lock()
        self._pending: dict[bytes, tuple[bytes, asyncio.Future[bool]]] = {}
        self._doubtful: dict[bytes, bytes] = {}  # content that may be recorded, of ids that nobody was told about

    def open(self) -> None:
        """Learn what the journal and the lake hold. Blocks while it reads; call it before serving.

        Raises LakeError, LockTimeoutError or OSError.
        """
        erasures = registered(self.lake)
        # The journal is read before the lake: what is sealed in between is known twice, never missed.
        for key, content in self._in_journal().items():
            self._remember(key, content)
        take_in(self.lake, self.journal_folder)
        self._sealed.reopen()
        self._erased_until = (self._sealed.path, erasures)

    def close(self) -> None:
        """Let go of the files."""
        self._sealed.close()
        self._unsealed.close()

    def check(self, row: dict[str, Any]) -> Verdict:
        """What recording ``row`` would be: new, the same again, or another content under a known id.

        Raises SeenFeedbackError if that can't be looked up.
        """
        with self._comparing("what is recorded"):
            key = key_of(row["tenant"], row["feedback_id"])
            known = self._sealed.get(key) or self._recorded(key)
        if known is None:
            return "new"
        return "same" if known == content_of(row) else "conflict"

    async def compare(self, row: dict[str, Any]) -> Verdict:
        """As ``check``, once what was removed meanwhile is forgotten: what is known will stay recorded.

        Raises SeenFeedbackError too while an erasure may remove it.
        """
        verdict = self.check(row)
        # Looked at before what was removed: an erasure that ends in between is seen there.
        being_erased = verdict == "same" and await self._is_being_erased(row)
        if verdict != "new" and await self._forget_removed():
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
                    await asyncio.to_thread(take_in, self.lake, self.journal_folder, rebuild=True)
                self._sealed.reopen()
                await self._forget_erased()
                await self._forget_sealed()
                self.error = None
            except Exception as error:  # noqa: BLE001 - whatever it was, erasures after it are to be heard of
                self.error = str(error) or repr(error)
                log.error("the feedback ledger does not follow the lake: %s", self.error)

    def stats(self) -> dict[str, float]:
        """Gauges for monitoring."""
        return {"healthy": float(self.error is None), "unsealed": self._unsealed_rows, "pending": len(self._pending)}

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
        found: dict[bytes, bytes] = {}
        for segment in list_segments(self.journal_folder) if self.journal_folder.exists() else ():
            if segment.name.table == "feedback" and (loaded := load(segment)) is not None:
                for key, content in keys_and_contents(
                    without_erased(self.lake, self.journal_folder, "feedback", loaded[0])
                ):
                    found.setdefault(key, content)
        return found

    async def _is_being_erased(self, row: dict[str, Any]) -> bool:
        """Whether an unfinished erasure means such feedback; of a local lake only, as for ``_forget_removed``."""
        if not self.lake.local:
            return False
        with self._comparing("what is being erased"):
            return await asyncio.to_thread(is_being_erased, self.lake, "feedback", to_batch([row], FEEDBACK))

    async def _forget_removed(self) -> bool:
        """Whether feedback left the lake or the journal that was still known here; it is forgotten then.

        Checked before an id is answered as known: else the feedback would be acknowledged and recorded nowhere. A lake
        on an object store is not read, as one that can't be reached would hold up every repeated request: there an id
        is known until ``follow`` notices the erasure, a few ``seal_seconds`` later.
        """
        if not self.lake.local or self._erased_until is None:
            return False
        with self._comparing("what is recorded"):
            version, erasures = self._sealed.version(), self._erased_until[1]
            removed = await asyncio.to_thread(registered, self.lake) != erasures
            if not (removed or await asyncio.to_thread(rows_left, self.lake, "feedback", version)):
                return False
            await asyncio.to_thread(take_in, self.lake, self.journal_folder)
            self._sealed.reopen()
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
        """Forget what left the lake, or will never come to it: sent again, it is new.

        There is such feedback after an erasure, which is in the registry, and after rows left the lake, when the index
        is rebuilt.
        """
        async with self._forgetting:
            erasures = await asyncio.to_thread(registered, self.lake)
            if (self._sealed.path, erasures) == self._erased_until:
                return
            self._turn = turn = self._turn + 1
            # The journal is read before the lake here too, so that nothing is taken for gone that is sealed in between.
            kept = await asyncio.to_thread(self._in_journal)
            await asyncio.to_thread(take_in, self.lake, self.journal_folder)
            self._sealed.reopen()
            await self._forget(lambda key: key not in kept, before_turn=turn)
            self._erased_until = (self._sealed.path, erasures)

    async def _forget_sealed(self) -> None:
        """Drop from the private file what the index has."""
        version = self._sealed.version()
        if version != self._forgotten_until:
            await self._forget(lambda key: self._sealed.get(key) is not None, before_turn=self._turn + 1)
            self._forgotten_until = version

    async def _forget(self, is_gone: Callable[[bytes], bool], *, before_turn: int) -> None:
        """Drop ids of earlier turns from the private file, a few at a time, between requests."""
        last = b""
        while rows := self._unsealed.execute(
            "SELECT key FROM ids WHERE key > ? AND turn < ? ORDER BY key LIMIT ?", (last, before_turn, _FORGET_ROWS)
        ).fetchall():
            gone = [(key,) for (key,) in rows if is_gone(key)]
            self._unsealed_rows -= self._unsealed.executemany("DELETE FROM ids WHERE key = ?", gone).rowcount
            last = rows[-1][0]
            await asyncio.sleep(0)


def _private_file() -> sqlite3.Connection:
    """A database that only this connection sees, in memory until it outgrows its cache, and gone with it."""
    connection = sqlite3.connect("", isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA journal_mode = OFF")
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
    columns = "key BLOB PRIMARY KEY, content BLOB NOT NULL, turn INTEGER NOT NULL"
    connection.execute(f"CREATE TABLE ids ({columns}) WITHOUT ROWID")
    return connection
