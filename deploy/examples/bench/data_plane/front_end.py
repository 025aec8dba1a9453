"""The server with an engine that answers at once: what is left is the cost of everything but the engine."""

from __future__ import annotations

import asyncio
from typing import Any

from feedback.config import FeedbackConfig
from serve.app import run
from serve.config import ServeConfig
from serve.generation.request import Generated, Generation, Sampling
from serve.generation.tokenizer import Text
from serve.policies.store import Policy
from serve.recorder import Recorder
from serve.runtime import Server
from serve.vllm.engine import Engine

_LETTER = 65


class InstantEngine(Engine):
    """Answers every request that is not streamed with as many tokens as it asks for, in no time. No vLLM anywhere."""

    async def start(self, policy: Policy) -> None:
        """Read the policy's tokenizer and its context length."""
        from transformers import AutoConfig, AutoTokenizer

        self.version = policy.version
        self._text = Text(AutoTokenizer.from_pretrained(policy.path))
        model = AutoConfig.from_pretrained(policy.path)
        self._context, self._vocabulary = int(model.max_position_embeddings), int(model.vocab_size)

    async def unsupported_reason(self) -> str:
        return "there are no weights"

    @property
    def healthy(self) -> bool:
        return True

    @property
    def max_model_len(self) -> int:
        return self._context

    @property
    def vocabulary(self) -> int:
        return self._vocabulary

    async def generate(
        self, request_id: str, prompt_token_ids: list[int], sampling: Sampling, version: int | None = None
    ) -> Generation:
        """The same letter, ``max_tokens`` times."""
        token_ids = [_LETTER] * sampling.max_tokens
        text = self.text.response(prompt_token_ids, token_ids)
        response = Generated(text, token_ids, [-1.0] * len(token_ids), [(0, self.version)], "length")
        await asyncio.sleep(0)
        return Generation([response] * sampling.n, 0.0, 0.0, 0.0)

    async def abort(self, request_id: str) -> None:
        """There is nothing under way."""


class Forgetful(Recorder):
    """Records nothing."""

    async def record(self, rows: list[dict[str, Any]]) -> None:
        """Count the rows, and drop them."""
        self.count(rows)


def front_end(serve: ServeConfig, feedback: FeedbackConfig, *, capture: bool) -> None:
    """Serve until SIGTERM. Raises what ``serve.app.run`` raises."""
    serve = serve.model_copy(update={"swap": serve.swap.model_copy(update={"probe": False})})
    server = Server(serve, feedback, engine=InstantEngine(serve.engine))
    if not capture:
        server.recorder = Forgetful(server.journal, server.ledger, server.metrics)
    run(serve, feedback, server=server)
