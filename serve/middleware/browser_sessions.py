"""A browser's session: a cookie that is worth what the key is that it was exchanged for.

The cookie names a key and says until when. It is signed with what this machine keeps
beside the key file, and with the key's own hash: every replica knows it, and none keeps it. Its key is looked up at
every request; with one that was revoked, has expired or is gone, it is worth nothing. A cookie that a user of a single
sign-on got names that user too, and is worth something only where the proxy says the same of the request.

A browser sends a cookie whoever's page made the request. So a request that brings one, and does more than look at a
page, must prove that the page was ours: by a token that only our pages hold, and by the headers in which browsers name
the page.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Final

from serve.http import Problem
from serve.middleware.keyring import Keyring, Principal, Refused

COOKIE: Final = "millrace_session"
HOST_COOKIE: Final = f"__Host-{COOKIE}"
"""Its name under TLS: browsers then take it from this very host alone, and send it over TLS alone."""
TOKEN_HEADER: Final = b"x-csrf-token"
SESSION_S: Final = 12 * 3600
_WITHOUT_KEY: Final = "none."


class BrowserSessions:
    """Makes cookies and knows them again. ``now``: Unix time in seconds."""

    def __init__(self, keyring: Keyring, now: Callable[[], float] = time.time) -> None:
        self.keyring = keyring
        self._now = now

    def begin(self, secret: str) -> str:
        """A cookie's value, for a key. Raises Refused."""
        principal = self.keyring.authenticate(secret.encode())
        assert principal.key is not None
        return self._signed(principal.key, "", SESSION_S)

    def begin_of_user(self, user: str) -> str:
        """A cookie's value, for a user of the single sign-on. Raises Refused."""
        return self._signed(self.keyring.key_of_user(user), user, SESSION_S)

    def begin_without_key(self) -> str:
        """A cookie's value where no key is needed: it is worth nothing; its token proves a page."""
        return _WITHOUT_KEY + secrets.token_urlsafe(18)

    def principal(self, cookie: str, user: str | None = None) -> Principal:
        """Whose session it is. Raises Refused if it is none, or ended.

        ``user``: who makes the request, as the single sign-on's proxy says; None if it says nothing.
        """
        payload, _, signature = cookie.rpartition(".")
        key_id, until, of = _fields(payload)
        if not hmac.compare_digest(self._signature(key_id, payload).encode(), signature.encode()):
            raise Refused("unknown", "there is no such session; log in")
        if until < self._now():
            raise Refused("expired", "the session has ended; log in again")
        if not of:
            return self.keyring.principal_of(key_id)
        principal = None
        if user is not None and of == _encoded(user.encode()):
            principal = self.keyring.principal_of_user(user)
        if principal is None or principal.key != key_id:
            raise Refused("unknown", "the session is of another user than who is signed on now; log in again")
        return principal

    def check_token(self, cookie: str, token: str) -> None:
        """Raises Problem 403 if a request does not prove that a page of ours made it."""
        if not hmac.compare_digest(token_of(cookie).encode(), token.encode()):
            raise Problem(403, "the request lacks the page's token (X-CSRF-Token): load the page anew")

    def _signed(self, key_id: str, user: str, seconds: float) -> str:
        payload = f"{key_id}.{int(self._now() + seconds)}.{_encoded(user.encode())}.{secrets.token_urlsafe(9)}"
        return f"{payload}.{self._signature(key_id, payload)}"

    def _signature(self, key_id: str, payload: str) -> str:
        """Raises Refused for a key that is not there, or where no session can be signed."""
        material = self.keyring.signing_secret(key_id)
        return _encoded(hmac.digest(material, f"session\0{payload}".encode(), hashlib.sha256))


def token_of(cookie: str) -> str:
    """The token that pages of a session hold. Others' pages can't read it, nor the cookie that it follows from."""
    return _encoded(hmac.digest(cookie.encode(), b"csrf", hashlib.sha256))


def cookie_of(headers: Mapping[bytes, bytes]) -> str | None:
    """The session's cookie among a request's headers (``cookie``; ``origin`` tells whether the page came over TLS).

    Under TLS a session of a key must have the prefix: without it, the cookie may be from any sibling domain.
    """
    sent = headers.get(b"cookie")
    if sent is None or COOKIE.encode() not in sent:
        return None
    pairs = (part.strip().partition("=") for part in sent.decode("latin-1").split(";"))
    found = {name: value for name, _, value in pairs}
    plain = found.get(COOKIE)
    if plain and not plain.startswith(_WITHOUT_KEY) and headers.get(b"origin", b"").startswith(b"https:"):
        plain = None
    return found.get(HOST_COOKIE) or plain


def set_cookie(value: str, *, tls: bool) -> str:
    """The Set-Cookie header; an empty value takes the cookie away. ``tls``: the page came over TLS."""
    name, secure = (HOST_COOKIE, "; Secure") if tls else (COOKIE, "")
    age = SESSION_S if value else 0
    return f"{name}={value}; Max-Age={age}; Path=/; HttpOnly; SameSite=Strict{secure}"


def _fields(payload: str) -> tuple[str, int, str]:
    """(A key's id, Unix time of the end, the user of the single sign-on, encoded). Raises Refused."""
    try:
        key_id, until, user, _ = payload.split(".")
        return key_id, int(until), user
    except ValueError:
        raise Refused("unknown", "there is no such session; log in") from None


def _encoded(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode().rstrip("=")
