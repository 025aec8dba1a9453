"""The fields of a request below /v1, their bounds, and the fields of vLLM's that are refused."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final

import orjson
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from pydantic_core import from_json

from serve.api import bounds
from serve.api.generate import MAX_SEED, MIN_SEED, SEVERAL_GREEDY, Label, check_metadata
from serve.config import LimitsConfig
from serve.http import Problem, field_problem, invalid, refuse_lone_surrogates

_BAD_WORDS_BYTES: Final = 1000
_MOST_LOGPROBS: Final = 20  # vLLM's own bound


def _field(kind: str, description: str, **bounds: Any) -> dict[str, Any]:
    """A field's JSON Schema; ``bounds``: further keywords of it."""
    return {"type": kind, **bounds, "description": description}


def _tokens(most: int, description: str) -> dict[str, Any]:
    return _field("array", description, maxItems=most, items={"type": "integer", "minimum": 0})


def _objects(most: int, description: str) -> dict[str, Any]:
    return _field("array", description, maxItems=most, items=_OBJECT)


_TEXT: Final = {"type": "string"}
_OBJECT: Final = {"type": "object"}
_PROMPT_IDS: Final = {"type": "array", "maxItems": bounds.TOKEN_IDS, "items": {"type": "integer", "minimum": 0}}

# On a GPU vLLM's engine has room for as many entries as allowed_token_ids, logit_bias, stop_token_ids and bad_words may
# have, and dies of more. A stream has begun before vLLM looks at numbers of logprobs.
_SHARED: Final[dict[str, dict[str, Any]]] = {
    "model": _field("string", "The served model's name, as GET /v1/models lists it."),
    "n": _field("integer", "Number of responses to each prompt; 1 if they are greedy.", minimum=1),
    "max_tokens": _field("integer", "Most tokens of a response; past the policy's context it ends there.", minimum=1),
    "temperature": _field("number", "0 is greedy; below 0.01 it is 0.01; 1 if not given.", minimum=0, maximum=2),
    "top_p": _field(
        "number", "Sample from the likeliest tokens that make up this much.", exclusiveMinimum=0, maximum=1
    ),
    "top_k": _field("integer", "Sample from this many of the likeliest tokens; 0: all.", minimum=-1, maximum=2**31 - 1),
    "min_p": _field("number", "Leave out tokens less likely than this share.", minimum=0, maximum=1),
    "presence_penalty": _field("number", "Against tokens that were sampled before.", minimum=-2, maximum=2),
    "frequency_penalty": _field("number", "The same, by how often.", minimum=-2, maximum=2),
    "repetition_penalty": _field(
        "number", "Divides the logits of tokens that were there; 1: none.", minimum=0.01, maximum=100
    ),
    "logit_bias": _field("object", "Token id -> what is added to its logit, -100 to 100.", maxProperties=1000),
    "seed": _field("integer", "Makes the sampling repeatable; -1 is as none.", minimum=MIN_SEED, maximum=MAX_SEED),
    "stop": {
        "anyOf": [_TEXT, {"type": "array", "items": _TEXT}],
        "maxItems": bounds.STOPS,
        "description": "End a response before any of these texts.",
    },
    "stop_token_ids": _tokens(100, "End a response with any of these tokens."),
    "include_stop_str_in_output": _field("boolean", "Keep the stop text in the response."),
    "ignore_eos": _field("boolean", "Go on after the end-of-sequence token."),
    "min_tokens": _field(
        "integer",
        "No end before this many tokens, at most max_tokens; what structured_outputs or response_format ask for ends "
        "when it is whole.",
        minimum=0,
    ),
    "allowed_token_ids": _tokens(1000, "Sample from these tokens only."),
    "bad_words": _field(
        "array",
        "Texts that must not be generated; not of white space alone.",
        items={**_TEXT, "pattern": r"\S"},
        maxItems=100,
    ),
    "logprob_token_ids": _tokens(bounds.LIST, "Return the logprobs of these tokens; needs logprobs."),
    "prompt_logprobs": _field(
        "integer",
        "Return the logprobs of the prompt's tokens, and of this many more; not for a stream.",
        minimum=0,
        maximum=_MOST_LOGPROBS,
    ),
    "response_format": _field(
        "object",
        "text, json_object, json_schema or structural_tag; 400 if it can't be generated with the tokens that "
        "allowed_token_ids, bad_words, logit_bias, stop_token_ids and min_tokens leave.",
    ),
    "structured_outputs": _field(
        "object",
        "vLLM's: json, regex, choice, grammar or structural_tag; instead of a response_format, and refused as that is.",
    ),
    "skip_special_tokens": _field("boolean", "Leave special tokens out of the text."),
    "spaces_between_special_tokens": _field("boolean", "Put spaces between special tokens."),
    "truncate_prompt_tokens": _field("integer", "Keep this many tokens of the prompt; -1: what fits."),
    "truncation_side": _field("string", "Which side is cut off.", enum=["left", "right"]),
    "add_special_tokens": _field("boolean", "Put the tokenizer's special tokens around the prompt."),
    "return_token_ids": _field("boolean", "Return the token ids of prompt and response."),
    "return_tokens_as_token_ids": _field("boolean", "In logprobs, write a token as token_id:ID."),
    "cache_salt": _field("string", "Share cached prefixes only with requests that bring the same."),
    "stream": _field("boolean", "Send the response while it is generated, as server-sent events."),
    "stream_options": _field("object", "include_usage, continuous_usage_stats; with stream."),
    "stream_interval": _field("integer", "Tokens of one streamed chunk, at least.", minimum=1),
    "user": _field("string", "Your name for the person; kept with the responses.", maxLength=200),
    "safety_identifier": _field("string", "The same, if there is no user.", maxLength=200),
    "session_id": _field(
        "string", "Your name for the conversation; the X-Session-Id header says it too.", maxLength=200
    ),
    "metadata": _field(
        "object",
        "Texts that are kept with the responses and passed to reward functions.",
        additionalProperties={"type": "string", "maxLength": 10_000},
        maxProperties=bounds.ENTRIES,
    ),
    "store": _field(
        "boolean", "false: nothing is stored of it, and no feedback can be given on it; true if not given."
    ),
    **dict.fromkeys(
        ("service_tier", "prompt_cache_key", "prompt_cache_retention"), _field("string", "Taken, and without effect.")
    ),
}

COMPLETION: Final[dict[str, dict[str, Any]]] = {
    "prompt": {
        "anyOf": [_TEXT, {"type": "array", "items": _TEXT}, _PROMPT_IDS, {"type": "array", "items": _PROMPT_IDS}],
        "description": "Text to go on from, or its token ids; a list of either is that many prompts.",
    },
    "echo": _field("boolean", "Answer with the prompt before the response."),
    "suffix": _field("string", "Text that comes after the response, for policies that can fill in."),
    "logprobs": _field(
        "integer", "Return the logprob of each token, and of this many more.", minimum=0, maximum=_MOST_LOGPROBS
    ),
    "best_of": _field("integer", "Taken if it is n."),
    **_SHARED,
    "max_tokens": _field(
        "integer",
        f"{_SHARED['max_tokens']['description']} 0, with echo: the prompt alone; only where nothing is stored.",
        minimum=0,
    ),
}
"""The fields of a request to /v1/completions: JSON Schema by name."""

CHAT: Final[dict[str, dict[str, Any]]] = {
    "messages": _objects(
        bounds.MESSAGES,
        f"Chat, put into the policy's own template; {bounds.PARTS} parts of contents in all. Media come as data: URLs.",
    ),
    "max_completion_tokens": _field("integer", "Most tokens of a response.", minimum=1),
    "logprobs": _field("boolean", "Tell the logprob of each token."),
    "top_logprobs": _field(
        "integer", "And of this many of the likeliest; with logprobs.", minimum=0, maximum=_MOST_LOGPROBS
    ),
    "tools": _objects(bounds.TOOLS, "Functions that the policy may call."),
    "tool_choice": {
        "anyOf": [{"type": "string", "enum": ["none", "auto", "required"]}, _OBJECT],
        "description": "Whether it may, must, or which.",
    },
    "parallel_tool_calls": _field("boolean", "Whether it may call more than one at a time."),
    "reasoning_effort": _field("string", "none to max, where the policy's template has it."),
    "include_reasoning": _field("boolean", "Tell the reasoning too."),
    "echo": _field("boolean", "Answer with the last message before the response, if the roles are one."),
    "add_generation_prompt": _field("boolean", "End the prompt with the head of a response."),
    "continue_final_message": _field("boolean", "Go on with the last message; not with add_generation_prompt."),
    "documents": _objects(bounds.DOCUMENTS, "Documents, where the template has them."),
    "chat_template_kwargs": _field("object", "Variables of the policy's template."),
    "return_prompt_text": _field("boolean", "Return the text that the template rendered."),
    **_SHARED,
}
"""The fields of a request to /v1/chat/completions: JSON Schema by name."""

_NOT_YOURS: Final = "it is not for clients to set"
_REFUSED: Final = {
    "use_beam_search": "beam search does not sample, so that its logprobs would be of no distribution",
    "best_of": "it must equal n: all responses that are generated are returned",
    "chat_template": "the policy's own template is used",
    "prompt_embeds": "a prompt is text or token ids",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "request_id": "send the X-Request-Id header",
    **dict.fromkeys(
        (
            "priority",
            "kv_transfer_params",
            "ec_transfer_params",
            "vllm_xargs",
            "media_io_kwargs",
            "mm_processor_kwargs",
            "watermarking",
            "routed_experts_prompt_start",
        ),
        _NOT_YOURS,
    ),
}
_WITHOUT_EFFECT: Final[dict[str, Any]] = {"use_beam_search": False, "priority": 0, "modalities": ["text"]}
_NAME: Final = re.compile(r"(?!(?:str|int|float|bool)$)[a-z_][a-z0-9_]*")
_MEDIA_KEYS: Final = ("image_url", "audio_url", "video_url")
_EMBEDDED: Final = ("image_embeds", "audio_embeds", "video_embeds", "prompt_embeds", "image_pil", "uuid")


class Labels(BaseModel):
    """What a request is kept with."""

    model_config = ConfigDict(strict=True)

    user: Label | None = None
    safety_identifier: Label | None = None
    session_id: Label | None = None
    metadata: dict[Label, Annotated[str, StringConstraints(max_length=10_000)]] | None = Field(default_factory=dict)


@dataclass(frozen=True)
class Understood:
    """A body that is fit for vLLM's request model, and what of it is ours."""

    body: dict[str, Any]
    labels: Labels
    messages: str | None
    has_text: bool
    store: bool


def understand(
    content: bytes,
    fields: dict[str, dict[str, Any]],
    limits: LimitsConfig,
    *,
    context: int,
    chat_template: bool,
    session_id: str | None,
) -> Understood:
    """The request of a body. ``context``: most tokens of a prompt and its response; ``chat_template``: one may come;
    ``session_id``: of the header, for a body without one.

    Raises Problem 400 naming the field.
    """
    body = _read(content)
    if not isinstance(body, dict):
        raise Problem(400, "the body is not a JSON object")
    body = {name: value for name, value in body.items() if value is not None}
    if session_id is not None:
        body.setdefault("session_id", session_id)
    allowed = fields.keys() | ({"chat_template"} if chat_template and "messages" in fields else set())
    for name in sorted(body.keys() - allowed):
        if name in _WITHOUT_EFFECT and body.pop(name) == _WITHOUT_EFFECT[name]:
            continue
        raise refuse(name, _REFUSED.get(name, "there is no such field"))
    if body.pop("best_of", None) not in (None, body.get("n", 1)):
        raise refuse("best_of", _REFUSED["best_of"])
    _check_sizes(body, fields)
    _check_types(body, fields)
    _check_bounds(body, fields, limits)
    if "messages" in fields:
        _check_parts(body)
    else:
        _check_prompts(body.get("prompt"), limits)
    length = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
    if not body.keys() & {"max_tokens", length}:
        body[length] = limits.default_max_tokens
    for name in body.keys() & {"max_tokens", length}:
        body[name] = min(body[name], context)  # where a response ends anyway; vLLM refuses more
    if body.get("continue_final_message"):
        body.setdefault("add_generation_prompt", False)  # vLLM's default is what its template then refuses
    _check_together(body, body.get(length, body.get("max_tokens", 0)))
    store = body.pop("store", True)
    return Understood(body, _labels(body, limits), _messages_as_sent(body), _has_text(body.get("prompt")), store)


def _read(content: bytes) -> Any:
    """The JSON of a body. Raises Problem 400."""
    try:
        orjson.loads(content)  # strict: the other one takes 1e999 for infinity
        return from_json(content, cache_strings="keys")  # with every digit of an integer
    except ValueError as error:
        refuse_lone_surrogates(content, 400)
        raise Problem(400, f"the body is not JSON: {error}") from None


def unfit(error: ValidationError, of: str = "") -> Problem:
    """A bad request, because of what pydantic says of it, or of the field ``of``."""
    reasons: dict[str, list[str]] = {}
    for item in error.errors(include_url=False, include_context=False, include_input=False):
        # Between the names of the client's fields stand those of vLLM's types.
        path = ".".join(str(part) for part in item["loc"] if isinstance(part, int) or _NAME.fullmatch(part))
        messages = reasons.setdefault(".".join(filter(None, (of, path))) or "body", [])
        if item["msg"] not in messages:
            messages.append(item["msg"].removeprefix("Value error, "))
    errors = [{"field": field, "reason": "; or: ".join(messages[:3])} for field, messages in list(reasons.items())[:3]]
    return Problem(400, "; ".join(f"{item['field']}: {item['reason']}" for item in errors), errors=errors)


refuse = partial(field_problem, 400)
"""A bad request, because of one field."""


def _check_sizes(body: dict[str, Any], fields: dict[str, dict[str, Any]]) -> None:
    """Refuse what has more entries than it may: vLLM's models say of each what is wrong with it."""
    for name, value in body.items():
        if name == "prompt":
            continue
        field = fields.get(name, {})
        below = [(value, name, field.get("maxItems") or field.get("maxProperties") or bounds.LIST)]
        while below:
            part, at, most = below.pop()
            if not isinstance(part, list | dict):
                continue
            if len(part) > most:
                raise refuse(at, f"{len(part)} entries are more than the {most} that are allowed")
            entries = enumerate(part) if isinstance(part, list) else part.items()
            below += [(item, f"{at}.{key}", bounds.LIST) for key, item in entries if isinstance(item, list | dict)]


_TYPES: Final = {"string": (str,), "boolean": (bool,), "object": (dict,), "array": (list,), "number": (int, float)}


def _check_types(body: dict[str, Any], fields: dict[str, dict[str, Any]]) -> None:
    """vLLM's request models take "5" for 5, and some of their validators fail on what has not the form they expect."""
    for name, value in body.items():
        wanted = fields.get(name, _TEXT).get("type")
        if wanted is not None and not (_is_integer(value) if wanted == "integer" else type(value) in _TYPES[wanted]):
            raise refuse(name, f"it is to be of type {wanted}")
        if wanted == "array" and fields[name]["items"] == _OBJECT:
            for position, item in enumerate(value):
                if not isinstance(item, dict):
                    raise refuse(f"{name}.{position}", "it is to be an object")


def _is_integer(value: Any) -> bool:
    return type(value) is int or (type(value) is float and value.is_integer())


def _check_bounds(body: dict[str, Any], fields: dict[str, dict[str, Any]], limits: LimitsConfig) -> None:
    """What vLLM does not bound, or not by our limits, and what it finds too late."""
    tokens = ("max_tokens", "max_completion_tokens", "min_tokens", "stream_interval")
    limited = {"n": limits.n, **dict.fromkeys(tokens, limits.max_tokens)}
    for name, value in body.items():
        field = fields.get(name, {})
        if "minimum" in field:
            least, most = field["minimum"], limited.get(name) or field["maximum"]
            if not least <= value <= most:
                raise refuse(name, f"{value:g} is not between {least} and {most}")
    if body.get("n", 1) > 1 and body.get("temperature", 1) == 0:
        raise refuse("n", SEVERAL_GREEDY)
    if (size := sum(len(str(word).encode()) for word in body.get("bad_words", ()))) > _BAD_WORDS_BYTES:
        raise refuse("bad_words", f"has {size} bytes in all, {_BAD_WORDS_BYTES} are allowed")


def _check_together(body: dict[str, Any], max_tokens: int) -> None:
    """What vLLM refuses of fields that are good by themselves, naming none, or with a traceback in the log."""
    chats = "messages" in body
    has_logprobs = body.get("logprobs", False) is not False
    for name, wrong, reason in (
        ("top_logprobs", chats and body.get("top_logprobs", 0) > 0 and not has_logprobs, "it needs logprobs: true"),
        ("logprob_token_ids", bool(body.get("logprob_token_ids")) and not has_logprobs, "it needs logprobs"),
        ("prompt_logprobs", bool(body.get("stream")) and body.get("prompt_logprobs", 0) > 0, "a stream has none"),
        ("stream_options", bool(body.get("stream_options")) and not body.get("stream"), "it needs stream: true"),
        (
            "max_tokens",
            not chats and max_tokens == 0 and not body.get("echo"),
            "0 needs echo: true",
        ),
        ("min_tokens", body.get("min_tokens", 0) > max_tokens, f"it is more than max_tokens, {max_tokens}"),
        (
            "add_generation_prompt",
            bool(body.get("add_generation_prompt")) and bool(body.get("continue_final_message")),
            "with continue_final_message there is no head of a new response",
        ),
        (
            "structured_outputs",
            bool(body.get("structured_outputs")) and body.get("response_format", {}).get("type", "text") != "text",
            "response_format says already what to make",
        ),
        (
            "bad_words",
            any(isinstance(word, str) and not word.strip() for word in body.get("bad_words", ())),
            "a text of white space alone is none",
        ),
    ):
        if wrong:
            raise refuse(name, reason)


def _check_prompts(prompt: Any, limits: LimitsConfig) -> None:
    """vLLM's models would say of each entry why it is none of each kind that it could be."""
    if not isinstance(prompt, list) or not prompt:
        return
    if not _is_integer(prompt[0]) and len(prompt) > limits.prompts:
        raise refuse("prompt", f"{len(prompt)} prompts are more than the {limits.prompts} that are allowed")
    if all(isinstance(item, str) for item in prompt):
        return
    for token_ids in prompt if isinstance(prompt[0], list) else [prompt]:
        if not (isinstance(token_ids, list) and all(map(_is_integer, token_ids))):
            raise refuse("prompt", "a list is of texts, of token ids, or of lists of token ids")
        if len(token_ids) > bounds.TOKEN_IDS:
            raise refuse("prompt", f"{len(token_ids)} tokens are more than the {bounds.TOKEN_IDS} that are allowed")


def _check_parts(body: dict[str, Any]) -> None:
    for position, tool in enumerate(body.get("tools", ())):
        function = tool.get("function")
        if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
            raise refuse(f"tools.{position}.function", "it is to be an object with a name")
    for position, document in enumerate(body.get("documents", ())):
        if wrong := next((key for key, value in document.items() if not isinstance(value, str)), None):
            raise refuse(f"documents.{position}.{wrong}", "it is to be of type string")
    parts = 0
    for position, message in enumerate(body.get("messages", ())):
        if not isinstance(message.get("role"), str):
            raise refuse(f"messages.{position}.role", "it is to be of type string")
        if not isinstance(message.get("tool_calls", []), list):
            raise refuse(f"messages.{position}.tool_calls", "it is to be of type array")
        if (calls := len(message.get("tool_calls", ()))) > bounds.TOOL_CALLS:
            reason = f"{calls} entries are more than the {bounds.TOOL_CALLS} that are allowed"
            raise refuse(f"messages.{position}.tool_calls", reason)
        content = message.get("content")
        parts += len(content) if isinstance(content, list) else 0
        if parts > bounds.PARTS:
            raise refuse("messages", f"their contents have more than the {bounds.PARTS} parts that are allowed")
        for number, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, dict):
                _check_media(part, f"messages.{position}.content")
            elif not isinstance(part, str):  # vLLM would say so later, naming its own types
                raise refuse(f"messages.{position}.content.{number}", "it is to be an object or of type string")


def _check_media(part: dict[str, Any], field: str) -> None:
    """Refuse what would have the server read a file, call an address, load a tensor, or use another's media."""
    if found := next((key for key in _EMBEDDED if part.get(key) is not None), None):
        raise refuse(field, f"{found} is not taken")
    for key in _MEDIA_KEYS:
        url = part.get(key)
        url = url.get("url") if isinstance(url, dict) else url
        if url is not None and not (isinstance(url, str) and url[:5].lower() == "data:"):
            raise refuse(field, f"{key}: media come as data: URLs, not as {str(url)[:80]!r}")


def _has_text(prompt: Any) -> bool:
    first = prompt[0] if isinstance(prompt, list) and prompt else prompt
    return not isinstance(first, int | list)


def _messages_as_sent(body: dict[str, Any]) -> str | None:
    if "messages" not in body:
        return None
    try:
        return json.dumps(body["messages"], ensure_ascii=False)
    except RecursionError:
        raise refuse("messages", "they are nested too deeply") from None


def _labels(body: dict[str, Any], limits: LimitsConfig) -> Labels:
    try:
        labels = Labels.model_validate({name: body.pop(name) for name in Labels.model_fields if name in body})
    except ValidationError as error:
        raise invalid(error, 400) from None  # a metadata key may be any text
    check_metadata(labels.metadata or {}, limits, 400)
    return labels
