"""``/v1/completions``, ``/v1/chat/completions`` and ``/v1/models``, as OpenAI's clients speak to them.

vLLM's own handlers answer; ``serve.vllm.openai_engine`` records what they are given by the engine. An answer's ``id``
is ``cmpl-U`` or ``chatcmpl-U``. U is the response_id of choice 0, ``U:i`` that of choice i, and ``/feedback`` takes
each of them with the prefix too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import orjson
from fastapi import APIRouter, Path, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from starlette.types import Receive, Scope, Send

from feedback.ids import uuid7
from serve.api.bounds import aside, check, is_large
from serve.api.completions_request import CHAT, COMPLETION, Understood, refuse, understand, unfit
from serve.api.generate import session_of
from serve.http import CLIENT_CLOSED_REQUEST, Problem, event_stream, json_response
from serve.vllm.engine import EngineError

if TYPE_CHECKING:
    from serve.app import Server
    from serve.vllm.openai_exchange import Exchange

log = logging.getLogger(__name__)

router = APIRouter()

Kind = Literal["completions", "chat"]

_FIELDS: Final[dict[Kind, dict[str, dict[str, Any]]]] = {"completions": COMPLETION, "chat": CHAT}
_HEADERS: Final = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
_MOST_CHARACTERS: Final = 2000  # of an error's text: vLLM repeats the value that is wrong in it
_ERROR: Final = 'data: {"error"'  # what the event of a stream that fails begins with, in OpenAI's API
_LAST: Final = "data: [DONE]"
_FEW_MESSAGES: Final = 16  # all that is wrong with so many is told at once
_LEAST_GRACE_S: Final = 10.0  # for the engine to end what was aborted
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
    async with AsyncExitStack() as work:
        work.enter_context(server.admitted())
        understood, body = await aside(is_large(content), _understand, content, session_of(request, 400), server, kind)
        exchange = _begin(request, understood, body, server, kind)
        await work.enter_async_context(_limited(exchange))
        handlers = _handlers(server)
        create = (
            handlers.completions.create_completion if kind == "completions" else handlers.chat.create_chat_completion
        )
        gone = asyncio.create_task(_disconnected(request))
        gone.add_done_callback(lambda task: None if task.cancelled() else exchange.stop("gone"))
        try:
            answer = await create(body, None)  # without the request: its headers would steer the engine
            if isinstance(answer, AsyncGenerator):
                return await _stream(exchange, answer, work.pop_all())
        except Exception as error:
            if exchange.ending == "gone":
                return Response(status_code=CLIENT_CLOSED_REQUEST)  # for the metrics; nobody reads it
            raise _problem(error, exchange, kind) from error
        finally:
            gone.cancel()
    if (wrong := getattr(answer, "error", None)) is not None:
        raise _told(wrong)
    return Response(answer.model_dump_json(), media_type="application/json")


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
    _check_model(server, body.get("model"))
    if len(messages := body.get("messages", ())) > _FEW_MESSAGES:
        for position, message in enumerate(messages):
            _check_message(position, message)
    try:
        asked = (CompletionRequest if kind == "completions" else ChatCompletionRequest).model_validate(body)
    except ValidationError as error:
        raise unfit(error) from None
    except Exception as error:  # of vLLM's own validators, which expect well-formed parts
        raise _misunderstood(error, kind) from error
    return understood, asked


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


def _begin(request: Request, understood: Understood, asked: Any, server: Server, kind: Kind) -> Exchange:
    """What is recorded of the request."""
    from serve.vllm.openai_exchange import Exchange, current

    labels = understood.labels
    response_id = uuid7()
    asked.request_id = response_id  # the handlers make the answer's id of it
    exchange = Exchange(
        server=server,
        endpoint="/v1/completions" if kind == "completions" else "/v1/chat/completions",
        request_id=request.scope["request_id"],
        principal=request.scope["principal"],
        response_id=response_id,
        session_id=labels.session_id,
        user=labels.user or labels.safety_identifier,
        metadata=labels.metadata or {},
        messages=understood.messages,
        has_text=understood.has_text,
        structured_by="response_format" if "response_format" in understood.body else "structured_outputs",
    )
    current.set(exchange)
    return exchange


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


@asynccontextmanager
async def _limited(exchange: Exchange) -> AsyncIterator[None]:
    """End the exchange when its time is up; as long again after that, whatever the engine does."""
    timeout_s = exchange.server.config.limits.timeout_s
    loop = asyncio.get_running_loop()
    timers = [
        loop.call_later(timeout_s, exchange.stop, "timeout"),
        loop.call_later(timeout_s + max(timeout_s, _LEAST_GRACE_S), exchange.give_up),
    ]
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
        exchange.settle()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _stream(exchange: Exchange, chunks: AsyncGenerator[str, None], work: AsyncExitStack) -> Response:
    """Start the answer once there is something to send. Raises what keeps it from that."""
    undo = AsyncExitStack()
    undo.push_async_exit(work)
    undo.callback(exchange.leave)
    undo.push_async_callback(chunks.aclose)
    try:
        first = await anext(chunks, "")
        if exchange.error is not None and first.startswith(_ERROR):
            raise exchange.error
    except BaseException:
        await undo.aclose()
        raise
    return _Events(exchange, first, chunks, undo)


class _Events(StreamingResponse):
    """The chunks of an answer. However it ends, the exchange ends with it."""

    def __init__(self, exchange: Exchange, first: str, chunks: AsyncGenerator[str, None], undo: AsyncExitStack) -> None:
        super().__init__(self._all(first, chunks), media_type="text/event-stream", headers=_HEADERS)
        self.exchange = exchange
        self.undo = undo
        self._ended_with = CLIENT_CLOSED_REQUEST  # until it has come to its end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The exchange ends by its own limits, which are twice the client's time at most; what takes longer is a client
        # that does not read. It gets no end of its stream, and the connection is closed.
        timeout_s = self.exchange.server.config.limits.timeout_s
        try:
            async with asyncio.timeout(2 * timeout_s + 2 * _LEAST_GRACE_S):
                await super().__call__(scope, receive, send)
        except TimeoutError:
            log.info("the client of %s does not read its stream", self.exchange.response_id)
        finally:
            scope["ended_with"] = self._ended_with
            # In a task of its own: this one may be cancelled at its next await.
            task = asyncio.create_task(self.undo.aclose(), name=f"end of {self.exchange.response_id}")
            self.exchange.server.work.add(task)
            task.add_done_callback(self.exchange.server.work.discard)

    async def _all(self, first: str, chunks: AsyncGenerator[str, None]) -> AsyncIterator[str]:
        self._note(first)
        yield first
        async for chunk in chunks:
            self._note(chunk)
            yield self._named(chunk)

    def _named(self, chunk: str) -> str:
        """A chunk; of an error of ours, which vLLM passes on as a bare text, with its type and field."""
        problem = getattr(self.exchange.error, "problem", None)
        if problem is None or not chunk.startswith(_ERROR):
            return chunk
        error = problem.openai_body()["error"] | {"code": problem.status}  # the stream's own status is 200
        return f"data: {orjson.dumps({'error': error}).decode()}\n\n"

    def _note(self, chunk: str) -> None:
        """Take note of a stream's end: before it is sent, as a client that has it may be gone at once."""
        if chunk.startswith(_ERROR):
            problem = getattr(self.exchange.error, "problem", None)
            self._ended_with = problem.status if problem is not None else 500
        elif chunk.startswith(_LAST) and self._ended_with == CLIENT_CLOSED_REQUEST:
            self._ended_with = 200


def _problem(error: Exception, exchange: Exchange, kind: Kind) -> Exception:
    """What the client is told of an error that a handler raised."""
    from vllm.entrypoints.serve import create_error_response
    from vllm.exceptions import VLLMValidationError

    from serve.vllm.openai_exchange import Interrupted

    if isinstance(error, Interrupted):
        return error.problem
    if isinstance(error, Problem):
        return error
    if isinstance(error, EngineError):
        return Problem(503, str(error), retry_after=5)
    told = create_error_response(error).error
    if told.code == 503:
        return Problem(503, told.message, retry_after=1)
    if isinstance(error, VLLMValidationError) or (told.code >= 500 and not any(part.asking for part in exchange.parts)):
        return _misunderstood(error, kind)  # nothing but the request had a part in it
    return _told(told) if told.code < 500 else error


def _told(error: Any) -> Problem:
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
    log.info("a request could not be understood", exc_info=error)
    return Problem(400, f"the request can't be understood: {type(error).__name__}: {message}")
