"""``resources.json`` of a run's folder. Imports no torch."""

from __future__ import annotations

from typing import Final

from pydantic import BaseModel

FILE: Final = "resources.json"


class Rank(BaseModel):
    """``peak_memory``: bytes, as of ``train.controller.usage.Usage``; None while the run is at work, or was killed."""

    pool: str
    rank: int
    host: str
    device: str
    index: str | None = None
    peak_memory: int | None = None


class Resources(BaseModel):
    """``parameters``: of the trained model, all and those that learn, adapters among them. ``peak_flops``: of all ranks
    in training together, in a second; None if that of a device, in the type that it computes in, is unknown."""

    architecture: str
    parameters: int
    trained: int
    peak_flops: float | None = None
    ranks: list[Rank]
