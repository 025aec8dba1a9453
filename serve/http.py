"""What all routes share: bodies in, JSON out, and errors: problem+json (RFC 9457), OpenAI's form below /v1."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, TypeVar

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.types import Receive

Model = TypeVar("Model", bound=BaseModel)

CLIENT_CLOSED_REQUEST = 499  # nginx's code

OPENAI: Final = "/v1/"  # what the paths of OpenAI's API begin with

_TITLES: Final = {
    400: "Bad request",
    401: "No key, or none that is good",
    403: "The key may not do this",
    404: "Not found",
    405: "Method not allowed",
    408: "Request timeout",
    409: "Conflict",
    413: "Body too large",
    415: "Not an encoding that is read",
    421: "Not a name of this server",
    422: "Invalid request",
    429: "Too many requests",
    431: "Head too large",
    500: "Internal error",
    503: "Not available",
    504: "Took too long",
}


# (type, code) as OpenAI's own API has them.
_OPENAI_ERRORS: Final[dict[int, tuple[str, str | None]]] = {
    401: ("invalid_request_error", "invalid_api_key"),
    403: ("invalid_request_error", "insufficient_permissions"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
}


class Problem(Exception):
    """An error as the client sees it.

    ``errors``: which field, and why; ``retry_after``: seconds; ``limit``: which rate it is over.
    """

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        errors: list[dict[str, str]] | None = None,
        retry_after: float | None = None,
        headers: Mapping[str, str] | None = None,
        limit: str | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.errors = errors
        self.retry_after = retry_after
        self.headers = headers
        self.limit = limit

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
        if self.limit:
            body["limit"] = self.limit
        return body

    def openai_body(self) -> dict[str, Any]:
        """What a client of OpenAI's API reads."""
        otherwise = ("server_error" if self.status >= 500 else "invalid_request_error", None)
        kind, code = _OPENAI_ERRORS.get(self.status, otherwise)
        param = self.errors[0]["field"] if self.errors else None
        return {"error": {"message": self.detail, "type": kind, "param": param, "code": code}}

    def response(self, path: str = "") -> Response:
        """application/problem+json; OpenAI's form for a ``path`` of its API."""
        headers = dict(self.headers or {})
        if self.retry_after is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after)))
        if path.startswith(OPENAI):
            return Response(orjson.dumps(self.openai_body()), self.status, headers, "application/json")
        return Response(orjson.dumps(self.body()), self.status, headers, "application/problem+json")


def field_problem(status: int, field: str, reason: str) -> Problem:
    """A problem with one field of the body."""
    return Problem(status, f"{field}: {reason}", errors=[{"field": field, "reason": reason}])


def json_response(content: Any, status: int = 200) -> Response:
    """``content`` as JSON."""
    return Response(orjson.dumps(content), status, media_type="application/json")


def page_headers(*, images: str = "") -> dict[str, str]:
    """Headers of a page: a browser takes scripts, styles and all else from this server alone, and shows it in no frame.

    ``images``: where else images may be from, as CSP names it.
    """
    policy = f"default-src 'self'; img-src 'self' {images}".strip()
    return {
        "Content-Security-Policy": f"{policy}; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
        "object-src 'none'",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "same-origin",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
    }


def client_gone() -> Response:
    """For the metrics; nobody reads it."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)


def parse(content: bytes, model: type[Model]) -> Model:
    """A JSON body as a ``model``. Raises Problem 422."""
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        if error.errors(include_context=False, include_input=False)[0]["type"] == "json_invalid":
            refuse_lone_surrogates(content, 422)
        raise invalid(error) from None


def refuse_lone_surrogates(content: bytes, status: int) -> None:
    """Name the field, if what keeps ``content`` from being read as JSON is half a character. Raises Problem.

    JSON can write one half of a UTF-16 surrogate pair, which no Unicode text has; strict parsers say at which byte.
    """
    try:
        below: list[tuple[str, Any]] = [("", json.loads(content))]
    except (ValueError, RecursionError):
        return
    while below:
        field, value = below.pop()
        if isinstance(value, str) and not _is_unicode(value):
            raise field_problem(status, field or "body", "has a lone surrogate (\\ud800 to \\udfff), half a character")
        if isinstance(value, list):
            below += [(f"{field}.{position}".lstrip("."), item) for position, item in enumerate(value)]
        if isinstance(value, dict):
            below += [(field, name) for name in value]
            below += [(f"{field}.{name}".lstrip("."), item) for name, item in value.items() if _is_unicode(name)]


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def invalid(error: ValidationError | RequestValidationError, status: int = 422) -> Problem:
    """A problem that names the fields."""
    brief = {} if isinstance(error, RequestValidationError) else {"include_context": False, "include_input": False}
    errors = [
        {
            "field": ".".join(str(part) for part in item["loc"]) or "body",
            "reason": item["msg"].removeprefix("Value error, "),
        }
        for item in error.errors(**brief)[:20]
    ]
    return Problem(status, "; ".join(f"{item['field']}: {item['reason']}" for item in errors[:3]), errors=errors)


def install(app: FastAPI) -> None:
    """Answer FastAPI's own errors in the form of their path; all others are ``serve.middleware.request_context``'s."""

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.scope["path"]
        detail = str(error.detail)
        if error.status_code == 404:
            detail = f"there is no {path[:200]}"
        elif error.status_code == 405:
            detail = f"{path} takes no {request.method[:20]}"
        return Problem(error.status_code, detail, headers=error.headers).response(path)

    async def unfit(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        path = request.scope["path"]
        return invalid(error, 400 if path.startswith(OPENAI) else 422).response(path)

    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, unfit)


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI description of a request whose body is a ``model``, for ``openapi_extra``."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def event_stream(*names: str) -> dict[str, Any]:
    """The OpenAPI description of server-sent events, each as an object; ``names``: of the events, if they have any."""
    properties: dict[str, Any] = {"data": {"type": "string", "description": "JSON."}}
    if names:
        properties["event"] = {"type": "string", "enum": list(names), "description": "What it is."}
    return {"text/event-stream": {"schema": {"type": "object", "properties": properties, "required": [*properties]}}}


class FieldError(BaseModel):
    """Which field is wrong, and why."""

    field: str = Field(description="The field, with dots between the parts of its path; body: the whole.")
    reason: str = Field(description="What is wrong with it.")


class ProblemOut(BaseModel):
    """An error (RFC 9457)."""

    type: str = Field(description="about:blank: the status says what kind of error it is.")
    title: str = Field(description="The status in words.")
    status: int = Field(description="The status of the answer.")
    detail: str = Field(description="What was wrong, and what to do.")
    errors: list[FieldError] | None = Field(None, description="Which fields of the body are wrong.")
    limit: str | None = Field(None, description="With 429: which limit it is over, requests or tokens.")


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI description of the errors that a route answers with."""
    return {status: {"model": ProblemOut, "description": _TITLES[status]} for status in statuses}


async def disconnected(receive: Receive) -> None:
    """Return when the client has left. ``receive``: of a request whose body is read."""
    with suppress(OSError):
        while (await receive())["type"] != "http.disconnect":
            pass
