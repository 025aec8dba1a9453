"""What a cycle's recipe says of its training run that is not known before the cycle has scored."""

from __future__ import annotations

from typing import Final

from deploy.config.root import Settings
from feedback.events import EARLIER_TURN
from feedback.schema import IMPORTED

_LEARNT_BY: Final = {"preference": "dpo", "thumb": "kto", "correction": "sft"}
"""By kind of feedback, the algorithm that learns from it; of kinds that there is as much of, the first."""

_RESPONSES: Final = f"""
SELECT kind, count(DISTINCT (tenant, response_id))
FROM feedback SEMI JOIN (FROM interactions WHERE status IN ('complete', '{IMPORTED}')) USING (tenant, response_id)
WHERE kind IN ('preference', 'thumb', 'correction') AND feedback_id NOT LIKE '{EARLIER_TURN}'
GROUP BY kind
"""


def arguments(settings: Settings) -> list[str]:
    """Options of `millrace train` beyond the settings: with the recipe ``offline``, the algorithm.

    It is the one that the settings name, if that learns from feedback; else the one for the kind of feedback that most
    responses have.
    """
    if settings.cycle.recipe != "offline" or settings.train.algorithm.is_offline:
        return []
    with settings.lake().connect() as connection:
        counts = dict(connection.execute(_RESPONSES).fetchall())
    return ["--train.algorithm.name", _LEARNT_BY[max(_LEARNT_BY, key=lambda kind: counts.get(kind, 0))]]
