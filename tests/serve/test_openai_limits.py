"""The routes below /v1 of a server with little time and a parser of tool calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from serve.policies import PolicyStore
from tests.serve.conftest import LiveServer, start_server, stop_server
from tests.serve.test_openai import rows_of, wait_for_rows

LONG: dict[str, Any] = {"model": "millrace", "max_tokens": 250, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model_folders: list[Path]) -> Iterator[LiveServer]:
    """A server that gives a request 50 ms and takes bodies of 2 KiB."""
    home = tmp_path_factory.mktemp("limits")
    store = PolicyStore(home / "policies")
    store.publish(model_folders[0], parent=None, lineage={"test": True}, metrics={})
    store.promote(1, expected=None, who="test", why="first")
    limits = {"timeout_s": 0.05, "body_bytes": 2048}
    live = start_server(home, store, limits=limits, openai={"tool_parser": "hermes"})
    yield live
    stop_server(live)


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    """OpenAI's client of it."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def test_a_request_that_takes_too_long_gets_504_and_its_row_says_aborted(
    client: openai.OpenAI, server: LiveServer
) -> None:
    with pytest.raises(openai.InternalServerError, match=r"aborted after 0\.05 s") as caught:
        client.completions.create(prompt="long", user="late", **LONG)
    assert caught.value.status_code == 504
    [row] = wait_for_rows(server, "\"user\" = 'late'")
    assert (row["status"], row["finish_reason"]) == ("aborted", "abort")
    assert len(row["logprobs"]) == len(row["response_token_ids"]) < 250


def test_a_stream_that_takes_too_long_ends_with_an_error_event(client: openai.OpenAI, server: LiveServer) -> None:
    with pytest.raises(openai.APIError, match=r"aborted after 0\.05 s"):
        for _ in client.completions.create(prompt="long", stream=True, user="late stream", **LONG):
            pass
    [row] = wait_for_rows(server, "\"user\" = 'late stream'")
    assert (row["status"], row["finish_reason"]) == ("aborted", "abort")
    assert len(row["logprobs"]) == len(row["response_token_ids"])


def test_a_body_over_the_limit_is_refused_whatever_is_in_it(server: LiveServer) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        answer = httpx.post(f"{server.url}{path}", content=b"x" * 2049)
        assert answer.status_code == 413
        assert "2048" in answer.json()["error"]["message"]


def test_tools_reach_the_policy_where_a_parser_is_configured(client: openai.OpenAI, server: LiveServer) -> None:
    tool: Any = {"type": "function", "function": {"name": "grind", "parameters": {"type": "object"}}}
    messages: list[Any] = [
        {"role": "user", "content": "go"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "grind", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "flour"},
    ]
    answer = client.chat.completions.create(
        messages=messages, tools=[tool], tool_choice="auto", model="millrace", max_tokens=2
    )
    [row] = rows_of(server, answer.id)
    assert json.loads(row["messages"]) == messages
    assert len(row["logprobs"]) == len(row["response_token_ids"])
