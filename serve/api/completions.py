"""``/v1/completions``, ``/v1/chat/completions`` and ``/v1/models``, as OpenAI's clients speak to them.

vLLM's own handlers answer; ``serve.vllm.openai.engine`` records what they get from the engine. An answer's ``id``
is ``cmpl-U`` or ``chatcmpl-U``. U is the response_id of choice 0, ``U:i`` that of choice i, and ``/feedback`` takes
each of them with the prefix too.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from datetime import UTC, datetime
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import orjson
from fastapi import APIRouter, Path, Request, Response
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from serve.admission import TokenBudget
from serve.api.answers import EventStream, watching_client
from serve.api.bounds import aside, check, is_large
from serve.api.completions_request import CHAT, COMPLETION, Understood, refuse, understand, unfit
from serve.api.generate import session_of
from serve.engine import EngineError
from serve.generation.request import GenerationRequest, Sampling
from serve.http import Problem, client_gone, event_stream, json_response
from serve.recorded_request import ActiveRequest

if TYPE_CHECKING:
    from serve.runtime import Server
    from serve.vllm.openai.request import OpenAIRequest

log = logging.getLogger(__name__)

router = APIRouter()

Kind = Literal["completions", "chat"]

_FIELDS: Final[dict[Kind, dict[str, dict[str, Any]]]] = {"completions": COMPLETION, "chat": CHAT}
_ROWS_BYTES: Final = 256 << 20  # of the rows of one request, by its body
_MOST_CHARACTERS: Final = 2000  # of an error's text: vLLM repeats the value that is wrong in it
_ERROR: Final = 'data: {"error"'  # what the event of a stream that fails begins with, in OpenAI's API
_FEW_MESSAGES: Final = 16  # up to here, all that is wrong with them is reported at once
_PROMPT_WORDS: Final = ("input_tokens", "input_text")  # where vLLM means the prompt
_ERRORS: Final = {
    400: "A field is wrong; the message names it",
    404: "There is no such model",
    408: "The body came too slowly",
    413: "Body too large",
    503: "Not available",
    504: "Took too long",
}


class ErrorInfo(BaseModel):
    """What is wrong, and with which field."""

    message: str = Field(description="What was wrong, and what to do.")
    type: str = Field(description="What kind of error it is.")
    param: str | None = Field(None, description="The field that is wrong.")
    code: int | str | None = Field(None, description="Which error it is, where its kind has several.")


class ErrorOut(BaseModel):
    """An error in OpenAI's form."""

    error: ErrorInfo = Field(description="What is wrong.")


def _or_null(field: dict[str, Any]) -> dict[str, Any]:
    """The schema of a field that may be null, which says the same as leaving it out."""
    schema = {name: value for name, value in field.items() if name != "description"}
    return {"anyOf": [schema, {"type": "null"}], "description": field["description"]}


def _described(fields: dict[str, dict[str, Any]], required: str, answer: str) -> dict[str, Any]:
    """OpenAPI of a route, for its decorator."""
    properties = {name: field if name == required else _or_null(field) for name, field in fields.items()}
    schema = {"type": "object", "properties": properties, "required": [required], "additionalProperties": False}
    content = {"application/json": {"schema": {"type": "object"}}, **event_stream()}
    return {
        "responses": {
            200: {"description": answer, "content": content},
            **{code: {"model": ErrorOut, "description": text} for code, text in _ERRORS.items()},
        },
        "openapi_extra": {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}},
    }


@router.post(
    "/v1/completions",
    **_described(COMPLETION, "prompt", "OpenAI's text_completion, or with stream its chunks as server-sent events"),
)
async def completions(request: Request) -> Response:
    """OpenAI's completions. Choice i of the answer `cmpl-U` is for `/feedback` the response `cmpl-U:i`, 0 `cmpl-U`.

    Choices are numbered through all prompts, as their `index` says.
    """
    return await _answer(request, "completions")


@router.post(
    "/v1/chat/completions",
    **_described(CHAT, "messages", "OpenAI's chat.completion, or with stream its chunks as server-sent events"),
)
async def chat(request: Request) -> Response:
    """OpenAI's chat. Choice i of the answer `chatcmpl-U` is for `/feedback` `chatcmpl-U:i`, choice 0 `chatcmpl-U`."""
    return await _answer(request, "chat")


@router.get("/v1/models", responses={200: {"description": "OpenAI's list of models", "content": {}}})
async def models(request: Request) -> Response:
    """The one model that is served."""
    server: Server = request.app.state.server
    return json_response((await _handlers(server).models.show_available_models()).model_dump())


@router.get("/v1/models/{model}", responses={404: {"model": ErrorOut, "description": _ERRORS[404]}})
async def model(request: Request, model: Annotated[str, Path(description="Its name.")]) -> Response:
    """The model, if it is the one that is served."""
    server: Server = request.app.state.server
    _check_model(server, model)
    return json_response((await _handlers(server).models.show_available_models()).model_dump()["data"][0])


async def _answer(request: Request, kind: Kind) -> Response:
    server: Server = request.app.state.server
    content = await server.bodies.read(request.receive)
    await server.admission.wait_until_awake(request.receive)
    with ExitStack() as work:
        work.enter_context(server.admission.admit())
        understood, body = await aside(is_large(content), _understand, content, session_of(request, 400), server, kind)
        openai_request = _openai_request(request, understood, server)
        body.request_id = openai_request.response_id  # the handlers make the answer's id of it
        active = work.enter_context(openai_request.active)
        handlers = _handlers(server)
        create = (
            handlers.completions.create_completion if kind == "completions" else handlers.chat.create_chat_completion
        )
        try:
            with watching_client(request, active):
                answer = await create(body, None)  # without the request: its headers would steer the engine
        except Exception as error:
            if active.ending == "gone":
                return client_gone()
            raise _problem(error, active, kind) from error
        if isinstance(answer, AsyncGenerator):
            return EventStream(active, _events(openai_request, answer, kind), work.pop_all(), _error_event)
    if (wrong := getattr(answer, "error", None)) is not None:
        raise _vllm_problem(wrong)
    return Response(answer.model_dump_json(), media_type="application/json")


async def _events(request: OpenAIRequest, chunks: AsyncGenerator[str, None], kind: Kind) -> AsyncGenerator[bytes, None]:
    """The handler's chunks. Raises Problem for an error before the first one."""
    active, sent = request.active, False
    async with aclosing(chunks):
        async for chunk in chunks:
            if chunk.startswith(_ERROR):
                problem = None if request.error is None else _problem(request.error, active, kind)
                if problem is not None and not sent:
                    raise problem from request.error
                if isinstance(problem, Problem):
                    active.problem = active.problem or problem
                    chunk = _error_event(problem).decode()  # vLLM's is a bare text
                active.problem = active.problem or Problem(500, "the response could not be put into OpenAI's form")
            yield chunk.encode()
            sent = True


def _error_event(problem: Problem) -> bytes:
    error = problem.openai_body()["error"] | {"code": problem.status}  # the stream's own status is 200
    return b"data: %b\n\n" % orjson.dumps({"error": error})


def _understand(content: bytes, session_id: str | None, server: Server, kind: Kind) -> tuple[Understood, Any]:
    """What is ours of a body, and the request as vLLM's model. Raises Problem 400 or 404."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    check(content, 400)
    config = server.config
    understood = understand(
        content,
        _FIELDS[kind],
        config.limits,
        context=server.engine.max_model_len,
        chat_template=config.openai.request_chat_template,
        session_id=session_id,
    )
    body = understood.body
    _check_rows(content, body)
    _check_model(server, body.get("model"))
    if len(messages := body.get("messages", ())) > _FEW_MESSAGES:
        for position, message in enumerate(messages):
            _check_message(position, message)
    try:
        model = (CompletionRequest if kind == "completions" else ChatCompletionRequest).model_validate(body)
    except ValidationError as error:
        raise unfit(error) from None
    except Exception as error:  # of vLLM's own validators, which expect well-formed parts
        raise _misunderstood(error, kind) from error
    return understood, model


def _check_rows(content: bytes, body: dict[str, Any]) -> None:
    """Raises Problem 413 if the rows that a body asks for, each with a copy of all but the prompts, are too large."""
    prompts = [body.get("prompt")]  # token ids are one, too
    if isinstance(prompts[0], list) and prompts[0] and isinstance(prompts[0][0], str | list):
        prompts = prompts[0]
    responses = (body.get("n") or 1) * len(prompts)
    if len(content) * responses > _ROWS_BYTES:
        own = len(orjson.dumps(prompts)) // len(prompts)  # of a prompt, on average
        size = responses * (max(0, len(content) - own * len(prompts)) + own)
        if size > _ROWS_BYTES:
            raise Problem(
                413,
                f"its {responses} responses would be recorded with {size} bytes of what it says, of which "
                f"{_ROWS_BYTES} are allowed: send fewer prompts at a time, or less beside them",
            )


def _check_message(position: int, message: dict[str, Any]) -> None:
    """Raises Problem 400. vLLM's request model says of all messages at once what keeps each from being of each kind."""
    try:
        _message_type().validate_python(message)
    except ValidationError as error:
        raise unfit(error, f"messages.{position}") from None


@cache
def _message_type() -> TypeAdapter[Any]:
    from vllm.renderers.chat_utils import ChatCompletionMessageParam

    return TypeAdapter(ChatCompletionMessageParam)


def _openai_request(request: Request, understood: Understood, server: Server) -> OpenAIRequest:
    """The request as its rows need it, and as the handlers' engine finds it."""
    from serve.vllm.openai.request import OpenAIRequest, current

    labels, principal = understood.labels, request.scope["principal"]
    if understood.body.get("max_tokens") == 0 and server.records(principal, store=understood.store):
        # The engine samples a token all the same: a response that nobody saw would be recorded as one that was given.
        raise refuse("max_tokens", "0 gives no response to record: send store: false, or use a key of scope evaluate")
    budget = TokenBudget(server.limiter, principal)
    recorder = server.recorder_for(principal, store=understood.store)
    at, user = datetime.now(UTC), labels.user or labels.safety_identifier
    drawn = server.drawn_for(request, user=user, session=labels.session_id, at=at)
    openai_request = OpenAIRequest(
        active=ActiveRequest(server.engine, recorder, budget, server.config.limits.timeout_s),
        row_request=GenerationRequest(
            request_id=request.scope["request_id"],
            endpoint=request.scope["path"],
            replica=server.config.replica_name,
            tenant=principal.tenant,
            variants=server.variants,
            created_at=at,
            turn=drawn,
            version=server.policy_for(principal.tenant, drawn),
            session_id=labels.session_id,
            user=user,
            metadata=labels.metadata or {},
            messages=understood.messages,
            prompt_token_ids=[],
            sampling=Sampling(),
        ),
        response_id=recorder.response_id(),
        has_text=understood.has_text,
        structured_by="response_format" if "response_format" in understood.body else "structured_outputs",
    )
    current.set(openai_request)
    return openai_request


def _check_model(server: Server, name: Any) -> None:
    if name and name != server.config.model_name:
        raise Problem(
            404,
            f"the model {str(name)[:200]!r} does not exist; {server.config.model_name!r} is served",
            errors=[{"field": "model", "reason": "there is no such model"}],
        )


def _handlers(server: Server) -> Any:
    if server.openai is None:
        raise Problem(503, server.unready() or "the server is starting", retry_after=5)
    return server.openai


def _problem(error: Exception, active: ActiveRequest, kind: Kind) -> Exception:
    """The problem of an error that a handler raised, or the error if it is the server's."""
    from vllm.entrypoints.serve import create_error_response
    from vllm.exceptions import VLLMValidationError

    from serve.vllm.openai.request import Interrupted

    if isinstance(error, Interrupted):
        return error.problem
    if isinstance(error, Problem):
        return error
    if isinstance(error, EngineError):
        return Problem(503, str(error), retry_after=5)
    vllm_error = create_error_response(error).error
    if vllm_error.code == 503:
        return Problem(503, vllm_error.message, retry_after=1)
    sampled = any(prompt.used_tokens() for prompt in active.prompts)
    if isinstance(error, VLLMValidationError) or (vllm_error.code >= 500 and not sampled):
        return _misunderstood(error, kind)  # nothing but the request had a part in it
    return _vllm_problem(vllm_error) if vllm_error.code < 500 else error


def _vllm_problem(error: Any) -> Problem:
    """A Problem of vLLM's error."""
    message = error.message[:_MOST_CHARACTERS]
    message = message.replace("--enable-auto-tool-choice and --tool-call-parser", "serve.openai.tool_parser")
    message = message.replace("--tool-call-parser", "serve.openai.tool_parser")
    message = message.replace("--trust-request-chat-template", "serve.openai.request_chat_template")
    return Problem(error.code, message, errors=[{"field": error.param, "reason": message}] if error.param else None)


def _misunderstood(error: Exception, kind: Kind) -> Problem:
    """A bad request, because of what vLLM says of it."""
    if isinstance(error, ValidationError):
        return unfit(error)
    message = str(error.args[0] if error.args else error)[:_MOST_CHARACTERS]
    field: str | None = getattr(error, "parameter", None)
    if field in _PROMPT_WORDS:
        field = "messages" if kind == "chat" else "prompt"
    if field is not None:
        return refuse(field, message.removeprefix(f"{field}: "))
    if (first := message.partition(" ")[0]) in _FIELDS[kind]:
        return Problem(400, message, errors=[{"field": first, "reason": message}])
    if isinstance(error, ValueError) or type(error).__module__.startswith("vllm"):
        return Problem(400, message)
    log.info("a request could not be understood: %s", type(error).__name__)  # its text may be the client's
    return Problem(400, f"the request can't be understood: {type(error).__name__}: {message}")
