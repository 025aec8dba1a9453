"""The routes below /v1 of a server with keys, little time and a parser of tool calls."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from serve.middleware.api_keys import create_key
from serve.policies.store import PolicyStore
from tests.serve.api.completions.test_completions import rows_of, wait_for_rows
from tests.serve.conftest import LiveServer, start_server, stop_server

# More than any machine makes in a second.
LONG: dict[str, Any] = {"model": "millrace", "prompt": ["long"] * 48, "n": 8, "max_tokens": 250}

KEYS: dict[str, str] = {}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model_folders: list[Path]) -> Iterator[LiveServer]:
    """A server that gives a request one second, takes bodies of 2 KiB, has work for four, and knows two keys."""
    home = tmp_path_factory.mktemp("limits")
    store = PolicyStore(home / "policies")
    store.publish(model_folders[0], parent=None, lineage={"test": True}, metrics={})
    store.promote(1, expected=None, who="test", why="first")
    limits = {"timeout_s": 1, "body_bytes": 2048, "concurrent_requests": 4}
    keys = home / "keys.json"
    _, KEYS["free"] = create_key(keys, name="free", tenant="acme", scopes=["generate"])
    _, KEYS["poor"] = create_key(keys, name="poor", tenant="acme", scopes=["generate"], tokens_per_minute=120)
    live = start_server(home, store, limits=limits, openai={"tool_parser": "hermes"}, keys=str(keys))
    yield live
    stop_server(live)


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    """OpenAI's client of it."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEYS["free"], max_retries=0, timeout=60) as made:
        yield made


def test_a_request_that_takes_too_long_gets_504_and_its_row_says_aborted(
    client: openai.OpenAI, server: LiveServer
) -> None:
    with pytest.raises(openai.InternalServerError, match="aborted after 1 s") as caught:
        client.completions.create(user="late", **LONG)
    assert caught.value.status_code == 504
    check_cut_off(wait_for_rows(server, "\"user\" = 'late'", 48 * 8))


def check_cut_off(rows: list[dict[str, Any]]) -> None:
    assert len(rows) == len({row["response_id"] for row in rows}) == 48 * 8
    assert "aborted" in {row["status"] for row in rows}
    for row in rows:
        assert row["tenant"] == "acme"
        assert (row["status"] == "aborted") is (row["finish_reason"] == "abort")
        assert len(row["logprobs"]) == len(row["response_token_ids"]) <= 250


def test_a_stream_that_takes_too_long_ends_with_an_error_event(client: openai.OpenAI, server: LiveServer) -> None:
    with pytest.raises(openai.APIError, match="aborted after 1 s"):
        for _ in client.completions.create(stream=True, user="late stream", **LONG):
            pass
    check_cut_off(wait_for_rows(server, "\"user\" = 'late stream'", 48 * 8))


def test_a_body_over_the_limit_is_refused_whatever_is_in_it(server: LiveServer) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        headers = {"Authorization": f"Bearer {KEYS['free']}"}
        answer = httpx.post(f"{server.url}{path}", content=b"x" * 2049, headers=headers, timeout=60)
        assert answer.status_code == 413
        assert "2048" in answer.json()["error"]["message"]


def test_connections_that_send_a_body_slowly_take_nobodys_place(client: openai.OpenAI, server: LiveServer) -> None:
    address = server.url.removeprefix("http://").split(":")
    head = f"Host: x\r\nAuthorization: Bearer {KEYS['free']}\r\nContent-Length: 1000\r\n\r\n{{"
    with ExitStack() as slow:
        for path in ("/generate", "/v1/completions", "/v1/chat/completions"):
            for _ in range(8):
                connection = slow.enter_context(socket.create_connection((address[0], int(address[1]))))
                connection.sendall(f"POST {path} HTTP/1.1\r\n{head}".encode())
        for _ in range(3):
            time.sleep(0.1)  # until the server has read their heads
            assert client.completions.create(model="millrace", prompt="a", max_tokens=1).usage
            plain = httpx.post(
                f"{server.url}/generate",
                json={"prompt": "a", "max_tokens": 1},
                headers={"Authorization": f"Bearer {KEYS['free']}"},
                timeout=60,
            )
            assert plain.status_code == 200, plain.text


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


def test_tokens_that_were_reserved_and_not_used_come_back_to_the_key(client: openai.OpenAI) -> None:
    poor = client.with_options(api_key=KEYS["poor"])
    for _ in range(3):  # each may use 60 tokens and uses 2
        poor.completions.create(
            prompt="a", model="millrace", max_tokens=59, logit_bias={"70": 100}, extra_body={"stop_token_ids": [70]}
        )
    poor.completions.create(prompt="a" * 60, model="millrace", max_tokens=1)
    with pytest.raises(openai.RateLimitError, match="tokens_per_minute"):
        poor.completions.create(prompt="a" * 110, model="millrace", max_tokens=1)


def test_a_request_without_a_good_key_is_refused_as_openai_refuses_it(client: openai.OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
