"""What an enemy sends to the console besides what test_console has: by hand-written HTTP too."""

from __future__ import annotations

import re
import socket
from contextlib import ExitStack
from urllib.parse import quote, urlsplit

import httpx
import pytest
from click.testing import CliRunner

from deploy import cli
from serve.middleware.api_keys import read_keys
from serve.observability.audit import AuditLog
from tests.deploy.console.conftest import Site, token

EVIL = "evil.example"


def raw(site: Site, request: bytes, *, wait_s: float = 30.0) -> bytes:
    """What the server answers to bytes, until it ends the connection or says nothing for a while."""
    address = urlsplit(site.url)
    assert address.hostname is not None
    assert address.port is not None
    answer = b""
    with socket.create_connection((address.hostname, address.port), timeout=wait_s) as connection:
        connection.sendall(request)
        connection.settimeout(3.0)
        try:
            while piece := connection.recv(65536):
                answer += piece
        except TimeoutError:
            pass
    return answer


def cookie(client: httpx.Client) -> str:
    return "; ".join(f"{name}={value}" for name, value in client.cookies.items())


# Header games


@pytest.mark.parametrize("path", ["/console", "/console/policies/", "/console/traffic/", "/console//", "/docs/"])
@pytest.mark.parametrize("name", ["Host", "X-Forwarded-Host", "Forwarded"])
def test_no_header_makes_the_server_lead_to_another_host(site: Site, path: str, name: str) -> None:
    value = f"host={EVIL}" if name == "Forwarded" else EVIL
    with site.client("ann") as ann:
        answer = ann.get(path, headers={name: value})
        assert EVIL not in answer.headers.get("Location", ""), answer.headers
        assert EVIL not in answer.text
        assert answer.headers.get("Location") == ("/console/" if path == "/console" else None)


def test_no_header_changes_which_page_or_method_is_meant(site: Site) -> None:
    with site.client("ann") as ann:
        for name in ("X-Original-URL", "X-Rewrite-URL", "X-Forwarded-Prefix", "X-Forwarded-Path"):
            answer = ann.get("/console/playground", headers={name: "/console/keys"})
            assert (answer.status_code, "Playground</h1>" in answer.text) == (200, True)
            assert ann.get("/console/keys", headers={name: "/console/playground"}).status_code == 403
        for name in ("X-HTTP-Method-Override", "X-HTTP-Method", "X-Method-Override"):
            assert ann.post("/console/playground", headers={name: "GET", "Origin": site.url}).status_code == 405
        for method in ("PUT", "DELETE", "PATCH", "TRACE", "OPTIONS", "PROPFIND"):
            assert ann.request(method, "/console/keys", headers={"Origin": site.url}).status_code in (403, 405)


def test_no_second_host_scheme_or_length_gets_past_the_checks(site: Site) -> None:
    with site.client("ann") as ann:
        session = cookie(ann).encode()
    host = urlsplit(site.url).netloc.encode()
    for request in (
        b"GET /console/keys HTTP/1.1\r\nHost: %s\r\nHost: evil.example\r\nCookie: %s\r\n\r\n" % (host, session),
        b"GET http://evil.example/console/keys HTTP/1.1\r\nHost: %s\r\nCookie: %s\r\n\r\n" % (host, session),
        b"GET /console/keys HTTP/1.1\r\nHost: %s\r\nCookie: %s\r\nCookie: none=1\r\n\r\n" % (host, session),
        b"GET /console/keys HTTP/1.1\r\nHost: %s\r\n Cookie: %s\r\n\r\n" % (host, session),
        b"GET /console/keys HTTP/1.0\r\n\r\n",
        b"GET  /console/keys\r\n\r\n",
        b"GET /console/\x00keys HTTP/1.1\r\nHost: %s\r\n\r\n" % host,
    ):
        answer = raw(site, request)
        assert b"HTTP/1.1 200" not in answer, (request, answer[:300])
        assert b"mrk_" not in answer
    # What one length hides from the other is never a request of its own.
    hidden = b"GET /console/static/icon.svg HTTP/1.1\r\nHost: %s\r\n\r\n" % host
    for lengths in (
        b"Content-Length: 5\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: chunked\r\nContent-Length: 5",
        b"Content-Length: 5\r\nContent-Length: %d" % (5 + len(hidden)),
        b"Transfer-Encoding : chunked\r\nContent-Length: 5",
        b"Transfer-Encoding: xchunked\r\nContent-Length: 5",
        b"Content-Length: +5",
        b"Content-Length: 0x5",
    ):
        head = b"POST /console/login HTTP/1.1\r\nHost: %s\r\nOrigin: %s\r\n" % (host, site.url.encode())
        answer = raw(site, head + lengths + b"\r\n\r\n0\r\n\r\n" + hidden)
        assert b"<svg" not in answer, (lengths, answer[:600])


def test_what_stands_in_a_header_starts_no_line_of_its_own(site: Site) -> None:
    with site.client("ann") as ann:
        line = "%0d%0aSet-Cookie:%20a=b"
        for query in (line, f"next=/console/{line}", "%E5%98%8A%E5%98%8DSet-Cookie:%20a=b"):
            for path in ("/console/login", "/console/traffic", "/console/keys"):
                answer = ann.get(f"{path}?{query}")
                assert answer.status_code in (200, 303, 403)
                assert "a=b" not in answer.headers.get("Set-Cookie", "")
        own = {"Origin": site.url}
        sent = {"key": site.secrets["ann"], "next": "/console/\r\nSet-Cookie: a=b"}
        answer = ann.post("/console/login", data=sent, headers=own)
        assert (answer.status_code, answer.headers["Location"]) == (303, "/console/")
        assert "a=b" not in answer.headers["Set-Cookie"]


def test_a_websocket_gets_no_page(site: Site) -> None:
    with site.client("ann") as ann:
        upgrade = {
            "Upgrade": "websocket",
            "Connection": "Upgrade",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
        }
        answer = ann.get("/console/live-socket", headers=upgrade)
        assert answer.status_code in (403, 404)


# CSRF


def test_no_way_to_send_a_form_without_the_sessions_own_token_does_anything(site: Site) -> None:
    path, own = "/console/keys", {"Origin": site.url}
    before = read_keys(site.keys)
    with site.client("ops") as ops, site.client("ann") as ann:
        good, others = token(ops), token(ann)
        form = {"name": "enemy", "scope-admin": "yes"}
        for sent, headers in (
            (form, own),
            (form | {"csrf": others}, own),
            (form | {"csrf": good[:-1]}, own),
            (form | {"csrf": good.swapcase()}, own),
            (form | {"csrf": f"{good}\x00"}, own),
            (form | {"csrf": good}, {"Origin": f"http://{EVIL}"}),
            (form | {"csrf": good}, {"Origin": f"{site.url}.{EVIL}"}),
            (form | {"csrf": good}, {"Origin": f"http://{EVIL}@{urlsplit(site.url).netloc}"}),
            (form | {"csrf": good}, {"Origin": site.url.upper().replace("HTTP", "http") + "0"}),
            (form | {"csrf": good}, {"Origin": "null"}),
            (form | {"csrf": good}, own | {"Sec-Fetch-Site": "same-site"}),
            (form | {"csrf": good}, own | {"Sec-Fetch-Site": "none"}),
        ):
            assert ops.post(path, data=sent, headers=headers).status_code == 403, (sent, headers)
        # Two tokens, the good one in a place where none is looked for, another type, and as JSON.
        assert ops.post(f"{path}?csrf={good}", data=form, headers=own).status_code == 403
        assert ops.post(path, content=f"csrf={good}&csrf=x&name=enemy&scope-admin=yes", headers=own).status_code == 403
        assert ops.post(path, json=form | {"csrf": good}, headers=own).status_code == 403
        files = {name: (None, value) for name, value in (form | {"csrf": good}).items()}
        assert ops.post(path, files=files, headers=own).status_code == 403
        # A session's cookie alone opens no route of the API either, and another session's does not fit.
        for headers in ({}, {"X-CSRF-Token": others} | own, {"X-CSRF-Token": good, "Origin": f"http://{EVIL}"}):
            assert ops.post("/feedback", json={}, headers=headers).status_code == 403
            assert ops.get("/metrics", headers=headers).status_code == 403
    assert read_keys(site.keys) == before


def test_no_page_can_be_framed_embedded_or_read_by_another_site(site: Site) -> None:
    with site.client("ops") as ops:
        for path in ("/console/", "/console/keys", "/console/login", "/console/static/console.js", "/docs"):
            answer = ops.get(path, headers={"Origin": f"http://{EVIL}"})
            assert answer.headers["X-Frame-Options"] == "DENY"
            assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
            assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"
            assert not [name for name in answer.headers if name.startswith("access-control-")]


# IDOR between tenants


def test_another_tenants_ids_give_nothing_away_wherever_they_are_put(site: Site) -> None:
    secret, other = "secret of other", site.others
    own = site.responses[0]
    with site.client("ann") as ann:
        proof = {"X-CSRF-Token": token(ann), "Origin": site.url}
        unknown = "01982f6e-7a31-7c55-8b40-0d1f5c2a9e61"
        for path in (
            "/console/traffic/{}",
            "/console/traffic/{}?part=tokens",
            "/console/playground/judged?response_id={}",
        ):
            there, nowhere = ann.get(path.format(other)), ann.get(path.format(unknown))
            assert (there.status_code, nowhere.status_code) == (404, 404)
            same = re.sub(r'name="csrf" content="[^"]+"', "", there.text).replace(other, "ID")
            assert same == re.sub(r'name="csrf" content="[^"]+"', "", nowhere.text).replace(unknown, "ID"), path
        for path in (
            f"/console/traffic?before=2999-01-01T00:00:00%2B00:00~{other}",
            "/console/traffic?session=x' OR '1'='1",
            "/console/traffic?text=%25",
            "/console/traffic?user=eve&tenant=other",
            f"/console/labels/next?order=random&skipped={own}",
            f"/console/compare/next?chosen={own}~{other}",
            f"/console/compare/next?chosen={other}~{other}",
            f"/console/compare/next?skipped={own}~{other}",
            "/console/policies/1/traffic?tenant=other",
        ):
            answer = ann.get(path, headers={"X-Tenant": "other", "HX-Request": "true"})
            assert answer.status_code == 200, path
            assert secret not in answer.text, path
            assert other not in answer.text.replace(quote(other), ""), path
        # What one says of another tenant's response is answered as if there were none, and nobody there sees it.
        for response in (other, unknown):
            for body in (
                {"response_id": response, "kind": "comment", "text": "an enemy was here"},
                {"response_id": own, "rejected_response_id": response, "kind": "preference"},
                {"response_id": response, "rejected_response_id": own, "kind": "preference"},
            ):
                assert ann.post("/feedback", json=body, headers=proof).status_code == 201, body
        # Nor take another tenant's name along with a key of one's own.
        named = {"response_id": own, "kind": "thumb", "value": 1, "tenant": "other"}
        assert ann.post("/feedback", json=named, headers=proof).status_code == 422
    with site.client("eve") as eve:
        page = eve.get(f"/console/traffic/{other}").text
        assert secret in page
        assert ("Nobody has judged it" in page, "an enemy was here" in page) == (True, False)


def test_a_session_is_of_no_other_key_tenant_or_server(site: Site) -> None:
    with site.client("ann") as ann, site.client("eve") as eve:
        mine, theirs = (next(iter(client.cookies.values())) for client in (ann, eve))
        fields, others = mine.split("."), theirs.split(".")
        for forged in (
            ".".join([others[0], *fields[1:]]),
            ".".join([*others[:-1], fields[-1]]),
            ".".join([fields[0], "99999999999", *fields[2:]]),
            ".".join([*fields[:2], "*", *fields[3:]]),
            ".".join([*fields[:-1], ""]),
            "none.x",
            "local.99999999999..x.",
            f"{mine}=",
            f'"{mine}"x',
            "A" * 20000,
        ):
            answer = httpx.get(
                f"{site.url}/console/playground", headers={"Cookie": f"millrace_session={forged}"}, timeout=60
            )
            assert answer.status_code in (303, 400, 431), forged[:80]


# Paths, and bodies


@pytest.mark.parametrize(
    "path",
    [
        "/console/%2e%2e/metrics",
        "/console/..;/metrics",
        "/console/static/%252e%252e/%252e%252e/app.py",
        "/console/static/..%5c..%5capp.py",
        "/console/static/vendor/%2e%2e%2f%2e%2e%2f%2e%2e%2fapp.py",
        "/console/static/%00",
        "/console/static/" + "../" * 12 + "etc/passwd",
        "/console/static/" + "a" * 5000,
        "/console/traffic/..%2f..%2fkeys.json",
        "/console/traffic/%2e%2e%2fkeys",
        "/console/keys/..%2f..%2fx/revoke",
        "/docs/static/..%2f..%2fapp.py",
        "/docs/static/../../../pyproject.toml",
        "/CONSOLE/keys",
        "//console/keys",
    ],
)
def test_no_spelling_of_a_path_leads_elsewhere(site: Site, path: str) -> None:
    with site.client("ann") as ann:
        head = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nCookie: {cookie(ann)}\r\n\r\n"
    answer = raw(site, head.encode())
    status = answer.partition(b"\r\n")[0]
    assert re.match(rb"HTTP/1\.1 (30[37]|40[0134]|405|414)", status), (path, status)
    assert not re.search(rb"^(import|from|root:|\[project\]|# HELP)|\"sha256\"", answer, re.MULTILINE), path


def test_what_is_too_large_is_refused_and_the_next_request_is_answered(site: Site) -> None:
    with site.client("ops") as ops:
        own = {"X-CSRF-Token": token(ops), "Origin": site.url}
        big = "a" * (200 << 10)
        assert ops.post("/console/data", data={"sql": f"SELECT '{big}'"}, headers=own).status_code == 200
        for sql in ("(" * 50000, "SELECT " + "1+" * 50000 + "1", "SELECT " * 20000, "[" * 50000, "SELECT 1;" * 20000):
            assert ops.post("/console/data", data={"sql": sql}, headers=own).status_code in (422, 503), sql[:20]
        assert ops.post("/console/data", data={"sql": "SELECT 42 AS n"}, headers=own).text.count("42") >= 1
        saved = {"name": "n" * 300, "sql": "SELECT 1"}
        assert ops.post("/console/data/save", data=saved, headers=own).status_code == 409
        why = {"why": "w" * (250 << 10)}
        assert ops.post("/console/policies/2/promote", data=why, headers=own).status_code == 409
        chunked = iter([b"sql="] + [b"a" * 65536] * 16)
        assert ops.post("/console/data", content=chunked, headers=own).status_code == 413
        assert ops.get("/console/traffic?text=" + "%F0%9F%92%A9" * 4000).status_code in (200, 400, 414, 431)
        assert ops.get("/console/labels/next?skipped=" + "a," * 15000).status_code in (200, 400, 414, 431)
        many = {f"X-{i}": "a" * 500 for i in range(90)}
        assert ops.get("/console/playground", headers=many).status_code in (200, 400, 431)
        assert ops.get("/console/playground").status_code == 200
    claimed = b"POST /console/login HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\nkey="
    assert b" 200 " not in raw(site, claimed).partition(b"\r\n")[0]


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM read_text('/etc/passwd')",
        "SELECT * FROM '/etc/passwd'",
        "FROM glob('/**')",
        "SELECT * FROM read_csv('http://127.0.0.1:1/x')",
        "COPY (SELECT 1) TO '/tmp/enemy'",
        "WITH x AS (INSERT INTO t VALUES (1) RETURNING *) SELECT * FROM x",
        "ATTACH '/tmp/enemy.db'",
        "INSTALL httpfs",
        "SET enable_external_access = true",
        "SELECT getenv('HOME')",
        "SELECT * FROM query('SELECT * FROM read_text(''/etc/passwd'')')",
        "SELECT * FROM query_table('/etc/passwd')",
        "PRAGMA database_list",
        "EXPLAIN ANALYZE COPY (SELECT 1) TO '/tmp/enemy'",
        "SELECT 1; SELECT 2",
        "CALL pragma_version()",
        "EXPORT DATABASE '/tmp/enemy'",
        "CREATE MACRO f() AS 1",
    ],
)
def test_sql_reads_the_lake_and_reaches_nothing_else(site: Site, sql: str) -> None:
    with site.client("ops") as ops:
        own = {"X-CSRF-Token": token(ops), "Origin": site.url}
        answer = ops.post("/console/data", data={"sql": sql}, headers=own)
        assert answer.status_code == 422, answer.text[-3000:]
        assert "root:" not in answer.text
    with site.client("ann") as ann:
        own = {"X-CSRF-Token": token(ann), "Origin": site.url}
        for path in ("/console/data", "/console/data/export", "/console/data/save", "/console/data/delete"):
            assert ann.post(path, data={"sql": sql, "as": "csv", "name": "x"}, headers=own).status_code == 403


# Room that others need, and records


def test_bodies_that_never_end_and_streams_of_one_key_leave_room_for_others(site: Site) -> None:
    address = urlsplit(site.url)
    with ExitStack() as stack:
        for _ in range(100):
            slow = stack.enter_context(socket.create_connection((address.hostname, address.port), timeout=30))
            slow.sendall(b"POST /console/login HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nk")
        ann, ops = stack.enter_context(site.client("ann")), stack.enter_context(site.client("ops"))
        live = ann.build_request("GET", "/console/live")
        streams = [ann.send(live, stream=True) for _ in range(18)]
        assert [stream.status_code for stream in streams] == [200] * 16 + [503] * 2
        others = ops.send(ops.build_request("GET", "/console/live"), stream=True)
        assert others.status_code == 200
        for stream in (*streams, others):
            stream.close()


def test_what_an_enemy_sends_is_no_line_of_the_log_nor_of_the_audit_log(site: Site) -> None:
    forged = "x\n2026-01-01 00:00:00,000 CRITICAL forged: FORGED\x1b[2J\u2028FORGED"
    audit = AuditLog(site.settings.path(site.settings.serve.audit))
    with site.client("ops") as ops:
        own = {"X-CSRF-Token": token(ops), "Origin": site.url}
        before = len(audit.entries())
        assert ops.post(f"/console/keys/{quote(forged, safe='')}/revoke", data={}, headers=own).status_code in (
            404,
            409,
        )
        assert ops.post("/console/policies/2/promote", data={"why": forged}, headers=own).status_code == 409
        for field in ("text", "user", "session", "policy", "before", "reward_above"):
            assert ops.get("/console/traffic", params={field: forged}).status_code == 200
    assert not re.search("^(2026-01-01 00|FORGED)", site.log.read_text(), re.MULTILINE)
    assert [entry.action for entry in audit.entries()[before:]][-1] == "console.promote"
    shown = CliRunner().invoke(cli.millrace, ["audit", "--home", str(site.settings.home)]).output
    assert "FORGED" in shown
    assert not re.search("^FORGED|\x1b", shown, re.MULTILINE)
