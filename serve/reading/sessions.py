"""Which responses a session has, for feedback on it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, Final
from weakref import WeakValueDictionary

from feedback.events import LAST_TURN
from feedback.lake.tables import Lake
from feedback.settings_base import IN_CLEAR
from serve.http import Problem, field_problem
from serve.reading.reader import Reader, ReadFailed

MOST_RESPONSES: Final = 100
"""Of a longer session the last ones count."""

_TIMEOUT_S: Final = 30.0
_WAITING: Final = 1000  # tenants; a look takes some 30 ms, so the last of them waits as long as it may
_QUERY: Final = """
SELECT response_id FROM interactions
WHERE tenant = $tenant AND session_id = $session AND status IN ('complete', 'redacted')
  AND created_at >= now() - to_days(CAST($days AS INTEGER))
ORDER BY created_at DESC, response_id DESC LIMIT $most
"""

_RECORDED_ON: Final = """
SELECT response_id FROM feedback SEMI JOIN interactions i
ON feedback.tenant = i.tenant AND feedback.response_id = i.response_id AND i.session_id = $session
WHERE feedback.tenant = $tenant AND feedback_id = $feedback
"""


class Sessions:
    """Looks for a session's responses in the journal of this machine and in the lake, one session at a time.

    ``session_worker`` does so, in a process that the first feedback on a session starts.
    """

    def __init__(self, lake: Lake, journal_folder: Path, days: int) -> None:
        """``days``: how far back responses are looked for."""
        self._days = days
        config = lake.config.model_dump(mode="json", context=IN_CLEAR)
        task = json.dumps({"uri": lake.uri, "config": config, "journal": str(journal_folder)})
        self._reader = Reader(["serve.reading.session_worker"], _TIMEOUT_S, waiting=_WAITING, task=task)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """One look of a tenant at a time, so that a batch of one takes turns with the others."""

    async def close(self) -> None:
        """End the process."""
        await self._reader.close()

    async def responses(self, tenant: str, session_id: str) -> list[str]:
        """The ids of its complete responses, oldest first, the last ``MOST_RESPONSES``; none if there are none.

        Raises Problem 503 if they can't be looked for.
        """
        found = await self._read(
            tenant,
            _QUERY,
            {"tenant": tenant, "session": session_id, "days": self._days, "most": MOST_RESPONSES},
            ("interactions",),
        )
        return found[::-1]

    async def recorded_on(self, tenant: str, session_id: str, feedback_id: str) -> str | None:
        """The response that was the session's last when this feedback on it was recorded; None if none was.

        Raises as ``responses``.
        """
        parameters = {"tenant": tenant, "session": session_id, "feedback": feedback_id + LAST_TURN}
        found = await self._read(tenant, _RECORDED_ON, parameters, ("interactions", "feedback"))
        return found[0] if found else None

    def unknown(self) -> Problem:
        """That a session has no response."""
        reason = f"no response was recorded of such a session in the last {self._days} days (serve.session_days)"
        return field_problem(404, "session_id", reason)

    async def _read(self, tenant: str, query: str, parameters: dict[str, Any], tables: tuple[str, ...]) -> list[str]:
        turn = self._turns.setdefault(tenant, asyncio.Lock())
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await turn.acquire()
        except TimeoutError:
            raise _not_read(f"other sessions were looked for for {_TIMEOUT_S:g} s") from None
        try:
            answer = await self._reader.read({"query": query, "parameters": parameters, "tables": tables})
        except ReadFailed as error:
            raise _not_read(str(error)) from error
        finally:
            turn.release()
        if "error" in answer:
            raise _not_read(answer["error"])
        found: list[str] = answer["found"]
        return found


def _not_read(reason: str) -> Problem:
    return Problem(503, f"the session can't be looked for: {reason}", retry_after=5)
