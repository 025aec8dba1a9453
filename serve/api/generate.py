"""``POST /generate``: a prompt in, responses out, every one of them recorded before its end goes out."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack, aclosing
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self

import orjson
from fastapi import APIRouter, Request, Response
from jinja2 import TemplateError
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

from feedback.sampling_parameters import RESERVED
from serve.admission import TokenBudget
from serve.api import bounds
from serve.api.answers import EventStream, watching_client
from serve.engine import EngineRefused
from serve.generation.request import GenerationRequest, Sampling
from serve.http import Problem, body_of, client_gone, event_stream, field_problem, json_response, problems
from serve.recorded_request import ActiveRequest, EngineSource, RecordedPrompt

if TYPE_CHECKING:
    from serve.config import LimitsConfig
    from serve.generation.tokenizer import Text
    from serve.middleware.keyring import Principal
    from serve.runtime import Server

router = APIRouter()

_MANY_MESSAGES, _MANY_CHARACTERS = 32, 8192  # past these, a chat is rendered beside the event loop

_RESPONSE_COLUMNS = (
    ("response_id", "response_id"),
    ("text", "response"),
    ("finish_reason", "finish_reason"),
    ("policy_spans", "policy_spans"),
)
MIN_SEED: Final = -1  # none, as vLLM has it; of n > 1 that start below, one would come upon it
MAX_SEED: Final = 2**63 - 1 - 4096  # vLLM counts up from it for n > 1
LEAST_TEMPERATURE: Final = 0.01  # vLLM takes what lies below for this
SEVERAL_GREEDY: Final = "greedy responses (temperature 0) would all be the same; ask for 1"

LABEL_CHARACTERS: Final = 200
Label = Annotated[str, StringConstraints(min_length=1, max_length=LABEL_CHARACTERS)]


def _greedy_or_warm(temperature: float) -> float:
    if 0 < temperature < LEAST_TEMPERATURE:
        raise ValueError(f"it is 0 (greedy) or at least {LEAST_TEMPERATURE}, not {temperature:g}")
    return temperature


def _texts(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _whole_number(value: Any) -> Any:
    """JSON knows no integers: 1.0 is one."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _whole_numbers(value: Any) -> Any:
    return [_whole_number(item) for item in value] if isinstance(value, list) else value


_Whole = BeforeValidator(_whole_number)
_Integers = BeforeValidator(_whole_numbers)
_Text = Annotated[str, StringConstraints(min_length=1)]
_Texts = Annotated[list[_Text], Field(max_length=bounds.STOPS, fail_fast=True)]


class Message(BaseModel):
    """One chat message."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Annotated[str, StringConstraints(min_length=1, max_length=64)] = Field(
        description="system, user, assistant …"
    )
    content: str = Field(description="What it says.")


_FORMS: Final = (("prompt", "string"), ("messages", "array"), ("prompt_token_ids", "array"))

# What holds between fields, for the OpenAPI page.
_RELATIONS: Final[dict[str, Any]] = {
    "oneOf": [
        {"required": [one], "properties": {name: {"type": form if name == one else "null"} for name, form in _FORMS}}
        for one, _ in _FORMS
    ],
    "anyOf": [{"properties": {"n": {"maximum": 1}}}, {"properties": {"temperature": {"exclusiveMinimum": 0}}}],
}


class GenerateIn(BaseModel):
    """The body of ``POST /generate``; exactly one of prompt, messages and prompt_token_ids, and no n if greedy."""

    model_config = ConfigDict(extra="forbid", strict=True, json_schema_extra=_RELATIONS)

    prompt: str | None = Field(None, description="Text to go on from.")
    messages: Annotated[list[Message], Field(fail_fast=True)] | None = Field(
        None, min_length=1, max_length=bounds.MESSAGES, description="Chat, put into the policy's own template."
    )
    prompt_token_ids: (
        Annotated[list[int], Field(min_length=1, max_length=bounds.TOKEN_IDS, fail_fast=True), _Integers] | None
    ) = Field(None, description="The prompt as token ids.")
    n: Annotated[int, Field(ge=1), _Whole] = Field(1, description="Number of responses.")
    max_tokens: Annotated[int, Field(ge=1), _Whole] | None = Field(
        None, description="Most tokens of a response; the server has a default."
    )
    temperature: Annotated[float, AfterValidator(_greedy_or_warm)] = Field(
        1.0,
        ge=0,
        le=2,
        allow_inf_nan=False,
        json_schema_extra={"anyOf": [{"const": 0}, {"minimum": LEAST_TEMPERATURE}]},
        description="0 is greedy; else 0.01 or more.",
    )
    top_p: float = Field(
        1.0, gt=0, le=1, allow_inf_nan=False, description="Sample from the likeliest tokens that make up this much."
    )
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1), _Whole] = Field(
        0, description="Sample from this many of the likeliest tokens; 0: all."
    )
    min_p: float = Field(
        0.0, ge=0, le=1, allow_inf_nan=False, description="Leave out tokens less likely than this times the likeliest."
    )
    stop: Annotated[_Texts, BeforeValidator(_texts, json_schema_input_type=_Text | _Texts)] | None = Field(
        None, description=f"End a response before any of these texts, {bounds.STOPS} at most."
    )
    stop_token_ids: Annotated[list[int], Field(max_length=16, fail_fast=True), _Integers] = Field(
        default_factory=list,
        description="End a response with any of these tokens; the token is the response's last, and not in its text.",
    )
    seed: Annotated[int, Field(ge=MIN_SEED, le=MAX_SEED), _Whole] | None = Field(
        None, description="Makes the sampling repeatable; -1 is as none."
    )
    logprobs: bool = Field(
        False, description="Return the log probability of each response token as it was sampled, in nats."
    )
    return_token_ids: bool = Field(False, description="Return the token ids of the prompt and of the responses.")
    stream: bool = Field(
        False,
        description="Send the responses while they are generated, as server-sent events: `delta` (response_id, index, "
        "text) and, at the end, one `done` with the body of the plain response, or `error` with a problem.",
    )
    store: bool = Field(
        True,
        description="false: the responses are answered and not stored: not recorded, not trained on, and no feedback "
        "can be given on them. A key without capture does so for all its requests.",
    )
    session_id: Label | None = Field(
        None, description="Your name for the conversation; without it, the header X-Session-Id."
    )
    user: Label | None = Field(None, description="Your name for the person.")
    metadata: dict[Label, Annotated[str, StringConstraints(max_length=10_000)]] = Field(
        default_factory=dict,
        json_schema_extra={"maxProperties": bounds.ENTRIES},
        description="Texts that are kept with the responses and passed to reward functions.",
    )

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        present = [name for name in ("prompt", "messages", "prompt_token_ids") if getattr(self, name) is not None]
        if len(present) != 1:
            raise ValueError(
                f"give exactly one of prompt, messages and prompt_token_ids, not {' and '.join(present) or 'none'}"
            )
        return self


class PolicySpan(BaseModel):
    """A stretch of a response that one policy sampled."""

    start: int = Field(description="The stretch's first response token; it goes up to the next stretch.")
    policy_version: int = Field(description="The policy that sampled it.")


class ResponseOut(BaseModel):
    """One response."""

    response_id: str = Field(description="What `/feedback` takes, unless it begins with `unstored-`.")
    text: str = Field(description="The response's text.")
    finish_reason: Literal["stop", "length"] = Field(
        description="stop: the policy ended it, or a stop text or token did; length: max_tokens, or the context, did."
    )
    policy_spans: list[PolicySpan] = Field(description="Which policy sampled which tokens; more than one after a swap.")
    token_ids: list[int] | None = Field(None, description="With `return_token_ids`: the response's tokens.")
    logprobs: list[float] | None = Field(
        None,
        description="With `logprobs`: of each token, under the distribution that it was sampled from (temperature, "
        "min_p, top_k and top_p applied; greedy: under the policy's own), in nats.",
    )


class Usage(BaseModel):
    """Tokens, over all responses."""

    prompt_tokens: int = Field(description="Tokens of the prompt.")
    completion_tokens: int = Field(description="Tokens of all responses.")
    total_tokens: int = Field(description="Both.")


class GenerateOut(BaseModel):
    """The answer of ``POST /generate``."""

    request_id: str = Field(description="Names the request in the logs and in the lake.")
    model: str = Field(description="The model's name, `serve.model_name`.")
    policy_version: int = Field(description="The policy that sampled the last token; of several responses, the newest.")
    responses: list[ResponseOut] = Field(description="The n responses.")
    usage: Usage = Field(description="Tokens.")
    prompt_token_ids: list[int] | None = Field(None, description="With `return_token_ids`: the prompt's tokens.")


@router.post(
    "/generate",
    responses={
        200: {"model": GenerateOut, "content": event_stream("delta", "done", "error")},
        **problems(400, 408, 413, 422, 503, 504),
    },
    openapi_extra=body_of(GenerateIn),
)
async def generate(request: Request) -> Response:
    """Sample responses to a prompt."""
    server: Server = request.app.state.server
    principal: Principal = request.scope["principal"]
    content = await server.bodies.read(request.receive)
    await server.admission.wait_until_awake(request.receive)
    with ExitStack() as work:
        work.enter_context(server.admission.admit())
        of_header = session_of(request, 422)
        body = await bounds.parse_body(content, GenerateIn)
        session_id = body.session_id or of_header
        prompt_request = await _understand(body, server, request, session_id)
        budget = TokenBudget(server.limiter, principal)
        active = work.enter_context(
            ActiveRequest(
                server.engine,
                server.recorder_for(principal, store=body.store),
                budget,
                server.config.limits.timeout_s,
            )
        )
        prompt_tokens, sampling = len(prompt_request.prompt_token_ids), prompt_request.sampling
        room = min(sampling.max_tokens, server.engine.max_model_len - prompt_tokens)
        await budget.reserve(prompt_tokens + sampling.n * room)
        prompt = RecordedPrompt(active, prompt_request, EngineSource(server.engine, prompt_request))
        if body.stream:
            events = _events(prompt, partial(_answer, server, body, prompt))
            return EventStream(active, events, work.pop_all(), partial(_event, b"error"), b": still at work\n\n")
        try:
            with watching_client(request, active):
                await prompt.whole()
        except EngineRefused as error:
            raise Problem(400, str(error)) from error
        except Problem:
            if active.ending == "gone":
                return client_gone()
            raise
    return json_response(_answer(server, body, prompt))


async def _events(prompt: RecordedPrompt, answer: Callable[[], dict[str, Any]]) -> AsyncGenerator[bytes, None]:
    """``delta`` with a response's next piece of text, then ``done``. Raises Problem."""
    heads = [
        b'event: delta\ndata: {"response_id":"%b","index":%d,"text":' % (response_id.encode(), index)
        for index, response_id in enumerate(prompt.response_ids)
    ]
    try:
        async with aclosing(prompt.stream()) as outputs:
            async for pieces in outputs:
                if pieces:
                    yield b"".join([b"%b%b}\n\n" % (heads[index], orjson.dumps(text)) for index, text in pieces])
    except EngineRefused as error:
        raise Problem(400, str(error)) from error
    yield _event(b"done", answer())


def _event(name: bytes, data: dict[str, Any] | Problem) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name, orjson.dumps(data.body() if isinstance(data, Problem) else data))


def session_of(request: Request, status: int) -> str | None:
    """The session of the header, which a fleet's router goes by. Raises Problem with ``status`` if it is no label."""
    session_id = request.headers.get("x-session-id")
    if session_id is not None and not 1 <= len(session_id) <= LABEL_CHARACTERS:
        raise field_problem(status, "X-Session-Id", f"has {len(session_id)} characters, not 1 to 200")
    return session_id


def check_metadata(metadata: dict[str, str], limits: LimitsConfig, status: int) -> None:
    """Raises Problem with ``status`` for too many entries, and for those that the server itself makes."""
    if len(metadata) > limits.metadata_entries:
        raise field_problem(status, "metadata", f"{len(metadata)} entries, {limits.metadata_entries} are allowed")
    if any(key.startswith(RESERVED) for key in metadata):
        raise field_problem(status, "metadata", f"keys that begin with {RESERVED!r} are Millrace's own")


async def _understand(body: GenerateIn, server: Server, request: Request, session_id: str | None) -> GenerationRequest:
    """The request as the engine needs it. Raises Problem 400 or 422 naming the field."""
    limits, engine = server.config.limits, server.engine
    if body.n > limits.n:
        raise field_problem(422, "n", f"{body.n} is more than the {limits.n} that are allowed")
    if body.n > 1 and body.temperature == 0:
        raise field_problem(422, "n", SEVERAL_GREEDY)
    if body.max_tokens is not None and body.max_tokens > limits.max_tokens:
        raise field_problem(422, "max_tokens", f"{body.max_tokens} is more than the {limits.max_tokens} allowed")
    check_metadata(body.metadata, limits, 422)
    _require_tokens("stop_token_ids", body.stop_token_ids, engine.vocabulary)
    field, prompt, messages, token_ids = await _tokenise(body, server)
    if not token_ids:
        raise field_problem(422, field, "there is no token in it")
    if len(token_ids) >= engine.max_model_len:
        raise _no_room(field, len(token_ids), server)
    at, tenant = datetime.now(UTC), request.scope["principal"].tenant
    drawn = server.drawn_for(request, user=body.user, session=session_id, at=at)
    return GenerationRequest(
        request_id=request.scope["request_id"],
        endpoint="/generate",
        created_at=at,
        replica=server.config.replica_name,
        variants=server.variants,
        turn=drawn,
        version=server.policy_for(tenant, drawn),
        tenant=tenant,
        prompt_token_ids=token_ids,
        prompt=prompt,
        messages=messages,
        session_id=session_id,
        user=body.user,
        metadata=body.metadata,
        sampling=Sampling(
            n=body.n,
            max_tokens=body.max_tokens or limits.default_max_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            min_p=body.min_p,
            stop=tuple(body.stop or ()),
            stop_token_ids=tuple(body.stop_token_ids),
            seed=None if body.seed == -1 else body.seed,
        ),
    )


async def _tokenise(body: GenerateIn, server: Server) -> tuple[str, str | None, str | None, list[int]]:
    """Which field the prompt came in, the text that was tokenised (None if token ids came), messages as JSON, tokens.

    Raises Problem 400 or 422 naming the field.
    """
    text = server.engine.text
    if body.prompt_token_ids is not None:
        if len(body.prompt_token_ids) >= server.engine.max_model_len:  # before each of them is looked at
            raise _no_room("prompt_token_ids", len(body.prompt_token_ids), server)
        _require_tokens("prompt_token_ids", body.prompt_token_ids, server.engine.vocabulary)
        return "prompt_token_ids", None, None, body.prompt_token_ids
    if body.prompt is not None:
        _require_room("prompt", body.prompt, server)
        return "prompt", body.prompt, None, await text.encode(body.prompt, special_tokens=True)
    if not text.has_chat_template:
        raise field_problem(400, "messages", "the policy's tokenizer has no chat template; send prompt instead")
    chat = body.messages or []
    large = len(chat) > _MANY_MESSAGES or sum(len(message.content) for message in chat) > _MANY_CHARACTERS
    try:
        prompt, messages = await bounds.aside(large, _render, text, chat)
    except (TemplateError, ValueError, TypeError, KeyError) as error:
        raise field_problem(400, "messages", f"the policy's chat template refuses them: {error}") from error
    _require_room("messages", prompt, server)
    return "messages", prompt, messages, await text.encode(prompt, special_tokens=False)


def _render(text: Text, messages: list[Message]) -> tuple[str, str]:
    """Messages in the policy's template, and as JSON. Raises what the template raises."""
    dumped = [message.model_dump() for message in messages]
    return text.chat(dumped), json.dumps(dumped, ensure_ascii=False)


def _no_room(field: str, tokens: int, server: Server) -> Problem:
    context = server.engine.max_model_len
    reason = f"{tokens} tokens leave no room for a response in the policy's context of {context} tokens"
    return field_problem(400, field, reason)


def _require_room(field: str, prompt: str, server: Server) -> None:
    """Refuse at once what can't fit: to encode a megabyte takes seconds, which others would have to wait."""
    context, longest = server.engine.max_model_len, server.engine.text.longest_token
    if len(prompt) > context * longest:
        reason = (
            f"{len(prompt)} characters are too many for the policy's context of {context} tokens, the longest of which "
            f"has {longest} characters"
        )
        raise field_problem(400, field, reason)


def _require_tokens(field: str, token_ids: list[int], vocabulary: int) -> None:
    for token in token_ids:
        if not 0 <= token < vocabulary:
            raise field_problem(422, field, f"{token} is no token id (0 to {vocabulary - 1})")


def _answer(server: Server, body: GenerateIn, prompt: RecordedPrompt) -> dict[str, Any]:
    request, sampled_tokens = prompt.request, 0
    responses, versions = [], []
    for row in prompt.rows:
        sampled_tokens += len(row["response_token_ids"])
        versions += [span["policy_version"] for span in row["policy_spans"][-1:]]
        response = {name: row[column] for name, column in _RESPONSE_COLUMNS}
        if body.return_token_ids:
            response["token_ids"] = row["response_token_ids"]
        if body.logprobs:
            response["logprobs"] = [float(logprob) for logprob in row["logprobs"]]
        responses.append(response)
    answer = {
        "request_id": request.request_id,
        "model": server.config.model_name,
        "policy_version": max(versions, default=server.engine.version),
        "responses": responses,
        "usage": {
            "prompt_tokens": len(request.prompt_token_ids),
            "completion_tokens": sampled_tokens,
            "total_tokens": len(request.prompt_token_ids) + sampled_tokens,
        },
    }
    if body.return_token_ids:
        answer["prompt_token_ids"] = request.prompt_token_ids
    return answer
