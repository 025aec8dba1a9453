"""The reward component ``judge``: the score that another model, behind an OpenAI-compatible API, gives a response.

The judge gets the rubric with the response's own texts put in, and answers a score, requested as JSON by
``response_format``, or in words alone from a server that does not know it. Scores become 0..1 by the range in the
settings.

What fails, also when it is asked again, is missing for the reason, and a later run asks again, as often as the
settings say; an answer without a usable score is final. Scores are kept in a database, so that a run which is killed
and repeated asks nothing twice; it holds hashes, no text.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any, Final

import httpx
import pyarrow as pa

from feedback.config import PLACEHOLDER, JudgeConfig
from feedback.scoring import retry
from feedback.scoring.sources.judge_cache import JudgeCache
from feedback.scoring.sources.openai_api import ABOUT_THE_QUESTION, CallFailed, NoAnswer, OpenAIApi
from feedback.scoring.sources.rules import Reasons, Values

NAME: Final = "judge"
BATCH_ROWS: Final = 256  # small, so that progress is seen; each batch waits for its slowest answer

_PATH: Final = "chat/completions"
# Begun at the first of its digits only and never given back, so that a search takes time in proportion to the text.
_NUMBER: Final = r"(?:[-+]|(?<!\d))\d++(?:\.\d++)?(?:[eE][-+]?\d++)?"


class Judge:
    """The judge of the responses of one scoring run.

    ``once``: each batch is a run by itself, with the whole deadline, and no later run asks again.
    """

    def __init__(self, config: JudgeConfig, *, once: bool = False) -> None:
        self.config = config
        self.once = once
        self.identity = [config.model, config.rubric, config.low, config.high, config.temperature, config.extra]
        self._cache = JudgeCache(config.cache)
        self._api = OpenAIApi(config)
        self._structured: bool | None = None  # whether the server knows response_format; None: not known yet

    def by_row(self, batch: pa.Table) -> tuple[Values, Reasons]:
        """(scores from 0 to 1, why a row has none). ``tries``, if there, is how many runs have asked about a row."""
        if self.once:
            self._api.begin()
        rows = batch.to_pylist()
        values: Values = [None] * len(rows)
        reasons: Reasons = [None] * len(rows)
        questions: dict[str, list[int]] = {}
        for index, row in enumerate(rows):
            try:
                questions.setdefault(self._question(row), []).append(index)
            except NoAnswer as error:
                reasons[index] = str(error)
        answers = asyncio.run(self._ask_all(list(questions)))
        for text, indexes in questions.items():
            for index in indexes:
                answer = answers[text]
                if isinstance(answer, float):
                    values[index] = (answer - self.config.low) / (self.config.high - self.config.low)
                elif self.once or isinstance(answer, NoAnswer):
                    reasons[index] = str(answer)
                else:
                    reasons[index] = retry.reason((rows[index].get("tries") or 0) + 1, self.config.runs, str(answer))
        return values, reasons

    def _question(self, row: Mapping[str, Any]) -> str:
        return question(self.config, row)

    async def _ask_all(self, questions: list[str]) -> dict[str, float | Exception]:
        """A score, or why there is none, for every question; the cache is read first."""
        keys = {text: self._key(text) for text in questions}
        known = self._cache.known(keys.values())
        answers: dict[str, float | Exception] = {text: known[key] for text, key in keys.items() if key in known}
        asked = [text for text in questions if text not in answers]
        found = await self._api.ask_all(asked, self._attempt, lambda text, score: self._cache.keep(keys[text], score))
        return answers | dict(zip(asked, found, strict=True))

    async def _attempt(self, client: httpx.AsyncClient, text: str) -> float:
        structured = self._structured is not False
        status, headers, body = await self._api.post(client, _PATH, self._request(text, structured))
        if status in ABOUT_THE_QUESTION and structured and self._structured is None:
            # Either the server knows no response_format, or it would refuse the question in any form.
            status, headers, body = await self._api.post(client, _PATH, self._request(text, False))
            if status == 200:
                self._structured = structured = False
        if status != 200:
            raise self._api.refused(status, headers, body)
        score = self._score(body)
        if structured:
            self._structured = True
        return score

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

    def _score(self, body: bytes) -> float:
        try:
            choice = json.loads(body)["choices"][0]
            content = choice["message"]["content"]
        except (ValueError, KeyError, IndexError, TypeError, RecursionError):
            raise CallFailed(f"an answer that is no chat completion{self._api.error_in(body)}") from None
        if not isinstance(content, str):
            raise NoAnswer(f"the judge answered no text (finish_reason {choice.get('finish_reason')})")
        return self._verdict(content)

    def _verdict(self, content: str) -> float:
        score = parse_score(content, self.config.high)
        if score is None:
            raise NoAnswer(f"no score in the judge's answer {self._api.quoted(content)!r}")
        if not self.config.low <= score <= self.config.high:
            raise NoAnswer(f"the judge's score {score:g} is not from {self.config.low:g} to {self.config.high:g}")
        return score

    def _key(self, text: str) -> str:
        return hashlib.sha256(json.dumps([*self.identity, text]).encode()).hexdigest()


def question(config: JudgeConfig, row: Mapping[str, Any]) -> str:
    """The rubric about one response. Raises NoAnswer if the response lacks what the rubric refers to."""

    def text(found: re.Match[str]) -> str:
        name = found[1]
        if name == "response":
            return str(row["response"])
        if name == "prompt":
            return prompt_text(row)
        key = name.removeprefix("metadata.")
        metadata = dict(row["metadata"] or ())
        if key not in metadata:
            raise NoAnswer(f"no {key!r} in the response's metadata, which the rubric refers to")
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
        raise NoAnswer("the prompt has no text, which the rubric refers to")
    try:
        messages = json.loads(row["messages"])
        return "\n".join(f"{message.get('role', '?')}: {message.get('content', '')}" for message in messages)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise NoAnswer(f"the messages can't be read: {type(error).__name__}: {error}") from error
