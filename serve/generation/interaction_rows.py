"""Engine output -> rows of the ``interactions`` table."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any, Final

from feedback.ids import uuid7
from feedback.sampling_parameters import RESERVED, SAMPLING_KEY
from serve.generation.request import Generation, GenerationRequest, Sampling
from serve.policies.experiments import FALLBACK, Assignment

_STATUS: Final = {"abort": "aborted", "error": "error"}

_OF_REQUEST: Final = (
    *("request_id", "session_id", "user", "tenant", "endpoint", "replica"),
    *("created_at", "messages", "prompt", "prompt_token_ids"),
)
_OF_SAMPLING: Final = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "n", "seed")
_TIMINGS: Final = ("queue_ms", "first_token_ms", "total_ms")

BLOCK: Final = RESERVED + "block"
"""The block of an experiment, as metadata."""

DRAW: Final = RESERVED + "draw"
"""The draw of an experiment that a request belongs to, as metadata (``serve.policies.experiments.Assignment``)."""

TRACE_KEY: Final = RESERVED + "trace"
"""The traceparent of the request's span, as metadata, where spans are exported."""


def build_rows(
    request: GenerationRequest, generation: Generation, response_ids: list[str] | None = None, *, failed: bool = False
) -> list[dict[str, Any]]:
    """One row per response, with these ids or new ones; one that was cut off has status ``aborted``.

    ``failed``: whatever there is of them, they have status ``error``.
    """
    sampling = request.sampling
    of_all = {
        **{column: getattr(request, column) for column in _OF_REQUEST},
        "sampling": {**{name: getattr(sampling, name) for name in _OF_SAMPLING}, "stop": list(sampling.stop)},
        "timings": {name: getattr(generation, name) for name in _TIMINGS},
        "metadata": [*request.metadata.items(), *_other_sampling(sampling), *_drawn_for(request), *_trace(request)],
        "completed_at": datetime.now(UTC),
    }
    rows = []
    for response_id, response in zip(
        response_ids or [uuid7() for _ in generation.responses], generation.responses, strict=True
    ):
        status = "error" if failed else _STATUS.get(response.finish_reason, "complete")
        versions = {version for _, version in response.policy_spans}
        rows.append(
            {
                **of_all,
                "variant": request.variants.label_of(request.requested_at, versions) if request.variants else None,
                **_of_experiment(request, response.policy_spans),
                "response_id": response_id,
                "response": response.text,
                "response_token_ids": response.token_ids,
                "logprobs": response.logprobs,
                "policy_spans": [
                    {"start": start, "policy_version": version} for start, version in response.policy_spans
                ],
                "finish_reason": None if status == "error" else response.finish_reason,
                "status": status,
            }
        )
    return rows


def _of_experiment(request: GenerationRequest, spans: list[tuple[int, int]]) -> dict[str, Any]:
    """The columns of an experiment; none where the first token is of another policy than the one whose turn it was.

    Such a request waited while the policies were exchanged. In a fleet, where another policy answers for that of the
    draw, its rows say so.
    """
    turn = request.turn
    if isinstance(turn, Assignment) and (not turn.counts or (spans and spans[0][1] != turn.version)):
        return {"experiment": turn.experiment, "variant": FALLBACK, "propensity": None}
    if turn is None or (spans and spans[0][1] != turn.version):
        return {"experiment": None, "propensity": None}
    return {"experiment": turn.experiment, "variant": turn.variant, "propensity": turn.propensity}


def _drawn_for(request: GenerationRequest) -> list[tuple[str, str]]:
    turn = request.turn
    if turn is None:
        return []
    return [(DRAW, turn.draw)] if isinstance(turn, Assignment) else [(BLOCK, str(turn.block))]


def _trace(request: GenerationRequest) -> list[tuple[str, str]]:
    return [] if request.trace is None else [(TRACE_KEY, request.trace)]


def _other_sampling(sampling: Sampling) -> list[tuple[str, str]]:
    """A metadata entry for what the column ``sampling`` has no place for."""
    if sampling.other is None and not sampling.stop_token_ids:
        return []
    other = json.loads(sampling.other) if sampling.other else {}
    if sampling.stop_token_ids:
        other["stop_token_ids"] = list(sampling.stop_token_ids)
    return [(SAMPLING_KEY, json.dumps(other))]
