"""What every request goes through: ids, traces, keys, limits, the form of errors, metrics, logs, the OpenAPI page.

The application is the real one with a real journal and lake; where no engine is needed none is started. One live server
has keys.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request, Response
from starlette.routing import Route

from feedback.config import FeedbackConfig, JournalConfig, LakeConfig
from feedback.ids import uuid7
from feedback.recovery import rows
from serve import logs
from serve.api.describe import openapi
from serve.app import Server, create_app
from serve.config import LimitsConfig, ServeConfig
from serve.keys import create_key, local_secret, revoke_key
from serve.policies import PolicyStore
from tests.serve.conftest import LiveServer, start_server, stop_server

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
THUMB = {"response_id": "r", "kind": "thumb", "value": 1}

# Of vLLM's own servers: what steers an engine, and what of OpenAI's API is not here.
VLLMS = [
    "/abort_requests",
    "/classify",
    "/collective_rpc",
    "/detokenize",
    "/fault_tolerance/apply",
    "/fault_tolerance/status",
    "/finish_weight_update",
    "/generative_scoring",
    "/get_world_size",
    "/inference/v1/generate",
    "/init_weight_transfer_engine",
    "/invocations",
    "/is_paused",
    "/is_scaling_elastic_ep",
    "/is_sleeping",
    "/kv_event_sources",
    "/load",
    "/pause",
    "/ping",
    "/pooling",
    "/release_kv_cache_memory",
    "/rerank",
    "/reset_encoder_cache",
    "/reset_mm_cache",
    "/reset_prefix_cache",
    "/resume",
    "/scale_elastic_ep",
    "/score",
    "/server_info",
    "/shutdown_weight_transfer_engine",
    "/sleep",
    "/start_draft_weight_update",
    "/start_profile",
    "/start_weight_update",
    "/stop_profile",
    "/tokenize",
    "/tokenizer_info",
    "/update_weight_version",
    "/update_weights",
    "/version",
    "/wake_up",
    "/weight_checker",
    "/weight_info",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/score",
    "/v1/rerank",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/messages",
    "/v1/realtime",
    "/v1/systemone",
    "/v2/embed",
]


def make(home: Path, **serve: Any) -> FastAPI:
    return create_app(
        ServeConfig(
            policies=str(home / "policies"), replicas=str(home / "replicas"), keys=str(home / "keys.json"), **serve
        ),
        FeedbackConfig(
            journal=JournalConfig(folder=str(home / "journal"), max_queued_rows=8),
            lake=LakeConfig(uri=str(home / "lake")),
        ),
    )


class Open:
    """The application of a home, without an engine, and a client of it."""

    def __init__(self, app: FastAPI) -> None:
        self.app = app
        self.server: Server = app.state.server
        self.server.lake.create()
        self.server.journal.open()
        self.server.ledger.open()
        self.server.keyring.load()
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://millrace")

    async def close(self) -> None:
        await self.http.aclose()
        self.server.journal.close()
        self.server.ledger.close()


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[Open]:
    """Without keys."""
    opened = Open(make(tmp_path))
    yield opened
    await opened.close()


@pytest.fixture
def secrets(tmp_path: Path) -> dict[str, str]:
    """A key for each scope, of a tenant of its own; made before ``locked``."""
    path = tmp_path / "keys.json"
    return {s: create_key(path, name=s, tenant=f"of-{s}", scopes=[s])[1] for s in ("generate", "feedback", "admin")}


@pytest.fixture
async def locked(tmp_path: Path, secrets: dict[str, str]) -> AsyncIterator[Open]:
    """With keys; six feedbacks a minute."""
    opened = Open(make(tmp_path, limits=LimitsConfig(requests_per_minute=6)))
    yield opened
    await opened.close()


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


# Ids and traces


@pytest.mark.parametrize("given", ["a", "A-1_b.c", "x" * 128])
async def test_a_well_formed_request_id_comes_back(door: Open, given: str) -> None:
    assert (await door.http.get("/health", headers={"X-Request-Id": given})).headers["X-Request-Id"] == given


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", "a\tb", "ä", "a,b", "<script>", None])
async def test_any_other_request_gets_an_id_of_its_own(door: Open, given: str | None) -> None:
    headers = {} if given is None else {"X-Request-Id": given.encode("latin-1")}
    (made,) = (await door.http.get("/nothing", headers=headers)).headers.get_list("X-Request-Id")
    assert re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}", made)


async def test_a_trace_comes_back_with_a_span_of_this_server(door: Open) -> None:
    answers = [await door.http.get("/health", headers={"traceparent": PARENT}) for _ in range(2)]
    spans = {re.fullmatch(f"00-{TRACE}-([0-9a-f]{{16}})-00", answer.headers["traceresponse"]) for answer in answers}
    assert None not in spans
    assert len(spans) == 2


@pytest.mark.parametrize(
    ("given", "good"),
    [
        (PARENT, True),
        (PARENT.replace("00-", "cc-", 1), True),
        (PARENT.replace("00-", "cc-", 1) + "-what-comes-later", True),
        (PARENT + "-more", False),
        (PARENT.replace("00-", "ff-", 1), False),
        (PARENT.upper(), False),
        (f"00-{'0' * 32}-b7ad6b7169203331-01", False),
        (f"00-{TRACE}-{'0' * 16}-01", False),
        (PARENT[:-1], False),
        ("", False),
        ("\xff", False),
    ],
)
async def test_a_malformed_trace_is_as_if_there_were_none(door: Open, given: str, good: bool) -> None:
    answer = await door.http.get("/nothing", headers={"traceparent": given.encode("latin-1")})
    assert answer.status_code == 404
    assert ("traceresponse" in answer.headers) is good


@pytest.mark.parametrize(
    ("state", "kept"),
    [
        ("congo=t61rcWkgMzE,rojo=00f067aa0ba902b7", True),
        ("a@b=1, ,c=d", True),
        ("Upper=1", False),
        ("a=1,a=2", False),
        ("novalue", False),
        (",".join(f"k{i}=1" for i in range(33)), False),
    ],
)
async def test_a_malformed_tracestate_is_left_out_and_the_trace_kept(state: str, kept: bool, tmp_path: Path) -> None:
    app = make(tmp_path)
    seen: dict[str, Any] = {}

    async def look(request: Request) -> Response:
        seen.update(request.scope)
        return Response()

    app.router.routes.insert(0, Route("/look", look))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://millrace") as http:
        await http.get("/look", headers={"traceparent": PARENT, "tracestate": state, "X-Request-Id": "mine"})
    assert (seen["traceparent"], seen["trace_id"], seen["request_id"]) == (PARENT, TRACE, "mine")
    assert seen.get("tracestate") == (state if kept else None)


# Keys and scopes

ROUTES = [
    ("POST", "/generate", "generate"),
    ("POST", "/v1/chat/completions", "generate"),
    ("POST", "/v1/completions", "generate"),
    ("GET", "/v1/models", "generate"),
    ("GET", "/v1/models/some", "generate"),
    ("POST", "/feedback", "feedback"),
    ("POST", "/feedback/batch", "feedback"),
    ("GET", "/policy", "admin"),
    ("GET", "/metrics", "admin"),
]


@pytest.mark.parametrize(("method", "path", "scope"), ROUTES)
async def test_a_route_wants_a_key_with_its_scope(
    locked: Open, secrets: dict[str, str], method: str, path: str, scope: str
) -> None:
    def message(answer: httpx.Response) -> str:
        body = answer.json()
        return str(body["error"]["message"] if path.startswith("/v1/") else body["detail"])

    none = await locked.http.request(method, path)
    assert (none.status_code, none.headers["WWW-Authenticate"]) == (401, 'Bearer realm="millrace"')
    assert "X-API-Key" in message(none)
    wrong = await locked.http.request(method, path, headers=bearer(secrets[scope][:-4] + "AAAA"))
    assert (wrong.status_code, message(wrong)) == (401, "there is no such key")
    assert 'error="invalid_token"' in wrong.headers["WWW-Authenticate"]
    for other, secret in secrets.items():
        answer = await locked.http.request(method, path, headers=bearer(secret))
        if other == scope:
            assert answer.status_code not in (401, 403)
        else:
            assert answer.status_code == 403
            assert f"this needs the scope {scope}" in message(answer)
            assert f'scope="{scope}"' in answer.headers["WWW-Authenticate"]


async def test_every_route_is_in_that_list_or_open(locked: Open) -> None:
    paths = {path.replace("/some", "/{model}") for _, path, _ in ROUTES}
    found = {getattr(route, "path", "") for route in locked.app.routes}
    assert found - paths == {"/health", "/ready", "/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json"}


async def test_health_docs_and_what_is_not_there_want_no_key(locked: Open) -> None:
    for path, code in (("/health", 503), ("/ready", 503), ("/docs", 200), ("/openapi.json", 200), ("/nothing", 404)):
        for headers in ({}, bearer("nonsense")):
            assert (await locked.http.get(path, headers=headers)).status_code == code, path


async def test_x_api_key_is_looked_at_first_and_bearer_in_any_case(locked: Open, secrets: dict[str, str]) -> None:
    both = {"X-API-Key": secrets["admin"], "Authorization": "Basic Z2F0ZXdheTp4"}
    assert (await locked.http.get("/policy", headers=both)).status_code == 200
    assert (
        await locked.http.get("/policy", headers={"Authorization": f"bEARER {secrets['admin']}"})
    ).status_code == 200
    assert (await locked.http.get("/policy", headers={"Authorization": secrets["admin"]})).status_code == 401
    twice = [("X-API-Key", secrets["admin"]), ("X-API-Key", secrets["admin"])]
    assert (await locked.http.get("/policy", headers=twice)).status_code == 401


async def test_feedback_is_its_keys_tenants_and_so_is_its_id(
    locked: Open, secrets: dict[str, str], tmp_path: Path
) -> None:
    _, other = create_key(tmp_path / "keys.json", name="other", tenant="other", scopes=["feedback"])
    locked.server.keyring.refresh()
    one = THUMB | {"feedback_id": "f"}
    codes = [
        (await locked.http.post("/feedback", json=body, headers=bearer(secret))).status_code
        for secret, body in (
            (secrets["feedback"], one),
            (secrets["feedback"], one),
            (secrets["feedback"], one | {"value": 0}),
            (other, one | {"value": 0}),
        )
    ]
    assert codes == [201, 200, 409, 201]
    batch = await locked.http.post("/feedback/batch", json={"feedback": [one | {"value": 0}]}, headers=bearer(other))
    assert batch.json()["results"][0]["status"] == 200
    recorded = rows(locked.server.journal.folder, "feedback").to_pylist()
    assert [(row["tenant"], row["value"]) for row in recorded] == [("of-feedback", 1.0), ("other", 0.0)]


async def test_without_keys_all_is_the_configured_tenants(door: Open) -> None:
    assert (await door.http.post("/feedback", json=THUMB)).status_code == 201
    assert rows(door.server.journal.folder, "feedback").column("tenant").to_pylist() == ["default"]
    assert (await door.http.get("/policy")).status_code == 200


# Limits


async def test_over_its_limit_a_key_gets_429_with_the_time_and_others_do_not(
    locked: Open, secrets: dict[str, str]
) -> None:
    send = {"url": "/feedback", "json": THUMB, "headers": bearer(secrets["feedback"])}
    codes = [(await locked.http.post(**send)).status_code for _ in range(6)]
    assert codes == [201] * 6
    refused = await locked.http.post(**send)
    assert (refused.status_code, refused.headers["Retry-After"]) == (429, "10")
    assert refused.json()["limit"] == "requests"
    assert "requests_per_minute is 6 for feedback" in refused.json()["detail"]
    for _ in range(8):
        generate = await locked.http.get("/v1/models", headers=bearer(secrets["generate"]))
    assert generate.status_code == 429
    assert generate.json()["error"]["code"] == "rate_limit_exceeded"
    for _ in range(10):  # whoever watches the server is not limited
        metrics = await locked.http.get("/metrics", headers=bearer(secrets["admin"]))
    assert re.search(r'millrace_rate_limited_total\{key="[0-9a-f]{12}",limit="requests"\} 1.0', metrics.text)


async def test_work_is_not_begun_whose_row_may_find_no_room_or_that_would_wait_too_long(door: Open) -> None:
    server = door.server
    server.unready = lambda: None  # type: ignore[method-assign]  # there is no engine
    with server.admitted():
        pass
    server.engine.stats["waiting"] = server.config.limits.waiting_responses
    with pytest.raises(Exception, match="1024 responses wait for the engine"), server.admitted():
        pass
    server.engine.stats["waiting"] = 0
    server.journal._queue.extend([None] * 7)  # type: ignore[list-item]  # of 8
    with pytest.raises(Exception, match="the journal's queue is nearly full"), server.admitted():
        pass
    server.journal._queue.clear()
    with server.admitted():
        pass


# Errors


@pytest.mark.parametrize("path", VLLMS)
async def test_vllms_own_endpoints_are_not_there(door: Open, path: str) -> None:
    for method in ("GET", "POST"):
        assert (await door.http.request(method, path)).status_code == 404


async def test_errors_have_the_form_of_their_path(door: Open) -> None:
    ours, theirs = await door.http.get("/nothing"), await door.http.get("/v1/nothing")
    assert ours.headers["content-type"] == "application/problem+json"
    assert ours.json() == {"type": "about:blank", "title": "Not found", "status": 404, "detail": "there is no /nothing"}
    assert theirs.headers["content-type"] == "application/json"
    error = {"message": "there is no /v1/nothing", "type": "invalid_request_error", "param": None, "code": None}
    assert theirs.json() == {"error": error}
    wrong = await door.http.delete("/v1/models")
    assert (wrong.status_code, wrong.headers["Allow"]) == (405, "GET")
    assert wrong.json()["error"]["message"] == "/v1/models takes no DELETE"


async def test_what_nobody_expected_is_500_in_the_right_form_and_one_line_with_the_requests_id(
    door: Open, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(door.server, "record_feedback", fail)
    answer = await door.http.post("/feedback", json=THUMB, headers={"X-Request-Id": "mine"})
    assert (answer.status_code, answer.headers["X-Request-Id"]) == (500, "mine")
    assert answer.headers["content-type"] == "application/problem+json"
    assert "ZeroDivisionError" in answer.text
    assert "secret detail" not in answer.text
    (line,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert line.exc_info


async def test_health_does_not_tell_strangers_why_an_engine_is_gone(door: Open) -> None:
    door.server.swapper.broken = "policy 7 (/home/someone/policies/v7) could not be put back"
    for path in ("/health", "/ready"):
        answer = await door.http.get(path)
        assert answer.status_code == 503
        assert "/home" not in answer.text


# Metrics and logs


async def test_metrics_know_routes_by_their_template_and_nothing_that_a_client_makes_up(
    locked: Open, secrets: dict[str, str]
) -> None:
    for path in ("/v1/models/a", "/v1/models/b", "/made-up/1", "/made-up/2"):
        await locked.http.get(path, headers=bearer(secrets["generate"]))
    await locked.http.post("/feedback", headers=bearer("mrk_none_" + "x" * 43))
    await locked.http.post("/feedback", headers=bearer(secrets["generate"]))
    text = (await locked.http.get("/metrics", headers=bearer(secrets["admin"]))).text
    assert 'millrace_requests_total{code="404",route="/v1/models/{model}"} 2.0' in text
    assert 'millrace_requests_total{code="404",route="other"} 2.0' in text
    assert 'millrace_auth_failures_total{reason="unknown"} 1.0' in text
    assert 'millrace_auth_failures_total{reason="scope"} 1.0' in text
    assert "made-up" not in text
    assert "mrk_" not in text


def test_a_tally_tells_what_a_histogram_of_prometheus_tells() -> None:
    from prometheus_client import CollectorRegistry, Histogram, generate_latest

    from serve.tallies import Tally

    texts = []
    for kind in (Histogram, Tally):
        registry = CollectorRegistry()
        metric = kind("h", "help", ("route",), buckets=(0.125, 1, 10), registry=registry)
        for number in range(10_000):
            metric.labels(route="a").observe((0.0625, 0.125, 0.5, 1.0, 11.0)[number % 5])
        metric.labels(route="b").observe(-1)
        texts.append(re.sub(r"(?m)^h_created.*$|\n# (HELP|TYPE) h_created.*", "", generate_latest(registry).decode()))
    assert texts[0] == texts[1]


def test_a_json_line_has_time_level_logger_message_ids_and_an_exception_as_one_field() -> None:
    logger = logging.getLogger("some.logger")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logger.makeRecord("some.logger", logging.ERROR, __file__, 1, "failed: %s", ("x",), sys.exc_info())
    before = logs.request.set({"request_id": "r1", "trace_id": TRACE, "span_id": "ab"})
    line = logs.Json().format(record)
    logs.request.reset(before)
    assert "\n" not in line
    read = json.loads(line)
    assert read["time"].endswith("+00:00")
    assert (read["level"], read["logger"], read["message"]) == ("ERROR", "some.logger", "failed: x")
    assert (read["request_id"], read["trace_id"], read["span_id"]) == ("r1", TRACE, "ab")
    assert read["exception"].startswith("Traceback")
    assert "ValueError: two\nlines" in read["exception"]
    half = logger.makeRecord("some.logger", logging.INFO, __file__, 1, "half a \ud800", (), None)
    assert json.loads(logs.Json().format(half))["message"] == "half a ?"


# The OpenAPI page


def test_every_property_and_parameter_of_the_openapi_page_is_described(tmp_path: Path) -> None:
    schema = openapi(make(tmp_path))
    missing = list(undescribed(schema, "#"))
    assert not missing, "\n".join(missing)


def undescribed(part: Any, where: str, *, names: bool = False) -> Iterator[str]:
    """Properties, parameters, headers and answers without a description; a reference has its target's.

    ``names``: the keys of ``part`` are fields' names, not words of OpenAPI.
    """
    if isinstance(part, list):
        for number, item in enumerate(part):
            yield from undescribed(item, f"{where}/{number}")
    if not isinstance(part, dict):
        return
    for name, below in part.items():
        at = f"{where}/{name}"
        if names:
            yield from undescribed(below, at)
            continue
        if name in ("properties", "responses", "headers", "securitySchemes") and isinstance(below, dict):
            for key, item in below.items():
                if "description" not in item and "$ref" not in item:
                    yield f"{at}/{key}"
        if name == "parameters":
            for item in below.values() if isinstance(below, dict) else below:
                if "description" not in item and "$ref" not in item:
                    yield f"{at}/{item.get('name')}"
        if name in ("get", "post") and where.startswith("#/paths") and not (below.get("description")):
            yield at
        yield from undescribed(below, at, names=name == "properties")


def test_the_openapi_page_names_keys_scopes_and_their_errors_and_every_reference_is_there(tmp_path: Path) -> None:
    schema = openapi(make(tmp_path))
    assert schema["components"]["securitySchemes"].keys() == {"bearer", "header"}
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            is_open = path in ("/health", "/ready")
            assert ("security" in operation) is not is_open
            assert ({"401", "403"} <= operation["responses"].keys()) is not is_open
    assert "429" in schema["paths"]["/generate"]["post"]["responses"]
    assert "`feedback`" in schema["paths"]["/feedback"]["post"]["description"]
    for reference in re.findall(r'"\$ref": "#/([^"]+)"', json.dumps(schema)):
        found = schema
        for part in reference.split("/"):
            found = found[part]


# A live server with keys


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
    answer = httpx.post(f"{server.url}/generate", json={"prompt": "a", "max_tokens": 3}, headers=headers, timeout=30)
    assert answer.status_code == 200, answer.text
    assert answer.headers["X-Request-Id"] == mine
    (row,) = server.rows("interactions", f"request_id = '{mine}'")
    assert row["tenant"] == "acme"
    lines = [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith("{")]
    (line,) = [line for line in lines if line.get("request_id") == mine]
    assert (line["logger"], line["route"], line["code"], line["tenant"]) == ("serve.access", "/generate", 200, "acme")
    assert line["trace_id"] == TRACE
    assert any("who asks needs a key: 3 are good" in line["message"] for line in lines)


def test_a_key_has_tokens_for_so_many_requests_and_what_it_does_not_use_comes_back(
    guarded: tuple[LiveServer, dict[str, str]],
) -> None:
    server, secrets = guarded
    url, headers = f"{server.url}/generate", bearer(secrets["small"])
    never = httpx.post(url, json={"prompt": "ab", "max_tokens": 59}, headers=headers)
    assert never.status_code == 400
    assert "could never pass" in never.json()["detail"]
    prompt, begins = next(found for letter in "abcdefgh" if (found := greedy(url, letter, bearer(secrets["acme"]))))
    body = {"prompt": prompt, "max_tokens": 29, "temperature": 0, "stop": [begins]}
    answers = [httpx.post(url, json=body, headers=headers, timeout=30) for _ in range(6)]
    # Each asks for half of what there is in a minute, and uses a few tokens.
    assert [answer.status_code for answer in answers] == [200] * 6
    assert all(answer.json()["usage"]["total_tokens"] < 10 for answer in answers)


def greedy(url: str, prompt: str, headers: dict[str, str]) -> tuple[str, str] | None:
    """(The prompt, the letter that its greedy response begins with), if that is one."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
    text = httpx.post(url, json=body, headers=headers, timeout=30).json()["responses"][0]["text"]
    return (prompt, text[0]) if text and text[0].isascii() else None


def test_metrics_have_vllms_and_ours(guarded: tuple[LiveServer, dict[str, str]]) -> None:
    server, secrets = guarded
    httpx.post(
        f"{server.url}/generate", json={"prompt": "a", "max_tokens": 3}, headers=bearer(secrets["acme"]), timeout=30
    )
    text = httpx.get(f"{server.url}/metrics", headers=bearer(secrets["ops"])).text
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
    assert httpx.get(f"{server.url}/policy", headers=own).json()["version"] == 1
    _, secret = create_key(path, name="short", tenant="t", scopes=["admin"])
    codes = []
    for change, wanted in ((lambda: None, 200), (lambda: revoke_key(path, "short"), 401)):
        change()
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            code = httpx.get(f"{server.url}/policy", headers=bearer(secret)).status_code
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
