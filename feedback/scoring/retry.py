"""Components that are missing for a reason that may pass, such as a server that did not answer.

Such a reason begins with ``try N of M:``. While N is less than M, the scorer's next run computes the response's reward
again. All that are pending stand among the rewards of the scorer's last run, so those are the list, as durable and as
exact as the rewards are; the run's time and the number of them are application transactions of its commit.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Final

import pyarrow as pa
from deltalake import DeltaTable

from feedback.lake.table_changes import DataFiles, scan_sql
from feedback.lake.tables import Lake
from feedback.lake.views import connect

_TRY: Final = re.compile(r"try (\d+) of (\d+): ")
_SCHEMA: Final = pa.schema([("response_id", pa.string()), ("tries", pa.int32())])


def reason(tries: int, most: int, why: str) -> str:
    """Why a component is missing after ``tries`` runs, of at most ``most``."""
    return f"try {tries} of {most}: {why}"


def is_transient(text: str | None) -> bool:
    """Whether a later run tries again."""
    return _tries(text) is not None


def pending(lake: Lake, rewards: DeltaTable, scorer: str, scored_at: datetime) -> pa.Table:
    """(response_id, how many runs have tried) of what the run at that time left to later ones."""
    files = DataFiles(rewards)
    paths = files.at("scored_at", scored_at)
    with connect(lake.config.memory_limit, lake.config.threads) as connection:
        rows = scan_sql(
            connection, lake, "rewards", paths, ("response_id", "missing", "scorer", "scored_at"), "rewards"
        )
        found = connection.execute(
            f"SELECT response_id, reason FROM (SELECT response_id, unnest(map_values(missing)) AS reason FROM ({rows}) "
            "WHERE scorer = ? AND scored_at = ?) WHERE starts_with(reason, 'try ')",
            [scorer, scored_at],
        ).fetchall()
    tries = {response_id: tries for response_id, text in found if (tries := _tries(text)) is not None}
    return pa.table([list(tries), list(tries.values())], schema=_SCHEMA)


def nothing() -> pa.Table:
    """No response, as ``pending`` would say it."""
    return _SCHEMA.empty_table()


def _tries(text: str | None) -> int | None:
    found = _TRY.match(text or "")
    return int(found[1]) if found and int(found[1]) < int(found[2]) else None
