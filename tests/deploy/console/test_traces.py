"""Spans and evaluation events of the server that the console's tests have running, as a collector gets them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import httpx

from deploy.config import root
from deploy.config.root import child_environment
from deploy.supervise.children import millrace
from tests.deploy.console.conftest import Site
from tests.otlp import Item
from tests.paths import ROOT

CALLER = "b7ad6b7169203331"
PROMPT = {"prompt": "3 + 4 =", "max_tokens": 6, "seed": 1}


def ask(site: Site, trace: str, path: str, **body: object) -> httpx.Response:
    headers = {"X-API-Key": site.secrets["ann"], "traceparent": f"00-{trace}-{CALLER}-01"}
    answer = httpx.post(f"{site.url}{path}", json=body, headers=headers, timeout=120)
    assert answer.status_code in (200, 201), answer.text
    return answer


def spans(site: Site, trace: str, count: int) -> dict[str, Item]:
    site.collector.until(lambda: len(site.collector.of(trace)) == count)
    return site.collector.of(trace)


def check_nesting(found: dict[str, Item], route: str) -> Item:
    """That request, responses, engine and journal lie in each other; the responses' span."""
    request, responses = found[f"POST {route}"], found["text_completion millrace"]
    assert (request.parent, request.kind, responses.parent) == (CALLER, 2, request.span)
    engine, journal = found["engine"], found["journal"]
    assert engine.parent == journal.parent == responses.span
    assert responses.start <= engine.start <= engine.end <= journal.start <= journal.end <= responses.end <= request.end
    assert engine.events == ("first token",)
    assert {item.service for item in found.values()} == {"millrace"}
    return responses


def test_a_request_can_be_followed_from_http_over_the_engine_to_the_journal(site: Site) -> None:
    trace = "1" * 32
    answer = ask(site, trace, "/generate", **PROMPT, user="ann-of-accounting", session_id="our-session").json()
    responses = check_nesting(spans(site, trace, 4), "/generate")
    attributes = dict(responses.attributes)
    assert attributes.pop("gen_ai.response.id") == answer["responses"][0]["response_id"]
    assert attributes.pop("gen_ai.response.finish_reasons") == [answer["responses"][0]["finish_reason"]]
    assert attributes.pop("gen_ai.usage.output_tokens") == answer["usage"]["completion_tokens"]
    assert attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "millrace",
        "gen_ai.request.model": "millrace",
        "gen_ai.response.model": "millrace",
        "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.seed": 1,
        "gen_ai.request.temperature": 1.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 0,
        "gen_ai.request.max_tokens": 6,
        "millrace.policy_version": answer["policy_version"],
    }
    for secret in ("3 + 4", "ann-of-accounting", "our-session", "acme", site.secrets["ann"]):
        assert not any(secret.encode() in body for body in site.collector.bodies)


def test_a_streamed_answer_of_v1_is_traced_alike_and_so_is_feedback(site: Site) -> None:
    trace = "2" * 32
    ask(site, trace, "/v1/completions", model="millrace", **PROMPT, stream=True)
    check_nesting(spans(site, trace, 4), "/v1/completions")
    voted = "3" * 32
    ask(site, voted, "/feedback", response_id=site.responses[0], kind="thumb", value=1)
    assert set(spans(site, voted, 1)) == {"POST /feedback"}


def test_a_reward_is_an_evaluation_event_in_the_trace_of_its_request(site: Site, tmp_path: Path) -> None:
    trace = "4" * 32
    answer = ask(site, trace, "/generate", **PROMPT, metadata={"answer": "7"}).json()
    request = spans(site, trace, 4)["POST /generate"]
    settings = root.load(site.settings.snapshot(), [("feedback.scoring.rules.exact.ready", "exact_match")], {})
    site.collector.events.clear()
    scored = subprocess.run(
        millrace("--config", settings.snapshot(), "score", "--json-out", tmp_path / "scored.json"),
        capture_output=True,
        text=True,
        timeout=300,
        env=child_environment({"PYTHONPATH": str(ROOT)}),
    )
    assert scored.returncode == 0, scored.stderr
    rewarded = json.loads((tmp_path / "scored.json").read_text())
    response = answer["responses"][0]["response_id"]
    own = {
        item.attributes["gen_ai.evaluation.name"]: item
        for item in site.collector.events
        if item.attributes["gen_ai.response.id"] == response
    }
    assert rewarded["scored"] > 0
    assert set(own) == {"exact", "reward"}
    for event in own.values():
        assert (event.name, event.service) == ("gen_ai.evaluation.result", "millrace-score")
        assert (event.trace, event.span) == (trace, request.span)
        assert event.attributes["gen_ai.evaluation.score.value"] in (0.0, 1.0)
