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

from feedback.lake.tables import Lake

_TRY: Final = re.compile(r"try (\d+) of (\d+): ")
_SCHEMA: Final = pa.schema([("response_id", pa.string()), ("tries", pa.int32())])


def reason(tries: int, most: int, why: str) -> str:
    """Why a component is missing after ``tries`` runs, of at most ``most``."""
    return f"try {tries} of {most}: {why}"


def is_transient(text: str | None) -> bool:
    """Whether a later run tries again."""
    return _tries(text) is not None


def pending(lake: Lake, version: int, scorer: str, scored_at: datetime) -> pa.Table:
    """(response_id, how many runs have tried) of what the run at that time left to later ones.

    ``version``: of the table of rewards.
    """
    found = lake.read(
        lambda connection: connection.execute(
            "SELECT response_id, reason FROM (SELECT response_id, unnest(map_values(missing)) AS reason FROM rewards "
            "WHERE date = ? AND scored_at = ? AND scorer = ?) WHERE starts_with(reason, 'try ')",
            [scored_at.date(), scored_at, scorer],
        ).fetchall(),
        versions={"rewards": version},
        tables=("rewards",),
    )
    tries = {response_id: tries for response_id, text in found if (tries := _tries(text)) is not None}
    return pa.table([list(tries), list(tries.values())], schema=_SCHEMA)


def nothing() -> pa.Table:
    """No response, as ``pending`` would say it."""
    return _SCHEMA.empty_table()


def _tries(text: str | None) -> int | None:
    found = _TRY.match(text or "")
    return int(found[1]) if found and int(found[1]) < int(found[2]) else None
