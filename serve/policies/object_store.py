"""A client of an object store: reads, conditional writes, whole files up and down. Every call ends, well or not.

Uses obstore (https://developmentseed.org/obstore), whose options are those that deltalake takes for the lake.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import from_url

from feedback.files import fsync_path
from serve.policies.folder import PolicyCorrupt, PolicyError, StoreUnreachable

_TIMEOUTS: Final = {"connect_timeout": "5s", "timeout": "60s"}  # the latter per request, and none is for more than
_LOOK: Final = "5s"
_SOON: Final = {"max_retries": 2, "retry_timeout": timedelta(seconds=10)}  # a connection that idled may be closed
_CHUNK: Final = 16 << 20  # these bytes, so that 0.3 MB/s are enough
_RETRIES: Final = {"max_retries": 2, "retry_timeout": timedelta(seconds=90)}
_TRANSFERS: Final = 4  # files, and parts of an upload, at the same time
_LONGEST: Final = 500  # characters of the client's own message
_ELAPSED: Final = re.compile(r" in [\d.]+(n|µ|m)?s\b")  # it would make each message another one
_PROVIDER: Final = re.compile(r"^(aws|azure|google)_")
_USERINFO: Final = re.compile(r"://[^/@\s]+@")
_CONNECTION: Final = frozenset(
    [
        "allow_http",
        "allow_invalid_certificates",
        "connect_timeout",
        "http1_only",
        "http2_only",
        "pool_idle_timeout",
        "pool_max_idle_per_host",
        "proxy_ca_certificate",
        "proxy_excludes",
        "proxy_url",
        "read_timeout",
        "root_certificate",
        "timeout",
        "user_agent",
    ]
)
"""Options of the connection, which deltalake takes among those of the store, and obstore beside them."""


@dataclass(frozen=True)
class Contents:
    """What a store has, for its messages. ``setting``: its section. ``remedy``: of a damaged object."""

    what: str
    setting: str
    remedy: str


POLICIES: Final = Contents("policies", "serve.policy_store", "restore the object, or publish the policy again")


class Conflict(PolicyError):
    """The object is not the version that was to be replaced."""


@dataclass(frozen=True)
class Stored:
    """An object's content, and what names this version of it for a conditional write."""

    content: bytes
    version: dict[str, str]


class ObjectStore:
    """The objects below one address. ``redact`` takes what is secret out of the client's messages."""

    def __init__(
        self,
        uri: str,
        options: Mapping[str, str],
        redact: Callable[[str], str] = str,
        contents: Contents = POLICIES,
    ) -> None:
        self.uri = uri.rstrip("/")
        self._redact, self._contents = redact, contents
        config, connection = dict[str, str](), dict[str, str](_TIMEOUTS)
        for name, value in options.items():
            of_connection = (short := _PROVIDER.sub("", name.lower())) in _CONNECTION
            (connection if of_connection else config)[short if of_connection else name.lower()] = value
        with self._reached("be opened"):
            self._store: Any = from_url(self.uri, config=config, client_options=connection, retry_config=_RETRIES)
            quick = {"client_options": connection | {"timeout": _LOOK}, "retry_config": _SOON}
            self._looking: Any = from_url(self.uri, config=config, **quick)

    def read(self, name: str, at_most: int) -> Stored | None:
        """An object, None if there is none. Raises PolicyError if it has more bytes than ``at_most``."""
        with self._reached(f"read {name}"):
            try:
                found = obstore.get(self._store, name)
                if (size := int(found.meta["size"])) > at_most:
                    raise PolicyError(f"{self.uri}/{name} has {size} bytes, more than {at_most}: restore it")
                return Stored(bytes(found.bytes()), _version(found.meta))
            except FileNotFoundError:
                return None

    def version(self, name: str) -> dict[str, str] | None:
        """What names an object's version, without its content; None if there is no object. Fails after seconds."""
        with self._reached(f"look at {name}"):
            try:
                return _version(obstore.head(self._looking, name))
            except FileNotFoundError:
                return None

    def write_if(self, name: str, content: bytes, before: dict[str, str] | None) -> dict[str, str]:
        """Replace the version ``before`` of an object, or create it if that is None; the new version.

        Raises Conflict if the object is another one, StoreUnreachable: then whether it was written is not known.
        """
        with self._reached(f"write {name}", must_be_there=True):
            return _version(obstore.put(self._store, name, content, mode=before or "create", use_multipart=False))

    def upload(self, files: Mapping[str, Path]) -> None:
        """Write files as objects, by name."""

        def one(name: str) -> None:
            with self._reached(f"write {name}", must_be_there=True):
                obstore.put(self._store, name, files[name], chunk_size=_CHUNK, max_concurrency=_TRANSFERS)

        _each(one, files)

    def download(self, files: Mapping[str, tuple[Path, int, str]], stopping: Callable[[], bool] = bool) -> None:
        """Write objects, by name, durable to (path, bytes, sha256); each goes on where a killed call ended.

        Raises FileNotFoundError for one that is not there, PolicyCorrupt for one that has another hash,
        StoreUnreachable also once ``stopping`` says so.
        """
        broken_off = threading.Event()

        def one(name: str) -> None:
            self._download(name, *files[name], lambda: broken_off.is_set() or stopping())

        _each(one, files, broken_off.set)

    def _download(self, name: str, path: Path, size: int, sha256: str, stopping: Callable[[], bool]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._reached(f"look at {name}"):
            there = int(obstore.head(self._store, name)["size"])
        if there != size:  # a range behind the end would be refused as if the store were at fault
            raise PolicyCorrupt(
                f"{self.uri}/{name} has {there} bytes, its manifest says {size}: {self._contents.remedy}"
            )
        for again in (False, True):
            if again:  # what was there of it may have been torn
                path.unlink(missing_ok=True)
            digest = hashlib.sha256()
            with path.open("a+b") as file:
                file.seek(0)
                while chunk := file.read(_CHUNK):
                    digest.update(chunk)
                resumed = done = file.tell()
                while done < size:
                    if stopping():
                        raise StoreUnreachable(f"the download of {name} was broken off: this process ends")
                    with self._reached(f"read {name}"):
                        part = obstore.get_range(self._store, name, start=done, length=min(_CHUNK, size - done))
                    if not len(part):
                        break
                    file.write(part)
                    digest.update(part)
                    done += len(part)
            if done == size and digest.hexdigest() == sha256:
                fsync_path(path)
                return
            if not resumed:
                break
        path.unlink(missing_ok=True)
        raise PolicyCorrupt(
            f"{self.uri}/{name} has sha256 {digest.hexdigest()[:12]}… ({done} bytes), its manifest says {sha256[:12]}… "
            f"({size} bytes): {self._contents.remedy}"
        )

    def names(self, prefix: str) -> list[str]:
        """The objects below a prefix."""
        with self._reached(f"list {prefix}", must_be_there=True):
            return [one["path"] for one in obstore.list(self._store, prefix).collect()]

    def delete(self, names: Iterable[str]) -> None:
        """Remove objects; harmless to repeat."""
        if found := list(names):
            with self._reached("remove objects"), contextlib.suppress(FileNotFoundError):
                obstore.delete(self._store, found)

    def try_out(self) -> None:
        """Prove that the store keeps to conditions of writes: two that can't both be done are not.

        Raises PolicyError that says what it does in place of that.
        """
        name = f"probe-{uuid.uuid4().hex}"
        self.version(name)  # a store that does not answer is found out within seconds
        first = self.write_if(name, b"1", None)
        second = self.write_if(name, b"2", first)
        try:
            for content, before, what in ((b"3", None, "If-None-Match: *"), (b"4", first, "If-Match")):
                try:
                    self.write_if(name, content, before)
                except Conflict:
                    continue
                raise PolicyError(f"{self.uri} wrote an object against {what}: it can't hold {self._contents.what}")
            if (found := self.read(name, 1)) is None or (found.content, found.version) != (b"2", second):
                raise PolicyError(f"{self.uri} does not read back what it wrote: it can't hold {self._contents.what}")
        finally:
            self.delete([name])

    @contextmanager
    def _reached(self, what: str, *, must_be_there: bool = False) -> Iterator[None]:
        """Raise the client's errors as ours, without what is secret in them.

        FileNotFoundError stays what it is, unless the bucket itself ``must_be_there``.
        """
        try:
            yield
        except (PreconditionError, AlreadyExistsError) as error:
            raise Conflict(f"{self.uri}: {self._text(error)}") from None
        except (BaseError, OSError, ValueError) as error:
            if isinstance(error, FileNotFoundError) and not must_be_there:
                raise FileNotFoundError(f"{self.uri}: {self._text(error)}") from None
            raise StoreUnreachable(
                f"the store of {self._contents.what} {self.uri} could not be reached to {what}: {self._text(error)}. "
                f"Look at {self._contents.setting} and the network; `millrace doctor` tries the store out"
            ) from None

    def _text(self, error: Exception) -> str:
        """The client's message without its debug output."""
        text = " ".join(str(error).partition("Debug source:")[0].split()) or type(error).__name__
        return self._redact(_USERINFO.sub("://", _ELAPSED.sub("", text)))[:_LONGEST]


def _version(found: Any) -> dict[str, str]:
    return {name: value for name in ("e_tag", "version") if (value := found.get(name)) is not None}


def _each(work: Callable[[str], None], names: Iterable[str], break_off: Callable[[], None] = lambda: None) -> None:
    """Do it for all, a few at a time; the first error is raised when what has begun has ended.

    ``break_off``: has that end early; called at an error, or a stop of this process.
    """
    with ThreadPoolExecutor(_TRANSFERS, thread_name_prefix="object store") as pool:
        calls = [pool.submit(work, name) for name in names]
        try:
            for call in calls:
                call.result()
        except BaseException:
            break_off()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
