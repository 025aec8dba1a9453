"""``/generate`` with ``stream: true``, over HTTP, on a real engine."""

from __future__ import annotations

import contextlib
import json
import resource
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from loadtests.event_lines import read_lines


def events(lines: Any) -> list[tuple[str, dict[str, Any]]]:
    """(event, data) of a stream of server-sent events."""
    found = []
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            found.append((name, json.loads(line.removeprefix("data: "))))
    return found


def streamed(url: str, **body: Any) -> list[tuple[str, dict[str, Any]]]:
    with httpx.stream("POST", f"{url}/generate", json={"stream": True} | body, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        return events(read_lines(answer))


def wait_for_row(server: Any, where: str) -> dict[str, Any]:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if rows := server.rows("interactions", where):
            return rows[0]
        time.sleep(0.05)
    raise TimeoutError(where)


def test_the_deltas_are_the_text_of_the_final_event_and_the_row_is_there_by_then(server):
    found = streamed(server.url, prompt="tell me", max_tokens=30, seed=4)
    name, body = found[-1]
    assert name == "done"
    assert [kind for kind, _ in found[:-1]] == ["delta"] * (len(found) - 1)
    assert len(found) > 3
    [response] = body["responses"]
    assert "".join(data["text"] for _, data in found[:-1]) == response["text"]
    assert {data["response_id"] for _, data in found[:-1]} == {response["response_id"]}
    [row] = server.rows("interactions", f"response_id = '{response['response_id']}'")
    assert (row["status"], row["response"]) == ("complete", response["text"])
    assert len(row["logprobs"]) == len(row["response_token_ids"]) == body["usage"]["completion_tokens"]


def test_a_streamed_response_is_that_of_a_plain_request(server):
    body = {"prompt": "the same", "max_tokens": 12, "seed": 9, "stop": ["q"]}
    plain = httpx.post(f"{server.url}/generate", json=body, timeout=60).json()
    _, last = streamed(server.url, **body)[-1]
    assert last.keys() == plain.keys()
    assert last["responses"][0]["text"] == plain["responses"][0]["text"]
    assert last["usage"] == plain["usage"]


def test_several_responses_are_streamed_side_by_side(server):
    found = streamed(server.url, prompt="three", max_tokens=10, n=3, seed=1)
    _, body = found[-1]
    texts = ["", "", ""]
    for _, data in found[:-1]:
        texts[data["index"]] += data["text"]
    assert texts == [response["text"] for response in body["responses"]]
    assert len(set(texts)) > 1
    assert len(server.rows("interactions", f"request_id = '{body['request_id']}' AND status = 'complete'")) == 3


def outcomes_since(server: Any, before: dict[str, int]) -> dict[str, int]:
    """How many requests have come to what since, as soon as one has come to something."""
    deadline = time.monotonic() + 180
    while (after := server.outcomes()) == before and time.monotonic() < deadline:
        time.sleep(0.05)
    return {name: after[name] - before[name] for name in after if after[name] != before[name]}


def left_requests(
    server: Any, body: dict[str, Any], path: str = "/generate"
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """What plain requests that their clients leave at ever later times come to, each with its rows.

    The engine stands still when they are left, so that on a quick machine too some are left while they are made.
    """
    engine = server.engine()
    for begun_s in 6 * (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64):
        user, before = f"left-{uuid.uuid4().hex}", server.outcomes()
        stop = threading.Timer(begun_s, engine.suspend)
        stop.start()
        try:
            with contextlib.suppress(httpx.ReadTimeout):
                timeout = httpx.Timeout(60, read=begun_s + 0.3)
                httpx.post(server.url + path, json=body | {"user": user}, timeout=timeout)
        finally:
            stop.join()
            engine.resume()
        [(outcome, count)] = outcomes_since(server, before).items()
        assert (outcome in ("left", "complete"), count) == (True, 1)
        yield outcome, server.rows("interactions", f"\"user\" = '{user}'")


def wait_for_outcome(server: Any, before: dict[str, int], outcome: str) -> None:
    """One request has come to ``outcome`` since, and to nothing else."""
    assert outcomes_since(server, before) == {outcome: 1}


def test_a_client_that_leaves_has_an_aborted_row_with_the_tokens_so_far(server):
    for attempt in range(20):  # on a busy machine this client may be the last to hear of its first token
        before = server.outcomes()
        body = {"prompt": "long", "max_tokens": 200, "stream": True, "metadata": {"who": f"leaver {attempt}"}}
        with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=60) as answer:
            assert next(line for line in read_lines(answer) if line.startswith("data: "))
        row = wait_for_row(server, f"metadata['who'] = 'leaver {attempt}'")
        outcomes = outcomes_since(server, before)
        if row["status"] != "complete":
            break
    assert (row["status"], row["finish_reason"]) == ("aborted", "abort")
    assert 1 <= len(row["response_token_ids"]) < 200
    assert len(row["logprobs"]) == len(row["response_token_ids"])
    assert outcomes == {"left": 1}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_a_request_that_is_answered_has_come_to_its_end_also_for_a_client_that_goes_then(server, path, stream):
    before = server.outcomes()
    body = {"prompt": "short", "max_tokens": 4, "stream": stream}
    with httpx.stream("POST", f"{server.url}{path}", json=body, timeout=60) as answer:
        for line in read_lines(answer):
            if line in ("event: done", "data: [DONE]"):
                break
    wait_for_outcome(server, before, "complete")
    assert httpx.post(f"{server.url}{path}", json=body | {"max_tokens": 0}, timeout=60).status_code in (400, 422)
    assert server.outcomes()["refused"] == before["refused"] + 1


@contextlib.contextmanager
def full_disk(process: int) -> Iterator[None]:
    """A process whose files can't grow."""
    before = resource.prlimit(process, resource.RLIMIT_FSIZE)
    resource.prlimit(process, resource.RLIMIT_FSIZE, (1, before[1]))
    yield
    resource.prlimit(process, resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_a_stream_whose_end_can_t_be_recorded_says_why_and_its_row_is_aborted_with_all_that_was_sent(server, path):
    who = f"full disk {path}"
    body = {"prompt": "long", "max_tokens": 200, "stream": True, "user": who, "temperature": 0.9, "seed": 5}
    before = server.outcomes()
    with httpx.stream("POST", f"{server.url}{path}", json=body, timeout=60) as answer:
        lines = read_lines(answer)
        first = next(line for line in lines if line.startswith("data: "))
        with full_disk(server.process.pid):
            rest = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    sent = [json.loads(line) for line in [first.removeprefix("data: "), *rest] if line != "[DONE]"]
    wait_for_outcome(server, before, "failed")  # although its status was 200
    assert "counts as aborted" in json.dumps(sent[-1]) or "File too large" in json.dumps(sent[-1])
    if path == "/generate":
        assert sent[-1]["status"] == 503
        text = "".join(event["text"] for event in sent[:-1])
    else:
        assert sent[-1]["error"]["code"] == 503
        text = "".join(choice["text"] for event in sent[:-1] for choice in event["choices"])
    row = wait_for_row(server, f"\"user\" = '{who}'")
    assert (row["status"], row["finish_reason"]) == ("aborted", "abort")
    assert row["response"].startswith(text)
    assert text
    assert len(row["logprobs"]) == len(row["response_token_ids"]) > 0
    assert httpx.post(f"{server.url}{path}", json=body | {"stream": False}, timeout=60).status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({"prompt": ""}, 422, "prompt"),
        ({"prompt": "a", "n": 0}, 422, "n"),
        ({"prompt": "x" * 300}, 400, "prompt"),
        ({"prompt": "a", "stream": "yes"}, 422, "stream"),
    ],
)
def test_what_can_t_be_streamed_is_a_plain_problem(server, body, status, field):
    answer = httpx.post(f"{server.url}/generate", json={"stream": True} | body, timeout=60)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["errors"][0]["field"] == field


def test_nothing_of_a_stream_stays_at_work(server):
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        text = httpx.get(f"{server.url}/metrics", timeout=60).text
        gauges = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("millrace_"))
        if float(gauges["millrace_journal_open_streams"]) == float(gauges["millrace_engine_in_flight"]) == 0:
            return
        time.sleep(0.05)
    raise AssertionError("streams are open still")
