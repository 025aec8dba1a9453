"""``POST /feedback`` and ``POST /feedback/batch``: feedback on responses."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import TYPE_CHECKING, Annotated, Any, Final, get_args

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema

from feedback import events
from feedback.events import FeedbackError, Kind
from feedback.ingest.idempotency import Verdict
from feedback.settings_base import Identifier
from serve.api.bounds import aside, check, parse_body
from serve.http import FieldError, Problem, body_of, field_problem, invalid, json_response, parse, problems
from serve.recorder import UNSTORED

if TYPE_CHECKING:
    from serve.runtime import Server

log = logging.getLogger(__name__)

router = APIRouter()

_MOST_ITEMS: Final = 1000
_ITEMS_A_TURN: Final = 50  # checked between two turns of the event loop
_KINDS: Final = frozenset(get_args(Kind))
_SEEN: Final = re.compile(
    r"(?:chatcmpl-|cmpl-)?((?:unstored-)?[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})(?::([0-9]{1,6}))?"
)


def _as_recorded(value: Any) -> Any:
    """The response_id that is recorded, of one as OpenAI's client sees it; anything else as it is."""
    if not (isinstance(value, str) and (found := _SEEN.fullmatch(value))):
        return value
    choice = int(found[2] or 0)
    return f"{found[1]}:{choice}" if choice else found[1]


_ResponseId = Annotated[Identifier, BeforeValidator(_as_recorded, json_schema_input_type=Identifier)]


class FeedbackIn(events.FeedbackIn):
    """Feedback on a response: the body of ``POST /feedback``."""

    response_id: _ResponseId | None = Field(
        default=None,
        examples=["01982f6e-7a31-7c55-8b40-0d1f5c2a9e61"],
        description="The response that this is about, as /generate returned it; of an answer of OpenAI's API its id "
        "(chatcmpl-U, cmpl-U), and for choice i of several chatcmpl-U:i, cmpl-U:i.",
    )
    rejected_response_id: _ResponseId | None = Field(
        default=None,
        examples=["01982f6e-7a31-7c55-8b40-0d1f5c2a9e62:1"],
        description="The response that a preference rejects; as response_id, and another one.",
    )


class FeedbackOut(BaseModel):
    """The id under which the feedback is recorded."""

    feedback_id: str = Field(description="Your id, or a new one.")


class FeedbackBatchIn(BaseModel):
    """The body of ``POST /feedback/batch``. Each item is checked by itself."""

    model_config = ConfigDict(extra="forbid")

    feedback: Annotated[
        list[Any],
        WithJsonSchema({"type": "array", "maxItems": _MOST_ITEMS, "items": {}}),
    ] = Field(description=f"Up to {_MOST_ITEMS} bodies of ``POST /feedback``.")


class FeedbackResult(BaseModel):
    """The result of one item: the status and the body that ``POST /feedback`` would have answered with."""

    status: int = Field(
        description="201 recorded, 200 recorded before, 404, 409, 422, or 503: not recorded, send it again."
    )
    feedback_id: str | None = Field(None, description="The id it is recorded under, or the one that it came with.")
    detail: str | None = Field(None, description="What is wrong.")
    errors: list[FieldError] | None = Field(None, description="Which fields are wrong.")
    retry_after: float | None = Field(None, description="With 503: seconds to wait before sending it again.")


class FeedbackBatchOut(BaseModel):
    """One result an item, in the items' order."""

    results: list[FeedbackResult] = Field(description="What came of each item.")


@router.post(
    "/feedback",
    status_code=201,
    responses={
        200: {"model": FeedbackOut, "description": "Recorded before, with the same content"},
        201: {"model": FeedbackOut, "description": "Recorded"},
        **problems(404, 408, 409, 413, 422, 503),
    },
    openapi_extra=body_of(FeedbackIn),
)
async def feedback(request: Request) -> Response:
    """Record feedback; with a feedback_id of yours, sending it again is harmless. Without one it is recorded again."""
    server: Server = request.app.state.server
    _require_recording(server)
    try:
        body = await parse_body(await server.bodies.read(request.receive), FeedbackIn)
    except Problem:
        server.metrics.feedback.labels(kind="unknown", verdict="invalid").inc()
        raise
    status, feedback_id = await _record(server, request.scope["principal"].tenant, body)
    return json_response({"feedback_id": feedback_id}, status)


@router.post(
    "/feedback/batch",
    responses={
        200: {"model": FeedbackBatchOut, "description": "What came of each item"},
        **problems(408, 413, 422, 503),
    },
    openapi_extra=body_of(FeedbackBatchIn),
)
async def feedback_batch(request: Request) -> Response:
    """Record up to 1,000 feedbacks, each for itself: a bad one does not keep the others from being recorded.

    With feedback_ids of yours, sending a whole batch again is harmless: what is recorded answers 200. An item without
    one is recorded again each time it is sent.
    """
    server: Server = request.app.state.server
    _require_recording(server)
    content = await server.bodies.read(request.receive)
    items = await aside(True, _items, content)  # a thousand small ones take their time too
    server.metrics.feedback_batch.observe(len(items))
    tenant = request.scope["principal"].tenant
    results: list[asyncio.Task[dict[str, Any]]] = []
    for start in range(0, len(items), _ITEMS_A_TURN):
        turn = items[start : start + _ITEMS_A_TURN]
        results += [asyncio.create_task(_result(server, tenant, item, understood)) for item, understood in turn]
        await asyncio.sleep(0)
    return json_response({"results": await asyncio.gather(*results)})


def _items(content: bytes) -> list[tuple[Any, FeedbackIn | Problem]]:
    """Each item as it came, and as what it is, or why it is none. Raises Problem 422 where the whole is wrong."""
    check(content, 422)
    items = parse(content, FeedbackBatchIn).feedback
    if len(items) > _MOST_ITEMS:
        raise field_problem(422, "feedback", f"{len(items)} items are more than the {_MOST_ITEMS} that are allowed")
    return [(item, _validated(item)) for item in items]


def _validated(item: Any) -> FeedbackIn | Problem:
    try:
        return FeedbackIn.model_validate(item)
    except ValidationError as error:
        return invalid(error)


def _require_recording(server: Server) -> None:
    if server.draining:
        raise Problem(503, "the server is stopping", retry_after=5)
    if not server.recording:
        raise Problem(503, "this server evaluates a policy, and records nothing")


async def _record(server: Server, tenant: str, body: FeedbackIn) -> tuple[int, str]:
    """(201 or 200, the id), when that is durable. Raises Problem 404, 409, 422 or 503."""
    counted = server.metrics.feedback
    for field in ("response_id", "rejected_response_id"):
        if (getattr(body, field) or "").startswith(UNSTORED):
            counted.labels(kind=body.kind, verdict="invalid").inc()
            raise field_problem(404, field, "that response is not stored (store: false, or a key without capture)")
    try:
        row = body.to_row(tenant, server.kinds)
        generated = body.feedback_id is None
        if body.session_id is None:
            verdict = await server.recorder.record_feedback(row, generated_id=generated)
        else:
            verdict = await _record_on_session(server, tenant, body.session_id, row, generated_id=generated)
    except FeedbackError as error:
        counted.labels(kind=body.kind, verdict="invalid").inc()
        raise field_problem(422, error.field, error.reason) from None
    except Problem:
        counted.labels(kind=body.kind, verdict="refused").inc()
        raise
    counted.labels(kind=body.kind, verdict=verdict).inc()
    if verdict == "conflict":
        raise field_problem(409, "feedback_id", f"{row['feedback_id']} is recorded already, with other content")
    return 201 if verdict == "new" else 200, row["feedback_id"]


async def _record_on_session(
    server: Server, tenant: str, session_id: str, row: dict[str, Any], *, generated_id: bool
) -> Verdict:
    """As ``Recorder.record_session_feedback``. Raises Problem 404 if the session has no responses."""
    found = await server.sessions.responses(tenant, session_id)
    verdict: Verdict = "conflict"
    if found:
        verdict = await server.recorder.record_session_feedback(row, found, generated_id=generated_id)
    if verdict == "conflict" and not generated_id:
        # Sent again when what was the session's last response then is too long ago: then it is the same.
        earlier = await server.sessions.recorded_on(tenant, session_id, row["feedback_id"])
        if earlier is not None:
            return await server.recorder.record_session_feedback(row, [earlier], generated_id=False)
    if not found:
        raise server.sessions.unknown()
    return verdict


async def _result(server: Server, tenant: str, item: Any, understood: FeedbackIn | Problem) -> dict[str, Any]:
    """What came of one item of a batch, whatever that is."""
    try:
        if isinstance(understood, Problem):
            kind = item.get("kind") if isinstance(item, dict) else None
            known = isinstance(kind, str) and kind in _KINDS
            server.metrics.feedback.labels(kind=kind if known else "unknown", verdict="invalid").inc()
            raise understood
        status, feedback_id = await _record(server, tenant, understood)
    except Problem as problem:
        return _failed(item, problem)
    except Exception as error:
        log.error("an item of a feedback batch failed", exc_info=error)
        return _failed(item, Problem(500, f"{type(error).__name__}; the server's log has the details"))
    return {"status": status, "feedback_id": feedback_id}


def _failed(item: Any, problem: Problem) -> dict[str, Any]:
    feedback_id = item.get("feedback_id") if isinstance(item, dict) else None
    result = {"status": problem.status, "feedback_id": feedback_id if isinstance(feedback_id, str) else None}
    return result | {
        name: value for name in ("detail", "errors", "retry_after") if (value := getattr(problem, name)) is not None
    }
