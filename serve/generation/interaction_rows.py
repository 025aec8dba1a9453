"""Engine output -> rows of the ``interactions`` table."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any, Final

from feedback.ids import uuid7
from serve.generation.request import Generation, GenerationRequest, Sampling

_STATUS: Final = {"abort": "aborted", "error": "error"}

RESERVED: Final = "millrace:"
"""What the keys of a row's metadata begin with that are not the client's."""


def build_rows(
    request: GenerationRequest, generation: Generation, response_ids: list[str] | None = None, *, failed: bool = False
) -> list[dict[str, Any]]:
    """One row per response, with these ids or new ones; one that was cut off has status ``aborted``.

    ``failed``: whatever there is of them, they have status ``error``.
    """
    completed_at = datetime.now(UTC)
    sampling = request.sampling
    timings = {
        "queue_ms": generation.queue_ms,
        "first_token_ms": generation.first_token_ms,
        "total_ms": generation.total_ms,
    }
    rows = []
    for response_id, response in zip(
        response_ids or [uuid7() for _ in generation.responses], generation.responses, strict=True
    ):
        status = "error" if failed else _STATUS.get(response.finish_reason, "complete")
        versions = {version for _, version in response.policy_spans}
        rows.append(
            {
                "request_id": request.request_id,
                "session_id": request.session_id,
                "user": request.user,
                "tenant": request.tenant,
                "endpoint": request.endpoint,
                "replica": request.replica,
                "variant": request.variants.label_of(request.requested_at, versions) if request.variants else None,
                "created_at": request.created_at,
                "messages": request.messages,
                "prompt": request.prompt,
                "prompt_token_ids": request.prompt_token_ids,
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
                "metadata": [*request.metadata.items(), *_other_sampling(sampling)],
                "response_id": response_id,
                "completed_at": completed_at,
                "response": response.text,
                "response_token_ids": response.token_ids,
                "logprobs": response.logprobs,
                "policy_spans": [
                    {"start": start, "policy_version": version} for start, version in response.policy_spans
                ],
                "finish_reason": None if status == "error" else response.finish_reason,
                "status": status,
                "timings": timings,
            }
        )
    return rows


def _other_sampling(sampling: Sampling) -> list[tuple[str, str]]:
    """A metadata entry for what the column ``sampling`` has no place for."""
    if sampling.other is None and not sampling.stop_token_ids:
        return []
    other = json.loads(sampling.other) if sampling.other else {}
    if sampling.stop_token_ids:
        other["stop_token_ids"] = list(sampling.stop_token_ids)
    return [(RESERVED + "sampling", json.dumps(other))]
