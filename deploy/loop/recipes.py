"""What a cycle's recipe says of its training run that is not known before the cycle has scored."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from deploy.config.root import Settings, load
from feedback.events import EARLIER_TURN
from feedback.schema import IMPORTED
from train.config.training import TrainConfig
from train.run.resume_settings import started

_LEARNT_BY: Final = {"preference": "dpo", "thumb": "kto", "correction": "sft"}
"""By kind of feedback, the algorithm that learns from it; of kinds that there is as much of, the first."""

_RESPONSES: Final = f"""
SELECT kind, count(DISTINCT (tenant, response_id))
FROM feedback SEMI JOIN (FROM interactions WHERE status IN ('complete', '{IMPORTED}')) USING (tenant, response_id)
WHERE kind IN ('preference', 'thumb', 'correction') AND feedback_id NOT LIKE '{EARLIER_TURN}'
GROUP BY kind
"""


def arguments(settings: Settings, run: Path | None = None) -> list[str]:
    """Options of `millrace train` beyond the settings: with the recipe ``offline``, the algorithm.

    It is the one that the settings name, if that learns from feedback; else the one for the kind of feedback that most
    responses have. ``run``: the folder of one that is to go on, which keeps the algorithm that it began with.
    """
    if settings.cycle.recipe != "offline" or settings.train.algorithm.is_offline:
        return []
    start = {} if run is None else started(run)
    name = str(start["config"]["algorithm"]["name"]) if start else ""
    if name not in _LEARNT_BY.values():
        with settings.lake().connect() as connection:
            counts = dict(connection.execute(_RESPONSES).fetchall())
        name = _LEARNT_BY[max(_LEARNT_BY, key=lambda kind: counts.get(kind, 0))]
    return ["--train.algorithm.name", name]


def training(settings: Settings, run: Path) -> TrainConfig:
    """The settings of training with which a cycle would go on with the run of this folder."""
    options = arguments(settings, run)
    pairs = [(name.removeprefix("--"), value) for name, value in zip(options[::2], options[1::2], strict=True)]
    return (load(settings.snapshot(), pairs, {}) if pairs else settings).training()
