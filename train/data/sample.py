"""A response that generation sampled."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """A sampled response. ``log_probs``: nats, of the distribution it was sampled from, one per token."""

    token_ids: list[int]
    text: str
    log_probs: list[float]
    finish_reason: str | None
