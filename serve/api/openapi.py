"""The OpenAPI page: what FastAPI makes of the routes, and what it can't see: bodies, keys, what every answer has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from feedback.events import kinds_schema
from feedback.sampling_parameters import RESERVED
from serve.api import admin, experiments, feedback, generate
from serve.http import OPENAI, ProblemOut, problems
from serve.middleware.keyring import scope_of

if TYPE_CHECKING:
    from serve.runtime import Server

_BODIES: Final[tuple[type[BaseModel], ...]] = (
    generate.GenerateIn,
    feedback.FeedbackIn,
    feedback.FeedbackBatchIn,
    experiments.StopIn,
    admin.SleepIn,
    admin.WakeIn,
)
_SCHEMAS: Final = "#/components/schemas/"
_SECURITY: Final = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "A key of `millrace keys create`."},
    "header": {"type": "apiKey", "in": "header", "name": "X-API-Key", "description": "The same, looked at first."},
}


def _header(name: str, description: str, **bounds: int) -> dict[str, Any]:
    schema = {"type": "string", **bounds}
    return {"name": name, "in": "header", "required": False, "schema": schema, "description": description}


_PARAMETERS: Final = {
    "RequestId": _header(
        "X-Request-Id",
        "Your id of the request: 1 to 128 letters, digits, dots, underscores and hyphens. The answer and the log have "
        "it; instead of one that is none, or missing, they have a new one.",
    ),
    "TraceParent": _header(
        "traceparent", "W3C trace context; the log has the trace's id. One that is malformed is ignored."
    ),
    "TraceState": _header("tracestate", "W3C trace context, kept with a traceparent."),
}
_SESSION: Final = _header(
    "X-Session-Id",
    "Your name for the conversation, if the body has no `session_id`. A fleet sends requests of one session to the "
    "same replica.",
    minLength=1,
    maxLength=generate.LABEL_CHARACTERS,
)
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
_ITEMS: Final = {
    "anyOf": [{"$ref": f"{_SCHEMAS}FeedbackIn"}, {"description": "Whatever else it is: its result has the status 422."}]
}
_ERROR_OUT: Final = f"{_SCHEMAS}ErrorOut"


def openapi(app: FastAPI) -> dict[str, Any]:
    """The description of ``app``; built again when the engine runs, whose policy sets bounds, and with a first key."""
    server: Server = app.state.server
    depends_on = (server.engine.healthy, server.keyring.on)
    if app.openapi_schema is None or app.state.described != depends_on:
        app.state.described = depends_on
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
        _bound_generate(schemas["GenerateIn"]["properties"], server)
        schemas["FeedbackIn"]["oneOf"] = kinds_schema(server.kinds)
        schemas["FeedbackBatchIn"]["properties"]["feedback"]["items"] = _ITEMS
        components |= {
            "securitySchemes": _SECURITY,
            "parameters": _PARAMETERS | {"SessionId": _SESSION},
            "headers": _HEADERS,
        }
        for path, operations in schema["paths"].items():
            for operation in operations.values():
                _complete(path, operation, needs_key=server.keyring.on)
        for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's; ours are problems
            schemas.pop(name, None)
        app.openapi_schema = schema
    return app.openapi_schema


def _bound_generate(properties: dict[str, Any], server: Server) -> None:
    """What the settings and the policy's tokenizer bound."""
    limits = server.config.limits
    properties["n"]["maximum"] = limits.n
    _value(properties["max_tokens"])["maximum"] = limits.max_tokens
    properties["metadata"]["maxProperties"] = limits.metadata_entries
    properties["metadata"]["propertyNames"]["pattern"] = f"^(?!{RESERVED})"
    token: dict[str, Any] = {"type": "integer", "minimum": 0}
    if server.engine.healthy:
        token["maximum"] = server.engine.vocabulary - 1
        _value(properties["prompt_token_ids"])["maxItems"] = server.engine.max_model_len - 1
        _value(properties["prompt"])["minLength"] = server.engine.text.least_characters
    properties["stop_token_ids"]["items"] = _value(properties["prompt_token_ids"])["items"] = token


def _value(schema: dict[str, Any]) -> dict[str, Any]:
    """Of a field that may be null, what else it may be."""
    return next(part for part in schema["anyOf"] if part != {"type": "null"})


def _complete(path: str, operation: dict[str, Any], *, needs_key: bool) -> None:
    """Add to one operation what all have."""
    responses = operation["responses"]
    if "HTTPValidationError" in str(responses.get("422")):
        del responses["422"]
    scope = scope_of(path)
    responses.setdefault("421", {"description": problems(421)[421]["description"]})  # where no key is needed
    if scope is not None:
        operation["security"] = [{name: []} for name in _SECURITY] + ([] if needs_key else [{}])
        operation["description"] = f"{operation.get('description', '')}\n\nNeeds a key with the scope `{scope}`."
        for status, description in problems(401, 403, 429).items():
            responses.setdefault(str(status), {"description": description["description"]})
    if "requestBody" in operation:
        responses.setdefault("415", {"description": problems(415)[415]["description"]})
    operation.setdefault("parameters", []).extend({"$ref": f"#/components/parameters/{name}"} for name in _PARAMETERS)
    if scope == "generate" and "requestBody" in operation:
        operation["parameters"].append({"$ref": "#/components/parameters/SessionId"})
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
