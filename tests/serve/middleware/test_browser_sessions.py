"""A session is worth what its key is, and proves nothing by itself."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from feedback.config import FeedbackConfig, JournalConfig, LakeConfig
from serve.app import create_app
from serve.config import ServeConfig
from serve.http import Problem
from serve.middleware.api_keys import create_key, read_keys, revoke_key, set_scopes
from serve.middleware.authentication import Authenticator
from serve.middleware.browser_sessions import SESSION_S, BrowserSessions, cookie_of, set_cookie, token_of
from serve.middleware.keyring import Keyring, Refused

ORIGIN = b"http://millrace.example"


def config(home: Path, **serve: Any) -> ServeConfig:
    folders = {name: str(home / name) for name in ("policies", "replicas")}
    return ServeConfig(**folders, keys=str(home / "keys.json"), **serve)


class Home:
    """A key file, who checks it, and a clock."""

    def __init__(self, home: Path, **serve: Any) -> None:
        self.config = config(home, **serve)
        self.key, self.secret = create_key(
            Path(self.config.keys), name="ann", tenant="acme", scopes=["read", "generate"]
        )
        self.keyring = Keyring(self.config)
        self.keyring.load()
        self.authenticator = Authenticator(self.keyring, self.config)
        self.seconds = 1e9
        self.sessions = BrowserSessions(self.keyring, now=lambda: self.seconds)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def headers(cookie: str, **changed: bytes | None) -> dict[bytes, bytes]:
    own: dict[bytes, bytes | None] = {
        b"host": b"millrace.example",
        b"cookie": b"a=b; millrace_session=" + cookie.encode(),
        b"origin": ORIGIN,
        b"sec-fetch-site": b"same-origin",
        b"x-csrf-token": token_of(cookie).encode(),
    } | {name.replace("_", "-").encode(): value for name, value in changed.items()}
    return {name: value for name, value in own.items() if value is not None}


def test_a_session_has_its_keys_tenant_and_scopes_and_no_part_of_its_secret(home: Home) -> None:
    cookie = home.sessions.begin(home.secret)
    principal = home.sessions.principal(cookie)
    assert (principal.tenant, principal.key, principal.scopes) == ("acme", home.key.id, {"read", "generate"})
    assert home.secret.split("_", 2)[2] not in cookie
    assert home.sessions.begin(home.secret) != cookie


def test_a_session_ends_with_its_key_and_after_its_time(home: Home) -> None:
    cookie = home.sessions.begin(home.secret)
    home.seconds += SESSION_S + 2
    with pytest.raises(Refused, match="ended"):
        home.sessions.principal(cookie)
    home.seconds -= SESSION_S
    home.sessions.principal(cookie)
    revoke_key(Path(home.config.keys), home.key.id)
    home.keyring.refresh()
    with pytest.raises(Refused, match="revoked"):
        home.sessions.principal(cookie)


def test_a_session_may_what_its_key_may_now(home: Home) -> None:
    cookie = home.sessions.begin(home.secret)
    for scopes in (["read"], ["read", "admin"], ["feedback"]):
        set_scopes(Path(home.config.keys), home.key.id, scopes)
        home.keyring.refresh()
        assert home.sessions.principal(cookie).scopes == set(scopes)


def test_a_replica_that_starts_later_knows_the_session(home: Home) -> None:
    cookie = home.sessions.begin(home.secret)
    other = Keyring(home.config)
    other.load()
    assert BrowserSessions(other, now=lambda: home.seconds).principal(cookie).key == home.key.id


def test_no_forged_or_changed_cookie_is_a_session(home: Home, tmp_path: Path) -> None:
    cookie = home.sessions.begin(home.secret)
    key_id, until, user, nonce, signature = cookie.split(".")
    assert user == ""
    (tmp_path / "other").mkdir()
    other = Home(tmp_path / "other")
    foreign = other.sessions.begin(other.secret)
    for forged in (
        "",
        ".",
        "....",
        "none.abc",
        cookie[:-1],
        f"{key_id}.{int(until) + 1}..{nonce}.{signature}",
        f"local.{until}..{nonce}.{signature}",
        f"proxy.{until}..{nonce}.{signature}",
        f"{key_id}.1e99..{nonce}.{signature}",
        f"{key_id}.{until}.YW5u.{nonce}.{signature}",
        f"{key_id}.{until}..{nonce}.",
        f"{key_id}.{until}..{nonce}.ß",
        foreign,
        f"{key_id}.{foreign.partition('.')[2]}",
        home.secret,
        "ä.ö.1.ü.ß",
    ):
        with pytest.raises(Refused):
            home.sessions.principal(forged)


@pytest.mark.parametrize(
    ("changed", "good"),
    [
        ({}, True),
        ({"origin": None}, True),  # of a GET no browser says it
        ({"sec_fetch_site": None}, True),  # nor, without TLS, this
        ({"x_csrf_token": None}, False),
        ({"x_csrf_token": b""}, False),
        ({"x_csrf_token": b"\xff"}, False),
        ({"x_csrf_token": token_of("none.other").encode()}, False),
        ({"origin": b"null"}, False),
        ({"origin": b"http://evil.example"}, False),
        ({"origin": b"http://millrace.example.evil.example"}, False),
        ({"origin": b"http://millrace.example:8080"}, False),
        ({"origin": b"http://localhost:3000"}, False),
        ({"sec_fetch_site": b"cross-site"}, False),
        ({"sec_fetch_site": b"same-site"}, False),
        ({"sec_fetch_site": b"none"}, False),
    ],
)
def test_a_cookie_is_worth_its_key_at_a_route_if_a_page_of_ours_asks(
    home: Home, changed: dict[str, bytes | None], good: bool
) -> None:
    home.seconds = 4e9  # as the authenticator has a clock of its own
    sent = headers(home.sessions.begin(home.secret), **changed)
    for check in (
        lambda: home.authenticator.authenticate("generate", sent),
        lambda: home.authenticator.check_before_body("/generate", sent),
    ):
        if good:
            assert check().key == home.key.id
        else:
            with pytest.raises(Problem) as refused:
                check()
            assert refused.value.status == 403


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({}, None),
        ({b"cookie": b""}, 401),
        ({b"cookie": b"millrace_session=a.1.b.c"}, 401),
        ({b"origin": b"http://evil.example"}, 403),
        ({b"sec-fetch-site": b"cross-site"}, 403),
    ],
)
@pytest.mark.parametrize("path", ["/console/logout", "/console/keys", "/console/policies/1/rollback"])
def test_a_form_whose_token_is_in_its_body_gets_past_a_fleets_proxy_by_its_session_and_origin(
    home: Home, path: str, changed: dict[bytes, bytes], status: int | None
) -> None:
    home.seconds = 4e9
    sent = headers(home.sessions.begin(home.secret), x_csrf_token=None) | changed
    if status is None:
        assert home.authenticator.check_before_body(path, sent).key == home.key.id
    else:
        with pytest.raises(Problem) as refused:
            home.authenticator.check_before_body(path, sent)
        assert refused.value.status == status


def test_a_request_without_a_cookie_proves_nothing_even_where_no_key_is_needed(tmp_path: Path) -> None:
    without_keys = Authenticator(Keyring(config(tmp_path)), config(tmp_path))
    for cookie in ({}, {b"cookie": b"millrace_session="}):
        with pytest.raises(Problem) as refused:
            without_keys.session({b"host": b"localhost", b"x-csrf-token": token_of("").encode()} | cookie, proved=True)
        assert refused.value.status == 403


def test_a_session_may_do_no_more_than_its_key(home: Home) -> None:
    home.seconds = 4e9
    with pytest.raises(Problem, match="needs the scope admin") as refused:
        home.authenticator.authenticate("admin", headers(home.sessions.begin(home.secret)))
    assert refused.value.status == 403


def test_a_key_in_a_header_counts_before_a_cookie(home: Home) -> None:
    sent = headers("....", x_csrf_token=None) | {b"x-api-key": home.secret.encode()}
    assert home.authenticator.authenticate("generate", sent).key == home.key.id


def test_a_proxys_name_for_itself_is_an_origin_of_ours(tmp_path: Path) -> None:
    home = Home(tmp_path, allowed_hosts=["console.example"])
    home.seconds = 4e9
    sent = headers(home.sessions.begin(home.secret), origin=b"https://console.example")
    sent[b"cookie"] = sent[b"cookie"].replace(b"millrace_session", b"__Host-millrace_session")
    assert home.authenticator.session(sent, proved=True).key == home.key.id


def test_a_cookie_is_for_this_site_alone_and_no_script_reads_it() -> None:
    assert set_cookie("x", tls=False) == "millrace_session=x; Max-Age=43200; Path=/; HttpOnly; SameSite=Strict"
    assert set_cookie("", tls=True).startswith(
        "__Host-millrace_session=; Max-Age=0; Path=/; HttpOnly; SameSite=Strict; Se"
    )
    assert cookie_of({b"cookie": b"x=1; millrace_session=a.b; y=2"}) == "a.b"
    assert cookie_of({b"cookie": b"other_millrace_session=a"}) is None


def test_over_tls_a_cookie_that_a_sibling_domain_can_set_is_no_session() -> None:
    tls = {b"origin": b"https://console.example"}
    assert cookie_of(tls | {b"cookie": b"millrace_session=the.attackers.own"}) is None
    assert cookie_of(tls | {b"cookie": b"millrace_session=a.b; __Host-millrace_session=c.d"}) == "c.d"
    assert cookie_of(tls | {b"cookie": b"millrace_session=none.x"}) == "none.x"  # it is worth nothing


# Through the application


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    create_key(tmp_path / "keys.json", name="ops", tenant="acme", scopes=["read", "admin"])
    journal, lake = JournalConfig(folder=str(tmp_path / "journal")), LakeConfig(uri=str(tmp_path / "lake"))
    app = create_app(config(tmp_path), FeedbackConfig(journal=journal, lake=lake))
    app.state.server.keyring.load()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://millrace.example") as client:
        client.headers["x-key"] = read_keys(tmp_path / "keys.json")[0].id
        client.app = app  # type: ignore[attr-defined]
        yield client


async def test_a_route_takes_a_session_with_its_proof_and_not_without(http: httpx.AsyncClient) -> None:
    server = http.app.state.server  # type: ignore[attr-defined]
    sessions = BrowserSessions(server.keyring)
    cookie = sessions._signed(http.headers["x-key"], "", SESSION_S)
    sent = {"Cookie": f"millrace_session={cookie}"}
    refused = await http.get("/policy", headers=sent)
    assert (refused.status_code, "X-CSRF-Token" in refused.text) == (403, True)
    assert (await http.get("/policy", headers=sent | {"X-CSRF-Token": token_of(cookie)})).status_code == 200
    ended = await http.get("/policy", headers={"Cookie": "millrace_session=....", "X-CSRF-Token": token_of("....")})
    assert ended.status_code == 401
