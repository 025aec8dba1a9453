"""Engine output -> rows of the ``interactions`` table."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from feedback.ids import uuid7
from serve.generation.request import Generation, Sampling
from serve.generation.variant import Trials

_keys = itertools.count()
_STATUS: Final = {"abort": "aborted", "error": "error"}

RESERVED: Final = "millrace:"
"""What the keys of a row's metadata begin with that are not the client's."""


@dataclass(frozen=True)
class Asked:
    """One request as it was understood, before the engine saw it.

    ``request_id`` may be the client's own; ``key`` is what the engine knows the request by.
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
    trials: Trials | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    asked_at: float = field(default_factory=time.monotonic)
    key: str = field(default_factory=lambda: f"generate-{next(_keys)}")


def answered(asked: Asked, generation: Generation, response_ids: list[str] | None = None) -> list[dict[str, Any]]:
    """One row a response, with the ids given or ids of its own; one that was cut off has status ``aborted``."""
    completed_at = datetime.now(UTC)
    timings = {
        "queue_ms": generation.queue_ms,
        "first_token_ms": generation.first_token_ms,
        "total_ms": generation.total_ms,
    }
    return [
        _row(
            asked,
            response_id=response_id,
            completed_at=completed_at,
            response=response.text,
            response_token_ids=response.token_ids,
            logprobs=response.logprobs,
            policy_spans=[{"start": start, "policy_version": version} for start, version in response.policy_spans],
            finish_reason=response.finish_reason,
            status=_STATUS.get(response.finish_reason, "complete"),
            timings=timings,
        )
        for response_id, response in zip(
            response_ids or [uuid7() for _ in generation.responses], generation.responses, strict=True
        )
    ]


def failed(asked: Asked, response_ids: list[str] | None = None, status: str = "error") -> list[dict[str, Any]]:
    """A row without a token for each response id, or one row, for a request that the engine did not answer."""
    completed_at = datetime.now(UTC)
    elapsed = (time.monotonic() - asked.asked_at) * 1e3
    return [
        _row(
            asked,
            response_id=response_id,
            completed_at=completed_at,
            response="",
            response_token_ids=[],
            logprobs=[],
            policy_spans=[],
            finish_reason="abort" if status == "aborted" else None,
            status=status,
            timings={"queue_ms": None, "first_token_ms": None, "total_ms": elapsed},
        )
        for response_id in response_ids or [uuid7()]
    ]


def _row(asked: Asked, **outcome: Any) -> dict[str, Any]:
    sampling, versions = asked.sampling, {span["policy_version"] for span in outcome["policy_spans"]}
    return {
        "request_id": asked.request_id,
        "session_id": asked.session_id,
        "user": asked.user,
        "tenant": asked.tenant,
        "endpoint": asked.endpoint,
        "replica": asked.replica,
        "variant": asked.trials.label_of(asked.asked_at, versions) if asked.trials else None,
        "created_at": asked.created_at,
        "messages": asked.messages,
        "prompt": asked.prompt,
        "prompt_token_ids": asked.prompt_token_ids,
        "sampling": {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "max_tokens": sampling.max_tokens,
            "n": sampling.n,
            "seed": sampling.seed,
            "stop": list(sampling.stop),
        },
        "metadata": [*asked.metadata.items(), *_further(sampling)],
        **outcome,
    }


def _further(sampling: Sampling) -> list[tuple[str, str]]:
    """A metadata entry for what the column ``sampling`` has no place for."""
    if sampling.other is None and not sampling.stop_token_ids:
        return []
    further = json.loads(sampling.other) if sampling.other else {}
    if sampling.stop_token_ids:
        further["stop_token_ids"] = list(sampling.stop_token_ids)
    return [(RESERVED + "sampling", json.dumps(further))]
