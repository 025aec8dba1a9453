"""What every request goes through: ids, traces, keys, limits, the form of errors, metrics, logs, the OpenAPI page.

The application is the real one with a real journal and lake; where no engine is needed none is started. One live server
has keys.
"""

from __future__ import annotations

import gzip
import io
import json
import logging
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from fastapi import FastAPI, Request, Response
from feedback_rows import rows
from starlette.routing import Route

from feedback.config import FeedbackConfig, JournalConfig, LakeConfig
from serve.app import create_app
from serve.config import LimitsConfig, ServeConfig
from serve.middleware.api_keys import create_key
from serve.observability import log_format
from serve.runtime import Server

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
            policies=str(home / "policies"),
            replicas=str(home / "replicas"),
            keys=str(home / "keys.json"),
            audit=str(home / "audit.jsonl"),
            **serve,
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
        self.http = httpx.AsyncClient(transport=transport, base_url="http://localhost")

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
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
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
    ("GET", "/experiments", "admin"),
    ("GET", "/experiments/1", "admin"),
    ("POST", "/experiments/1/stop", "admin"),
    ("POST", "/server/sleep", "admin"),
    ("POST", "/server/wake", "admin"),
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
    paths = {path.replace("/some", "/{model}").replace("/1", "/{number}") for _, path, _ in ROUTES}
    found = {getattr(route, "path", "") for route in locked.app.routes}
    assert found - paths == {"/", "/health", "/ready", "/docs", "/docs/static", "/openapi.json"}


async def test_health_docs_and_what_is_not_there_want_no_key(locked: Open) -> None:
    open_to_all = (
        ("/", 200),
        ("/health", 503),
        ("/ready", 503),
        ("/docs", 200),
        ("/openapi.json", 200),
        ("/nothing", 404),
    )
    for path, code in open_to_all:
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


@pytest.mark.parametrize("path", ["/feedback", "/generate", "/v1/chat/completions"])
async def test_a_body_that_is_compressed_is_refused_by_the_name_of_its_encoding(door: Open, path: str) -> None:
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    answer = await door.http.post(path, content=gzip.compress(json.dumps(THUMB).encode()), headers=headers)
    assert (answer.status_code, answer.headers["Accept-Encoding"]) == (415, "identity")
    assert "Content-Encoding is 'gzip'" in answer.text
    plain = await door.http.post("/feedback", json=THUMB, headers={"Content-Encoding": "identity"})
    assert plain.status_code == 201


async def test_without_keys_all_is_the_configured_tenants(door: Open) -> None:
    assert (await door.http.post("/feedback", json=THUMB)).status_code == 201
    assert rows(door.server.journal.folder, "feedback").column("tenant").to_pylist() == ["default"]
    assert (await door.http.get("/policy")).status_code == 200


@pytest.mark.parametrize(
    ("origin", "code"),
    [
        ("http://evil.example", 403),
        ("http://localhost.evil.example", 403),
        ("null", 403),
        ("http://localhost:8000", 201),
        ("https://127.0.0.1", 201),
        ("http://[::1]:3000", 201),
    ],
)
async def test_without_keys_no_web_page_of_another_host_may_write(door: Open, origin: str, code: int) -> None:
    sent = {"Origin": origin, "Content-Type": "text/plain"}  # which browsers send without asking first
    answer = await door.http.post("/feedback", content=json.dumps(THUMB), headers=sent)
    assert answer.status_code == code, answer.text


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("localhost:8000", 200),
        ("LOCALHOST.", 200),
        ("127.0.0.1", 200),
        ("127.9.9.9:80", 200),
        ("[::1]:8000", 200),
        ("millrace.lan", 200),
        ("evil.example", 421),
        ("evil.example:8000", 421),
        ("localhost.evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("evil.example@localhost", 421),
        ("203.0.113.7", 421),
        ("0.0.0.0:8000", 421),  # which reaches loopback, and stands in pages of others
        ("2130706433", 421),
        ("127.1", 421),
        ("evil.localhost", 421),
        ("localhost, evil.example", 421),
        ("localhost:8000:evil.example", 421),
        ("evil.example#localhost", 421),
        ("evil.example\\.localhost", 421),
        ("*", 421),
        ("[::1", 421),
        ("[::ffff:127.0.0.1]", 421),
        ("x" * 300, 421),
        ("", 421),
    ],
)
async def test_without_keys_a_name_that_is_not_the_servers_is_refused(tmp_path: Path, host: str, code: int) -> None:
    opened = Open(make(tmp_path, allowed_hosts=["Millrace.LAN"]))
    try:
        for path in ("/policy", "/metrics"):
            answer = await opened.http.get(path, headers={"Host": host})
            assert answer.status_code == code
            if code == 421:
                assert repr(host)[:150] in answer.json()["detail"]
                assert "serve.allowed_hosts" in answer.json()["detail"]
        twice = await opened.http.get("/policy", headers=[("Host", "localhost"), ("Host", "evil.example")])
        assert twice.status_code == 421
        own = {"Host": "millrace.lan", "Origin": "http://millrace.lan", "Content-Type": "text/plain"}
        assert (await opened.http.post("/feedback", content=json.dumps(THUMB), headers=own)).status_code == 201
    finally:
        await opened.close()


@pytest.mark.parametrize(
    ("serve", "host", "origin", "code"),
    [
        ({"host": "0.0.0.0", "auth": "off"}, "203.0.113.7:80", None, 201),
        ({"host": "0.0.0.0", "auth": "off"}, "203.0.113.7:80", "http://203.0.113.7:80", 201),
        ({"host": "0.0.0.0", "auth": "off"}, "203.0.113.7:80", "http://203.0.113.9", 403),
        ({"host": "0.0.0.0", "auth": "off"}, "evil.example", None, 421),
        ({"host": "0.0.0.0", "auth": "off", "allowed_hosts": ["*"]}, "app.example", "https://app.example", 201),
        ({"host": "0.0.0.0", "auth": "off", "allowed_hosts": ["*"]}, "app.example", "https://evil.example", 403),
        ({"host": "own.example", "auth": "off"}, "own.example:8000", None, 201),
    ],
)
async def test_without_keys_beyond_loopback_addresses_are_taken_and_pages_are_those_of_the_host(
    tmp_path: Path, serve: dict[str, Any], host: str, origin: str | None, code: int
) -> None:
    opened = Open(make(tmp_path, **serve))
    headers = {"Host": host} | ({} if origin is None else {"Origin": origin})
    answer = await opened.http.post("/feedback", json=THUMB, headers=headers)
    await opened.close()
    assert answer.status_code == code, answer.text


async def test_another_host_gets_nothing_of_any_route_nor_by_headers_that_name_the_right_one(tmp_path: Path) -> None:
    opened = Open(make(tmp_path))
    evil = {
        "Host": "evil.example",
        "X-Forwarded-Host": "localhost",
        "Forwarded": "host=localhost",
        "X-Host": "localhost",
    }
    try:
        for route in opened.app.routes:
            path = getattr(route, "path", "/").partition("{")[0]
            for method in ("GET", "POST", "HEAD", "OPTIONS"):
                assert (await opened.http.request(method, path, headers=evil)).status_code == 421, (method, path)
    finally:
        await opened.close()


async def test_with_a_key_any_name_is_taken(locked: Open, secrets: dict[str, str]) -> None:
    headers = bearer(secrets["admin"]) | {"Host": "millrace.example"}
    assert (await locked.http.get("/policy", headers=headers)).status_code == 200


@pytest.mark.parametrize("form", ["text", "json"])
async def test_what_a_client_sends_makes_no_line_of_the_log_and_no_part_of_one(tmp_path: Path, form: str) -> None:
    opened = Open(make(tmp_path, access_log=True))
    lines = io.StringIO()
    handler = logging.StreamHandler(lines)
    handler.setFormatter(log_format.Json() if form == "json" else log_format.Text())
    logger = logging.getLogger("serve")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)

    async def fails(request: Request) -> Response:
        raise ValueError(f"no {request.scope['path']}")

    opened.app.router.routes.insert(0, Route("/fails/{rest:path}", fails))
    forged = "2026-01-01 00:00:00,000 INFO serve.access: GET /policy 200"
    try:
        for end in ("\n", "\r", "\x85", "\u2028", "\x1b[2K", "\x00"):
            for path in ("/x", "/fails/x"):
                url = f"{path}{quote(end + forged)}"
                headers = {"X-Request-Id": "a b", "User-Agent": forged, "traceparent": forged}
                assert (await opened.http.get(url, headers=headers)).status_code in (404, 500)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
        await opened.close()
    written = lines.getvalue().split("\n")
    assert all(line.isprintable() for line in written)
    own = [line for line in written if line and not line.startswith(" ")]
    assert len(own) == 12 + 5  # in the access log, and what failed; a route's path has no line end
    assert not any(line.startswith("2026-01-01") for line in own)
    assert not any(f" {forged.rpartition(' ')[2]} " in line for line in own if form == "text")
    assert all(json.loads(line)["path"].count(" ") == 0 for line in own if form == "json" and '"path"' in line)


async def test_with_a_key_the_page_does_not_matter(locked: Open, secrets: dict[str, str]) -> None:
    headers = bearer(secrets["feedback"]) | {"Origin": "http://app.example"}
    assert (await locked.http.post("/feedback", json=THUMB, headers=headers)).status_code == 201


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
    with server.admission.admit():
        pass
    server.engine.stats["waiting"] = server.config.limits.waiting_responses
    with pytest.raises(Exception, match="1024 responses wait for the engine"), server.admission.admit():
        pass
    server.engine.stats["waiting"] = 0
    server.journal._queued = 7  # of 8
    with pytest.raises(Exception, match="the journal's queue is nearly full"), server.admission.admit():
        pass
    server.journal._queued = 0
    with server.admission.admit():
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

    monkeypatch.setattr(door.server.recorder, "record_feedback", fail)
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


async def test_who_asks_for_the_policy_is_told_why_its_server_takes_no_requests(door: Open) -> None:
    assert (await door.http.get("/policy")).json()["unready"] == "the engine's process has died"


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
