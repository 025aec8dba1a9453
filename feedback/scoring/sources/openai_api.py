"""Questions to an OpenAI-compatible API, many at once, each asked again while it fails.

A question that fails is asked again after a wait that doubles, has jitter, and honours ``Retry-After``. A status that
says that the settings are wrong (401, 404 …) ends the questions until the next ``begin``.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import random
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

import httpx

from feedback.config import ApiConfig

_MAY_PASS: Final = (408, 409, 425, 429)
ABOUT_THE_QUESTION: Final = (400, 413, 422)
"""Statuses by which a server refuses a question, and not all of them."""
_MOST_QUOTED: Final = 200

Question = TypeVar("Question")
Answer = TypeVar("Answer")


class NoAnswer(Exception):
    """There is no answer, and asking again would not change it."""


class CallFailed(Exception):
    """There is no answer for a reason that may pass. ``again``: whether to ask at once; ``wait`` is in seconds."""

    def __init__(self, why: str, *, again: bool = True, wait: float = 0.0) -> None:
        super().__init__(why)
        self.again = again
        self.wait = wait


class OpenAIApi:
    """``longest``: bytes of an answer; of more, it has failed."""

    def __init__(self, config: ApiConfig, *, longest: int = 4 << 20) -> None:
        self.config, self._longest = config, longest
        self._deadline: float | None = None
        self._not_before = 0.0  # the server demands a pause until then
        self._halted: str | None = None

    def begin(self) -> None:
        """Give the questions from here on the whole of ``deadline_s``, and ask again what was refused for good."""
        self._deadline, self._halted = time.monotonic() + self.config.deadline_s, None

    async def ask_all(
        self,
        questions: Sequence[Question],
        ask: Callable[[httpx.AsyncClient, Question], Awaitable[Answer]],
        keep: Callable[[Question, Answer], None] = lambda question, answer: None,
    ) -> list[Answer | NoAnswer | CallFailed]:
        """What ``ask`` makes of each question, or why there is nothing, with the key masked.

        Args:
            ask: one attempt, by ``post``. Raises NoAnswer, or CallFailed.
            keep: called with each answer at once.
        """
        if self._deadline is None:
            self.begin()
        answers: dict[int, Answer | NoAnswer | CallFailed] = {}
        waiting = iter(enumerate(questions))

        async def work(client: httpx.AsyncClient) -> None:
            for number, question in waiting:
                try:
                    answers[number] = answer = await self._ask(client, question, ask)
                    keep(question, answer)
                except (NoAnswer, CallFailed) as error:
                    error.args = (self.masked(str(error)),)
                    answers[number] = error

        headers = {}
        if self.config.api_key is not None:
            headers["Authorization"] = f"Bearer {self.config.api_key.get_secret_value()}"
        limits = httpx.Limits(max_connections=self.config.concurrency)
        try:
            async with (
                httpx.AsyncClient(headers=headers, timeout=None, limits=limits) as client,
                asyncio.TaskGroup() as group,
            ):
                for _ in range(min(self.config.concurrency, len(questions))):
                    group.create_task(work(client))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [answers[number] for number in range(len(questions))]

    async def post(
        self, client: httpx.AsyncClient, path: str, body: dict[str, Any]
    ) -> tuple[int, httpx.Headers, bytes]:
        """(status, headers, body) of one request. Raises CallFailed."""
        timeout = min(self.config.timeout_s, max(self._left(), 0.001))
        try:
            async with (
                asyncio.timeout(timeout),
                client.stream("POST", f"{self.config.url}/{path}", json=body) as answer,
            ):
                content = b""
                async for piece in answer.aiter_bytes():
                    content += piece
                    if len(content) > self._longest:
                        raise CallFailed(f"the answer is longer than {self._longest} bytes")
                return answer.status_code, answer.headers, content
        except TimeoutError:
            whole = timeout >= self.config.timeout_s
            limit = f"{timeout:g} s" if whole else f"deadline_s={self.config.deadline_s:g}"
            raise CallFailed(f"no answer within {limit}") from None
        except httpx.HTTPError as error:
            raise CallFailed(f"{type(error).__name__}: {error}") from error

    def refused(self, status: int, headers: httpx.Headers, body: bytes) -> CallFailed:
        """Why a status that is not 200 is no answer."""
        why = f"HTTP {status}{self.error_in(body)}"
        if status in _MAY_PASS or status >= 500:
            wait = min(_retry_after(headers), self.config.max_backoff_s)
            self._not_before = max(self._not_before, time.monotonic() + wait)
            return CallFailed(why, wait=wait)
        if status not in ABOUT_THE_QUESTION:
            self._halted = why
        return CallFailed(why, again=False)

    def error_in(self, body: bytes) -> str:
        """The message in an error's body, after a colon."""
        text = body.decode(errors="replace")
        try:
            content = json.loads(text)
            error = content.get("error", content)
            text = error if isinstance(error, str) else str(error.get("message", text))
        except (ValueError, AttributeError, RecursionError):
            pass
        text = self.quoted(" ".join(text.split()))
        return f": {text}" if text else ""

    def masked(self, text: str) -> str:
        """A text for a reason, which files and logs keep, with the key masked: a server or a library may repeat it."""
        return text if self.config.api_key is None else text.replace(self.config.api_key.get_secret_value(), "***")

    def quoted(self, text: str) -> str:
        """The beginning of what a server said. Half a key would not be found, so it is masked first."""
        return self.masked(text)[:_MOST_QUOTED]

    async def _ask(
        self,
        client: httpx.AsyncClient,
        question: Question,
        ask: Callable[[httpx.AsyncClient, Question], Awaitable[Answer]],
    ) -> Answer:
        """The answer, after as many attempts as it takes and the settings allow."""
        attempts = 0
        while True:
            try:
                await self._until_allowed()
                return await ask(client, question)
            except CallFailed as error:
                attempts += 1
                wait = max(error.wait, self._backoff(attempts))
                if not error.again:
                    raise
                if attempts >= self.config.attempts:
                    raise CallFailed(f"{error} ({attempts} attempts)", again=False) from error
                if wait > self._left():
                    raise CallFailed(f"{error} (no time for another attempt)", again=False) from error
            await asyncio.sleep(wait)

    async def _until_allowed(self) -> None:
        await asyncio.sleep(max(0.0, min(self._not_before - time.monotonic(), self._left())))
        if self._halted is not None:
            raise CallFailed(f"not asked: {self._halted}", again=False)
        if self._left() <= 0:
            raise CallFailed(f"not asked within deadline_s={self.config.deadline_s:g}", again=False)

    def _left(self) -> float:
        assert self._deadline is not None
        return self._deadline - time.monotonic()

    def _backoff(self, attempts: int) -> float:
        longest = min(self.config.backoff_s * 2 ** min(attempts - 1, 60), self.config.max_backoff_s)
        return longest * random.uniform(0.5, 1.0)


def _retry_after(headers: httpx.Headers) -> float:
    """Seconds that the server wants, 0 if it does not or can't be understood (RFC 9110, section 10.2.3)."""
    text = headers.get("Retry-After", "")
    if re.fullmatch(r"\d{1,9}(\.\d+)?", text):
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (TypeError, ValueError, IndexError, OverflowError, OSError):
        return 0.0
