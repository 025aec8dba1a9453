"""One HTTP request to /v1 while it is at work: what its rows need, what it may use, and how it is ended."""

from __future__ import annotations

import json
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, Literal

from vllm.exceptions import GenerationError
from vllm.sampling_params import SamplingParams

from serve.generation import interaction_rows
from serve.generation.request import Sampling
from serve.http import Problem
from serve.vllm.engine import EngineError

if TYPE_CHECKING:
    from serve.app import Server
    from serve.middleware.principals import Principal
    from serve.vllm.openai_engine import Part

_NEUTRAL: Final = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_tokens": 0}
_CONSTRAINTS: Final = ("logit_bias", "allowed_token_ids", "bad_words", "structured_outputs")

Ending = Literal["gone", "timeout"]


class Interrupted(GenerationError):
    """A request that was ended early, as vLLM's handlers pass it on; ``problem`` is what its client is told."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.detail)
        self.status_code = HTTPStatus(problem.status)
        self.problem = problem


@dataclass(eq=False)
class Exchange:
    """One HTTP request to /v1: what its rows need, and what becomes of its prompts."""

    server: Server
    endpoint: str
    request_id: str
    principal: Principal
    response_id: str  # of choice 0
    session_id: str | None
    user: str | None
    metadata: dict[str, str]
    messages: str | None = None
    has_text: bool = True  # not token ids
    structured_by: str = "structured_outputs"  # the field that may have asked for what can't be made
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    asked_at: float = field(default_factory=time.monotonic)
    parts: list[Part] = field(default_factory=list)
    reserved: int = 0  # tokens, of the principal's limit
    ending: Ending | None = None
    error: Exception | None = None
    """What went wrong with one of its prompts; the handlers put it into a stream's last event."""

    async def reserve(self, tokens: int) -> None:
        """Pay for the prompts' tokens and all that the responses may have. Raises Problem 429, 400 or 503."""
        await self.server.limiter.take_tokens(self.principal, tokens)
        self.reserved = tokens

    def settle(self) -> None:
        """Get back what was not used."""
        if self.reserved and self.principal.tokens_per_minute is not None:
            used = sum(part.used() for part in self.parts)
            self.server.limiter.give_back(self.principal, self.reserved - used)

    def stop(self, ending: Ending) -> None:
        """End it in the engine. Its parts then end with what there is."""
        if self.ending is None:
            self.ending = ending
            for part in self.parts:
                part.abort_later()

    def give_up(self) -> None:
        """The engine does not even end what was aborted: end it here."""
        for part in self.parts:
            part.put(EngineError("the engine did not answer"))

    def leave(self) -> None:
        """Nobody reads any more."""
        for part in self.parts:
            part.leave()

    def cut_off(self) -> Interrupted:
        """What the client of a request that was aborted is told."""
        if self.ending == "timeout":
            limit = self.server.config.limits.timeout_s
            return Interrupted(Problem(504, f"the request was aborted after {limit:g} s"))
        if self.ending == "gone":
            return Interrupted(Problem(503, "the client has gone"))
        return Interrupted(Problem(503, "the server is stopping; the response was cut off", retry_after=5))


current: ContextVar[Exchange] = ContextVar("current")
"""The exchange that the running task works on; the handlers know nothing of it."""


def asked_of(exchange: Exchange, prompt: dict[str, Any], params: SamplingParams) -> interaction_rows.Asked:
    """What the rows of a prompt say of how it was asked."""
    return interaction_rows.Asked(
        request_id=exchange.request_id,
        endpoint=exchange.endpoint,
        replica=exchange.server.config.replica_name,
        trials=exchange.server.trials,
        tenant=exchange.principal.tenant,
        prompt_token_ids=prompt["prompt_token_ids"],
        prompt=prompt.get("prompt") if exchange.has_text else None,
        messages=exchange.messages,
        session_id=exchange.session_id,
        user=exchange.user,
        metadata=exchange.metadata,
        created_at=exchange.created_at,
        asked_at=exchange.asked_at,
        sampling=Sampling(
            n=params.n,
            max_tokens=params.max_tokens or 0,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=max(0, params.top_k),
            min_p=params.min_p,
            stop=tuple(params.stop or ()),
            stop_token_ids=tuple(params.stop_token_ids or ()),
            seed=params.seed,
            other=_other(params),
        ),
    )


def _other(params: SamplingParams) -> str | None:
    """What else shaped the distribution that was sampled from, as JSON."""
    other = {name: value for name, neutral in _NEUTRAL.items() if (value := getattr(params, name)) != neutral}
    other |= {name: value for name in _CONSTRAINTS if (value := getattr(params, name))}
    if not other:
        return None
    return json.dumps(other, sort_keys=True, default=_plain)


def _plain(value: Any) -> Any:
    """A dataclass of vLLM's, without what nobody set."""
    return {name: part for name, part in vars(value).items() if part and not name.startswith("_")}
