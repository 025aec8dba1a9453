"""What a teacher, a larger policy behind an OpenAI-compatible API, gives the tokens that were sampled.

The teacher is asked for the logprobs of a prompt and its response, as token ids: ``/completions`` with ``echo`` and
``logprobs``, as vLLM's server answers it. Both must have one tokenizer; where the text of the teacher's tokens is not
that of the response, they have not.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final

import httpx
import pyarrow as pa

from feedback.config import ApiConfig
from feedback.scoring.scorer import Source
from feedback.scoring.sources.openai_api import CallFailed, NoAnswer, OpenAIApi
from feedback.scoring.sources.rules import PerToken, Reasons, Values

NAME: Final = "teacher"
_IMPOSSIBLE: Final = -9999.0
"""What vLLM says in place of minus infinity: a logprob that no advantage can be made of."""
_UNREAD: Final = "\ufffd"
"""In the text of a token that is a part of a character."""


class Teacher:
    """The reward of a response is the sum of its tokens' logprobs (nats) under the teacher."""

    def __init__(self, config: ApiConfig, timeout_s: float) -> None:
        """``timeout_s``: for all questions of a call, at most."""
        self.config = config.model_copy(update={"deadline_s": min(config.deadline_s, timeout_s)})
        self._api = OpenAIApi(self.config, longest=256 << 20)

    @property
    def source(self) -> Source:
        """It as the source of a reward."""
        return Source(NAME, 1.0, [NAME, self.config.url, self.config.model], by_row=self.by_row)

    def by_row(self, rows: pa.Table) -> tuple[Values, Reasons]:
        """(rewards with those of each token, why a response has none). Columns as ``train.data.samples.table_of``."""
        self._api.begin()
        answers = asyncio.run(self._api.ask_all(rows.to_pylist(), self._ask))
        values: Values = [answer if isinstance(answer, PerToken) else None for answer in answers]
        return values, [None if isinstance(answer, PerToken) else str(answer) for answer in answers]

    async def _ask(self, client: httpx.AsyncClient, row: dict[str, Any]) -> PerToken:
        prompt, response = row["prompt_token_ids"], row["response_token_ids"]
        if not response:
            raise NoAnswer("the response has no tokens")
        status, headers, body = await self._api.post(
            client,
            "completions",
            {
                "model": self.config.model,
                "prompt": [*prompt, *response],
                "max_tokens": 1,  # what it adds is not read
                "echo": True,
                "logprobs": 1,
                "temperature": 0,
            },
        )
        if status != 200:
            raise self._api.refused(status, headers, body)
        try:
            found = json.loads(body)["choices"][0]["logprobs"]
            log_probs, tokens = (found[name][len(prompt) :][: len(response)] for name in ("token_logprobs", "tokens"))
        except (ValueError, KeyError, IndexError, TypeError, RecursionError):
            raise CallFailed(f"an answer without logprobs{self._api.error_in(body)}") from None
        if len(log_probs) != len(response) or len(tokens) != len(response):
            raise NoAnswer(f"logprobs of {len(log_probs)} tokens for {len(response)}: the API does not echo token ids")
        if not all(isinstance(value, int | float) and _IMPOSSIBLE < value <= 0 for value in log_probs):
            raise NoAnswer("logprobs that are none")
        self._require_same_text(tokens, row["response"])
        return PerToken.of(log_probs, len(response))

    def _require_same_text(self, tokens: list[str], response: str) -> None:
        """The response is what the teacher's tokens read, but for some that its text does not have: special ones."""
        own, told = _without_spaces(response), [_without_spaces(str(token)) for token in tokens]
        if _UNREAD in own or any(_UNREAD in token or token.startswith(("token_id:", "bytes:")) for token in told):
            return
        read = 0
        for token in told:
            read += len(token) if own.startswith(token, read) else 0
        if read < len(own):
            raise NoAnswer(
                f"the response's tokens are {self._api.quoted(''.join(told))!r} to the teacher, and {own[:200]!r} to "
                "the policy: they have different tokenizers"
            )


def _without_spaces(text: str) -> str:
    """Tokenizers differ in whether a text's first token shows its space."""
    return "".join(text.split())
