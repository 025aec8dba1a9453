"""Single sign-on: who a proxy names gets in by a key, and only the right proxy may name anybody."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from pydantic import ValidationError

from feedback.config import FeedbackConfig
from serve.app import run
from serve.config import ServeConfig, SsoConfig
from serve.middleware.api_keys import create_key, read_keys, revoke_key
from serve.middleware.browser_sessions import BrowserSessions
from serve.middleware.keyring import Keyring, NeedsKeys, Refused
from tests.deploy.console.conftest import SSO_HEADER, SSO_PROXY, Site, token


@pytest.fixture
def carol(site: Site) -> Iterator[str]:
    """A user whom a key names, which can look and judge."""
    key, _ = create_key(site.keys, name="carol", tenant="acme", scopes=["read", "feedback"], sso="carol@example.org")
    yield "carol@example.org"
    revoke_key(site.keys, key.id)


@contextmanager
def browser(site: Site, user: str | bytes | None, *, by: str = SSO_PROXY) -> Iterator[httpx.Client]:
    """Whose requests come from the address ``by`` and say that they are ``user``'s."""
    headers = [] if user is None else [(SSO_HEADER, user)]
    transport = httpx.HTTPTransport(local_address=by)
    with httpx.Client(base_url=site.url, transport=transport, headers=headers, timeout=120) as client:
        yield client


def sign_on(client: httpx.Client, **headers: str) -> httpx.Response:
    own = {"Origin": str(client.base_url).rstrip("/")} | headers
    return client.post("/console/login", data={"sso": "yes"}, headers=own)


def signed_on(client: httpx.Client) -> None:
    deadline = time.monotonic() + 120
    while (answer := sign_on(client)).status_code == 401 and time.monotonic() < deadline:
        time.sleep(0.1)  # the server reads new keys twice a second
    assert (answer.status_code, answer.headers["Location"]) == (303, "/console/"), answer.text


def test_a_user_whom_the_proxy_names_gets_in_by_the_key_that_names_them(site: Site, carol: str) -> None:
    with browser(site, carol) as client:
        assert client.get("/console/").headers["Location"].startswith("/console/login")
        assert f"Continue as {carol}" in client.get("/console/login").text
        signed_on(client)
        assert client.get("/console/").status_code == 200
        assert client.get("/console/keys").status_code == 403, "the key has no scope admin"
    assert f'"sso": "{carol}"' in site.settings.path(site.settings.serve.audit).read_text()


def test_the_session_is_worth_nothing_without_the_proxys_word_for_the_same_user(site: Site, carol: str) -> None:
    with browser(site, carol) as client:
        signed_on(client)
        stolen = client.cookies
    for user, by in ((None, SSO_PROXY), ("dave@example.org", SSO_PROXY), (carol, "127.0.0.1"), (None, "127.0.0.1")):
        with browser(site, user, by=by) as other:
            other.cookies = stolen
            assert other.get("/console/").status_code == 303, (user, by)
            page_token = {"X-CSRF-Token": "x", "Origin": site.url}
            assert other.post("/feedback", json={}, headers=page_token).status_code in (401, 403)


@pytest.mark.parametrize(
    ("user", "headers", "by"),
    [
        ("carol@example.org", {}, "127.0.0.1"),
        (None, {"X-Millrace-User": "carol@example.org"}, "127.0.0.1"),
        (None, {"X-Millrace-User": "carol@example.org"}, SSO_PROXY),
        ("nobody@example.org", {"X-Millrace-User": "carol@example.org"}, SSO_PROXY),
        (None, {}, SSO_PROXY),
        ("", {}, SSO_PROXY),
        ("*", {}, SSO_PROXY),
        ("carol@example.org,carol@example.org", {}, SSO_PROXY),
        (b"carol\xff@example.org", {}, SSO_PROXY),
        ("carol@example.org" + "x" * 200, {}, SSO_PROXY),
        ("CAROL@example.org", {}, SSO_PROXY),
        ("\u00a0carol@example.org".encode(), {}, SSO_PROXY),
        ("carol@example.org\u3000".encode(), {}, SSO_PROXY),
    ],
)
def test_nobody_gets_in_on_another_word(
    site: Site, carol: str, user: str | bytes | None, headers: dict[str, str], by: str
) -> None:
    with browser(site, carol) as client:
        signed_on(client)  # the key is known by now
    with browser(site, user, by=by) as client:
        assert sign_on(client, **headers).status_code == 401


def test_a_header_that_comes_twice_names_nobody(site: Site, carol: str) -> None:
    with browser(site, carol) as client:
        signed_on(client)
    transport = httpx.HTTPTransport(local_address=SSO_PROXY)
    twice = [(SSO_HEADER, "nobody@example.org"), (SSO_HEADER, carol), ("Origin", site.url)]
    with httpx.Client(base_url=site.url, transport=transport, headers=twice, timeout=60) as client:
        assert client.post("/console/login", data={"sso": "yes"}).status_code == 401


def test_another_sites_page_signs_nobody_on(site: Site, carol: str) -> None:
    with browser(site, carol) as client:
        signed_on(client)
        assert sign_on(client, Origin="http://evil.example").status_code == 403
        assert sign_on(client, **{"Sec-Fetch-Site": "cross-site"}).status_code == 403


def test_a_session_ends_with_its_key(site: Site, carol: str) -> None:
    with browser(site, carol) as client:
        signed_on(client)
        [key] = [key for key in read_keys(site.keys) if key.sso == carol and key.revoked_at is None]
        revoke_key(site.keys, key.id)
        deadline = time.monotonic() + 120
        while (answer := client.get("/console/")).status_code == 200 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert answer.status_code == 303


def test_users_who_share_a_key_are_told_apart_and_one_who_gets_an_own_key_leaves(site: Site) -> None:
    shared, _ = create_key(site.keys, name="everybody", tenant="acme", scopes=["read", "feedback"], sso="*")
    own = None
    try:
        said = {}
        for user in ("erin@example.org", "frank@example.org"):
            with browser(site, user) as client:
                signed_on(client)
                proof = {"X-CSRF-Token": token(client, "/console/labels"), "Origin": site.url}
                thumb = {"response_id": site.responses[0], "kind": "thumb", "value": 1, "source": "user"}
                answer = client.post("/feedback", json=thumb, headers=proof)
                assert answer.status_code < 300, answer.text
                said[user] = client.get("/console/").text
        assert all(f"sso:{user}" in page for user, page in said.items())
        with browser(site, "erin@example.org") as client:
            signed_on(client)
            own, _ = create_key(site.keys, name="erin", tenant="other", scopes=["read"], sso="erin@example.org")
            deadline = time.monotonic() + 120
            while (answer := client.get("/console/")).status_code == 200 and time.monotonic() < deadline:
                time.sleep(0.1)
            assert answer.status_code == 303, "the shared key's session of one who has an own key"
            signed_on(client)
            assert client.get(f"/console/traffic/{site.responses[0]}").status_code == 404, "another tenant's"
    finally:
        for key in (shared, own):
            if key is not None:
                revoke_key(site.keys, key.id)


def test_a_user_whose_own_key_is_good_no_more_is_not_anybody(tmp_path: Path) -> None:
    path, soon = tmp_path / "keys.json", datetime.now(UTC) + timedelta(seconds=1)
    anybody, _ = create_key(path, name="all", tenant="acme", scopes=["read"], sso="*")
    contractor, _ = create_key(path, name="gus", tenant="other", scopes=["read"], sso="gus", expires_at=soon)
    dismissed, _ = create_key(path, name="hal", tenant="acme", scopes=["read"], sso="hal")
    keyring = Keyring(ServeConfig(keys=str(path)))
    keyring.load()
    assert [keyring.key_of_user(user) for user in ("gus", "hal", "ida")] == [contractor.id, dismissed.id, anybody.id]
    sessions = BrowserSessions(keyring)
    cookie = sessions.begin_of_user("hal")
    revoke_key(path, dismissed.id)
    time.sleep(1)
    keyring.refresh()
    with pytest.raises(Refused, match=f"key {dismissed.id} was revoked"):
        sessions.principal(cookie, "hal")
    for user in ("gus", "hal"):
        with pytest.raises(Refused, match=r"was revoked|has expired"):
            sessions.begin_of_user(user)
    again, _ = create_key(path, name="hal again", tenant="acme", scopes=["read"], sso="hal")
    revoke_key(path, anybody.id)
    keyring.refresh()
    assert keyring.key_of_user("hal") == again.id
    with pytest.raises(Refused, match="no key lets ida in"):
        keyring.key_of_user("ida")


@pytest.mark.parametrize("name", ["", "ann,bob", " ann", "ann ", "a\nb", "x" * 201])
def test_a_key_is_not_made_for_a_name_that_no_proxy_can_say(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="no user's name"):
        create_key(tmp_path / "keys.json", name="ann", tenant="t", scopes=["read"], sso=name)


def test_a_key_for_anybody_is_no_admins_and_a_user_has_one_key(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    with pytest.raises(ValueError, match="would be an admin"):
        create_key(path, name="all", tenant="t", scopes=["admin"], sso="*")
    create_key(path, name="ann", tenant="t", scopes=["admin"], sso="ann")
    with pytest.raises(ValueError, match="lets 'ann' in already"):
        create_key(path, name="ann again", tenant="t", scopes=["read"], sso="ann")


@pytest.mark.parametrize("auth", ["keys", "off"])
def test_single_sign_on_without_keys_is_refused(tmp_path: Path, auth: str) -> None:
    sso = {"header": SSO_HEADER, "proxies": [SSO_PROXY]}
    paths = {name: str(tmp_path / name) for name in ("keys", "replicas", "audit")}
    config = ServeConfig(sso=sso, auth=auth, port=0, **paths)
    with pytest.raises(NeedsKeys, match="millrace keys create --sso"):
        run(config, FeedbackConfig())


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"header": "X-Forwarded-User"}, "go together"),
        ({"proxies": ["10.0.0.1"]}, "go together"),
        ({"header": "X-Forwarded-User", "proxies": ["0.0.0.0/0"]}, "is everybody"),
        ({"header": "X-Forwarded-User", "proxies": ["::/0"]}, "is everybody"),
        ({"header": "X-Forwarded-User", "proxies": ["proxy.example"]}, "no address or network"),
        ({"header": "Cookie", "proxies": ["10.0.0.1"]}, "requests have anyway"),
        ({"header": "X User", "proxies": ["10.0.0.1"]}, "pattern"),
    ],
)
def test_settings_that_would_let_anybody_in_are_refused(values: dict[str, object], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        SsoConfig(**values)
