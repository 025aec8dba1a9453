"""Which feedback is recorded already, so that a repeated request is recorded once.

The ledger knows every ``feedback_id`` of the lake and the journal, with a hash of what it said.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from feedback.journal import Journal
from feedback.lake import Lake
from feedback.schema import FEEDBACK

Verdict = Literal["new", "same", "conflict"]

_CONTENT = tuple(name for name in FEEDBACK.names if name not in ("feedback_id", "created_at"))


def content_hash(row: dict[str, Any]) -> bytes:
    """16 bytes for everything that a feedback row says: all of it but its id and its time."""
    content = json.dumps([row.get(name) for name in _CONTENT], ensure_ascii=True, separators=(",", ":"))
    return hashlib.blake2b(content.encode(), digest_size=16).digest()


class FeedbackLedger:
    """Every feedback id that this server knows. One event loop uses it; it is not for several threads."""

    def __init__(self) -> None:
        self._recorded: dict[str, bytes] = {}
        self._pending: dict[str, tuple[bytes, asyncio.Future[bool]]] = {}

    @classmethod
    def load(cls, lake: Lake, journal_folder: Path) -> FeedbackLedger:
        """All that lake and journal hold. Blocks while it reads; call it before serving."""
        ledger = cls()
        with lake.connect(journal_folder) as connection:
            columns = ", ".join(("feedback_id", *_CONTENT))
            for batch in connection.sql(f"SELECT {columns} FROM feedback").to_arrow_reader(8192):
                for row in batch.to_pylist():
                    ledger._recorded[row["feedback_id"]] = content_hash(row)
        return ledger

    def __len__(self) -> int:
        return len(self._recorded)

    def check(self, row: dict[str, Any]) -> Verdict:
        """What recording ``row`` would be: new, the same again, or another content under a known id."""
        known = self._recorded.get(row["feedback_id"])
        if known is None:
            return "new"
        return "same" if known == content_hash(row) else "conflict"

    async def record(self, row: dict[str, Any], journal: Journal) -> Verdict:
        """Append ``row`` to the journal unless its id is known; return when the verdict is durable.

        Of several requests at once with the same id one appends, the others wait for it. Raises what
        ``Journal.append`` raises; the row's id is then free again.
        """
        feedback_id, content = row["feedback_id"], content_hash(row)
        while feedback_id in self._pending:
            other, done = self._pending[feedback_id]
            if await asyncio.shield(done):
                return "same" if other == content else "conflict"
        verdict = self.check(row)
        if verdict != "new":
            return verdict
        done = asyncio.get_running_loop().create_future()
        self._pending[feedback_id] = (content, done)
        append = asyncio.ensure_future(journal.append("feedback", row))
        # The append outlives a caller that goes away, so that the ledger always learns how it ended.
        append.add_done_callback(self._settler(feedback_id, content, done))
        await asyncio.shield(append)
        return "new"

    def _settler(
        self, feedback_id: str, content: bytes, done: asyncio.Future[bool]
    ) -> Callable[[asyncio.Future[None]], None]:
        def settle(append: asyncio.Future[None]) -> None:
            recorded = not append.cancelled() and append.exception() is None
            if recorded:
                self._recorded[feedback_id] = content
            del self._pending[feedback_id]
            done.set_result(recorded)

        return settle
