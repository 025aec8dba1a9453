"""One HTTP request to /v1: what its rows say of it, and what vLLM's handlers need not know."""

from __future__ import annotations

import json
from contextvars import ContextVar
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, Final

from vllm.exceptions import GenerationError
from vllm.sampling_params import SamplingParams

from serve.generation.request import GenerationRequest, Sampling
from serve.http import Problem
from serve.recorded_request import ActiveRequest

_NEUTRAL: Final = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_tokens": 0}
_CONSTRAINTS: Final = ("logit_bias", "allowed_token_ids", "bad_words", "structured_outputs")


class Interrupted(GenerationError):
    """A problem, as vLLM's handlers pass it on."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.detail)
        self.status_code = HTTPStatus(problem.status)
        self.problem = problem


@dataclass(eq=False)
class OpenAIRequest:
    """One HTTP request to /v1. ``row_request``: what its rows say of it, still without a prompt.

    ``response_id``: of choice 0; ``has_text``: its prompts are no token ids; ``structured_by``: the field that may ask
    for structured output.
    """

    active: ActiveRequest
    row_request: GenerationRequest
    response_id: str
    has_text: bool
    structured_by: str
    error: Exception | None = None
    """What went wrong with one of its prompts; the handlers put its text into a stream's last event."""

    def for_prompt(self, key: str, prompt: dict[str, Any], params: SamplingParams) -> GenerationRequest:
        """What the rows of a prompt say of its request. ``key``: vLLM's id of it."""
        return replace(
            self.row_request,
            key=key,
            prompt_token_ids=prompt["prompt_token_ids"],
            prompt=prompt.get("prompt") if self.has_text else None,
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

    def response_ids(self, prompt: int, n: int) -> list[str]:
        """The ids of the n responses to the prompt of this number, from 0."""
        first = prompt * n
        return [f"{self.response_id}:{index}" if index else self.response_id for index in range(first, first + n)]


current: ContextVar[OpenAIRequest] = ContextVar("current")
"""The request that the running task works on; the handlers know nothing of it."""


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
