"""Spans of requests that need no engine, as a collector gets them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from loadtests.server import free_port
from serve.config import TracesConfig
from serve.middleware.api_keys import create_key
from serve.observability.tracing import Collected, Tracing, remote_parent
from tests.otlp import Collector, collecting
from tests.serve.middleware.test_request_context import PARENT, THUMB, TRACE, Open, make

UNSAMPLED = f"{PARENT[:-2]}00"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as found:
        yield found


@pytest.fixture
async def traced(tmp_path: Path, collector: Collector) -> AsyncIterator[Open]:
    opened = Open(make(tmp_path, traces=TracesConfig(endpoint=collector.url)))
    assert opened.server.tracing is not None
    opened.server.tracing.start()
    yield opened
    await opened.close()


def exported(opened: Open) -> None:
    assert opened.server.tracing is not None
    opened.server.tracing.close()


async def test_a_request_goes_on_with_its_clients_trace(traced: Open, collector: Collector) -> None:
    headers = {"traceparent": PARENT, "X-Request-Id": "mine"}
    answer = await traced.http.post("/feedback", json=THUMB, headers=headers)
    assert answer.status_code == 201, answer.text
    await traced.http.get("/health", headers=headers)  # which nobody asks about
    exported(traced)
    [span] = collector.spans
    assert (span.name, span.trace, span.parent, span.kind) == ("POST /feedback", TRACE, PARENT.split("-")[2], 2)
    assert answer.headers["traceresponse"] == f"00-{TRACE}-{span.span}-01"
    assert span.attributes == {
        "http.request.method": "POST",
        "url.path": "/feedback",
        "http.response.status_code": 201,
        "millrace.request_id": "mine",
    }
    assert span.start < span.end
    assert not span.error


async def test_a_request_without_a_trace_begins_one_and_one_whose_client_does_not_sample_is_not_exported(
    traced: Open, collector: Collector
) -> None:
    begun = await traced.http.post("/feedback", json=THUMB)
    unsampled = await traced.http.post("/feedback", json=THUMB, headers={"traceparent": UNSAMPLED})
    assert unsampled.headers["traceresponse"].endswith("-00")
    exported(traced)
    [span] = collector.spans
    assert (span.parent, begun.headers["traceresponse"]) == ("", f"00-{span.trace}-{span.span}-03")  # its id is random


async def test_a_request_that_fails_says_so_in_its_span(traced: Open, collector: Collector) -> None:
    traced.server.journal.close()
    assert (await traced.http.post("/feedback", json=THUMB)).status_code == 503
    assert (await traced.http.post("/feedback", json={"kind": "no"})).status_code == 422
    exported(traced)
    assert [(span.attributes["http.response.status_code"], span.error) for span in collector.spans] == [
        (503, True),
        (422, False),
    ]


async def test_a_collector_that_is_gone_costs_spans_and_no_request(tmp_path: Path) -> None:
    opened = Open(make(tmp_path, traces=TracesConfig(endpoint=f"http://127.0.0.1:{free_port()}")))
    assert opened.server.tracing is not None
    opened.server.tracing.start()
    for _ in range(3):
        assert (await opened.http.post("/feedback", json=THUMB)).status_code == 201
    exported(opened)
    await opened.close()


def test_a_collector_that_is_gone_is_in_the_log_once_with_its_address_and_then_now_and_then(
    caplog: pytest.LogCaptureFixture,
) -> None:
    endpoint, now = f"http://127.0.0.1:{free_port()}", [0.0]
    tracing = Tracing(TracesConfig(endpoint=endpoint, timeout_s=0.2), "millrace")
    tracing.start()
    for name in ("one", "two"):
        with tracing.span(name):
            pass
        tracing._provider.force_flush()
    tracing.close()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1, lines
    assert f"the collector at {endpoint} (serve.traces.endpoint) takes no spans, 1 are lost so far: " in lines[0]
    collected = Collected(endpoint, lambda: now[0])
    for now[0] in (0.0, 13.0, 26.0, 3600.0, 3613.0):
        collected.sent(2, taken=False)
    assert [line.getMessage().split(", ")[1].split(":")[0] for line in caplog.records[1:]] == [
        "2 are lost so far",
        "8 are lost so far",
    ]
    caplog.set_level("INFO")
    collected.sent(1, taken=True)
    collected.sent(1, taken=True)
    assert caplog.text.count("takes spans again; 10 were lost") == 1


async def test_a_strangers_trace_is_neither_joined_nor_exported_for_its_word(
    tmp_path: Path, collector: Collector
) -> None:
    _, secret = create_key(tmp_path / "keys.json", name="app", tenant="acme", scopes=["feedback"])
    opened = Open(make(tmp_path, traces=TracesConfig(endpoint=collector.url, sample_ratio=0)))
    assert opened.server.tracing is not None
    opened.server.tracing.start()
    for headers in ({}, {"X-API-Key": "mrk_none_" + "x" * 43}, {"X-API-Key": secret}):
        answer = await opened.http.post("/feedback", json=THUMB, headers={"traceparent": PARENT, **headers})
        assert (TRACE in answer.headers["traceresponse"]) == (answer.status_code == 201)
    exported(opened)
    await opened.close()
    [span] = collector.spans
    assert (span.trace, span.attributes["http.response.status_code"]) == (TRACE, 201)


def test_what_is_no_address_of_a_collector_is_refused() -> None:
    for wrong in ("localhost:4318", "ftp://x", "http://ann:secret@collector"):
        with pytest.raises(ValidationError):
            TracesConfig(endpoint=wrong)


def test_without_an_endpoint_neither_sdk_nor_exporter_is_there() -> None:
    assert Tracing.of(TracesConfig(), "millrace") is None
    code = (
        "import sys; from feedback.config import FeedbackConfig; from serve.config import ServeConfig; "
        "from serve.app import create_app; create_app(ServeConfig(), FeedbackConfig()); "
        "print([name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n", done.stdout + done.stderr


@pytest.mark.parametrize("ratio", [1.0, 0.0])
def test_a_response_whose_client_has_left_has_its_spans_if_the_request_has(collector: Collector, ratio: float) -> None:
    tracing = Tracing(TracesConfig(endpoint=collector.url, sample_ratio=ratio), "millrace")
    tracing.start()
    request = tracing.begin_request("POST", "/generate", None)
    with tracing.at_work(request):
        tracing.end_request(request, "mine", 499)
        tracing.responses([ROW], "m", 2_000_000_000, recorded=True)
    tracing.close()
    spans = {span.name: span for span in collector.spans}
    assert spans.keys() == ({"POST /generate", "text_completion m", "engine", "journal"} if ratio else set())
    if ratio:
        assert spans["text_completion m"].parent == spans["POST /generate"].span


ROW: dict[str, Any] = {
    "response_id": "r",
    "status": "aborted",
    "messages": None,
    "prompt_token_ids": [1],
    "response_token_ids": [2],
    "finish_reason": None,
    "policy_spans": [{"policy_version": 1}],
    "timings": {"queue_ms": 0.1, "first_token_ms": 1.0, "total_ms": 2.0},
    "sampling": {"n": 1, "seed": None, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 9},
}


@pytest.mark.parametrize(("parent", "state"), [(b"0" * 600, None), (PARENT.encode(), b"a=b," * 3000)])
def test_what_a_stranger_sends_of_any_length_leaves_no_line_in_the_log(
    parent: bytes, state: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    remote_parent(parent, state)
    assert not caplog.records


def test_every_evaluation_event_arrives_though_they_are_more_than_a_queue_holds(collector: Collector) -> None:
    taking = collector.take

    def take_slowly(path: str, body: bytes) -> None:
        time.sleep(0.05)
        taking(path, body)

    collector.take = take_slowly  # type: ignore[method-assign]
    Tracing(TracesConfig(endpoint=collector.url), "millrace-score").evaluations(scored(3000))
    assert {event.attributes["gen_ai.response.id"] for event in collector.events} == {f"r{n}" for n in range(3000)}


def test_a_collector_that_is_gone_is_asked_once_for_all_evaluation_events(caplog: pytest.LogCaptureFixture) -> None:
    config = TracesConfig(endpoint=f"http://127.0.0.1:{free_port()}", timeout_s=0.2)
    Tracing(config, "millrace-score").evaluations(scored(3000))
    assert caplog.text.count("takes no more evaluation events") == 1


def scored(responses: int) -> list[dict[str, Any]]:
    common = {"scorer": "s", "at": 1, "trace": None, "scores": {"reward": 0.5}}
    return [{"response_id": f"r{number}", **common} for number in range(responses)]
