"""What all routes share: bodies in, JSON out, and errors as problem+json (RFC 9457)."""

from __future__ import annotations

import logging
import math
from typing import Any, TypeVar

import orjson
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

log = logging.getLogger(__name__)

Model = TypeVar("Model", bound=BaseModel)

CLIENT_CLOSED_REQUEST = 499  # nginx's code

_TITLES = {
    400: "Bad request",
    404: "Not found",
    405: "Method not allowed",
    409: "Conflict",
    413: "Body too large",
    422: "Invalid request",
    500: "Internal error",
    503: "Not available",
    504: "Took too long",
}


class Problem(Exception):
    """An error as the client sees it. ``errors``: which field, and why; ``retry_after``: seconds."""

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        errors: list[dict[str, str]] | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.errors = errors
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """What the client reads."""
        body: dict[str, Any] = {
            "type": "about:blank",
            "title": _TITLES.get(self.status, "Error"),
            "status": self.status,
            "detail": self.detail,
        }
        if self.errors:
            body["errors"] = self.errors
        return body

    def response(self) -> Response:
        """application/problem+json."""
        headers = {} if self.retry_after is None else {"Retry-After": str(max(1, math.ceil(self.retry_after)))}
        return Response(orjson.dumps(self.body()), self.status, headers, "application/problem+json")


def field_problem(status: int, field: str, reason: str) -> Problem:
    """A problem with one field of the body."""
    return Problem(status, f"{field}: {reason}", errors=[{"field": field, "reason": reason}])


def json_response(content: Any, status: int = 200) -> Response:
    """``content`` as JSON."""
    return Response(orjson.dumps(content), status, media_type="application/json")


async def read_body(request: Request, model: type[Model], limit: int) -> Model:
    """The request's JSON body as a ``model``. Raises Problem 413 or 422."""
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise Problem(413, f"the body is larger than {limit} bytes")
        chunks.append(chunk)
    try:
        return model.model_validate_json(b"".join(chunks))
    except ValidationError as error:
        raise invalid(error) from None


def invalid(error: ValidationError) -> Problem:
    """A problem 422 that names the fields."""
    errors = [
        {
            "field": ".".join(str(part) for part in item["loc"]) or "body",
            "reason": item["msg"].removeprefix("Value error, "),
        }
        for item in error.errors(include_url=False, include_context=False, include_input=False)[:20]
    ]
    return Problem(422, "; ".join(f"{item['field']}: {item['reason']}" for item in errors[:3]), errors=errors)


def install(app: FastAPI) -> None:
    """Answer every error of ``app`` as problem+json."""

    async def problem(request: Request, error: Exception) -> Response:
        assert isinstance(error, Problem)
        return error.response()

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        response = Problem(error.status_code, str(error.detail)).response()
        response.headers.update(error.headers or {})
        return response

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)  # for the metrics; nobody reads it

    async def unexpected(request: Request, error: Exception) -> Response:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return Problem(500, f"{type(error).__name__}; the server's log has the details").response()

    app.add_exception_handler(Problem, problem)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(Exception, unexpected)


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI description of a request whose body is a ``model``, for ``openapi_extra``."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


class ProblemOut(BaseModel):
    """An error (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str
    errors: list[dict[str, str]] | None = None


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI description of the errors that a route answers with."""
    return {status: {"model": ProblemOut, "description": _TITLES[status]} for status in statuses}
