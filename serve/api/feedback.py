"""``POST /feedback``: what somebody said of a response."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from feedback.events import FeedbackIn
from serve.api.http import Problem, body_of, field_problem, json_response, problems, read_body

if TYPE_CHECKING:
    from serve.app import Server

router = APIRouter()


class FeedbackOut(BaseModel):
    """The id under which the feedback is recorded."""

    feedback_id: str


@router.post(
    "/feedback",
    status_code=201,
    responses={
        200: {"model": FeedbackOut, "description": "Recorded before, with the same content"},
        201: {"model": FeedbackOut, "description": "Recorded"},
        **problems(409, 413, 422, 503),
    },
    openapi_extra=body_of(FeedbackIn),
)
async def feedback(request: Request) -> Response:
    """Record feedback; with a feedback_id of yours, sending it again is harmless."""
    server: Server = request.app.state.server
    if server.draining:
        raise Problem(503, "the server is stopping", retry_after=5)
    body = await read_body(request, FeedbackIn, server.config.limits.body_bytes)
    row = body.to_row(server.config.tenant)
    verdict = await server.record_feedback(row)
    if verdict == "conflict":
        raise field_problem(409, "feedback_id", f"{row['feedback_id']} is recorded already, with other content")
    return json_response({"feedback_id": row["feedback_id"]}, 201 if verdict == "new" else 200)
