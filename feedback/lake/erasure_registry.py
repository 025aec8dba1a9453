"""What was erased, as far as it must be known: rows of it may still be on their way in another journal.

The registry is the folder ``_erasures`` of the lake, one JSON file an erasure: its time, what kind of value it names,
a keyed hash of each value, never the value, and the versions of the tables in which all rows are older than it. A seal
leaves out rows that it matches and that were made before it. ``<name>.done`` beside it says that the erasure went
through, and up to which versions; without that, the next maintenance finishes it.

Two machines' clocks may differ, and which is wrong can't be known. So a machine for whose clock an erasure is dated
later than now notes, beside its own journal, when it first saw it: what it made until then is older. The time in the
registry stays.

The key lies outside the lake (``LakeConfig.erasure_key``): names are few and easily tried, so that a reader of the
lake could otherwise find out who was erased. Each erasure has a salt of its own besides.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, Literal

import pyarrow as pa
import pyarrow.compute as pc

from feedback.events import FeedbackIn
from feedback.files import fsync_path, make_key, read_key, write_once
from feedback.ids import uuid7
from feedback.lake.tables import Lake, LakeError

log = logging.getLogger(__name__)

Kind = Literal["user", "user_of_tenant", "tenant", "response_id"]

FOLDER: Final = "_erasures"
NOTES: Final = "erasures"
"""The folder beside a journal that notes when this machine first saw erasures dated later than its now."""

ALL_TIMES: Final = datetime.max.replace(tzinfo=UTC)
SKEW: Final = timedelta(minutes=1)
"""What is later than now by more than this was dated by another clock, one that runs ahead of ours."""

_DONE: Final = ".done"
_KEY_ID: Final = "key_id"
_FORM: Final = "form"  # there once no entry of an older form is left
_TIME: Final = "%Y%m%dT%H%M%S%fZ"
_NAME: Final = re.compile(r"\d{8}T\d{12}Z-[0-9a-f-]{36}")
ANONYMOUS: Final = FeedbackIn.model_fields["source"].default
"""The source of feedback that names none."""

COLUMNS: Final[dict[str, dict[Kind, tuple[tuple[str, ...], ...]]]] = {
    "interactions": {
        "user": (("user",),),
        "user_of_tenant": (("tenant", "user"),),
        "tenant": (("tenant",),),
        "response_id": (("response_id",),),
    },
    "feedback": {
        "user": (("source",),),
        "user_of_tenant": (("tenant", "source"),),
        "tenant": (("tenant",),),
        "response_id": (("response_id",), ("rejected_response_id",)),
    },
    "rewards": {"response_id": (("response_id",),)},
}
"""Of each table the columns by which a kind of value finds its rows; two columns are one value, joined by a NUL."""


@dataclass(frozen=True)
class Values:
    """What is to go: rows that name one of some values (an Arrow array of text) and were made before an erasure.

    Those are the rows that were made until ``at``, and, whatever their time says, all that a table had at the version
    in ``versions``: clocks may be wrong, the order of commits is not. Up to those in ``drained`` came what a journal
    held then and what was made since: of that go rows dated later than ``late`` too, which no right clock made.
    """

    kind: Kind
    values: pa.Array
    at: datetime
    versions: Mapping[str, int] = field(default_factory=dict)
    drained: Mapping[str, int] = field(default_factory=dict)
    late: datetime | None = None

    @property
    def registered_at(self) -> datetime:
        """The time that the registry has of it."""
        return self.at

    def is_in(self, column: pa.Array) -> pa.Array:
        """Of each text whether it is one of the values; null for a null."""
        return pc.is_in(column, value_set=self.values)


@dataclass(frozen=True)
class Erasure:
    """The same of which only hashes of the values are known, as the registry keeps it.

    ``at`` is when it was made for the machine that asks, ``registered_at`` what the registry says, the same for all.
    ``key`` is None in an old entry, whose ``salt`` is its only key. ``done_until``: the versions of the tables up to
    which nothing of it is left, if it went through; ``reported_until``: those up to which it is on record what had
    read its rows. An old entry names none.
    """

    name: str
    kind: Kind
    at: datetime
    versions: Mapping[str, int]
    salt: bytes
    key: bytes | None
    digests: frozenset[str]
    done: bool
    done_until: Mapping[str, int]
    reported_until: Mapping[str, int]
    registered_at: datetime

    def is_in(self, column: pa.Array) -> pa.Array:
        """Of each text whether it is one of the values; false for a null."""
        distinct = column.dictionary_encode()
        known = [
            text is not None and _digest(text, self.salt, self.key) in self.digests
            for text in distinct.dictionary.to_pylist()
        ]
        return pa.array(known, pa.bool_()).take(distinct.indices)


Selector = Values | Erasure


def matching(table: str, rows: pa.RecordBatch | pa.Table, selectors: Iterable[Selector]) -> pa.ChunkedArray | pa.Array:
    """Of each row whether one of the selectors means it (never null).

    Interactions and feedback that were made after a selector's time are not meant (its versions are for who knows
    where the rows are from); the rewards of a response are, whenever they were computed.
    """
    found = pa.repeat(False, rows.num_rows)
    for selector in selectors:
        for names in COLUMNS[table].get(selector.kind, ()):
            text = _joined(rows, names)
            meant = selector.is_in(text)
            if "source" in names:
                meant = pc.and_(meant, pc.not_equal(rows.column("source"), ANONYMOUS))
            if table != "rewards":
                meant = pc.and_(meant, _made_before(rows.column("created_at"), selector))
            found = pc.or_(found, pc.fill_null(meant, False))
    return found


def needed_columns(table: str) -> list[str]:
    """The columns that ``matching`` reads."""
    names = {name for columns in COLUMNS[table].values() for column in columns for name in column}
    return sorted(names | ({"created_at"} if table != "rewards" else set()))


def drop_erased(lake: Lake, journal_folder: Path, table: str, rows: pa.Table) -> pa.Table:
    """The rows of a journal without those that were erased while they were on their way to the lake.

    Feedback on a response that is dropped here must go as well, wherever it is: the id joins the registry.
    """
    if not rows.num_rows or table == "rewards":
        return rows
    relevant = erasures(lake, journal_folder, since=pc.min(rows.column("created_at")).as_py())
    dropped = pa.repeat(False, rows.num_rows)
    for erasure in relevant:
        meant = matching(table, rows, [erasure])
        if table == "interactions" and erasure.kind != "response_id" and pc.any(meant).as_py():
            ids = rows.filter(meant).column("response_id").to_pylist()
            register(lake, "response_id", ids, erasure.registered_at, erasure.versions)
        dropped = pc.or_(dropped, meant)
    count = pc.sum(dropped).as_py()
    if not count:
        return rows
    log.info("%d rows of %s were erased before they were sealed and are dropped", count, table)
    return rows.filter(pc.invert(dropped))


def without_erased(lake: Lake, journal_folder: Path, table: str, rows: pa.Table) -> pa.Table:
    """The rows of a journal that a seal would not drop; nothing is registered or logged."""
    if not rows.num_rows:
        return rows
    relevant = erasures(lake, journal_folder, since=pc.min(rows.column("created_at")).as_py())
    return rows.filter(pc.invert(matching(table, rows, relevant))) if relevant else rows


def meant_by_pending(lake: Lake, table: str, rows: pa.RecordBatch | pa.Table) -> pa.ChunkedArray | pa.Array:
    """Of each row whether an erasure that has not gone through means it, whatever its time."""
    pending = [replace(erasure, at=ALL_TIMES) for erasure in erasures(lake, since=ALL_TIMES, pending=True)]
    return matching(table, rows, pending)


def is_being_erased(lake: Lake, table: str, rows: pa.RecordBatch) -> bool:
    """Whether an erasure that has not gone through means one of these rows, whatever their time."""
    return pc.any(meant_by_pending(lake, table, rows)).as_py() is True


def registered(lake: Lake) -> frozenset[str]:
    """The names of all erasures."""
    names = (file.path.rpartition("/")[2].removesuffix(".json") for file in lake.store().list(FOLDER))
    return frozenset(name for name in names if _NAME.fullmatch(name))


def register(lake: Lake, kind: Kind, values: Sequence[str], at: datetime, versions: Mapping[str, int]) -> str:
    """Enter an erasure, durable on return; returns its name.

    ``versions``: of the tables, read before ``at`` or later where all they hold was made before it.
    """
    key = _local_key(lake)
    salt = secrets.token_bytes(16)
    digests = sorted(_digest(value, salt, key) for value in set(values))
    name = f"{at.astimezone(UTC):{_TIME}}-{uuid7()}"
    content = {"kind": kind, "at": at.isoformat(), "versions": dict(versions), "salt": salt.hex()}
    _write(lake, f"{name}.json", content | {"key_id": _key_id(key), "digests": digests})
    return name


def id_of(name: str) -> str:
    """What all entries of one erasure have in common: its time, as their names begin with it."""
    return name.partition("-")[0]


def mark_done(lake: Lake, names: Iterable[str], versions: Mapping[str, int], reported: Mapping[str, int]) -> None:
    """Note that these erasures went through, and that nothing of them is in the tables up to these versions.

    ``reported``: the versions up to which it is on record what had read the rows that went.
    """
    for name in names:
        _write(lake, f"{name}{_DONE}", {"versions": dict(versions), "told": dict(reported)})


def reopen(lake: Lake, names: Iterable[str]) -> None:
    """Note that these erasures are to be gone through once more."""
    lake.store().delete(f"{FOLDER}/{name}{_DONE}" for name in names)


def erasures(
    lake: Lake, journal_folder: Path | None = None, *, since: datetime, pending: bool = False
) -> list[Erasure]:
    """The erasures made at ``since`` or later; those that did not go through as well if ``pending``.

    One that is dated later than now counts, for the machine of ``journal_folder``, as made when it was first seen so.
    Raises LakeError if one can't be read, or was hashed with a key that is not ours.
    """
    names = {file.path.rpartition("/")[2] for file in lake.store().list(FOLDER)}
    found = []
    for name in sorted(names):
        stem = name.removesuffix(".json")
        if stem == name or not _NAME.fullmatch(stem):  # not one of ours
            continue
        done = f"{stem}{_DONE}" in names
        at = datetime.strptime(stem.partition("-")[0], _TIME).replace(tzinfo=UTC)
        if at >= since or (pending and not done):
            found.append(_read(lake, journal_folder, stem, at, done=done))
    return found


def note_future_erasures(lake: Lake, journal_folder: Path) -> None:
    """Read the registry, so that an erasure dated later than now counts as made now for the rows of this journal."""
    erasures(lake, journal_folder, since=datetime.now(UTC))


def upgrade(lake: Lake) -> None:
    """Bring entries of an older Millrace up to date, once: hashed with the key, readable for their owner only."""
    store = lake.store()
    files = store.list(FOLDER)
    if not files or any(file.path.endswith(f"/{_FORM}") for file in files):
        return
    for file in files:
        name = file.path.rpartition("/")[2]
        if not _NAME.fullmatch(name.removesuffix(".json")) or not name.endswith(".json"):
            continue
        content = _content(lake, name)
        if "key" in content:
            key = _local_key(lake)
            digests = sorted(_keyed(bytes.fromhex(digest), key) for digest in content["digests"])
            new = {"salt": content.pop("key"), "key_id": _key_id(key), "digests": digests}
            _write(lake, name, {"versions": {}} | content | new)
    if store.folder is not None:
        for file in files:
            with contextlib.suppress(FileNotFoundError):  # a mark that another process took back
                (store.folder / file.path).chmod(0o600)
        fsync_path(store.folder / FOLDER)
    _write(lake, _FORM, {"form": 2})


def _read(lake: Lake, journal_folder: Path | None, stem: str, registered_at: datetime, *, done: bool) -> Erasure:
    content = _content(lake, f"{stem}.json")
    done_until: dict[str, Any] = {}
    if done:
        try:
            done_until = _content(lake, f"{stem}{_DONE}")
        except FileNotFoundError:  # another process has just reopened it
            done = False
    at = registered_at if journal_folder is None else _by_local_clock(journal_folder, stem, registered_at)
    key = None if "key" in content else _own_key(lake, content["key_id"], f"{stem}.json")
    salt, digests = bytes.fromhex(content["salt"] if key else content["key"]), frozenset(content["digests"])
    versions, until = content.get("versions", {}), done_until.get("versions", {})
    reported = done_until.get("told", {})
    return Erasure(stem, content["kind"], at, versions, salt, key, digests, done, until, reported, registered_at)


def _by_local_clock(journal_folder: Path, stem: str, registered_at: datetime) -> datetime:
    """When an erasure was made, for the rows of a journal: by the clock that dates them, if that is behind."""
    note = journal_folder / NOTES / stem
    if not note.exists():
        now = datetime.now(UTC)
        if registered_at <= now + SKEW:
            return registered_at
        log.warning(
            "the erasure %s/%s is dated later than now (%s): its clock ran ahead, or this one is behind; in %s it "
            "counts as made now",
            *(FOLDER, stem, now.isoformat(), journal_folder),
        )
        write_once(note, now.isoformat().encode())
    try:
        return datetime.fromisoformat(note.read_text())
    except ValueError as error:
        raise LakeError(f"{note}, when this machine first saw an erasure, is damaged ({error}); remove it") from error


def _content(lake: Lake, name: str) -> dict[str, Any]:
    """The fields of a file of the registry; none of a mark that an older Millrace left."""
    data = lake.store().read_bytes(f"{FOLDER}/{name}")
    try:
        content = json.loads(data or b"{}")
        if name.endswith(".json"):
            for named in ("kind", "at", "digests"):
                content[named]
            bytes.fromhex(content["key"] if "key" in content else content["salt"] + content["key_id"])
        return dict(content)
    except (ValueError, KeyError, TypeError) as error:
        raise LakeError(
            f"{lake.uri}/{FOLDER}/{name} is damaged ({error!r}), so what it says was erased is not known; "
            "repeat that erasure and remove the file"
        ) from error


def _write(lake: Lake, name: str, content: Mapping[str, Any]) -> None:
    lake.store().write_bytes(f"{FOLDER}/{name}", json.dumps(content).encode(), private=True)


def _key_file(lake: Lake) -> Path:
    if lake.config.erasure_key is not None:
        path = Path(lake.config.erasure_key)
    elif lake.local:
        path = Path(lake.uri).parent / "erasure.key"
    else:
        raise LakeError(f"{lake.uri}: feedback.lake.erasure_key must name the file of the key that hashes erased names")
    if lake.local and path.absolute().is_relative_to(Path(lake.uri).absolute()):
        raise LakeError(f"feedback.lake.erasure_key {path} is in the lake, whose readers must not have it: move it out")
    return path


def _local_key(lake: Lake) -> bytes:
    """The key to hash with; created if the registry has none yet. Raises LakeError if its key is not ours."""
    try:
        return _own_key(lake, lake.store().read_bytes(f"{FOLDER}/{_KEY_ID}").decode(), "the registry")
    except FileNotFoundError:
        key = _own_key(lake, None, "the registry")
        lake.store().write_bytes(f"{FOLDER}/{_KEY_ID}", _key_id(key).encode(), private=True)
        return key


def _own_key(lake: Lake, key_id: str | None, what: str) -> bytes:
    """Our key, if it is the one by which ``what`` was hashed; a new one if nothing was. Raises LakeError."""
    path, key = _key_file(lake), None
    try:
        key = make_key(path) if key_id is None else read_key(path)
    except FileNotFoundError:
        pass
    except ValueError as error:
        raise LakeError(f"feedback.lake.erasure_key: {error}; put back the file that was there") from error
    if key is None or key_id not in (None, _key_id(key)):
        holds = "holds" if key else "would hold, which is not there"
        raise LakeError(
            f"{lake.uri}/{FOLDER}: {what} was hashed with another key than {path} {holds}, so what it says was erased "
            "is not known: copy the file feedback.lake.erasure_key from the machine that erased. If it is lost, remove "
            "this folder and repeat the erasures"
        )
    return key


def _key_id(key: bytes) -> str:
    return hashlib.blake2b(b"millrace erasure registry", digest_size=8, key=key).hexdigest()


def _digest(value: str, salt: bytes, key: bytes | None) -> str:
    salted = hashlib.blake2b(value.encode(), digest_size=16, key=salt)
    return salted.hexdigest() if key is None else _keyed(salted.digest(), key)


def _keyed(salted: bytes, key: bytes) -> str:
    return hashlib.blake2b(salted, digest_size=16, key=key).hexdigest()


def _joined(rows: pa.RecordBatch | pa.Table, names: tuple[str, ...]) -> pa.Array:
    columns = [rows.column(name) for name in names]
    joined = columns[0] if len(columns) == 1 else pc.binary_join_element_wise(*columns, "\0")
    return joined.combine_chunks() if isinstance(joined, pa.ChunkedArray) else joined


def _made_before(times: pa.Array | pa.ChunkedArray, selector: Selector) -> pa.Array | pa.ChunkedArray:
    before = pc.less_equal(times, _timestamp(selector.at))
    late = selector.late if isinstance(selector, Values) else None
    return before if late is None else pc.or_(before, pc.greater(times, _timestamp(late)))


def _timestamp(at: datetime) -> pa.Scalar:
    return pa.scalar(at, pa.timestamp("us", tz="UTC"))
