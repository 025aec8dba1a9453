"""The key file: who may use the server. Written by ``millrace keys``, read by ``serve.middleware.keyring``.

A secret is 256 random bits, so its plain SHA-256 is what is kept: nobody can try that many, and a slow or salted hash,
which is for secrets that people choose, would only be paid for at every request.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from feedback.files import locked, replace_file

Scope = Literal["generate", "feedback", "evaluate", "read", "admin"]
SCOPES: Final[tuple[Scope, ...]] = ("generate", "feedback", "evaluate", "read", "admin")
ANY_USER: Final = "*"
LOCAL: Final = "local"
"""The id of the key that commands on the server's own machine use; it stands in a file of its own."""

_LOCK_TIMEOUT_S: Final = 10
_PAST: Final = {"revoked": "was revoked", "expired": "has expired"}
_FORM: Final = re.compile(rb"mrk_([a-z0-9]{1,32})_[A-Za-z0-9_-]{20,128}")

Label = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)] | Literal["unlimited"]


class KeyFileError(RuntimeError):
    """The key file can't be used; the text says why."""


class ApiKey(BaseModel):
    """One key, without its secret. ``requests_per_minute``, ``tokens_per_minute``: None is the config's default.

    ``capture``: False if no response to its requests is stored, whatever they say. ``sso``: the user who is let in by
    it on a proxy's word (``serve.sso``); ``ANY_USER``: each who has no other.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]{1,32}$")]
    name: Label
    tenant: Label
    scopes: tuple[Scope, ...] = Field(min_length=1)
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    created_at: AwareDatetime
    expires_at: AwareDatetime | None = None
    revoked_at: AwareDatetime | None = None
    requests_per_minute: Rate | None = None
    tokens_per_minute: Rate | None = None
    capture: bool = True
    sso: Label | None = None

    def state(self, now: datetime) -> Literal["active", "revoked", "expired"]:
        """What the key is worth at ``now``."""
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if self.expires_at is not None and self.expires_at <= now else "active"


class KeyFile(BaseModel):
    """The file: every key there ever was, so that a revoked one can be told from one that never was."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = 1
    keys: tuple[ApiKey, ...] = ()


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """The keys; none if there is no file. Raises KeyFileError."""
    try:
        keys = KeyFile.model_validate_json(path.read_bytes()).keys
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise KeyFileError(f"the key file {path} can't be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise KeyFileError(f"the key file {path} is not one: {where}: {first['msg']}") from None
    ids = [key.id for key in keys]
    if len(set(ids)) != len(ids) or LOCAL in ids:
        raise KeyFileError(f"the key file {path} is not one: the ids of its keys are {', '.join(ids)}")
    return keys


def create_key(
    path: Path,
    *,
    name: str,
    tenant: str,
    scopes: Iterable[Scope],
    expires_at: datetime | None = None,
    requests_per_minute: float | Literal["unlimited"] | None = None,
    tokens_per_minute: float | Literal["unlimited"] | None = None,
    capture: bool = True,
    sso: str | None = None,
) -> tuple[ApiKey, str]:
    """Add a key; returns it and its secret, which is nowhere else.

    A key of scope ``evaluate`` may generate, and its traffic is never recorded, so nothing is trained on it. Raises
    KeyFileError, ValueError for a value that doesn't fit or a name that an active key has.
    """
    scopes = _scopes(scopes, sso)
    if sso is not None and sso != ANY_USER and not is_user(sso):
        raise ValueError(
            f"sso: {sso!r} is no user's name: 1 to 200 printable characters, no comma, and no space at its ends"
        )
    now = datetime.now(UTC)
    key_id = secrets.token_hex(6)
    secret = new_secret(key_id)
    key = ApiKey(
        id=key_id,
        name=name,
        tenant=tenant,
        scopes=scopes,
        sha256=digest(secret.encode()).hex(),
        created_at=now,
        expires_at=expires_at,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        capture=capture,
        sso=sso,
    )
    if expires_at is not None and expires_at <= now:
        raise ValueError(f"a key that expires at {expires_at.isoformat()} would never be good: that is past")
    with _changed(path) as keys:
        if taken := next((other for other in keys if other.name == name and other.state(now) == "active"), None):
            raise ValueError(f"key {taken.id} is called {name!r} already: choose another name, or revoke it first")
        if sso and (
            taken := next((other for other in keys if other.sso == sso and other.state(now) == "active"), None)
        ):
            raise ValueError(f"key {taken.id} ({taken.name}) lets {sso!r} in already: revoke it first")
        keys.append(key)
    return key, secret


def is_user(name: str) -> bool:
    """Whether a proxy can mean one user by a name: a header that came twice has a comma, and ``ANY_USER`` is nobody."""
    return 0 < len(name) <= 200 and name.isprintable() and name == name.strip() and "," not in name and name != ANY_USER


def set_scopes(
    path: Path, wanted: str, scopes: Iterable[Scope], *, seen: Iterable[str] | None = None, keep_admin: bool = False
) -> tuple[ApiKey, ApiKey]:
    """Give the key with this id, or the active one with this name, these scopes instead of those that it has.

    Its secret and its sessions stay good, for what it then may. Returns the key as it was and as it is. Raises
    KeyFileError, ValueError for scopes that don't go together or a key that is good for nothing any more.

    Args:
        seen: what it had when somebody decided: ValueError if it has others by now.
        keep_admin: raise ValueError if no active key would have ``admin``.
    """
    now = datetime.now(UTC)
    with _changed(path) as keys:
        before = _find(keys, wanted, path, now)
        if (state := before.state(now)) != "active":
            raise ValueError(f"key {before.id} of {before.name} {_PAST[state]}: make a new one")
        if seen is not None and set(seen) != set(before.scopes):
            raise ValueError(f"key {before.id} has other scopes by now, {', '.join(before.scopes)}: look again")
        if not (chosen := _scopes(scopes, before.sso)):
            raise ValueError("a key has one scope at least; one that is to be good for nothing is revoked")
        after = before.model_copy(update={"scopes": chosen})
        keys[keys.index(before)] = after
        if keep_admin:
            _require_admin(keys, before, now)
    return before, after


def revoke_key(path: Path, wanted: str, *, keep_admin: bool = False) -> ApiKey:
    """Revoke the key with this id, or the active one with this name; harmless to repeat.

    Raises KeyFileError; with ``keep_admin`` ValueError if no active key would have ``admin`` any more.
    """
    now = datetime.now(UTC)
    with _changed(path) as keys:
        found = _find(keys, wanted, path, now)
        revoked = found if found.revoked_at else found.model_copy(update={"revoked_at": now})
        keys[keys.index(found)] = revoked
        if keep_admin:
            _require_admin(keys, found, now)
    return revoked


def _require_admin(keys: list[ApiKey], before: ApiKey, now: datetime) -> None:
    """Raise ValueError if the key, as it was before, was the last that has ``admin``."""
    if "admin" not in before.scopes or before.state(now) != "active":
        return
    if not any("admin" in key.scopes and key.state(now) == "active" for key in keys):
        raise ValueError(
            f"key {before.id} is the last one with the scope admin, without which nobody can get in here: make another "
            "first, or use `millrace keys` on the server's machine"
        )


def local_secret(path: Path) -> str:
    """The secret with which commands on this machine call the server, created if there is none. Raises OSError.

    It stands in clear in a file that only this user can read: who can read that can write the key file too.
    """
    file = local_file(path)
    with locked(_lock_file(path), _LOCK_TIMEOUT_S):
        try:
            return file.read_text().strip()
        except FileNotFoundError:
            secret = new_secret(LOCAL)
            replace_file(file, f"{secret}\n".encode(), private=True)
            return secret


def local_file(path: Path) -> Path:
    """Where ``local_secret`` is kept, for the key file ``path``."""
    return path.with_name(f"{path.name}.local")


def new_secret(key_id: str) -> str:
    """A secret of 256 random bits, which begins with what it is and its key's id."""
    return f"mrk_{key_id}_{secrets.token_urlsafe(32)}"


def id_of(secret: bytes) -> str | None:
    """The id in a secret; None if it is no secret of ours."""
    found = _FORM.fullmatch(secret)
    return None if found is None else found[1].decode()


def digest(secret: bytes) -> bytes:
    """What is kept of a secret."""
    return hashlib.sha256(secret).digest()


def _scopes(scopes: Iterable[Scope], sso: str | None) -> tuple[Scope, ...]:
    """Scopes, each once and in their order. Raises ValueError for those that don't go together."""
    chosen = set(scopes)
    if {"evaluate", "generate"} <= chosen:
        raise ValueError("scope evaluate generates too, and nothing is recorded: leave generate out")
    if sso == ANY_USER and "admin" in chosen:
        raise ValueError("each user whom the proxy lets in would be an admin: leave the scope out, or name one user")
    return tuple(scope for scope in SCOPES if scope in chosen)


def _find(keys: list[ApiKey], wanted: str, path: Path, now: datetime) -> ApiKey:
    """The key with this id, or the active one with this name. Raises KeyFileError."""
    found = [key for key in keys if key.id == wanted]
    found += [key for key in keys if key.name == wanted and key.state(now) == "active"]
    if not found:
        raise KeyFileError(f"there is no key {wanted!r} in {path}: `millrace keys list` shows them")
    return found[0]


@contextmanager
def _changed(path: Path) -> Iterator[list[ApiKey]]:
    """The file's keys, to be changed in the block; the file is replaced whole or not at all, by one at a time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(_lock_file(path), _LOCK_TIMEOUT_S):
            keys = list(read_keys(path))
            yield keys
            content = KeyFile(keys=tuple(keys)).model_dump_json(indent=1).encode() + b"\n"
            # Where a link leads, so that what keeps the keys there, a Secret say, goes on to be obeyed.
            replace_file(path.resolve(), content, private=True)
    except OSError as error:
        raise KeyFileError(f"the key file {path} can't be written: {error.strerror or error}") from error


def _lock_file(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")
