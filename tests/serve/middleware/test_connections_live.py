"""A live server with keys, limits and JSON logs: what it records of whom, and what it tells."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from feedback.ids import uuid7
from serve.middleware.api_keys import create_key, local_secret, revoke_key
from serve.policies.store import PolicyStore
from tests.serve.conftest import LiveServer, start_server, stop_server

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


@pytest.fixture(scope="module")
def guarded(
    tmp_path_factory: pytest.TempPathFactory, model_folders: list[Path]
) -> Iterator[tuple[LiveServer, dict[str, str]]]:
    """A server with keys, limits and JSON logs."""
    home = tmp_path_factory.mktemp("guarded")
    store = PolicyStore(home / "policies")
    store.publish(model_folders[0], parent=None, lineage={}, metrics={})
    store.promote(1, expected=None, who="test", why="first")
    path = home / "keys.json"
    secrets = {
        name: create_key(path, name=name, tenant=name, scopes=scopes, tokens_per_minute=limit)[1]
        for name, scopes, limit in (
            ("acme", ["generate", "feedback"], None),
            ("small", ["generate"], 60),
            ("ops", ["admin"], None),
        )
    }
    live = start_server(home, store, log_format="json", access_log=True)
    yield live, secrets
    stop_server(live)


def test_rows_of_a_key_are_its_tenants_with_the_clients_request_id(
    guarded: tuple[LiveServer, dict[str, str]],
) -> None:
    server, secrets = guarded
    mine = f"mine-{uuid7()}"
    headers = bearer(secrets["acme"]) | {"X-Request-Id": mine, "traceparent": PARENT}
    answer = httpx.post(f"{server.url}/generate", json={"prompt": "a", "max_tokens": 3}, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.headers["X-Request-Id"] == mine
    (row,) = server.rows("interactions", f"request_id = '{mine}'")
    assert row["tenant"] == "acme"
    lines = [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith("{")]
    (line,) = [line for line in lines if line.get("request_id") == mine]
    assert (line["logger"], line["route"], line["code"], line["tenant"]) == ("serve.access", "/generate", 200, "acme")
    assert line["trace_id"] == TRACE
    assert any("requests need a key: 3 are good" in line["message"] for line in lines)


def test_a_key_has_tokens_for_so_many_requests_and_what_it_does_not_use_comes_back(
    guarded: tuple[LiveServer, dict[str, str]],
) -> None:
    server, secrets = guarded
    url, headers = f"{server.url}/generate", bearer(secrets["small"])
    never = httpx.post(url, json={"prompt": "ab", "max_tokens": 59}, headers=headers, timeout=60)
    assert never.status_code == 400
    assert "could never pass" in never.json()["detail"]
    prompt, begins = next(found for letter in "abcdefgh" if (found := greedy(url, letter, bearer(secrets["acme"]))))
    body = {"prompt": prompt, "max_tokens": 29, "temperature": 0, "stop": [begins]}
    answers = [httpx.post(url, json=body, headers=headers, timeout=60) for _ in range(6)]
    # Each asks for half of what there is in a minute, and uses a few tokens.
    assert [answer.status_code for answer in answers] == [200] * 6
    assert all(answer.json()["usage"]["total_tokens"] < 10 for answer in answers)


def greedy(url: str, prompt: str, headers: dict[str, str]) -> tuple[str, str] | None:
    """(The prompt, the letter that its greedy response begins with), if that is one."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
    text = httpx.post(url, json=body, headers=headers, timeout=60).json()["responses"][0]["text"]
    return (prompt, text[0]) if text and text[0].isascii() else None


def test_metrics_have_vllms_and_ours(guarded: tuple[LiveServer, dict[str, str]]) -> None:
    server, secrets = guarded
    httpx.post(
        f"{server.url}/generate", json={"prompt": "a", "max_tokens": 3}, headers=bearer(secrets["acme"]), timeout=60
    )
    text = httpx.get(f"{server.url}/metrics", headers=bearer(secrets["ops"]), timeout=60).text
    for name in (
        'vllm:generation_tokens_total{engine="0",model_name="millrace"}',
        "vllm:e2e_request_latency_seconds_bucket",
        "millrace_first_token_seconds_bucket",
        "millrace_inter_token_seconds_count",
        "millrace_journal_queued_rows",
        "millrace_journal_last_commit_ms",
        "millrace_policy_version 1.0",
        "millrace_swap_hold_seconds_bucket",
        "millrace_keys_active 3.0",
        "process_resident_memory_bytes",
    ):
        assert name in text
    counted = re.search(r"vllm:generation_tokens_total\{[^}]*\} (\S+)", text)
    assert counted is not None
    assert float(counted[1]) > 0
    assert "v000001" not in text


def test_this_machines_own_commands_may_ask_and_a_revoked_key_is_worthless_within_seconds(
    guarded: tuple[LiveServer, dict[str, str]],
) -> None:
    server, _ = guarded
    path = server.home / "keys.json"
    own = {"X-API-Key": local_secret(path)}
    assert httpx.get(f"{server.url}/policy", headers=own, timeout=60).json()["version"] == 1
    _, secret = create_key(path, name="short", tenant="t", scopes=["admin"])
    codes = []
    for change, wanted in ((lambda: None, 200), (lambda: revoke_key(path, "short"), 401)):
        change()
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline:
            code = httpx.get(f"{server.url}/policy", headers=bearer(secret), timeout=60).status_code
            if code == wanted:
                break
            time.sleep(0.05)
        codes.append(code)
    assert codes == [200, 401]


async def test_many_requests_at_once_keep_their_own_ids(guarded: tuple[LiveServer, dict[str, str]]) -> None:
    server, secrets = guarded
    async with httpx.AsyncClient(base_url=server.url, headers=bearer(secrets["acme"]), timeout=60) as http:

        async def ask(number: int) -> None:
            name = f"n{number}"
            body = {"prompt": "a", "max_tokens": 2}
            answer = await http.post("/generate", json=body, headers={"X-Request-Id": name})
            assert answer.headers["X-Request-Id"] == answer.json()["request_id"] == name

        await asyncio.gather(*(ask(number) for number in range(32)))
