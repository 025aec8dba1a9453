"""What the lake says of feedback and rewards, read now and then in a thread of its own: no scrape waits for it."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

import duckdb

from deploy.config.root import Settings
from feedback.lake.statistics import feedback_rate_sql

log = logging.getLogger(__name__)

POLICIES: Final = 10
"""Of so many policies, the newest with rewards, the mean is shown."""
RECENT: Final = timedelta(days=1)
BEFORE: Final = timedelta(days=7)
"""What is recent is compared with as much as this before it."""

_SCORED: Final = """
CREATE TEMP TABLE scored AS
SELECT policy, reward, completed_at
FROM current_rewards
JOIN (
    SELECT response_id, completed_at, policy_spans[-1].policy_version AS policy
    FROM interactions WHERE status = 'complete'
) USING (response_id)
WHERE reward IS NOT NULL
"""
_BY_POLICY: Final = f"""
SELECT policy, count(*), avg(reward) FROM scored WHERE policy IS NOT NULL
GROUP BY policy ORDER BY policy DESC LIMIT {POLICIES}
"""
_WINDOW: Final = (
    "SELECT count(*), avg(reward), var_samp(reward) FROM scored WHERE completed_at >= ? AND completed_at < ?"
)


@dataclass(frozen=True)
class Window:
    """Rewards of the responses that ended within some time. ``variance``: of one, None below two."""

    rewarded: int
    mean: float | None
    variance: float | None


@dataclass(frozen=True)
class Traffic:
    """The lake's figures at ``at``, seconds of Unix time. ``by_policy``: version -> (responses with a reward, mean)."""

    at: float
    rows: dict[str, int]
    responses: int
    responses_with_feedback: int
    by_policy: dict[int, tuple[int, float]]
    recent: Window
    before: Window


def read(settings: Settings, now: datetime) -> Traffic:
    """Of what is sealed. Raises LakeError."""
    lake = settings.lake()
    start, middle = now - RECENT - BEFORE, now - RECENT

    def work(connection: duckdb.DuckDBPyConnection) -> Traffic:
        connection.execute(_SCORED)
        [[responses, answered]] = connection.execute(
            feedback_rate_sql("interactions", "status = 'complete'")
        ).fetchall()
        return Traffic(
            at=now.timestamp(),
            rows=lake.counts(),
            responses=responses,
            responses_with_feedback=answered,
            by_policy={policy: (n, mean) for policy, n, mean in connection.execute(_BY_POLICY).fetchall()},
            recent=Window(*connection.execute(_WINDOW, [middle, now]).fetchall()[0]),
            before=Window(*connection.execute(_WINDOW, [start, middle]).fetchall()[0]),
        )

    return lake.read(work)


class TrafficReader:
    """Reads the lake again once something is new in it, every ``schedule.metrics.lake_seconds`` at most."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.latest: Traffic | None = None
        """None before the first read."""
        self.error: str | None = None
        """Why the last read failed."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lake metrics", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """It ends by itself, after the query that it is at; being read-only, that need not be waited for."""
        self._stopping.set()

    def _run(self) -> None:
        known: dict[str, int] | None = None
        while True:
            try:
                known = self._read(known)
                self.error = None
            except Exception as error:  # noqa: BLE001  what is wrong with the lake ends nothing here
                if str(error) != self.error:
                    log.warning("the lake's metrics could not be read: %s; tried again", error)
                self.error = str(error)
            if self._stopping.wait(self._settings.schedule.metrics.lake_seconds):
                return

    def _read(self, known: dict[str, int] | None) -> dict[str, int] | None:
        """Read what is new since the versions ``known``, or a day's windows have moved by an hour; the versions."""
        lake = self._settings.lake()
        if "://" not in lake.uri and not self._settings.path(lake.uri).is_dir():
            return None  # nothing was ever recorded
        versions = lake.versions()
        if versions != known or self.latest is None or time.time() - self.latest.at > 3600:
            self.latest = read(self._settings, datetime.now(UTC))
        return versions
