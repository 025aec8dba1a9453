"""What of a cycle's recipe is not known before the cycle has scored."""

from __future__ import annotations

from typing import Final

from deploy.config.root import RecipeStage, Settings
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


def stages(settings: Settings) -> list[RecipeStage]:
    """What the cycle trains, in order; with the recipe ``offline``, by which algorithm.

    It is the one that the settings name, if that learns from feedback; else the one for the kind of feedback that most
    responses have.
    """
    if settings.cycle.recipe != "offline" or settings.train.algorithm.is_offline:
        return settings.cycle.stages
    with settings.lake().connect() as connection:
        counts = dict(connection.execute(_RESPONSES).fetchall())
    algorithm = _LEARNT_BY[max(_LEARNT_BY, key=lambda kind: counts.get(kind, 0))]
    return [RecipeStage(stage="train", set={"algorithm": {"name": algorithm}})]
