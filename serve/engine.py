"""What serving needs of an engine: ``serve.vllm.engine`` is the one, benches use one that answers at once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from serve.generation.request import Generation, GenerationProgress, Sampling


class EngineError(RuntimeError):
    """The engine can't do what was requested; the text says why."""


class EngineDead(EngineError):
    """The engine's process has died. Nothing but a restart helps."""


class EngineRefused(EngineError):
    """vLLM takes the request for a bad one."""


class SamplingEngine(Protocol):
    """What the serving path calls; ``serve.vllm.engine.Engine`` says what each does."""

    stats: dict[str, float]

    async def generate(
        self, request_id: str, prompt_token_ids: list[int], sampling: Sampling, version: int | None = None
    ) -> Generation: ...

    def stream(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling: Sampling,
        underway: GenerationProgress,
        version: int | None = None,
    ) -> AsyncIterator[list[tuple[int, str]]]: ...

    async def abort(self, request_id: str) -> None: ...
