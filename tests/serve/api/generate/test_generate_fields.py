"""What a request of ``/generate`` may ask for beyond its text, over HTTP, on a real engine."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest

from tests.serve.api.generate.test_generate_stream import left_requests, streamed
from tests.serve.conftest import LiveServer, reference_logprobs

CLOSE = 2e-3  # nats, between vLLM and transformers in float32


def ask(server: LiveServer, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}/generate", json={"prompt": "the mill", "max_tokens": 12} | body, timeout=60)
    assert answer.status_code == 200, answer.text
    parsed: dict[str, Any] = answer.json()
    return parsed


def row_of(server: LiveServer, response: dict[str, Any]) -> dict[str, Any]:
    [row] = server.rows("interactions", f"response_id = '{response['response_id']}'")
    return row


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_and_logprobs_are_those_of_the_row_and_the_policy(server, n, stream):
    fields = {"n": n, "logprobs": True, "return_token_ids": True, "temperature": 0.8, "seed": 3}
    if stream:
        name, body = streamed(server.url, prompt="the mill", max_tokens=12, **fields)[-1]
        assert name == "done"
    else:
        body = ask(server, **fields)
    folder = server.store.get(body["policy_version"]).path
    for response in body["responses"]:
        row = row_of(server, response)
        assert response["token_ids"] == row["response_token_ids"]
        assert response["logprobs"] == pytest.approx(row["logprobs"], abs=1e-6)
        expected = reference_logprobs(folder, body["prompt_token_ids"], response["token_ids"], temperature=0.8)
        assert response["logprobs"] == pytest.approx(expected, abs=CLOSE)
        assert row["timings"]["first_token_ms"] <= row["timings"]["total_ms"]
        assert row["timings"]["queue_ms"] <= row["timings"]["first_token_ms"]


def test_token_ids_and_logprobs_are_left_out_unless_asked_for(server):
    body = ask(server)
    assert "prompt_token_ids" not in body
    assert body["responses"][0].keys() == {"response_id", "text", "finish_reason", "policy_spans"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_token_ends_a_response_and_is_its_last_token_but_not_its_text(server, stream):
    free = ask(server, temperature=0, max_tokens=20, return_token_ids=True)["responses"][0]
    stop = free["token_ids"][5]
    at = free["token_ids"].index(stop)
    fields = {"temperature": 0, "max_tokens": 20, "stop_token_ids": [stop], "return_token_ids": True}
    if stream:
        events = streamed(server.url, prompt="the mill", **fields)
        body = events[-1][1]
        assert "".join(data["text"] for name, data in events if name == "delta") == body["responses"][0]["text"]
    else:
        body = ask(server, **fields)
    [cut] = body["responses"]
    assert (cut["finish_reason"], cut["token_ids"]) == ("stop", free["token_ids"][: at + 1])
    assert free["text"].startswith(cut["text"])
    assert len(cut["text"]) < len(free["text"])
    assert json.loads(dict(row_of(server, cut)["metadata"])["millrace:sampling"]) == {"stop_token_ids": [stop]}


def test_a_plain_request_whose_client_leaves_has_a_row_with_the_tokens_so_far(server):
    # One response without stop texts: the engine keeps its tokens until it is told to hand them over.
    for outcome, rows in left_requests(server, {"prompt": "gone", "max_tokens": 240}):
        if not rows:  # a busy server had not read the request yet
            assert outcome == "left"
            continue
        [row] = rows
        made = len(row["response_token_ids"])
        assert (row["status"] == "aborted") is (row["finish_reason"] == "abort")
        assert made == len(row["logprobs"])
        assert [span["start"] for span in row["policy_spans"]] == ([0] if made else [])
        if row["status"] == "aborted" and made:
            assert (made < 240, outcome) == (True, "left")
            return
    pytest.fail("no client left while its response was made")


def test_a_streamed_text_that_ends_within_a_character_is_that_of_a_plain_request(server):
    for seed in range(8):  # of random bytes: many a response ends within a character
        fields = {"max_tokens": 5, "seed": seed}
        plain = ask(server, **fields)["responses"][0]["text"]
        events = streamed(server.url, prompt="the mill", **fields)
        assert "".join(data["text"] for name, data in events if name == "delta") == plain
        assert events[-1][1]["responses"][0]["text"] == plain


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": list(range(17))}, "stop_token_ids"),
        ({"logprobs": 3}, "logprobs"),
        ({"metadata": {"millrace:sampling": "{}"}}, "metadata"),
        ({"temperature": 1e-300}, "temperature"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop.1"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": 5}, "stop"),
    ],
)
def test_a_wrong_field_is_named(server, fields, field):
    answer = httpx.post(f"{server.url}/generate", json={"prompt": "a"} | fields, timeout=60)
    assert answer.status_code == 422, answer.text
    assert answer.json()["errors"][0]["field"].startswith(field)


def test_the_session_may_come_as_a_header_and_the_body_has_the_last_word(server):
    for body, expected in (({}, "of the header"), ({"session_id": "of the body"}, "of the body")):
        answer = httpx.post(
            f"{server.url}/generate",
            json={"prompt": "a", "max_tokens": 1} | body,
            headers={"X-Session-Id": "of the header"},
            timeout=60,
        )
        assert row_of(server, answer.json()["responses"][0])["session_id"] == expected
    answer = httpx.post(f"{server.url}/generate", json={"prompt": "a"}, headers={"X-Session-Id": "x" * 201}, timeout=60)
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "X-Session-Id")


def test_the_metrics_are_told_what_the_engine_does(server):
    before = time.monotonic()
    ask(server, max_tokens=30)
    while time.monotonic() < before + 120:
        text = httpx.get(f"{server.url}/metrics", timeout=60).text
        gauges = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("millrace_engine_"))
        if float(gauges["millrace_engine_running"]) == 0 == float(gauges["millrace_engine_in_flight"]):
            return
        time.sleep(0.05)
    raise AssertionError("the engine seems to run still")
