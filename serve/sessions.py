"""Which responses a session has, for feedback on it."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import duckdb

from feedback.events import LAST_TURN
from feedback.lake.tables import Lake, LakeError
from serve.http import Problem, field_problem

MOST_RESPONSES: Final = 100
"""Of a longer session the last ones count."""

_TIMEOUT_S: Final = 30.0
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
    """Looks for a session's responses in the journal of this machine and in the lake, one session at a time."""

    def __init__(self, lake: Lake, journal_folder: Path, days: int) -> None:
        """``days``: how far back responses are looked for."""
        self._lake = lake
        self._journal_folder = journal_folder
        self._days = days
        self._thread = ThreadPoolExecutor(1, "sessions")

    async def responses(self, tenant: str, session_id: str) -> list[str]:
        """The ids of its complete responses, oldest first, the last ``MOST_RESPONSES``; none if there are none.

        Raises Problem 503 if they can't be looked for.
        """
        found = await self._read(
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
        found = await self._read(_RECORDED_ON, parameters, ("interactions", "feedback"))
        return found[0] if found else None

    def unknown(self) -> Problem:
        """That a session has no response."""
        reason = f"no response was recorded of such a session in the last {self._days} days (serve.session_days)"
        return field_problem(404, "session_id", reason)

    async def _read(self, query: str, parameters: dict[str, Any], tables: tuple[str, ...]) -> list[str]:
        def look(connection: duckdb.DuckDBPyConnection) -> list[str]:
            return [response_id for (response_id,) in connection.execute(query, parameters).fetchall()]

        def read() -> list[str]:
            return self._lake.read(look, self._journal_folder, tables=tables)

        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await asyncio.get_running_loop().run_in_executor(self._thread, read)
        except (LakeError, OSError, TimeoutError, duckdb.Error) as error:
            reason = str(error) or f"other sessions were looked for for {_TIMEOUT_S:g} s"
            raise Problem(503, f"the session can't be looked for: {reason}", retry_after=5) from error
