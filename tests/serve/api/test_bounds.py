"""How much a body may hold, and that others are served while a large one is worked on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from serve.api import bounds
from serve.api.feedback import FeedbackBatchIn
from serve.api.generate import GenerateIn, Message, _render
from serve.config import LimitsConfig
from serve.generation.tokenizer import Text
from serve.http import Problem, parse
from tests.serve.api.test_openapi_page import page
from tests.serve.middleware.test_request_context import Open, make

Result = TypeVar("Result")
EMPTY = b'{"role":"u","content":""}'
MANY = b'{"messages":[' + b",".join([EMPTY] * 160_000) + b"]}"
"""Four megabytes."""


async def turns_during(work: Awaitable[Result]) -> tuple[Result | BaseException, int]:
    """What came of it, and how often the event loop got a turn before it was done."""
    task = asyncio.ensure_future(work)
    turns = -1  # the one in which it begins
    while not task.done():
        turns += 1
        await asyncio.sleep(0)
    return task.exception() or task.result(), turns


# Counting


def nested(value: Any) -> tuple[int, int, int]:
    """(Objects, lists and texts; depth; entries of the largest object), by a plain walk."""
    if isinstance(value, str):
        return 1, 0, 0
    if not isinstance(value, list | dict):
        return 0, 0, 0
    names = len(value) if isinstance(value, dict) else 0
    below = [nested(item) for item in (value.values() if isinstance(value, dict) else value)]
    return (
        1 + names + sum(part[0] for part in below),
        1 + max((part[1] for part in below), default=0),
        max([names, *(part[2] for part in below)]),
    )


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(st.sampled_from('a"\\[]{}:,\n ü😀')),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(st.sampled_from('ab"\\[{:')), inner),
        max_leaves=12,
    ),
    st.booleans(),
)
def test_what_is_counted_is_what_is_there_whatever_stands_in_texts(value: Any, ascii_only: bool) -> None:
    content = json.dumps(value, ensure_ascii=ascii_only).encode()
    values, depth, entries = nested(value)
    for limits, good in (
        ((values, depth, entries), True),
        ((values - 1, depth, entries), values < 1),
        ((values, depth - 1, entries), depth < 1),
        ((values, depth, entries - 1), entries < 1),
    ):
        with pytest.MonkeyPatch.context() as patch:
            for name, limit in zip(("VALUES", "DEPTH", "ENTRIES"), limits, strict=True):
                patch.setattr(bounds, name, max(0, limit))
            try:
                bounds.check(content, 422)
            except Problem:
                assert not good
            else:
                assert good


@pytest.mark.parametrize("content", [b"", b'"', b'"\\', b'{"a', b"]]]]{", b"[" * 65, b'{"' + b"\\" * 10_001])
def test_a_body_that_is_no_json_is_counted_to_its_end(content: bytes) -> None:
    if content.startswith(b"[["):
        with pytest.raises(Problem, match="64 levels"):
            bounds.check(content, 422)
    else:
        bounds.check(content, 422)


@pytest.mark.parametrize(
    "text", ["a" * 4_000_000, "\\" * 2_000_000, "\u4e2d" * 600_000, '[{":' * 800_000], ids=["plain", "\\", "u", "marks"]
)
def test_a_long_text_is_one_value(text: str) -> None:
    bounds.check(json.dumps({"prompt": text}).encode(), 422)


# What is refused


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (MANY, "messages: with it there are more than the 100000 objects"),
        (b'{"messages":[' + b",".join([EMPTY] * 2049) + b"]}", "messages: List should have at most 2048 items"),
        (b'{"prompt_token_ids":[' + b"1," * (1 << 20) + b"1]}", "prompt_token_ids: List should have at most 1048576"),
        (
            b'{"prompt_token_ids":[' + b"1.5," * 1_000_000 + b"1]}",
            "prompt_token_ids.0: Input should be",
        ),
        (b'{"prompt":"a","stop":[' + b"1," * 2_000_000 + b"1]}", "stop"),
        (b'{"prompt":"a","stop_token_ids":[' + b"1.5," * 1_000_000 + b"1]}", "stop_token_ids.0: "),
        (b"{" + b",".join(b'"%x":0' % i for i in range(1025)) + b"}", "an object has more than the 1024 entries"),
        (b'{"prompt" :' + b"[" * 10_000 + b"]" * 10_000 + b"}", "prompt: it is nested more deeply than the 64 levels"),
    ],
    ids=["values", "messages", "ids", "wrong ids", "wrong stops", "wrong stop ids", "entries", "depth"],
)
async def test_a_body_of_too_much_is_refused_by_the_number_and_not_item_by_item(content: bytes, said: str) -> None:
    found, turns = await turns_during(bounds.parse_body(content, GenerateIn))
    assert isinstance(found, Problem)
    assert (found.status, said in found.detail) == (422, True), found.detail
    assert len(found.errors or ()) <= 2
    assert turns > 0 or not bounds.is_large(content)


# Beside the event loop


@pytest.mark.parametrize(
    ("content", "model"),
    [
        (json.dumps({"prompt": "a" * 4_000_000}).encode(), GenerateIn),
        (json.dumps({"messages": [{"role": "user", "content": "[" * 1800}] * 2048}).encode(), GenerateIn),
        (json.dumps({"prompt_token_ids": [1] * 500_000}).encode(), GenerateIn),
        (json.dumps({"feedback": [{"response_id": "r", "kind": "comment", "text": "t" * 4000}] * 1000}).encode(),
         FeedbackBatchIn),
    ],
    ids=["prompt", "messages", "ids", "feedback"],
)  # fmt: skip
async def test_the_event_loop_goes_on_while_a_large_body_is_parsed(content: bytes, model: Any) -> None:
    found, turns = await turns_during(bounds.parse_body(content, model))
    assert found == parse(content, model)
    assert turns > 0


async def test_a_chat_of_many_messages_is_rendered_beside_the_event_loop(model_folders: list[Path]) -> None:
    text = Text(AutoTokenizer.from_pretrained(model_folders[0]))
    messages = [Message(role="user", content=f"m{i}") for i in range(2048)]
    found, turns = await turns_during(bounds.aside(True, _render, text, messages))
    assert found == _render(text, messages)
    assert turns > 0


async def test_a_large_feedback_batch_is_recorded_and_others_have_turns_meanwhile(tmp_path: Path) -> None:
    opened = Open(make(tmp_path))
    good: dict[str, Any] = {"response_id": "r", "kind": "comment", "text": "t" * 1000}
    wrong = good | {f"extra{i}": i for i in range(500)}
    try:
        sent = opened.http.post("/feedback/batch", json={"feedback": [good, wrong, 1] * 100}, timeout=60)
        answer, turns = await turns_during(sent)
        assert isinstance(answer, httpx.Response)
        results = answer.json()["results"]
        assert {result["status"] for result in results[1::3] + results[2::3]} == {422}
        assert {result["status"] for result in results[::3]} <= {201, 503}
        assert turns > 0
        many = await opened.http.post("/feedback/batch", content=b'{"feedback":[' + b"{}," * 150_000 + b"{}]}")
        assert many.status_code == 422
        assert "100000" in many.json()["detail"]
    finally:
        await opened.close()


# A server


async def test_a_server_refuses_too_much_by_the_field_and_the_number(client: httpx.AsyncClient) -> None:
    message = {"role": "user", "content": "a"}
    part = {"type": "text", "text": "a"}
    for path, status, body, said in (
        ("/generate", 422, MANY, "100000"),
        ("/v1/chat/completions", 400, MANY, "100000"),
        ("/v1/chat/completions", 400, {"messages": [message] * 2049}, "messages: 2049 entries are more than the 2048"),
        ("/v1/chat/completions", 400, {"messages": [message | {"content": [part] * 1500}] * 2}, "the 2048 parts"),
        ("/v1/chat/completions", 400, {"messages": [message | {"content": [5] * 2048}] * 1}, "messages"),
        ("/v1/chat/completions", 400, {"messages": [message] * 20 + [message | {"content": 5}]}, "messages.20.content"),
        ("/v1/chat/completions", 400, {"messages": [message | {"tool_calls": [{}] * 129}]}, "the 128"),
        ("/v1/chat/completions", 400, {"messages": [message], "tools": [{}] * 129}, "tools: 129 entries"),
        ("/v1/chat/completions", 400, {"messages": [message], "documents": [{"a": 1}]}, "documents.0.a"),
        ("/v1/completions", 400, {"prompt": "a", "stop": ["a"] * 17}, "stop: 17 entries are more than the 16"),
        ("/v1/completions", 400, {"prompt": "a", "structured_outputs": {"choice": [1] * 10_000}}, "the 2048"),
        ("/v1/completions", 400, {"prompt": [1] * 500_000 + ["a"]}, "a list is of texts, of token ids"),
        ("/v1/completions", 400, {"prompt": [[1] * 500_000, ["a"]]}, "a list is of texts, of token ids"),
        ("/generate", 400, {"prompt_token_ids": [1] * 500_000}, "500000 tokens leave no room"),
        ("/generate", 400, {"messages": [message] * 2048}, "messages: "),
    ):
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = await client.post(path, content=content)
        assert answer.status_code == status, (path, answer.text[:500])
        assert said in answer.text, (path, answer.text[:500])
    for ids in ([1, 2, 3], [1.0, 2.0], [[1, 2], [3]], "a", ["a", "b"]):
        answer = await client.post("/v1/completions", json={"prompt": ids, "max_tokens": 1})
        assert answer.status_code == 200, answer.text


def test_the_openapi_page_has_the_numbers(tmp_path: Path) -> None:
    schema = page(tmp_path)
    schemas = schema["components"]["schemas"]
    bodies = {
        "/generate": schemas["GenerateIn"]["properties"],
        "/feedback/batch": schemas["FeedbackBatchIn"]["properties"],
    }
    for path in ("/v1/completions", "/v1/chat/completions"):
        body = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        bodies[path] = body["properties"]
    for path, field, number in (
        ("/generate", "messages", bounds.MESSAGES),
        ("/generate", "prompt_token_ids", bounds.TOKEN_IDS),
        ("/generate", "stop", bounds.STOPS),
        ("/generate", "stop_token_ids", 16),
        ("/generate", "metadata", LimitsConfig().metadata_entries),
        ("/v1/completions", "prompt", bounds.TOKEN_IDS),
        ("/v1/completions", "stop", bounds.STOPS),
        ("/v1/chat/completions", "messages", bounds.MESSAGES),
        ("/v1/chat/completions", "messages", bounds.PARTS),
        ("/v1/chat/completions", "tools", bounds.TOOLS),
        ("/v1/chat/completions", "documents", bounds.DOCUMENTS),
        ("/feedback/batch", "feedback", 1000),
    ):
        assert str(number) in json.dumps(bodies[path][field]), (path, field)
