"""The reward component ``judge``: the score that another model, behind an OpenAI-compatible API, gives a response.

The judge gets the rubric with the response's own texts put in, and answers a score, requested as JSON by
``response_format``, or in words alone from a server that does not know it. Scores become 0..1 by the range in the
settings.

A question that fails is asked again after a wait that doubles, has jitter, and honours ``Retry-After``. What still
fails is missing for the reason, and a later run asks again, as often as the settings say; an answer without a usable
score is final. A status that says that the settings are wrong (401, 404 …) ends the questions of this run. Scores are
kept in a database, so that a run which is killed and repeated asks nothing twice; it holds hashes, no text.
"""

from __future__ import annotations

import asyncio
import email.utils
import hashlib
import json
import math
import random
import re
import time
from collections.abc import Mapping
from typing import Any, Final

import httpx
import pyarrow as pa

from feedback.config import PLACEHOLDER, JudgeConfig
from feedback.scoring import retry
from feedback.scoring.sources.judge_cache import JudgeCache
from feedback.scoring.sources.rules import Reasons, Values

NAME: Final = "judge"
BATCH_ROWS: Final = 256  # small, so that progress is seen; each batch waits for its slowest answer

_MAY_PASS: Final = (408, 409, 425, 429)
_ABOUT_THE_QUESTION: Final = (400, 413, 422)
_MOST_BYTES: Final = 4 << 20
_MOST_QUOTED: Final = 200
# Begun at the first of its digits only and never given back, so that a search takes time in proportion to the text.
_NUMBER: Final = r"(?:[-+]|(?<!\d))\d++(?:\.\d++)?(?:[eE][-+]?\d++)?"


class NoScoreError(Exception):
    """There is no score, and asking again would not change it."""


class _FailedError(Exception):
    """There is no score for a reason that may pass. ``again``: whether to ask at once; ``wait`` is in seconds."""

    def __init__(self, why: str, *, again: bool = True, wait: float = 0.0) -> None:
        super().__init__(why)
        self.again = again
        self.wait = wait


class Judge:
    """The judge of the responses of one scoring run.

    ``once``: each batch is a run by itself, with the whole deadline, and no later run asks again.
    """

    def __init__(self, config: JudgeConfig, *, once: bool = False) -> None:
        self.config = config
        self.once = once
        self.identity = [config.model, config.rubric, config.low, config.high, config.temperature, config.extra]
        self._cache = JudgeCache(config.cache)
        self._structured: bool | None = None  # whether the server knows response_format; None: not known yet
        self._deadline: float | None = None
        self._not_before = 0.0  # the server demands a pause until then
        self._halted: str | None = None

    def by_row(self, batch: pa.Table) -> tuple[Values, Reasons]:
        """(scores from 0 to 1, why a row has none). ``tries``, if there, is how many runs have asked about a row."""
        if self.once:
            self._deadline = self._halted = None
        rows = batch.to_pylist()
        values: Values = [None] * len(rows)
        reasons: Reasons = [None] * len(rows)
        questions: dict[str, list[int]] = {}
        for index, row in enumerate(rows):
            try:
                questions.setdefault(self._question(row), []).append(index)
            except NoScoreError as error:
                reasons[index] = str(error)
        answers = asyncio.run(self._ask_all(list(questions)))
        for text, indexes in questions.items():
            for index in indexes:
                answer = answers[text]
                if isinstance(answer, float):
                    values[index] = (answer - self.config.low) / (self.config.high - self.config.low)
                elif self.once or isinstance(answer, NoScoreError):
                    reasons[index] = str(answer)
                else:
                    reasons[index] = retry.reason((rows[index].get("tries") or 0) + 1, self.config.runs, str(answer))
        return values, reasons

    def _question(self, row: Mapping[str, Any]) -> str:
        return question(self.config, row)

    async def _ask_all(self, questions: list[str]) -> dict[str, float | Exception]:
        """A score, or why there is none, for every question; the cache is read first."""
        answers: dict[str, float | Exception] = {}
        keys = {text: self._key(text) for text in questions}
        known = self._cache.known(keys.values())
        open_questions = iter([text for text in questions if keys[text] not in known])
        answers.update({text: known[key] for text, key in keys.items() if key in known})
        if self._deadline is None:
            self._deadline = time.monotonic() + self.config.deadline_s

        async def work(client: httpx.AsyncClient) -> None:
            for text in open_questions:
                try:
                    answers[text] = score = await self._ask(client, text)
                    self._cache.keep(keys[text], score)
                except (NoScoreError, _FailedError) as error:
                    error.args = (self._masked(str(error)),)
                    answers[text] = error

        headers = {}
        if self.config.api_key is not None:
            headers["Authorization"] = f"Bearer {self.config.api_key.get_secret_value()}"
        limits = httpx.Limits(max_connections=self.config.concurrency)
        try:
            async with (
                httpx.AsyncClient(headers=headers, timeout=None, limits=limits) as client,
                asyncio.TaskGroup() as group,
            ):
                for _ in range(min(self.config.concurrency, len(questions) - len(answers))):
                    group.create_task(work(client))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return answers

    async def _ask(self, client: httpx.AsyncClient, text: str) -> float:
        """The score, after as many attempts as it takes and the settings allow."""
        attempts = 0
        while True:
            try:
                return await self._attempt(client, text)
            except _FailedError as error:
                attempts += 1
                wait = max(error.wait, self._backoff(attempts))
                if not error.again:
                    raise
                if attempts >= self.config.attempts:
                    raise _FailedError(f"{error} ({attempts} attempts)", again=False) from error
                if wait > self._left():
                    raise _FailedError(f"{error} (no time for another attempt)", again=False) from error
            await asyncio.sleep(wait)

    async def _attempt(self, client: httpx.AsyncClient, text: str) -> float:
        await asyncio.sleep(max(0.0, min(self._not_before - time.monotonic(), self._left())))
        if self._halted is not None:
            raise _FailedError(f"not asked: {self._halted}", again=False)
        if self._left() <= 0:
            raise _FailedError(f"not asked within deadline_s={self.config.deadline_s:g}", again=False)
        structured = self._structured is not False
        status, headers, body = await self._post(client, text, structured=structured)
        if status in _ABOUT_THE_QUESTION and structured and self._structured is None:
            # Either the server knows no response_format, or it would refuse the question in any form.
            status, headers, body = await self._post(client, text, structured=False)
            if status == 200:
                self._structured = structured = False
        if status != 200:
            raise self._refused(status, headers, body)
        score = self._score(body)
        if structured:
            self._structured = True
        return score

    async def _post(
        self, client: httpx.AsyncClient, text: str, *, structured: bool
    ) -> tuple[int, httpx.Headers, bytes]:
        timeout = min(self.config.timeout_s, max(self._left(), 0.001))
        url = f"{self.config.url}/chat/completions"
        try:
            async with (
                asyncio.timeout(timeout),
                client.stream("POST", url, json=self._request(text, structured)) as answer,
            ):
                body = b""
                async for piece in answer.aiter_bytes():
                    body += piece
                    if len(body) > _MOST_BYTES:
                        raise _FailedError(f"the answer is longer than {_MOST_BYTES} bytes")
                return answer.status_code, answer.headers, body
        except TimeoutError:
            whole = timeout >= self.config.timeout_s
            limit = f"{timeout:g} s" if whole else f"deadline_s={self.config.deadline_s:g}"
            raise _FailedError(f"no answer within {limit}") from None
        except httpx.HTTPError as error:
            raise _FailedError(f"{type(error).__name__}: {error}") from error

    def _request(self, text: str, structured: bool) -> dict[str, Any]:
        instruction, properties = self._form()
        request: dict[str, Any] = {
            "model": self.config.model,
            "messages": [{"role": "user", "content": f"{text}\n\n{instruction}"}],
            "temperature": self.config.temperature,
            "max_tokens": self.config.max_tokens,
        }
        if structured:
            schema = {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": False,
            }
            form = {"name": "verdict", "strict": True, "schema": schema}
            request["response_format"] = {"type": "json_schema", "json_schema": form}
        request |= self.config.extra
        return {key: value for key, value in request.items() if value is not None}

    def _form(self) -> tuple[str, dict[str, Any]]:
        """What the answer is to be: in words, and as properties of a JSON Schema."""
        low, high = self.config.low, self.config.high
        whole = low.is_integer() and high.is_integer()
        low, high = (int(low), int(high)) if whole else (low, high)
        score = {"type": "integer" if whole else "number", "minimum": low, "maximum": high}
        return f'Give a score from {low} (worst) to {high} (best), as JSON: {{"score": <number>}}', {"score": score}

    def _masked(self, text: str) -> str:
        """A text for a reason, which files and logs keep, with the key masked: a server or a library may repeat it."""
        return text if self.config.api_key is None else text.replace(self.config.api_key.get_secret_value(), "***")

    def _quoted(self, text: str) -> str:
        """The beginning of what a server said. Half a key would not be found, so it is masked first."""
        return self._masked(text)[:_MOST_QUOTED]

    def _error_in(self, body: bytes) -> str:
        """The message in an error's body."""
        text = body.decode(errors="replace")
        try:
            content = json.loads(text)
            error = content.get("error", content)
            text = error if isinstance(error, str) else str(error.get("message", text))
        except (ValueError, AttributeError, RecursionError):
            pass
        text = self._quoted(" ".join(text.split()))
        return f": {text}" if text else ""

    def _refused(self, status: int, headers: httpx.Headers, body: bytes) -> Exception:
        why = f"HTTP {status}{self._error_in(body)}"
        if status in _MAY_PASS or status >= 500:
            wait = min(_retry_after(headers), self.config.max_backoff_s)
            self._not_before = max(self._not_before, time.monotonic() + wait)
            return _FailedError(why, wait=wait)
        if status not in _ABOUT_THE_QUESTION:
            self._halted = why
        return _FailedError(why, again=False)

    def _score(self, body: bytes) -> float:
        try:
            choice = json.loads(body)["choices"][0]
            content = choice["message"]["content"]
        except (ValueError, KeyError, IndexError, TypeError, RecursionError):
            raise _FailedError(f"an answer that is no chat completion{self._error_in(body)}") from None
        if not isinstance(content, str):
            raise NoScoreError(f"the judge answered no text (finish_reason {choice.get('finish_reason')})")
        return self._verdict(content)

    def _verdict(self, content: str) -> float:
        score = parse_score(content, self.config.high)
        if score is None:
            raise NoScoreError(f"no score in the judge's answer {self._quoted(content)!r}")
        if not self.config.low <= score <= self.config.high:
            raise NoScoreError(f"the judge's score {score:g} is not from {self.config.low:g} to {self.config.high:g}")
        return score

    def _key(self, text: str) -> str:
        return hashlib.sha256(json.dumps([*self.identity, text]).encode()).hexdigest()

    def _left(self) -> float:
        assert self._deadline is not None
        return self._deadline - time.monotonic()

    def _backoff(self, attempts: int) -> float:
        longest = min(self.config.backoff_s * 2 ** min(attempts - 1, 60), self.config.max_backoff_s)
        return longest * random.uniform(0.5, 1.0)


def question(config: JudgeConfig, row: Mapping[str, Any]) -> str:
    """The rubric about one response. Raises NoScoreError if the response lacks what the rubric refers to."""

    def text(found: re.Match[str]) -> str:
        name = found[1]
        if name == "response":
            return str(row["response"])
        if name == "prompt":
            return prompt_text(row)
        key = name.removeprefix("metadata.")
        metadata = dict(row["metadata"] or ())
        if key not in metadata:
            raise NoScoreError(f"no {key!r} in the response's metadata, which the rubric refers to")
        return str(metadata[key])

    return PLACEHOLDER.sub(text, config.rubric)  # in one pass, so that braces in the texts stand for themselves


def parse_score(content: str, high: float) -> float | None:
    """The score in a judge's answer: that of its last JSON object, else a number after "score", else the only number.

    ``high`` is for scores that are written as "7/10" or "7 out of 10". None if there is no such number.
    """
    for text in reversed(re.findall(r"\{[^{}]*\}", content)):
        try:
            score = json.loads(text).get("score")
        except (ValueError, RecursionError):
            continue
        if isinstance(score, int | float) and not isinstance(score, bool):
            try:
                return float(score)
            except OverflowError:
                return math.inf if score > 0 else -math.inf
    content = re.sub(rf"({_NUMBER})\s*+(?:/|out of)\s*{high:g}(?![\d.]*\d)", r"\1", content)
    named = re.findall(rf"score\W{{0,10}}(?:is|of|:|=)?\W{{0,10}}({_NUMBER})", content, re.IGNORECASE)
    found = named[-1:] or re.findall(_NUMBER, content)
    return float(found[0]) if len(found) == 1 else None


def prompt_text(row: Mapping[str, Any]) -> str:
    if row["prompt"] is not None and row["messages"] is None:
        return str(row["prompt"])
    if row["messages"] is None:
        raise NoScoreError("the prompt has no text, which the rubric refers to")
    try:
        messages = json.loads(row["messages"])
        return "\n".join(f"{message.get('role', '?')}: {message.get('content', '')}" for message in messages)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise NoScoreError(f"the messages can't be read: {type(error).__name__}: {error}") from error


def _retry_after(headers: httpx.Headers) -> float:
    """Seconds that the server wants, 0 if it does not or can't be understood (RFC 9110, section 10.2.3)."""
    text = headers.get("Retry-After", "")
    if re.fullmatch(r"\d{1,9}(\.\d+)?", text):
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (TypeError, ValueError, IndexError, OverflowError, OSError):
        return 0.0
