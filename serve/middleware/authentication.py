"""Authentication of a request by its headers alone, before its body is read. Runs in Ray Serve's proxies too."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from starlette.types import Scope

from serve.config import ServeConfig
from serve.http import Problem
from serve.middleware.api_keys import is_user
from serve.middleware.browser_sessions import TOKEN_HEADER, BrowserSessions, cookie_of
from serve.middleware.connections import USER, word_of
from serve.middleware.keyring import CONSOLE, Keyring, Principal, Refused, is_wildcard, scope_of
from serve.middleware.refusals import Refusals

READ: Final = frozenset(
    {b"authorization", b"x-api-key", b"origin", b"host", b"cookie", b"sec-fetch-site", TOKEN_HEADER}
)
LOGIN: Final = f"{CONSOLE}/login"
_AUTHORITY: Final = re.compile(r"(\[[0-9a-f:.]{2,45}\]|[^\[\]:/@,\s]{1,255})(?::\d{0,5})?")
_ORIGIN: Final = re.compile(r"https?://(.{1,300})")


def headers_of(scope: Scope, wanted: frozenset[bytes]) -> dict[bytes, bytes]:
    """Those of a request's headers that are ``wanted``; one that comes twice has both values, with a comma.

    And what a proxy says of the user, under ``word_of``, which is no header's name.
    """
    found: dict[bytes, bytes] = {}
    for name, value in scope["headers"]:
        if name in wanted:
            found[name] = value if name not in found else found[name] + b"," + value
    if USER in scope:
        word, user = scope[USER]
        found[word] = user
    return found


def client_of(scope: Scope) -> str:
    """The address that a request came from: the connection's, or what one of ``serve.proxies`` says."""
    return (scope.get("client") or ("unknown",))[0]


class Authenticator:
    """Finds a request's principal. Without keys: refuses other machines, and web pages of other hosts."""

    def __init__(self, keyring: Keyring, config: ServeConfig, refusals: Refusals | None = None) -> None:
        """``refusals``: what counts the keys that are refused, and where."""
        self.keyring = keyring
        self.sessions = BrowserSessions(keyring)
        self._word = None if config.sso.header is None else word_of(config.sso)
        self.refusals = refusals or Refusals(config.limits.refused_per_minute)
        self._hosts = frozenset({"localhost", _plain(config.host), *map(_plain, config.allowed_hosts)})
        self._named = frozenset(map(_plain, config.allowed_hosts))
        self._is_wildcard = is_wildcard(config.host)
        self._is_ours = lru_cache(1024)(self._answers_to)  # clients say the same host over and over

    def authenticate(self, wanted: str | None, headers: Mapping[bytes, bytes], client: str = "") -> Principal:
        """The request's principal. ``wanted``: the scope it needs, None if it is open to all; ``client``: its address.

        Raises Problem 401, 403 or 421; 429 in place of 401 where too many of the client's keys were not good.
        """
        keyring = self.keyring
        if not keyring.on:
            self._check_sender(headers)
            return keyring.anonymous
        if wanted is None:
            return keyring.nobody
        principal = self._owner(headers, client)
        if wanted not in principal.scopes:
            self.refusals.add("scope", client)
            allowed = ", ".join(sorted(principal.scopes))
            challenge = f'Bearer realm="millrace", error="insufficient_scope", scope="{wanted}"'
            raise Problem(
                403,
                f"this needs the scope {wanted}; key {principal.key} has {allowed}",
                headers={"WWW-Authenticate": challenge},
            )
        return principal

    def knows(self, headers: Mapping[bytes, bytes]) -> bool:
        """Whether a good key or session came with a request, or none is needed. What it may do is not looked at."""
        if not self.keyring.on:
            return True
        secret, cookie = _secret(headers), cookie_of(headers)
        try:
            if secret is None and cookie is not None:
                self.sessions.principal(cookie, self.user(headers))
            else:
                self.keyring.authenticate(secret)
        except Refused:
            return False
        return True

    def check_before_body(self, path: str, headers: Mapping[bytes, bytes], client: str = "") -> Principal:
        """The principal of a request with a body. Raises Problem as ``authenticate`` where that need not be read."""
        scope = scope_of(path)
        if not self.keyring.on or scope in ("generate", "feedback"):
            return self.authenticate(scope, headers, client)
        if path == LOGIN:  # which is where one gets a session
            return self.keyring.nobody
        if path.startswith(f"{CONSOLE}/"):
            return self.check_form(headers, client)
        # No route there takes a body, but for a key's owner it is read, and the answer is the route's own.
        return self._owner(headers, client)

    def begin_session(self, secret: str, client: str = "") -> str:
        """The cookie of a new session of a key. Raises Problem 401, or 429 as ``authenticate``."""
        try:
            return self.sessions.begin(secret)
        except Refused as refused:
            self.refusals.add(refused.reason, client)
            raise Problem(401, str(refused)) from None

    def user(self, headers: Mapping[bytes, bytes]) -> str | None:
        """Who makes a request, as the single sign-on's proxy says; None where it says nothing, or nothing clear."""
        if self._word is None:
            return None
        try:
            name = headers.get(self._word, b"").strip(b" \t").decode()  # no other space: that is in another's name
        except UnicodeDecodeError:
            return None
        return name if is_user(name) else None

    def begin_session_of_user(self, headers: Mapping[bytes, bytes], client: str = "") -> str:
        """The cookie of a new session of the single sign-on's user. Raises Problem as ``begin_session``."""
        try:
            if (user := self.user(headers)) is None:
                raise Refused("missing", "no proxy says who you are; log in with a key")
            return self.sessions.begin_of_user(user)
        except Refused as refused:
            self.refusals.add(refused.reason, client)
            raise Problem(401, str(refused)) from None

    def session(self, headers: Mapping[bytes, bytes], client: str = "", *, proved: bool) -> Principal:
        """Who looks at a page. ``proved``: the request must prove too that a page of ours made it.

        Without keys everybody is anybody. Raises Problem 401 or 429 without a session, 403 without the proof.
        """
        cookie = cookie_of(headers)
        if proved:
            self.check_page(headers, cookie)
        if not self.keyring.on:
            return self.keyring.anonymous
        try:
            if cookie is None:
                raise Refused("missing", "there is no such session; log in")
            return self.sessions.principal(cookie, self.user(headers))
        except Refused as refused:
            self.refusals.add(refused.reason, client)
            raise Problem(401, str(refused)) from None

    def check_form(self, headers: Mapping[bytes, bytes], client: str = "") -> Principal:
        """Whose form it is, before its body is read, in which the page's token comes. Raises Problem as ``session``."""
        self.check_origin(headers)
        return self.session(headers, client, proved=False)

    def check_page(self, headers: Mapping[bytes, bytes], cookie: str | None) -> None:
        """Raises Problem 403 unless a page of ours made the request, which holds the session's token."""
        self.check_origin(headers)
        if not cookie:  # whose token everybody knows
            raise Problem(403, "the request has no session's cookie: load the page anew")
        self.sessions.check_token(cookie, headers.get(TOKEN_HEADER, b"").decode("latin-1"))

    def check_origin(self, headers: Mapping[bytes, bytes]) -> None:
        """Raises Problem 403 for a request that a page of another origin made, by what browsers say of it."""
        origin, site = headers.get(b"origin"), headers.get(b"sec-fetch-site", b"same-origin")
        found = None if origin is None else _ORIGIN.fullmatch(origin.decode("latin-1"))
        own = origin is None or (found is not None and self._is_own(found[1], headers.get(b"host", b"")))
        if not own or site != b"same-origin":
            raise Problem(
                403, "a page of another origin may not do this; behind a proxy, name it in serve.allowed_hosts"
            )

    def _owner(self, headers: Mapping[bytes, bytes], client: str) -> Principal:
        """The key's principal. Raises Problem 401 or 429."""
        secret = _secret(headers)
        if secret is None and cookie_of(headers) is not None:
            return self.session(headers, client, proved=True)
        try:
            return self.keyring.authenticate(secret)
        except Refused as refused:
            self.refusals.add(refused.reason, client)
            error = "" if refused.reason == "missing" else f', error="invalid_token", error_description="{refused}"'
            raise Problem(401, str(refused), headers={"WWW-Authenticate": f'Bearer realm="millrace"{error}'}) from None

    def _check_sender(self, headers: Mapping[bytes, bytes]) -> None:
        """Raises Problem 403 or 421 for what a browser sends on behalf of another host's page.

        A page whose name its owner makes resolve to this machine (DNS rebinding) is of the server's own origin to a
        browser, and may read answers; its name is in Host. A page of another origin may write without asking; that is
        in Origin.
        """
        host = headers.get(b"host", b"")
        if not self._is_ours(host):
            shown = host.decode("latin-1")[:200]
            names = ", ".join(sorted(name for name in self._hosts if name))
            raise Problem(
                421,
                f"the Host header is {shown!r}; without keys this server answers to {names} and loopback addresses "
                "only: add the name to serve.allowed_hosts, or make keys (millrace keys create)",
            )
        origin = headers.get(b"origin")
        if origin is None:
            return
        found = _ORIGIN.fullmatch(origin.decode("latin-1"))
        if found is None or not (found[1].encode("latin-1") == host or self._is_named(found[1])):
            raise Problem(403, "a page of another host may not use a server without keys (millrace keys create)")

    def _is_own(self, authority: str, host: bytes) -> bool:
        """Whether an origin is the server's own: what was asked for, or what a proxy is called that it is behind.

        Another port of this machine is another page's.
        """
        named = _AUTHORITY.fullmatch(authority.lower())
        return authority.encode("latin-1") == host or (named is not None and _plain(named[1]) in self._named)

    def _answers_to(self, host: bytes) -> bool:
        authority = host.decode("latin-1")
        if "*" in self._hosts or self._is_named(authority):
            return True
        return self._is_wildcard and _address(authority) is not None  # an address is nobody's name

    def _is_named(self, authority: str) -> bool:
        """Whether it is one of the names and addresses that nobody else can have."""
        address = _address(authority)
        found = _AUTHORITY.fullmatch(authority.lower())
        return (address is not None and address.is_loopback) or (found is not None and _plain(found[1]) in self._hosts)


def _secret(headers: Mapping[bytes, bytes]) -> bytes | None:
    """The key that came with a request."""
    # Looked at first: Authorization may be for a gateway before this server.
    if (secret := headers.get(b"x-api-key")) is not None:
        return secret
    kind, _, value = headers.get(b"authorization", b"").partition(b" ")
    return value.strip() if kind.lower() == b"bearer" else None


def _plain(host: str) -> str:
    return host.lower().strip("[]").removesuffix(".")


def _address(authority: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that a host and port name, if it is not a name."""
    found = _AUTHORITY.fullmatch(authority.lower())
    try:
        return None if found is None else ipaddress.ip_address(_plain(found[1]))
    except ValueError:
        return None
