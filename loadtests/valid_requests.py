"""Requests that the docs allow: a draw from all combinations of the fields of the three generating routes.

A few combinations are drawn that the docs say are refused; ``refused`` has the fields that the refusal may name.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from loadtests.tiny_model import CONTEXT

Body = dict[str, Any]
Draw = Callable[[random.Random], Any]

GENERATE: Final = "/generate"
COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"

VOCABULARY: Final = 258
EOS: Final = 1
DEFAULT_MAX_TOKENS: Final = 256
MAX_SEED: Final = 2**63 - 1 - 4096

_TEXTS: Final = ("the mill", "a", "é", "🙂 x", "\n\t", "\x00", "<eos>", "{{ 7*7 }}", "ا ب", '"\\', "e\u0301", "日本")
_STOPS: Final = ("a", "e", " ", "x", "\n", "é", "zz", "ab", "\x00", "<eos>", "�", "qq\n")


@dataclass(frozen=True)
class Case:
    """One request."""

    path: str
    body: Body

    def __str__(self) -> str:
        return f"{self.path} {json.dumps(self.body)}"

    @property
    def n(self) -> int:
        """Responses to each prompt."""
        n: int = self.body.get("n") or 1
        return n

    @property
    def prompts(self) -> int:
        """How many there are."""
        prompt = self.body.get("prompt")
        return len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1

    @property
    def max_tokens(self) -> int:
        """Of a response, if the context has room."""
        most: int = (
            self.body.get("max_completion_tokens")
            or self.body.get("max_tokens")
            or min(DEFAULT_MAX_TOKENS, CONTEXT if self.path != GENERATE else DEFAULT_MAX_TOKENS)
        )
        return most

    @property
    def stops(self) -> list[str]:
        """The stop texts."""
        stop = self.body.get("stop")
        return [stop] if isinstance(stop, str) else list(stop or ())

    @property
    def temperature(self) -> float:
        """1 if none is given."""
        given = self.body.get("temperature")
        return 1.0 if given is None else given

    @property
    def room(self) -> int:
        """For a response, after the longest prompt of token ids; the context, if there is none."""
        prompt = self.body.get("prompt_token_ids", self.body.get("prompt"))
        prompts = prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], list) else [prompt]
        sizes = [len(ids) for ids in prompts if isinstance(ids, list) and ids and isinstance(ids[0], int)]
        longest = max(sizes, default=0)
        if kept := self.body.get("truncate_prompt_tokens", 0):
            longest = min(longest, kept if kept > 0 else CONTEXT - 1)
        return CONTEXT - longest

    @property
    def repeats(self) -> bool:
        """Whether the same request is to have the same answer."""
        return self.temperature == 0 or self.body.get("seed", -1) != -1

    def but(self, **fields: Any) -> Case:
        """The same with other fields."""
        return Case(self.path, self.body | fields)


def _one(*values: Any) -> Draw:
    return lambda chance: chance.choice(values)


def _whole(low: int, high: int) -> Draw:
    return lambda chance: chance.randint(low, high)


def _number(low: float, high: float) -> Draw:
    return lambda chance: chance.choice((low, high, round(chance.uniform(low, high), 3), chance.uniform(low, high)))


def _flag(chance: random.Random) -> bool:
    return chance.random() < 0.6


def _token(chance: random.Random) -> int:
    return chance.randrange(VOCABULARY)


def _tokens(low: int, high: int) -> Draw:
    return lambda chance: [_token(chance) for _ in range(chance.randint(low, high))]


def _text(chance: random.Random) -> str:
    if chance.random() < 0.5:
        return chance.choice(_TEXTS)
    return "".join(chance.choices(string.printable, k=chance.choice((1, 3, 20, 60))))


def _label(chance: random.Random) -> str:
    return chance.choice(("u", "mia", "é" * 200, "x" * 200, " ", "'; --", _text(chance)))


def _labels(chance: random.Random) -> dict[str, str]:
    return {_label(chance): _text(chance) for _ in range(chance.choice((0, 1, 3, 60)))}


def _stop(most: int) -> Draw:
    def draw(chance: random.Random) -> Any:
        if chance.random() < 0.4:
            return chance.choice(_STOPS)
        return [chance.choice(_STOPS) for _ in range(chance.choice((0, 1, 2, most)))]

    return draw


def _bias(chance: random.Random) -> dict[str, float]:
    return {
        str(_token(chance)): chance.choice((-100, 100, 0, 1.5, chance.uniform(-100, 100)))
        for _ in range(chance.choice((0, 1, 5)))
    }


_SCHEMA: Final = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def _max_tokens(chance: random.Random) -> int:
    return chance.choice((1, 2, 5, 12, 12, 30, 300, 4096))


_SAMPLING: Final[dict[str, Draw]] = {
    "n": _one(1, 2, 3, 16),
    "max_tokens": _max_tokens,
    "temperature": _one(0, 0, 0.01, 0.3, 0.7, 1, 1.0, 1.5, 2),
    "top_p": _one(1, 1.0, 0.9, 0.5, 1e-6, 0.999),
    "top_k": _one(0, 1, 2, 50, 1000, 2**31 - 1),
    "min_p": _one(0, 0.05, 0.5, 1),
    "seed": lambda chance: chance.choice((-1, 0, 1, 7, 2**31, 2**32 + 5, MAX_SEED, chance.randrange(MAX_SEED))),
    "user": _label,
    "session_id": _label,
    "metadata": _labels,
    "return_token_ids": _flag,
}

_GENERATE: Final[dict[str, Draw]] = _SAMPLING | {
    "stop": _stop(16),
    "stop_token_ids": _tokens(0, 16),
    "logprobs": _flag,
}

_V1: Final[dict[str, Draw]] = _SAMPLING | {
    "model": _one("millrace"),
    "stop": _stop(4),
    "stop_token_ids": _tokens(0, 20),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "repetition_penalty": _one(0.01, 0.5, 1, 1.2, 100),
    "logit_bias": _bias,
    "include_stop_str_in_output": _flag,
    "ignore_eos": _flag,
    "min_tokens": _one(0, 1, 4, 10),
    "allowed_token_ids": _tokens(1, 40),
    "bad_words": lambda chance: [chance.choice(_STOPS[:5]) for _ in range(chance.choice((0, 1, 3)))],
    "prompt_logprobs": _one(0, 1, 5, 20),
    "response_format": _one(
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}},
    ),
    "structured_outputs": _one({"choice": ["yes", "no"]}, {"regex": "[a-c]{1,5}"}, {"json": _SCHEMA}),
    "skip_special_tokens": _flag,
    "spaces_between_special_tokens": _flag,
    "truncate_prompt_tokens": _one(-1, 1, 3, 200),
    "truncation_side": _one("left", "right"),
    "add_special_tokens": _flag,
    "return_tokens_as_token_ids": _flag,
    "cache_salt": _one("s", "another salt"),
    "stream_interval": _one(1, 2, 7, 4096),
    "safety_identifier": _label,
    "store": _one(True),
    "service_tier": _one("auto", "default"),
    "prompt_cache_key": _text,
    "prompt_cache_retention": _one("24h", "in-memory"),
}

_COMPLETIONS: Final[dict[str, Draw]] = _V1 | {
    "echo": _flag,
    "logprobs": _one(0, 1, 5, 20),
    "logprob_token_ids": _tokens(1, 8),
}

_CHAT: Final[dict[str, Draw]] = _V1 | {
    "max_completion_tokens": _max_tokens,
    "logprobs": _flag,
    "top_logprobs": _one(0, 1, 3, 20),
    "logprob_token_ids": _tokens(1, 8),
    "echo": _flag,
    "add_generation_prompt": _flag,
    "continue_final_message": _flag,
    "include_reasoning": _flag,
    "parallel_tool_calls": _flag,
    "documents": lambda chance: [{"title": "a", "text": _text(chance)}],
    "chat_template_kwargs": _one({"enable_thinking": False}, {}),
    "return_prompt_text": _flag,
}

FIELDS: Final = {GENERATE: _GENERATE, COMPLETIONS: _COMPLETIONS, CHAT: _CHAT}


def _messages(chance: random.Random, *, parts: bool) -> list[Body]:
    messages: list[Body] = []
    for _ in range(chance.choice((1, 1, 2, 4))):
        content: Any = _text(chance)
        if parts and chance.random() < 0.3:
            content = [{"type": "text", "text": content}]
        messages.append({"role": chance.choice(("system", "user", "assistant")), "content": content})
        if parts and chance.random() < 0.1:
            messages[-1]["name"] = "mia"
    return messages


def _prompt_ids(chance: random.Random) -> list[int]:
    size = chance.choice((1, 2, 7, 30, CONTEXT - 2, CONTEXT - 1)) if chance.random() < 0.97 else CONTEXT + 5
    return [_token(chance) for _ in range(size)]


def _prompt(path: str, chance: random.Random) -> Body:
    kind = chance.random()
    if path == CHAT:
        return {"messages": _messages(chance, parts=True)}
    if path == GENERATE:
        if kind < 0.4:
            return {"prompt": _text(chance)}
        return {"messages": _messages(chance, parts=False)} if kind < 0.7 else {"prompt_token_ids": _prompt_ids(chance)}
    if kind < 0.4:
        return {"prompt": _text(chance)}
    if kind < 0.6:
        return {"prompt": [_text(chance) for _ in range(chance.choice((1, 2, 5)))]}
    if kind < 0.85:
        return {"prompt": _prompt_ids(chance)}
    return {"prompt": [_prompt_ids(chance) for _ in range(chance.choice((1, 2, 3)))]}


def draw(chance: random.Random) -> Case:
    """A request. Some have few fields beside their prompt and some nearly all."""
    path = chance.choice((GENERATE, COMPLETIONS, CHAT))
    share = chance.choice((0.05, 0.15, 0.4, 0.8))
    body = _prompt(path, chance)
    for name, value in FIELDS[path].items():
        if chance.random() < share:
            body[name] = value(chance)
    if chance.random() < 0.5:
        body.setdefault("seed", 5)
    _fit(path, body, chance)
    return Case(path, body)


def _fit(path: str, body: Body, chance: random.Random) -> None:
    """Most combinations that the docs say are refused are made into ones that are not."""
    if chance.random() < 0.05:
        return
    if body.get("n", 1) > 1 and body.get("temperature") == 0:
        del body["n"]
    if _structured(body):
        for name in ("allowed_token_ids", "bad_words", "logit_bias"):
            body.pop(name, None)
    if _structured(body) and "structured_outputs" in body:
        body.pop("response_format", None)
    if body.get("top_logprobs") or ("logprob_token_ids" in body and path == CHAT):
        body["logprobs"] = True
    if "logprob_token_ids" in body:
        body.setdefault("logprobs", 1)
        body.pop("top_logprobs", None)
    if body.get("continue_final_message"):
        body.pop("add_generation_prompt", None)
    most = body.get("max_completion_tokens") or body.get("max_tokens") or DEFAULT_MAX_TOKENS
    if body.get("min_tokens", 0) > most:
        body["min_tokens"] = most


def _structured(body: Body) -> bool:
    """Whether a grammar says what may be made."""
    return "structured_outputs" in body or _form(body) != "text"


def _form(body: Body) -> Any:
    return (body.get("response_format") or {}).get("type", "text")


def refused(case: Case, mode: str) -> set[str]:
    """The fields that a refusal which the docs state may name; empty if they state none. ``mode``: stream, or not."""
    body = case.body
    chats, logprobs = case.path == CHAT, body.get("logprobs", False) is not False
    stated = {
        "n": case.n > 1 and case.temperature == 0,
        "top_logprobs": chats and body.get("top_logprobs", 0) > 0 and not logprobs,
        "logprob_token_ids": bool(body.get("logprob_token_ids")) and not logprobs,
        "min_tokens": body.get("min_tokens", 0) > min(case.max_tokens, case.room),
        "add_generation_prompt": bool(body.get("add_generation_prompt")) and bool(body.get("continue_final_message")),
        "structured_outputs": "structured_outputs" in body
        and _structured({"response_format": body.get("response_format")}),
        "bad_words": any(not word.strip() for word in body.get("bad_words", ())),
        "prompt_logprobs": mode == "stream" and body.get("prompt_logprobs", 0) > 0,
        "prompt": case.path == COMPLETIONS and case.room < 1,
        "prompt_token_ids": case.room < 1,
    }
    return {name for name, is_so in stated.items() if is_so}


_LEAVE_FEWER_TOKENS: Final = ("allowed_token_ids", "bad_words", "logit_bias", "stop_token_ids", "min_tokens")


def may_be_refused(case: Case) -> set[str]:
    """The fields that a refusal may name which depends on what the policy would make."""
    body = case.body
    bounds = {name for name in _LEAVE_FEWER_TOKENS if body.get(name)}
    if _structured(body):
        return {"response_format", "structured_outputs"} if bounds else set()
    # What a response may begin with can be no token: those that are allowed may all be bad words, or end it too early.
    return bounds - {"stop_token_ids"} if len(bounds) > 1 else set()
