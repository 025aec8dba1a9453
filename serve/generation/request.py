"""A request to the engine and its responses, without vLLM in it."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np

from serve.generation.variant import CanaryVariants
from serve.observability import tracing
from serve.policies.experiments import Assignment, Turn

_keys = itertools.count()


@dataclass(frozen=True)
class Sampling:
    """How to sample. ``top_k`` 0: no limit; ``temperature`` 0: greedy; ``seed`` None: the engine's own.

    ``stop`` texts and ``stop_token_ids`` end a response. ``other``: JSON of parameters beyond these, for the record.
    """

    n: int = 1
    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    other: str | None = None


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt as the engine gets it, and what its rows say of the request.

    ``request_id`` may be the client's own; ``key`` is the engine's id of it. ``requested_at``: time.monotonic().
    ``turn``: the block of an experiment that it came in, or what was drawn for its user. ``version``: the policy that
    is to answer, where the engine has several; None: the one that serves. ``trace``: the traceparent of
    the request's span, if that is exported.
    """

    request_id: str
    endpoint: str
    replica: str
    tenant: str
    prompt_token_ids: list[int]
    sampling: Sampling
    prompt: str | None = None
    messages: str | None = None
    session_id: str | None = None
    user: str | None = None
    variants: CanaryVariants | None = None
    turn: Turn | Assignment | None = None
    version: int | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    requested_at: float = field(default_factory=time.monotonic)
    key: str = field(default_factory=lambda: f"generate-{next(_keys)}")
    trace: str | None = field(default_factory=tracing.current.get)


@dataclass(frozen=True)
class Generated:
    """One response. ``logprobs``: nats, one per token; ``policy_spans``: (first token, policy version), rising."""

    text: str
    token_ids: list[int]
    logprobs: Sequence[float] | np.ndarray
    policy_spans: list[tuple[int, int]]
    finish_reason: str  # stop, length, abort


@dataclass(frozen=True)
class Generation:
    """All responses to one prompt, and how long they took."""

    responses: list[Generated]
    queue_ms: float | None
    first_token_ms: float | None
    total_ms: float


def sampled_logprobs(token_ids: Sequence[int], logprobs: Any) -> list[float]:
    """The logprobs of the sampled tokens, from vLLM's of one response (flat ones have nothing else) or from numbers."""
    if logprobs is None:
        return []
    if isinstance(logprobs, list) and logprobs and isinstance(logprobs[0], float):
        return logprobs
    if hasattr(logprobs, "logprobs"):
        return list(logprobs.logprobs)
    return [position[token].logprob for position, token in zip(logprobs, token_ids, strict=False)]


def nothing_was_left(logprobs: Sequence[float] | np.ndarray) -> bool:
    """Whether a token was taken though none was allowed (a grammar, say, needs one that ends responses): its is NaN."""
    return math.isnan(sum(logprobs) if isinstance(logprobs, list) else np.add.reduce(logprobs))


class ResponseProgress:
    """A response while it is sampled: pieces are added in the event loop, and any thread may read.

    vLLM reports which policy sampled which token at a response's end. Until then the spans are those of the versions
    that served when its tokens came, which around a swap can be a step off.
    """

    __slots__ = ("_logprobs", "_pieces", "_spans", "finish_reason")

    def __init__(self) -> None:
        self._logprobs: Sequence[float] | np.ndarray | None = None
        self._pieces: list[tuple[str, Sequence[int], Any, int]] = []
        self._spans: list[tuple[int, int]] | None = None
        self.finish_reason: str | None = None

    def add(self, text: str, token_ids: Sequence[int], logprobs: Any, version: int) -> None:
        """Add a piece: its logprobs as vLLM's or as numbers, and the policy that serves when it comes."""
        self._pieces.append((text, token_ids, logprobs, version))

    def end(
        self,
        finish_reason: str,
        spans: list[tuple[int, int]] | None,
        logprobs: Sequence[float] | np.ndarray | None = None,
    ) -> None:
        """After the last piece: why it is the last; if reported, which policies sampled which tokens, all logprobs."""
        self._spans = spans
        self._logprobs = logprobs
        self.finish_reason = finish_reason

    def so_far(self) -> Generated:
        """The response up to now, with finish_reason "abort" if it goes on. A logprob not yet reported is NaN."""
        reported, finish_reason, all_logprobs = self._spans, self.finish_reason, self._logprobs
        token_ids: list[int] = []
        logprobs: list[float] = []
        seen: list[tuple[int, int]] = []
        pieces = list(self._pieces)
        for _, ids, piece_logprobs, version in pieces:
            if ids and (not seen or seen[-1][1] != version):
                seen.append((len(token_ids), version))
            token_ids += ids
            if all_logprobs is None:
                known = sampled_logprobs(ids, piece_logprobs)
                logprobs += known if len(known) == len(ids) else [math.nan] * len(ids)
        text = "".join(piece[0] for piece in pieces)
        return Generated(
            text,
            token_ids,
            logprobs if all_logprobs is None else all_logprobs,
            seen if reported is None else reported,
            finish_reason or "abort",
        )


class GenerationProgress:
    """A request whose responses are read while they are sampled."""

    def __init__(self, n: int) -> None:
        self.responses = [ResponseProgress() for _ in range(n)]
        self.started = time.monotonic()
        self.queue_ms: float | None = None
        self.first_token_ms: float | None = None

    def generation(self, indices: Iterable[int] | None = None) -> Generation:
        """The responses up to now, or those with these indices; to be called from any thread."""
        chosen = self.responses if indices is None else [self.responses[index] for index in indices]
        return Generation(
            responses=[response.so_far() for response in chosen],
            queue_ms=self.queue_ms,
            first_token_ms=self.first_token_ms,
            total_ms=(time.monotonic() - self.started) * 1e3,
        )
