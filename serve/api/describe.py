"""The OpenAPI page: what FastAPI makes of the routes, and what it can't see: bodies, keys, what every answer has."""

from __future__ import annotations

from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from serve.api import feedback, generate
from serve.api.http import OPENAI, ProblemOut, problems
from serve.auth import scope_of

_BODIES: Final[tuple[type[BaseModel], ...]] = (generate.GenerateIn, feedback.FeedbackIn, feedback.FeedbackBatchIn)
_SCHEMAS: Final = "#/components/schemas/"
_SECURITY: Final = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "A key of `millrace keys create`."},
    "header": {"type": "apiKey", "in": "header", "name": "X-API-Key", "description": "The same, looked at first."},
}
_PARAMETERS: Final = {
    "RequestId": {
        "name": "X-Request-Id",
        "in": "header",
        "required": False,
        "schema": {"type": "string"},
        "description": "Your id of the request: 1 to 128 letters, digits, dots, underscores and hyphens. The answer "
        "and the log have it; instead of one that is none, or missing, they have one made here.",
    },
    "TraceParent": {
        "name": "traceparent",
        "in": "header",
        "required": False,
        "schema": {"type": "string"},
        "description": "W3C trace context; the log has the trace's id. One that is malformed is ignored.",
    },
    "TraceState": {
        "name": "tracestate",
        "in": "header",
        "required": False,
        "schema": {"type": "string"},
        "description": "W3C trace context, kept with a traceparent.",
    },
}
_HEADERS: Final = {
    "X-Request-Id": {"description": "The request's id.", "schema": {"type": "string"}},
    "traceresponse": {
        "description": "With a traceparent: its trace, and this request's own id in it.",
        "schema": {"type": "string"},
    },
}
_RETRY_AFTER: Final = {"description": "Seconds until it is worth another try.", "schema": {"type": "integer"}}
_WWW_AUTHENTICATE: Final = {
    "description": "What kind of key is needed, and why this is none.",
    "schema": {"type": "string"},
}
_ERROR_OUT: Final = f"{_SCHEMAS}ErrorOut"


def openapi(app: FastAPI) -> dict[str, Any]:
    """The description of ``app``, made once."""
    if app.openapi_schema is None:
        schema = get_openapi(
            title=app.title,
            version=app.version,
            routes=app.routes,
            description="Keys are needed as soon as there is one; each has scopes, and is a tenant's.",
        )
        components = schema.setdefault("components", {})
        schemas = components.setdefault("schemas", {})
        models: tuple[type[BaseModel], ...] = (*_BODIES, ProblemOut)
        for model in models:
            definitions = model.model_json_schema(ref_template=_SCHEMAS + "{model}")
            for name, definition in definitions.pop("$defs", {}).items():
                schemas.setdefault(name, definition)
            schemas.setdefault(model.__name__, definitions)
        components |= {"securitySchemes": _SECURITY, "parameters": _PARAMETERS, "headers": _HEADERS}
        for path, operations in schema["paths"].items():
            for operation in operations.values():
                _complete(path, operation)
        for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's; ours are problems
            schemas.pop(name, None)
        app.openapi_schema = schema
    return app.openapi_schema


def _complete(path: str, operation: dict[str, Any]) -> None:
    """Add to one operation what all have."""
    responses = operation["responses"]
    if "HTTPValidationError" in str(responses.get("422")):
        del responses["422"]
    scope = scope_of(path)
    if scope is not None:
        operation["security"] = [{name: []} for name in _SECURITY]
        operation["description"] = f"{operation.get('description', '')}\n\nNeeds a key with the scope `{scope}`."
        for status, description in problems(401, 403, *(() if scope == "admin" else (429,))).items():
            responses.setdefault(str(status), {"description": description["description"]})
    operation.setdefault("parameters", []).extend({"$ref": f"#/components/parameters/{name}"} for name in _PARAMETERS)
    is_openai = path.startswith(OPENAI)
    for status, response in responses.items():
        headers: dict[str, Any] = {name: {"$ref": f"#/components/headers/{name}"} for name in _HEADERS}
        if status in ("429", "503"):
            headers["Retry-After"] = _RETRY_AFTER
        if status in ("401", "403"):
            headers["WWW-Authenticate"] = _WWW_AUTHENTICATE
        response["headers"] = headers
        if int(status) >= 400:
            kind = "application/json" if is_openai else "application/problem+json"
            form = _ERROR_OUT if is_openai else f"{_SCHEMAS}ProblemOut"
            response["content"] = {kind: {"schema": {"$ref": form}}}
