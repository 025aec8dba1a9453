"""The server over real HTTP: its answers, what it records, and how it refuses."""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from typing import Any

import httpx
import pytest

from loadtests.tiny_model import CONTEXT
from tests.serve.api.generate.test_generate_stream import left_requests
from tests.serve.conftest import LiveServer, reference_logprobs


async def generate(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post("/generate", json={"prompt": "the mill", "max_tokens": 8, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def test_an_answer_has_the_promised_form(client: httpx.AsyncClient) -> None:
    answer = await generate(client, n=2)
    assert answer.keys() == {"request_id", "model", "policy_version", "responses", "usage"}
    first = answer["responses"][0]
    assert first.keys() == {"response_id", "text", "finish_reason", "policy_spans"}
    assert uuid.UUID(first["response_id"]).version == 7
    assert len({response["response_id"] for response in answer["responses"]}) == 2
    assert first["policy_spans"] == [{"start": 0, "policy_version": answer["policy_version"]}]
    usage = answer["usage"]
    assert usage["prompt_tokens"] == len("the mill")
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


async def test_every_answered_response_is_recorded_by_the_time_it_is_answered(
    client: httpx.AsyncClient, server: LiveServer
) -> None:
    answer = await generate(
        client,
        n=2,
        temperature=0.7,
        top_k=0,
        seed=3,
        stop=["zz"],
        session_id="s1",
        user="u1",
        metadata={"answer": "42"},
    )
    rows = server.rows("interactions", f"request_id = '{answer['request_id']}'")
    assert {row["response_id"] for row in rows} == {r["response_id"] for r in answer["responses"]}
    for row in rows:
        assert row["status"] == "complete"
        assert row["prompt"] == "the mill"
        assert row["prompt_token_ids"] == server_tokens(server, "the mill")
        assert (row["session_id"], row["user"], row["tenant"]) == ("s1", "u1", "default")
        assert (row["replica"], row["endpoint"]) == ("replica-0", "/generate")
        assert dict(row["metadata"]) == {"answer": "42"}
        assert row["sampling"]["temperature"] == pytest.approx(0.7)
        assert (row["sampling"]["seed"], row["sampling"]["n"], row["sampling"]["stop"]) == (3, 2, ["zz"])
        assert row["created_at"] <= row["completed_at"]
        assert 0 <= row["timings"]["queue_ms"] <= row["timings"]["first_token_ms"] <= row["timings"]["total_ms"]
        policy = server.store.get(row["policy_spans"][0]["policy_version"])
        expected = reference_logprobs(policy.path, row["prompt_token_ids"], row["response_token_ids"], temperature=0.7)
        assert row["logprobs"] == pytest.approx(expected, abs=1e-4)


def server_tokens(server: LiveServer, text: str) -> list[int]:
    vocabulary = json.loads((server.store.get(1).path / "tokenizer.json").read_text())["model"]["vocab"]
    return [vocabulary["Ġ" if character == " " else character] for character in text]


async def test_messages_go_through_the_policys_template(client: httpx.AsyncClient, server: LiveServer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    answer = await generate(client, prompt=None, messages=messages)
    (row,) = server.rows("interactions", f"request_id = '{answer['request_id']}'")
    assert json.loads(row["messages"]) == messages
    assert row["prompt"] == "user: hi\nassistant:"


async def test_token_ids_are_a_prompt_too(client: httpx.AsyncClient, server: LiveServer) -> None:
    answer = await generate(client, prompt=None, prompt_token_ids=[5, 6, 7])
    (row,) = server.rows("interactions", f"request_id = '{answer['request_id']}'")
    assert (row["prompt"], row["messages"], row["prompt_token_ids"]) == (None, None, [5, 6, 7])


@pytest.mark.parametrize(
    ("body", "status", "field", "reason"),
    [
        ({}, 422, "body", "exactly one of"),
        ({"prompt": "a", "prompt_token_ids": [1]}, 422, "body", "exactly one of"),
        ({"prompt": ""}, 422, "prompt", "no token"),
        ({"prompt": 5}, 422, "prompt", "string"),
        ({"prompt": "a", "promt": "b"}, 422, "promt", "not permitted"),
        ({"prompt": "a", "n": 0}, 422, "n", "greater than or equal to 1"),
        ({"prompt": "a", "n": 99}, 422, "n", "16"),
        ({"prompt": "a", "n": "2"}, 422, "n", "integer"),
        ({"prompt": "a", "max_tokens": 10**6}, 422, "max_tokens", "4096"),
        ({"prompt": "a", "temperature": -1}, 422, "temperature", "greater"),
        ({"prompt": "a", "temperature": 0.001}, 422, "temperature", "0.01"),
        ({"prompt": "a", "top_p": 0}, 422, "top_p", "greater than 0"),
        ({"prompt": "a", "seed": 2**63}, 422, "seed", "less than"),
        ({"prompt": "a", "stop": [""]}, 422, "stop.0", "at least 1 character"),
        ({"prompt": "a", "metadata": {"k": 1}}, 422, "metadata.k", "string"),
        ({"prompt": "a", "metadata": {str(i): "" for i in range(65)}}, 422, "metadata", "64"),
        ({"messages": []}, 422, "messages", "at least 1"),
        ({"messages": [{"role": "user"}]}, 422, "messages.0.content", "required"),
        ({"prompt_token_ids": [1, 99999]}, 422, "prompt_token_ids", "99999"),
        ({"prompt_token_ids": [-1]}, 422, "prompt_token_ids", "-1"),
        ({"prompt": "x" * CONTEXT}, 400, "prompt", f"{CONTEXT} tokens leave no room"),
        ({"prompt": "x" * 900_000}, 400, "prompt", f"900000 characters .* {CONTEXT} tokens"),
        (
            {"messages": [{"role": "user", "content": "x" * 900_000}]},
            400,
            "messages",
            f"characters .* {CONTEXT} tokens",
        ),
        ({"prompt_token_ids": [5] * 300}, 400, "prompt_token_ids", f"300 tokens .* {CONTEXT} tokens"),
    ],
)
async def test_a_bad_request_is_told_which_field_and_why(
    client: httpx.AsyncClient, body: dict[str, Any], status: int, field: str, reason: str
) -> None:
    response = await client.post("/generate", json=body)
    assert response.status_code == status
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert problem["status"] == status
    (error,) = [error for error in problem["errors"] if error["field"] == field]
    assert re.search(reason, error["reason"], re.IGNORECASE), error


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b'{"prompt": "\\ud800"}', b"null"])
@pytest.mark.parametrize("route", ["/generate", "/feedback"])
async def test_a_body_that_is_no_json_object_is_refused(client: httpx.AsyncClient, route: str, content: bytes) -> None:
    response = await client.post(route, content=content)
    assert response.status_code == 422
    assert response.json()["errors"]


async def test_a_body_that_is_too_large_is_refused(client: httpx.AsyncClient) -> None:
    response = await client.post("/generate", content=b" " * (5 << 20))
    assert response.status_code == 413


async def test_unknown_routes_and_methods_are_problems_too(client: httpx.AsyncClient) -> None:
    missing, wrong = await client.get("/nothing"), await client.get("/generate")
    assert (missing.status_code, wrong.status_code) == (404, 405)
    assert missing.headers["content-type"] == wrong.headers["content-type"] == "application/problem+json"


async def test_feedback_is_recorded_once_whatever_is_sent_again(client: httpx.AsyncClient, server: LiveServer) -> None:
    response_id = (await generate(client))["responses"][0]["response_id"]
    body = {"response_id": response_id, "kind": "thumb", "value": 1, "feedback_id": f"f-{response_id}"}
    answers = await asyncio.gather(*(client.post("/feedback", json=body) for _ in range(8)))
    assert sorted(answer.status_code for answer in answers) == [200] * 7 + [201]
    assert {answer.json()["feedback_id"] for answer in answers} == {body["feedback_id"]}
    conflict = await client.post("/feedback", json=body | {"value": 0})
    assert conflict.status_code == 409
    assert conflict.json()["errors"][0]["field"] == "feedback_id"
    (row,) = server.rows("feedback", f"response_id = '{response_id}'")
    assert (row["kind"], row["value"], row["source"]) == ("thumb", 1.0, "user")


async def test_feedback_without_an_id_gets_one(client: httpx.AsyncClient) -> None:
    body = {"response_id": "some", "kind": "comment", "text": "so so"}
    one, two = [await client.post("/feedback", json=body) for _ in range(2)]
    assert one.status_code == two.status_code == 201
    assert one.json()["feedback_id"] != two.json()["feedback_id"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"kind": "thumb", "value": 1}, "response_id"),
        ({"response_id": "r", "kind": "thumb"}, "value"),
        ({"response_id": "r", "kind": "thumb", "value": 0.5}, "1 .up. or 0"),
        ({"response_id": "r", "kind": "applause", "value": 1}, "kind"),
        ({"response_id": "r", "kind": "preference"}, "rejected_response_id"),
        ({"response_id": "r", "kind": "thumb", "value": 1, "extra": 1}, "extra"),
    ],
)
async def test_bad_feedback_is_refused_with_the_reason(
    client: httpx.AsyncClient, body: dict[str, Any], says: str
) -> None:
    response = await client.post("/feedback", json=body)
    assert response.status_code == 422
    assert re.search(says, response.text)


def test_a_client_that_goes_away_ends_its_request_and_the_row_says_aborted(server: LiveServer) -> None:
    for outcome, rows in left_requests(server, {"prompt": "gone", "max_tokens": 250, "n": 16, "temperature": 0.01}):
        assert len(rows) in (0, 16)
        for row in rows:
            assert len(row["logprobs"]) == len(row["response_token_ids"])
            assert row["finish_reason"] == ("abort" if row["status"] == "aborted" else row["finish_reason"])
        if "aborted" in {row["status"] for row in rows}:
            assert outcome == "left"
            return
    pytest.fail("no client left while its responses were made")


async def test_a_hundred_clients_at_once_are_all_answered_and_recorded(
    client: httpx.AsyncClient, server: LiveServer
) -> None:
    answers = await asyncio.gather(
        *(generate(client, prompt=f"client {i}", user="crowd", max_tokens=16) for i in range(100))
    )
    recorded = {row["response_id"] for row in server.rows("interactions", "\"user\" = 'crowd'")}
    assert recorded == {answer["responses"][0]["response_id"] for answer in answers}
    assert len(recorded) == 100


async def test_health_ready_and_metrics_answer(client: httpx.AsyncClient) -> None:
    assert (await client.get("/health")).json() == {"status": "ok"}
    assert (await client.get("/ready")).json()["status"] == "ready"
    await generate(client)
    text = (await client.get("/metrics")).text
    for name in (
        'millrace_requests_total{code="200",route="/generate"}',
        "millrace_response_tokens_total",
        "millrace_journal_queued_rows",
        "millrace_engine_running",
        "millrace_policy_version",
        "millrace_request_seconds_bucket",
        "millrace_swap_hold_seconds_bucket",
    ):
        assert name in text


async def test_the_openapi_page_describes_bodies_and_errors(client: httpx.AsyncClient) -> None:
    schema = (await client.get("/openapi.json")).json()
    body = schema["components"]["schemas"]["GenerateIn"]
    assert all("description" in field for field in body["properties"].values())
    references = {part.split('"')[0] for part in json.dumps(schema).split("#/components/schemas/")[1:]}
    assert references <= schema["components"]["schemas"].keys()
    assert "422" in schema["paths"]["/feedback"]["post"]["responses"]


@pytest.mark.parametrize("path", ["/generate", "/feedback"])
async def test_a_client_that_goes_in_the_middle_of_its_body_is_no_error_of_the_server(
    client: httpx.AsyncClient, server: LiveServer, path: str
) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    for _ in range(3):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-length: 500\r\n\r\n{{".encode())
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()
        await writer.wait_closed()
    counted = f'millrace_requests_total{{code="499",route="{path}"}}'
    deadline = asyncio.get_running_loop().time() + 5
    while counted not in (metrics := (await client.get("/metrics")).text):
        assert asyncio.get_running_loop().time() < deadline, metrics
        await asyncio.sleep(0.05)
    assert 'code="500"' not in metrics
    assert "ClientDisconnect" not in server.log.read_text()
