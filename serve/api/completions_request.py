"""The fields of a request below /v1, their bounds, and the fields of vLLM's that are refused."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Annotated, Any, Final

import orjson
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from pydantic_core import from_json

from serve.api import bounds
from serve.api.generate import MAX_SEED, MIN_SEED, SEVERAL_GREEDY, Label
from serve.config import LimitsConfig
from serve.generation.interaction_rows import RESERVED
from serve.http import Problem, invalid, refuse_lone_surrogates

_BAD_WORDS_BYTES: Final = 1000
_MOST_BAD_WORDS: Final = 100
_MOST_LOGPROBS: Final = 20  # vLLM's own bound
_TEXT: Final = {"type": "string"}
_NUMBER: Final = {"type": "number"}
_COUNT: Final = {"type": "integer", "minimum": 0}
_YES_NO: Final = {"type": "boolean"}
_OBJECT: Final = {"type": "object"}
_IDS: Final = {"type": "array", "maxItems": bounds.LIST, "items": {"type": "integer", "minimum": 0}}
_PROMPT_IDS: Final = _IDS | {"maxItems": bounds.TOKEN_IDS}

_SHARED: Final[dict[str, dict[str, Any]]] = {
    "model": {**_TEXT, "description": "The served model's name, as GET /v1/models lists it."},
    "n": {"type": "integer", "minimum": 1, "description": "Number of responses to each prompt; 1 if they are greedy."},
    "max_tokens": {
        "type": "integer",
        "minimum": 1,
        "description": "Most tokens of a response; past the policy's context it ends there.",
    },
    "temperature": {
        **_NUMBER,
        "minimum": 0,
        "maximum": 2,
        "description": "0 is greedy; below 0.01 it is 0.01; 1 if not given.",
    },
    "top_p": {
        **_NUMBER,
        "exclusiveMinimum": 0,
        "maximum": 1,
        "description": "Sample from the likeliest tokens that make up this much.",
    },
    "top_k": {
        "type": "integer",
        "minimum": -1,
        "maximum": 2**31 - 1,
        "description": "Sample from this many of the likeliest tokens; 0: all.",
    },
    "min_p": {**_NUMBER, "minimum": 0, "maximum": 1, "description": "Leave out tokens less likely than this share."},
    "presence_penalty": {
        **_NUMBER,
        "minimum": -2,
        "maximum": 2,
        "description": "Against tokens that were sampled before.",
    },
    "frequency_penalty": {**_NUMBER, "minimum": -2, "maximum": 2, "description": "The same, by how often."},
    "repetition_penalty": {
        **_NUMBER,
        "minimum": 0.01,
        "maximum": 100,
        "description": "Divides the logits of tokens that were there; 1: none.",
    },
    "logit_bias": {**_OBJECT, "description": "Token id -> what is added to its logit, -100 to 100."},
    "seed": {
        "type": "integer",
        "minimum": MIN_SEED,
        "maximum": MAX_SEED,
        "description": "Makes the sampling repeatable; -1 is as none.",
    },
    "stop": {
        "anyOf": [_TEXT, {"type": "array", "items": _TEXT, "maxItems": bounds.STOPS}],
        "description": "End a response before any of these texts.",
    },
    "stop_token_ids": {**_IDS, "description": "End a response with any of these tokens."},
    "include_stop_str_in_output": {**_YES_NO, "description": "Keep the stop text in the response."},
    "ignore_eos": {**_YES_NO, "description": "Go on after the end-of-sequence token."},
    "min_tokens": {
        **_COUNT,
        "description": "No end before this many tokens, at most max_tokens; what structured_outputs or response_format "
        "ask for ends when it is whole.",
    },
    "allowed_token_ids": {**_IDS, "description": "Sample from these tokens only."},
    "bad_words": {
        "type": "array",
        "items": {**_TEXT, "pattern": r"\S"},
        "maxItems": _MOST_BAD_WORDS,
        "description": "Texts that must not be generated; not of white space alone.",
    },
    "logprob_token_ids": {**_IDS, "description": "Return the logprobs of these tokens; needs logprobs."},
    "prompt_logprobs": {
        "type": "integer",
        "minimum": 0,
        "maximum": _MOST_LOGPROBS,
        "description": "Return the logprobs of the prompt's tokens, and of this many more; not for a stream.",
    },
    "response_format": {
        **_OBJECT,
        "description": "text, json_object, json_schema or structural_tag; 400 if it can't be generated with the tokens "
        "that allowed_token_ids, bad_words, logit_bias, stop_token_ids and min_tokens leave.",
    },
    "structured_outputs": {
        **_OBJECT,
        "description": "vLLM's: json, regex, choice, grammar or structural_tag; instead of a response_format, and "
        "refused as that is.",
    },
    "skip_special_tokens": {**_YES_NO, "description": "Leave special tokens out of the text."},
    "spaces_between_special_tokens": {**_YES_NO, "description": "Put spaces between special tokens."},
    "truncate_prompt_tokens": {"type": "integer", "description": "Keep this many tokens of the prompt; -1: what fits."},
    "truncation_side": {"type": "string", "enum": ["left", "right"], "description": "Which side is cut off."},
    "add_special_tokens": {**_YES_NO, "description": "Put the tokenizer's special tokens around the prompt."},
    "return_token_ids": {**_YES_NO, "description": "Return the token ids of prompt and response."},
    "return_tokens_as_token_ids": {**_YES_NO, "description": "In logprobs, write a token as token_id:ID."},
    "cache_salt": {**_TEXT, "description": "Share cached prefixes only with requests that bring the same."},
    "stream": {**_YES_NO, "description": "Send the response while it is generated, as server-sent events."},
    "stream_options": {**_OBJECT, "description": "include_usage, continuous_usage_stats; with stream."},
    "stream_interval": {"type": "integer", "minimum": 1, "description": "Tokens of one streamed chunk, at least."},
    "user": {**_TEXT, "maxLength": 200, "description": "Your name for the person; kept with the responses."},
    "safety_identifier": {**_TEXT, "maxLength": 200, "description": "The same, if there is no user."},
    "session_id": {
        **_TEXT,
        "maxLength": 200,
        "description": "Your name for the conversation; the X-Session-Id header says it too.",
    },
    "metadata": {
        **_OBJECT,
        "additionalProperties": {"type": "string", "maxLength": 10_000},
        "maxProperties": bounds.ENTRIES,
        "description": "Texts that are kept with the responses and passed to reward functions.",
    },
    "store": {**_YES_NO, "enum": [True], "description": "Every response is recorded, so that false is refused."},
    "service_tier": {**_TEXT, "description": "Taken, and without effect."},
    "prompt_cache_key": {**_TEXT, "description": "Taken, and without effect."},
    "prompt_cache_retention": {**_TEXT, "description": "Taken, and without effect."},
}

COMPLETION: Final[dict[str, dict[str, Any]]] = {
    "prompt": {
        "anyOf": [_TEXT, {"type": "array", "items": _TEXT}, _PROMPT_IDS, {"type": "array", "items": _PROMPT_IDS}],
        "description": "Text to go on from, or its token ids; a list of either is that many prompts.",
    },
    "echo": {**_YES_NO, "description": "Answer with the prompt before the response."},
    "suffix": {**_TEXT, "description": "Text that comes after the response, for policies that can fill in."},
    "logprobs": {
        "type": "integer",
        "minimum": 0,
        "maximum": _MOST_LOGPROBS,
        "description": "Return the logprob of each token, and of this many more.",
    },
    "best_of": {"type": "integer", "description": "Taken if it is n."},
    **_SHARED,
}
"""The fields of a request to /v1/completions: JSON Schema by name."""

CHAT: Final[dict[str, dict[str, Any]]] = {
    "messages": {
        "type": "array",
        "items": _OBJECT,
        "maxItems": bounds.MESSAGES,
        "description": f"Chat, put into the policy's own template; {bounds.PARTS} parts of contents in all. Media come "
        "as data: URLs.",
    },
    "max_completion_tokens": {"type": "integer", "minimum": 1, "description": "Most tokens of a response."},
    "logprobs": {**_YES_NO, "description": "Tell the logprob of each token."},
    "top_logprobs": {
        "type": "integer",
        "minimum": 0,
        "maximum": _MOST_LOGPROBS,
        "description": "And of this many of the likeliest; with logprobs.",
    },
    "tools": {
        "type": "array",
        "items": _OBJECT,
        "maxItems": bounds.TOOLS,
        "description": "Functions that the policy may call.",
    },
    "tool_choice": {
        "anyOf": [{"type": "string", "enum": ["none", "auto", "required"]}, _OBJECT],
        "description": "Whether it may, must, or which.",
    },
    "parallel_tool_calls": {**_YES_NO, "description": "Whether it may call more than one at a time."},
    "reasoning_effort": {**_TEXT, "description": "none to max, where the policy's template has it."},
    "include_reasoning": {**_YES_NO, "description": "Tell the reasoning too."},
    "echo": {**_YES_NO, "description": "Answer with the last message before the response, if the roles are one."},
    "add_generation_prompt": {**_YES_NO, "description": "End the prompt with the head of a response."},
    "continue_final_message": {
        **_YES_NO,
        "description": "Go on with the last message; not with add_generation_prompt.",
    },
    "documents": {
        "type": "array",
        "items": _OBJECT,
        "maxItems": bounds.DOCUMENTS,
        "description": "Documents, where the template has them.",
    },
    "chat_template_kwargs": {**_OBJECT, "description": "Variables of the policy's template."},
    "return_prompt_text": {**_YES_NO, "description": "Return the text that the template rendered."},
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
    if body.get("store") is False:
        raise refuse("store", "every response is recorded, and there is no way to have one that is not")
    if body.pop("best_of", None) not in (None, body.get("n", 1)):
        raise refuse("best_of", _REFUSED["best_of"])
    _check_numbers(body)
    _check_types(body, fields)
    _check_bounds(body, limits)
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
    return Understood(body, _labels(body, limits), _messages_as_sent(body), _has_text(body.get("prompt")))


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


def refuse(field: str, reason: str) -> Problem:
    """A bad request, because of one field."""
    return Problem(400, f"{field}: {reason}", errors=[{"field": field, "reason": reason}])


_MOST: Final = {
    "messages": bounds.MESSAGES,
    "tools": bounds.TOOLS,
    "documents": bounds.DOCUMENTS,
    "stop": bounds.STOPS,
}


def _check_numbers(body: dict[str, Any]) -> None:
    """Refuse what has more entries than it may: vLLM's models say of each what is wrong with it."""
    for name, value in body.items():
        if name == "prompt":
            continue
        below = [(value, name, _MOST.get(name, bounds.LIST))]
        while below:
            part, field, most = below.pop()
            if isinstance(part, list):
                if len(part) > most:
                    raise refuse(field, f"{len(part)} entries are more than the {most} that are allowed")
                below += [(item, f"{field}.{i}", bounds.LIST) for i, item in enumerate(part) if _is_nested(item)]
            elif isinstance(part, dict):
                below += [(item, f"{field}.{key}", bounds.LIST) for key, item in part.items() if _is_nested(item)]


def _is_nested(value: Any) -> bool:
    return isinstance(value, list | dict)


def _check_types(body: dict[str, Any], fields: dict[str, dict[str, Any]]) -> None:
    """vLLM's request models take "5" for 5, and some of their validators fail on what has not the form they expect."""
    for name, value in body.items():
        wanted = fields.get(name, _TEXT).get("type")
        if wanted is not None and not _is(wanted, value):
            raise refuse(name, f"it is to be of type {wanted}")
        if wanted == "array" and fields[name]["items"] is _OBJECT:
            for position, item in enumerate(value):
                if not isinstance(item, dict):
                    raise refuse(f"{name}.{position}", "it is to be an object")


def _is(wanted: str, value: Any) -> bool:
    if wanted == "integer":
        return (isinstance(value, int) and not isinstance(value, bool)) or (
            isinstance(value, float) and value.is_integer()
        )
    if wanted == "number":
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, {"string": str, "boolean": bool, "object": dict, "array": list}[wanted])


def _check_bounds(body: dict[str, Any], limits: LimitsConfig) -> None:
    """What vLLM does not bound, or not by our limits."""
    for name, least, most in (
        ("n", 1, limits.n),
        ("max_tokens", 1, limits.max_tokens),
        ("max_completion_tokens", 1, limits.max_tokens),
        ("min_tokens", 0, limits.max_tokens),
        ("top_k", -1, 2**31 - 1),
        ("seed", MIN_SEED, MAX_SEED),
        ("repetition_penalty", 0.01, 100),
        ("stream_interval", 1, limits.max_tokens),
        # A stream has begun before vLLM looks at these.
        ("logprobs", 0, _MOST_LOGPROBS),
        ("top_logprobs", 0, _MOST_LOGPROBS),
        ("prompt_logprobs", 0, _MOST_LOGPROBS),
    ):
        value = body.get(name)
        if value is not None and not least <= value <= most:
            raise refuse(name, f"{value:g} is not between {least} and {most}")
    if body.get("n", 1) > 1 and body.get("temperature", 1) == 0:
        raise refuse("n", SEVERAL_GREEDY)
    # On a GPU vLLM's engine has room for this many, and dies of more.
    for name, most in (
        ("logit_bias", 1000),
        ("allowed_token_ids", 1000),
        ("stop_token_ids", 100),
        ("bad_words", _MOST_BAD_WORDS),
    ):
        value = body.get(name)
        if isinstance(value, list | dict) and len(value) > most:
            raise refuse(name, f"has {len(value)} entries, {most} are allowed")
    words = body.get("bad_words")
    if isinstance(words, list) and (size := sum(len(str(word).encode()) for word in words)) > _BAD_WORDS_BYTES:
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
    if not _is_token(prompt[0]) and len(prompt) > limits.prompts:
        raise refuse("prompt", f"{len(prompt)} prompts are more than the {limits.prompts} that are allowed")
    if all(isinstance(item, str) for item in prompt):
        return
    for token_ids in prompt if isinstance(prompt[0], list) else [prompt]:
        if not (isinstance(token_ids, list) and all(map(_is_token, token_ids))):
            raise refuse("prompt", "a list is of texts, of token ids, or of lists of token ids")
        if len(token_ids) > bounds.TOKEN_IDS:
            raise refuse("prompt", f"{len(token_ids)} tokens are more than the {bounds.TOKEN_IDS} that are allowed")


def _is_token(value: Any) -> bool:
    return type(value) is int or (type(value) is float and value.is_integer())


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
        problem = invalid(error)  # a metadata key may be any text
        problem.status = 400
        raise problem from None
    if reserved := next((key for key in labels.metadata or () if key.startswith(RESERVED)), None):
        raise refuse("metadata", f"{reserved}: keys that begin with {RESERVED} are the server's own")
    if len(labels.metadata or ()) > limits.metadata_entries:
        raise refuse("metadata", f"{len(labels.metadata or ())} entries, {limits.metadata_entries} are allowed")
    return labels
