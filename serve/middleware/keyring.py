"""Checks keys: whether one is known, not revoked and not expired, and whose it is (principal, tenant, scopes)."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import os
import socket
import stat
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal

from serve.config import ServeConfig
from serve.middleware.api_keys import (
    ANY_USER,
    LOCAL,
    SCOPES,
    ApiKey,
    KeyFileError,
    Scope,
    digest,
    id_of,
    local_secret,
    read_keys,
)

log = logging.getLogger(__name__)

_POLL_S: Final = 0.5
_REPEAT_S: Final = 60.0  # between two lines about a key file that stays unreadable
_OPEN: Final = frozenset({"/", "/health", "/ready", "/openapi.json", "/docs", "/docs/static"})
CONSOLE: Final = "/console"
"""Below it are the console's pages, which let in by a session."""
_NOBODYS_DIGEST: Final = bytes(32).hex()

Reason = Literal["missing", "unknown", "revoked", "expired"]


@dataclass(frozen=True, slots=True)
class Principal:
    """Whose request it is. ``key``: the key's id, None without keys; limits: per minute, None for none.

    ``capture``: whether the responses to it are stored.
    """

    tenant: str
    key: str | None
    name: str
    scopes: frozenset[str]
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    capture: bool = True


class Refused(Exception):
    """A request that brings no key, or none that is good."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason: Reason = reason


class NeedsKeys(RuntimeError):
    """What is set up needs keys, and there are none: without, a server is for its own machine only."""


def scope_of(route: str) -> Scope | None:
    """The scope that a route needs, None if it is open to all. What is not known here is for admins."""
    if route in _OPEN or route == CONSOLE or route.startswith(f"{CONSOLE}/"):
        return None
    if route == "/generate" or route.startswith("/v1/"):
        return "generate"
    if route == "/feedback" or route.startswith("/feedback/"):
        return "feedback"
    return "admin"


class Keyring:
    """The keys that this server knows, as the key file has them, and what there is without one."""

    def __init__(self, config: ServeConfig) -> None:
        self.path = Path(config.keys)
        self.off = config.auth == "off"
        self._sso = config.sso.header
        self.on = False
        """Whether requests need a key. Once they do, only a restart changes that."""
        self.error: str | None = None
        """Why the file's present state is not the one in use."""
        self._tenant = config.tenant
        self._limits = limits = config.limits
        self.anonymous = Principal(
            config.tenant, None, "anybody", frozenset(SCOPES), limits.requests_per_minute, limits.tokens_per_minute
        )
        """The principal where no key is needed."""
        self.nobody = Principal(config.tenant, None, "nobody", frozenset())
        """The principal at a route that is open to all, where others need a key."""
        self._known: dict[str, tuple[ApiKey, Principal]] = {}
        self._machine: bytes | None = None  # what this machine alone knows, beside the keys
        self._signature: tuple[int, ...] | None = None
        self._logged_at = 0.0  # the error, last

    def load(self, before: tuple[ApiKey, ...] = ()) -> None:
        """Read the file, at the start. Raises KeyFileError.

        before: what another process of this server has read; it stays in use here too if the file gives no keys.
        """
        self._take(before)
        if self.on:
            self._signature = ()  # look, also where there is no file
            self.refresh()
            return
        self._signature = _signature(self.path)
        self._take(read_keys(self.path))

    @property
    def keys(self) -> tuple[ApiKey, ...]:
        """The keys that were read."""
        return tuple(key for key, _ in self._known.values() if key.id != LOCAL)

    def refresh(self) -> None:
        """Read the file again if it has changed; one that can't be read changes nothing, and is logged."""
        try:
            signature = _signature(self.path)
            if signature == self._signature:
                return
            keys = read_keys(self.path)
            if self.on and not keys:
                raise KeyFileError(f"the key file {self.path} is gone, or has no keys any more")
            self._take(keys)
        except (KeyFileError, OSError) as error:
            self._keep_what_was_read(error)
        else:
            self._signature, self.error = signature, None
            if keys:
                log.info("the key file %s was read again: %d keys are good", self.path, self.stats()["active"])

    def _keep_what_was_read(self, error: Exception) -> None:
        self._signature, said = (), str(error) or repr(error)  # look again
        if said != self.error or time.monotonic() - self._logged_at > _REPEAT_S:
            log.error("%s; the keys that were read before stay in use", said)
            self._logged_at = time.monotonic()
        self.error = said

    async def follow(self) -> None:
        """Take up changes of the file, until cancelled."""
        while True:
            await asyncio.sleep(_POLL_S)
            try:
                await asyncio.to_thread(self.refresh)  # the file may be on a network's disk
            except Exception as error:  # noqa: BLE001 - whatever it was, a key that is revoked next must end
                self._keep_what_was_read(error)

    def authenticate(self, secret: bytes | None) -> Principal:
        """The principal with this secret. Raises Refused."""
        if secret is None:
            raise Refused("missing", "a key is needed: send Authorization: Bearer KEY, or X-API-Key: KEY")
        key, principal = self._known.get(id_of(secret) or "", (None, self.nobody))
        good = hmac.compare_digest(digest(secret).hex(), _NOBODYS_DIGEST if key is None else key.sha256)
        if key is None or not good:
            raise Refused("unknown", "there is no such key")
        return _good(key, principal)

    def principal_of(self, key_id: str) -> Principal:
        """The principal of the key with this id, as long as it is good. Raises Refused."""
        return _good(*self._get(key_id))

    def key_of_user(self, user: str) -> str:
        """The id of the key by which a user of the single sign-on gets in. Raises Refused."""
        now = datetime.now(UTC)
        for wanted in (user, ANY_USER):
            named = [(key, principal) for key, principal in self._known.values() if key.sso == wanted]
            for key, _ in named:
                if key.state(now) == "active":
                    return key.id
            if named and wanted == user:  # who was shut out is not anybody
                _good(*named[-1])
        raise Refused("unknown", f"no key lets {user} in: an admin makes one with `millrace keys create --sso {user}`")

    def principal_of_user(self, user: str) -> Principal:
        """Who a user of the single sign-on is; of those who share a key, each by the own name. Raises Refused."""
        key, principal = self._get(self.key_of_user(user))
        return replace(_good(key, principal), name=f"sso:{user}") if key.sso == ANY_USER else _good(key, principal)

    def signing_secret(self, key_id: str) -> bytes:
        """What sessions of this key are signed with. Raises Refused."""
        if self._machine is None:
            raise Refused(
                "unknown", "there are no sessions here: the log says why this machine has no secret of its own"
            )
        return self._machine + bytes.fromhex(self._get(key_id)[0].sha256)

    def _get(self, key_id: str) -> tuple[ApiKey, Principal]:
        try:
            return self._known[key_id]
        except KeyError:
            raise Refused("unknown", "there is no such key") from None

    def check_host(self, host: str, setting: str = "serve.host") -> None:
        """Raises NeedsKeys where no key is needed, for a host, a name or an address, that others reach, and for users
        of a single sign-on, who are let in by keys.
        """
        if self._sso is not None and not self.on:
            why = "serve.auth is off" if self.off else f"there is no key in {self.path}"
            raise NeedsKeys(
                f"serve.sso lets users in by their keys, and {why}: make them with `millrace keys create --sso USER`"
            )
        if self.on or self.off or is_loopback(host):
            return
        raise NeedsKeys(
            f"{setting} is {host}, which others than this machine reach, and there is no key in {self.path}: make "
            "one with `millrace keys create`, or set serve.auth to off if a proxy before it authenticates requests"
        )

    def describe(self) -> str:
        """Who may use the server, for the log."""
        if self.off:
            return "serve.auth is off: everybody who reaches this server may do everything"
        if self.on:
            return f"requests need a key: {self.stats()['active']:.0f} are good ({self.path})"
        return (
            f"there is no key in {self.path}: the server listens on loopback only, and everybody on this machine may "
            "do everything; `millrace keys create` changes that"
        )

    def stats(self) -> dict[str, float]:
        """Gauges for monitoring."""
        now = datetime.now(UTC)
        active = sum(key.state(now) == "active" for key, _ in self._known.values() if key.id != LOCAL)
        return {"needed": float(self.on), "active": active, "healthy": float(self.error is None)}

    def _take(self, keys: tuple[ApiKey, ...]) -> None:
        if self.off or not keys:
            return
        try:
            secret = local_secret(self.path)
        except (OSError, UnicodeDecodeError) as error:
            log.warning("`millrace` on this machine can't ask the server which policy it serves: %s", error)
        else:
            keys = (*keys, _local_key(secret, self._tenant))
            self._machine = digest(f"sessions {secret}".encode())
        with suppress(FileNotFoundError):
            _warn_of_mode(self.path)
        self._known = {key.id: (key, self._principal(key)) for key in keys}  # at once: the event loop reads meanwhile
        self.on = True

    def _principal(self, key: ApiKey) -> Principal:
        def limit(own: float | Literal["unlimited"] | None, default: float | None) -> float | None:
            return None if own == "unlimited" else own or default

        requests = limit(key.requests_per_minute, self._limits.requests_per_minute)
        tokens = limit(key.tokens_per_minute, self._limits.tokens_per_minute)
        evaluates = "evaluate" in key.scopes  # lm-eval, say: it generates, and is no traffic to learn from
        scopes = frozenset(key.scopes) | ({"generate"} if evaluates else set())
        return Principal(key.tenant, key.id, key.name, scopes, requests, tokens, key.capture and not evaluates)


def _good(key: ApiKey, principal: Principal) -> Principal:
    """Raises Refused for a key that is good no more."""
    state = key.state(datetime.now(UTC))
    if state != "active":
        raise Refused(state, f"key {key.id} {'was revoked' if state == 'revoked' else 'has expired'}")
    return principal


def _local_key(secret: str, tenant: str) -> ApiKey:
    sha256, now = digest(secret.encode()).hex(), datetime.now(UTC)
    return ApiKey.model_construct(
        id=LOCAL, name="this machine", tenant=tenant, scopes=("admin",), sha256=sha256, created_at=now
    )


def is_loopback(host: str) -> bool:
    """Whether a host, a name or an address, can be reached from its own machine only. Raises OSError for no host."""
    if not host:  # all addresses
        return False
    try:
        addresses = [str(found[4][0]) for found in socket.getaddrinfo(host, None)]
    except socket.gaierror as error:
        raise OSError(error.errno, f"serve.host {host!r} is no address of this machine: {error.strerror}") from error
    for address in addresses:
        parsed = ipaddress.ip_address(address.partition("%")[0])
        if not (getattr(parsed, "ipv4_mapped", None) or parsed).is_loopback:
            return False
    return True


def is_wildcard(host: str) -> bool:
    """Whether a host stands for all addresses of its machine."""
    try:
        return not host or ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _signature(path: Path) -> tuple[int, ...] | None:
    """What changes when the file does; None if it is not there. Raises KeyFileError."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise KeyFileError(f"the key file {path} can't be looked at: {error.strerror}") from error
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _warn_of_mode(path: Path) -> None:
    mode = stat.S_IMODE(os.stat(path).st_mode)
    if mode & 0o022:
        log.warning("the key file %s can be written by others (mode %o): make it 600", path, mode)
