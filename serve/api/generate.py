"""``POST /generate``: a prompt in, responses out, every one of them recorded before its end goes out."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from fastapi import APIRouter, Request, Response
from jinja2 import TemplateError
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from feedback.ids import uuid7
from serve import capture
from serve.api.http import CLIENT_CLOSED_REQUEST, Problem, body_of, field_problem, json_response, problems, read_body
from serve.api.streaming import stream
from serve.engine import EngineError, EngineRefused, Generation, Sampling

if TYPE_CHECKING:
    from serve.app import Server

router = APIRouter()

_LONG_PROMPT_CHARACTERS = 8192  # past this, tokenising takes long enough to be done beside the event loop
_MAX_SEED = 2**63 - 1 - 4096  # vLLM counts up from it for n > 1


Label = Annotated[str, StringConstraints(min_length=1, max_length=200)]


class Message(BaseModel):
    """One chat message."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Annotated[str, StringConstraints(min_length=1, max_length=64)] = Field(
        description="system, user, assistant …"
    )
    content: str = Field(description="What it says.")


class GenerateIn(BaseModel):
    """The body of ``POST /generate``; exactly one of prompt, messages and prompt_token_ids."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: str | None = Field(None, description="Text to go on from.")
    messages: list[Message] | None = Field(None, min_length=1, description="Chat, put into the policy's own template.")
    prompt_token_ids: list[int] | None = Field(None, min_length=1, description="The prompt as token ids.")
    n: int = Field(1, ge=1, description="Number of responses.")
    max_tokens: int | None = Field(None, ge=1, description="Most tokens of a response; the server has a default.")
    temperature: float = Field(1.0, ge=0, le=2, allow_inf_nan=False, description="0 is greedy; else 0.01 or more.")
    top_p: float = Field(
        1.0, gt=0, le=1, allow_inf_nan=False, description="Sample from the likeliest tokens that make up this much."
    )
    top_k: int = Field(0, ge=0, le=2**31 - 1, description="Sample from this many of the likeliest tokens; 0: all.")
    min_p: float = Field(
        0.0, ge=0, le=1, allow_inf_nan=False, description="Leave out tokens less likely than this times the likeliest."
    )
    stop: str | list[str] | None = Field(None, description="End a response before any of these texts.")
    seed: int | None = Field(None, ge=0, le=_MAX_SEED, description="Makes the sampling repeatable.")
    stream: bool = Field(
        False,
        description="Send the responses while they are made, as server-sent events: `delta` (response_id, index, text) "
        "and, at the end, one `done` with the body of the plain response, or `error` with a problem.",
    )
    session_id: Label | None = Field(None, description="Your name for the conversation.")
    user: Label | None = Field(None, description="Your name for the person.")
    metadata: dict[Label, Annotated[str, StringConstraints(max_length=10_000)]] = Field(
        default_factory=dict, description="Texts that are kept with the responses and given to reward functions."
    )

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        given = [name for name in ("prompt", "messages", "prompt_token_ids") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"give exactly one of prompt, messages and prompt_token_ids, not {' and '.join(given) or 'none'}"
            )
        if 0 < self.temperature < 0.01:
            raise ValueError(f"temperature is 0 (greedy) or at least 0.01, not {self.temperature:g}")
        if isinstance(self.stop, list) and len(self.stop) > 16:
            raise ValueError(f"stop has {len(self.stop)} texts, 16 are allowed")
        if any(not text for text in self.stops):
            raise ValueError("stop has an empty text")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop texts as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class PolicySpan(BaseModel):
    """From response token ``start`` on, until the next span, ``policy_version`` sampled."""

    start: int
    policy_version: int


class ResponseOut(BaseModel):
    """One response; ``response_id`` is what ``/feedback`` takes."""

    response_id: str
    text: str
    finish_reason: Literal["stop", "length"]
    policy_spans: list[PolicySpan]


class Usage(BaseModel):
    """Tokens, over all responses."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class GenerateOut(BaseModel):
    """The answer of ``POST /generate``; ``policy_version`` is the newest policy that sampled any of it."""

    request_id: str
    model: str
    policy_version: int
    responses: list[ResponseOut]
    usage: Usage


@router.post(
    "/generate",
    responses={200: {"model": GenerateOut}, **problems(400, 413, 422, 503, 504)},
    openapi_extra=body_of(GenerateIn),
)
async def generate(request: Request) -> Response:
    """Sample responses to a prompt."""
    server: Server = request.app.state.server
    async with AsyncExitStack() as admitted:
        admitted.enter_context(server.admitted())
        body = await read_body(request, GenerateIn, server.config.limits.body_bytes)
        asked = await _understand(body, server)
        if body.stream:
            return await stream(server, asked, admitted, partial(_answer, server, asked))
        generation, ending = await _sample(server, asked, request)
        rows = capture.answered(asked, generation)
        await server.record(rows)
    if ending == "gone":
        return Response(status_code=CLIENT_CLOSED_REQUEST)  # for the metrics; nobody reads it
    if ending == "timeout":
        raise Problem(504, f"the request was aborted after {server.config.limits.timeout_s:g} s")
    if any(row["status"] != "complete" for row in rows):
        raise Problem(503, "the server is stopping; the response was cut off", retry_after=5)
    return json_response(_answer(server, asked, generation, rows))


async def _understand(body: GenerateIn, server: Server) -> capture.Asked:
    """The request as the engine needs it. Raises Problem 400 or 422 naming the field."""
    limits, engine = server.config.limits, server.engine
    if body.n > limits.n:
        raise field_problem(422, "n", f"{body.n} is more than the {limits.n} that are allowed")
    if body.max_tokens is not None and body.max_tokens > limits.max_tokens:
        raise field_problem(422, "max_tokens", f"{body.max_tokens} is more than the {limits.max_tokens} allowed")
    if len(body.metadata) > limits.metadata_entries:
        raise field_problem(422, "metadata", f"{len(body.metadata)} entries, {limits.metadata_entries} are allowed")
    field, prompt, token_ids = await _tokenise(body, server)
    if not token_ids:
        raise field_problem(422, field, "there is no token in it")
    room = engine.max_model_len - len(token_ids)
    if room < 1:
        reason = (
            f"{len(token_ids)} tokens leave no room for a response in the policy's context of "
            f"{engine.max_model_len} tokens"
        )
        raise field_problem(400, field, reason)
    return capture.Asked(
        request_id=uuid7(),
        endpoint="/generate",
        replica=server.config.replica_name,
        tenant=server.config.tenant,
        prompt_token_ids=token_ids,
        prompt=prompt,
        messages=json.dumps([message.model_dump() for message in body.messages], ensure_ascii=False)
        if body.messages
        else None,
        session_id=body.session_id,
        user=body.user,
        metadata=body.metadata,
        sampling=Sampling(
            n=body.n,
            max_tokens=body.max_tokens or limits.default_max_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            min_p=body.min_p,
            stop=body.stops,
            seed=body.seed,
        ),
    )


async def _tokenise(body: GenerateIn, server: Server) -> tuple[str, str | None, list[int]]:
    """Which field the prompt came in, the text that was tokenised (None if token ids came), the token ids."""
    tokenizer = server.engine.tokenizer
    if body.prompt_token_ids is not None:
        vocabulary = server.engine.vocabulary
        for token in body.prompt_token_ids:
            if not 0 <= token < vocabulary:
                raise field_problem(422, "prompt_token_ids", f"{token} is no token id (0 to {vocabulary - 1})")
        return "prompt_token_ids", None, body.prompt_token_ids
    if body.prompt is not None:
        return "prompt", body.prompt, await _encode(tokenizer, body.prompt, special_tokens=True)
    if not tokenizer.chat_template:
        raise field_problem(400, "messages", "the policy's tokenizer has no chat template; send prompt instead")
    messages = [message.model_dump() for message in body.messages or ()]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except (TemplateError, ValueError, TypeError, KeyError) as error:
        raise field_problem(400, "messages", f"the policy's chat template refuses them: {error}") from error
    return "messages", text, await _encode(tokenizer, text, special_tokens=False)


async def _encode(tokenizer: Any, text: str, *, special_tokens: bool) -> list[int]:
    if len(text) > _LONG_PROMPT_CHARACTERS:
        return list(await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=special_tokens))
    return list(tokenizer.encode(text, add_special_tokens=special_tokens))


async def _sample(
    server: Server, asked: capture.Asked, request: Request
) -> tuple[Generation, Literal["done", "gone", "timeout"]]:
    """Run the request in the engine; a client that goes away, or takes too long, ends it there too."""
    engine = server.engine
    work = asyncio.create_task(engine.generate(asked.request_id, asked.prompt_token_ids, asked.sampling))
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({work, gone}, timeout=server.config.limits.timeout_s, return_when="FIRST_COMPLETED")
        if work.done():
            return await work, "done"
        await engine.abort(asked.request_id)
        async with asyncio.timeout(server.config.limits.timeout_s):
            return await work, "gone" if gone.done() else "timeout"
    except EngineRefused as error:
        raise Problem(400, str(error)) from error
    except (EngineError, TimeoutError) as error:
        await server.record(capture.failed(asked))
        raise Problem(503, str(error) or "the engine did not answer", retry_after=5) from error
    finally:
        gone.cancel()
        work.cancel()  # does nothing to one that is done


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _answer(server: Server, asked: capture.Asked, generation: Generation, rows: list[dict[str, Any]]) -> dict[str, Any]:
    made = sum(len(row["response_token_ids"]) for row in rows)
    return {
        "request_id": asked.request_id,
        "model": server.config.model_name,
        "policy_version": generation.policy_version,
        "responses": [
            {
                "response_id": row["response_id"],
                "text": row["response"],
                "finish_reason": row["finish_reason"],
                "policy_spans": row["policy_spans"],
            }
            for row in rows
        ],
        "usage": {
            "prompt_tokens": len(asked.prompt_token_ids),
            "completion_tokens": made,
            "total_tokens": len(asked.prompt_token_ids) + made,
        },
    }
