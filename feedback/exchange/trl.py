"""TRL's dataset formats (https://huggingface.co/docs/trl/dataset_formats): what a row means, and how one is written.

A prompt is text (TRL's standard format) or a list of chat messages (its conversational format), and a completion then
text or a list of one message of the assistant. ``trl-preference``: prompt, chosen, rejected; the prompt may also be
what the messages of both begin with. ``trl-kto``: prompt, completion, label. ``trl-sft``: prompt and completion, or
messages, of which the last is the completion.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Final

import pyarrow as pa

from feedback.exchange import ImportForm
from feedback.exchange.record_files import Record, RecordError

Messages = list[dict[str, str]]
Prompt = str | Messages

EMPTY: Final = "empty"
MORE_THAN_TEXT: Final = "with messages that hold more than text"
NO_QUESTION: Final = "with a prompt that ends with the assistant's turn"
SAME: Final = "with two responses that are the same"

_MESSAGES: Final = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


class UnfitError(ValueError):
    """A well-formed row that can't be used; the message is the reason to count it by."""


@dataclass(frozen=True)
class Example:
    """What a row says of responses to a prompt: the first is better than the second, or good or not (``label``)."""

    prompt: Prompt
    responses: tuple[str, ...]
    label: bool | None = None


def example(form: ImportForm, record: Record) -> Example:
    """What a row says. Raises UnfitError, and RecordError, which names it, for one that is not of the format."""
    if form == "trl-preference":
        return _preference(record)
    if form == "trl-kto":
        label = record["label"]
        if not isinstance(label, bool):
            raise RecordError(f"{record.where}: column 'label' is true or false, not {label!r}")
        return _checked(prompt_of(record, "prompt"), _completion(record, "completion"), label=label)
    if "messages" in record.values and "prompt" not in record.values:
        *turns, last = messages_of(record, "messages")
        if last["role"] != "assistant":
            raise RecordError(f"{record.where}: the last of 'messages' is the {last['role']}'s, not the assistant's")
        return _checked(_asked(turns), last["content"])
    return _checked(prompt_of(record, "prompt"), _completion(record, "completion"))


def prompt_of(record: Record, column: str) -> Prompt:
    """A prompt that a column holds. Raises UnfitError and RecordError."""
    value = record[column]
    if value is None or isinstance(value, str):
        if not value:
            raise UnfitError(EMPTY)
        return value
    return _asked(messages_of(record, column))


def messages_of(record: Record, column: str) -> Messages:
    """Chat messages that a column holds, of roles and texts alone. Raises UnfitError and RecordError."""
    value = record[column]
    if not isinstance(value, list) or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in value):
        raise RecordError(
            f"{record.where}: column {column!r} is neither text nor a list of messages, each with a role and content"
        )
    if not value:
        raise UnfitError(EMPTY)
    return [text_message(message) for message in value]


def text_message(message: Mapping[str, Any]) -> dict[str, str]:
    """A message as its role and text. Raises UnfitError if it holds more."""
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
        content = "\n".join(str(part["text"]) for part in content)
    more = {key for key, value in message.items() if key not in ("role", "content") and value not in (None, [], {})}
    if not isinstance(content, str) or more:
        raise UnfitError(MORE_THAN_TEXT)
    return {"role": message["role"], "content": content}


def _preference(record: Record) -> Example:
    if "prompt" in record.values:
        prompt = prompt_of(record, "prompt")
    else:
        both = zip(messages_of(record, "chosen"), messages_of(record, "rejected"), strict=False)
        prompt = _asked([left for left, _ in takewhile(lambda pair: pair[0] == pair[1], both)])
    turns = len(prompt) if isinstance(prompt, list) else 0
    return _checked(prompt, *(_completion(record, name, prompt, turns) for name in ("chosen", "rejected")))


def _completion(record: Record, column: str, prompt: Prompt = "", turns: int = 0) -> str:
    """The text of a completion; of messages that begin with the prompt's, what follows them."""
    value = record[column]
    if isinstance(value, str):
        return value
    messages = messages_of(record, column)
    if turns and messages[:turns] == prompt:
        messages = messages[turns:]
    if len(messages) != 1 or messages[0]["role"] != "assistant":
        raise RecordError(f"{record.where}: column {column!r} is not one message of the assistant")
    return messages[0]["content"]


def _asked(prompt: Messages) -> Messages:
    if not prompt or not any(message["content"] for message in prompt):
        raise UnfitError(EMPTY)
    if prompt[-1]["role"] == "assistant":
        raise UnfitError(NO_QUESTION)
    return prompt


def _checked(prompt: Prompt, *responses: str, label: bool | None = None) -> Example:
    if not all(responses):
        raise UnfitError(EMPTY)
    if len(set(responses)) < len(responses):
        raise UnfitError(SAME)
    return Example(prompt, responses, label)


# ------------------------------------------------------------------------------------------------------- written


def schema(columns: Mapping[str, pa.DataType | None], *, conversational: bool) -> pa.Schema:
    """The columns of a set; a type of None is that of prompts and completions."""
    text = _MESSAGES if conversational else pa.string()
    return pa.schema([(name, kind or text) for name, kind in columns.items()])


def completion(text: str, *, conversational: bool) -> Prompt:
    """A completion as a set has it."""
    return [{"role": "assistant", "content": text}] if conversational else text
