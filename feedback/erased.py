"""What was erased, as far as it must be known: rows of it may still be on their way in another journal.

The registry is the folder ``_erasures`` of the lake, one JSON file an erasure: its time, what kind of value it names,
and a keyed hash of each value, never the value. A seal leaves out rows that it matches and that were made before it.
``<name>.done`` beside it says that the erasure went through; without that, the next maintenance finishes it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Literal, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from feedback.events import FeedbackIn
from feedback.ids import uuid7
from feedback.lake import Lake, LakeError

log = logging.getLogger(__name__)

Kind = Literal["user", "user_of_tenant", "tenant", "response_id"]

FOLDER: Final = "_erasures"
_DONE: Final = ".done"
_TIME: Final = "%Y%m%dT%H%M%S%fZ"
_NAME: Final = re.compile(r"\d{8}T\d{12}Z-[0-9a-f-]{36}")
_NOBODY: Final = FeedbackIn.model_fields["source"].default
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


class Selector(Protocol):
    """What is to go: rows that name one of some values and were made until ``at``."""

    @property
    def kind(self) -> Kind: ...

    @property
    def at(self) -> datetime: ...

    def is_in(self, column: pa.Array) -> pa.Array:
        """Of each text whether it is one of the values; null for a null."""
        ...


@dataclass(frozen=True)
class Values:
    """A selector that knows its values: ``values`` is an Arrow array of text."""

    kind: Kind
    values: pa.Array
    at: datetime

    def is_in(self, column: pa.Array) -> pa.Array:
        return pc.is_in(column, value_set=self.values)


@dataclass(frozen=True)
class Erasure:
    """A selector that knows hashes of its values, as the registry keeps it."""

    name: str
    kind: Kind
    at: datetime
    key: bytes
    digests: frozenset[str]
    done: bool

    def is_in(self, column: pa.Array) -> pa.Array:
        distinct = column.dictionary_encode()
        known = [
            text is not None and _digest(self.key, text) in self.digests for text in distinct.dictionary.to_pylist()
        ]
        return pa.array(known, pa.bool_()).take(distinct.indices)


def matching(table: str, rows: pa.RecordBatch | pa.Table, selectors: Iterable[Selector]) -> pa.ChunkedArray | pa.Array:
    """Of each row whether one of the selectors means it (never null).

    Interactions and feedback that were made after a selector's time are not meant; the rewards of a response are,
    whenever they were given.
    """
    found = pa.repeat(False, rows.num_rows)
    for selector in selectors:
        for names in COLUMNS[table].get(selector.kind, ()):
            text = _joined(rows, names)
            meant = selector.is_in(text)
            if "source" in names:
                meant = pc.and_(meant, pc.not_equal(rows.column("source"), _NOBODY))
            if table != "rewards":
                meant = pc.and_(meant, pc.less_equal(rows.column("created_at"), _timestamp(selector.at)))
            found = pc.or_(found, pc.fill_null(meant, False))
    return found


def needed_columns(table: str) -> list[str]:
    """The columns that ``matching`` reads."""
    names = {name for columns in COLUMNS[table].values() for column in columns for name in column}
    return sorted(names | ({"created_at"} if table != "rewards" else set()))


def drop_erased(lake: Lake, table: str, rows: pa.Table) -> pa.Table:
    """The rows of a journal without those that were erased while they were on their way to the lake.

    What is said of a response that is dropped here must go as well, wherever it is: its id joins the registry.
    """
    if not rows.num_rows or table == "rewards":
        return rows
    relevant = erasures(lake, since=pc.min(rows.column("created_at")).as_py())
    dropped = pa.repeat(False, rows.num_rows)
    for erasure in relevant:
        meant = matching(table, rows, [erasure])
        if table == "interactions" and erasure.kind != "response_id" and pc.any(meant).as_py():
            register(lake, "response_id", rows.filter(meant).column("response_id").to_pylist(), erasure.at)
        dropped = pc.or_(dropped, meant)
    count = pc.sum(dropped).as_py()
    if not count:
        return rows
    log.info("%d rows of %s were erased before they were sealed and are dropped", count, table)
    return rows.filter(pc.invert(dropped))


def without_erased(lake: Lake, table: str, rows: pa.Table) -> pa.Table:
    """The rows of a journal that a seal would not drop; nothing is registered and nothing told."""
    if not rows.num_rows:
        return rows
    relevant = erasures(lake, since=pc.min(rows.column("created_at")).as_py())
    return rows.filter(pc.invert(matching(table, rows, relevant))) if relevant else rows


def newest(lake: Lake) -> str | None:
    """The name of the last erasure; None if there was none."""
    names = [file.path.rpartition("/")[2].removesuffix(".json") for file in lake.store().list(FOLDER)]
    return max((name for name in names if _NAME.fullmatch(name)), default=None)


def register(lake: Lake, kind: Kind, values: Sequence[str], at: datetime) -> str:
    """Enter an erasure, durable on return; returns its name."""
    key = secrets.token_bytes(16)
    digests = sorted(_digest(key, value) for value in set(values))
    name = f"{at.astimezone(UTC):{_TIME}}-{uuid7()}"
    content = {"kind": kind, "at": at.isoformat(), "key": key.hex(), "digests": digests}
    lake.store().write_bytes(f"{FOLDER}/{name}.json", json.dumps(content).encode())
    return name


def mark_done(lake: Lake, names: Iterable[str]) -> None:
    """Note that these erasures went through."""
    for name in names:
        lake.store().write_bytes(f"{FOLDER}/{name}{_DONE}", b"")


def erasures(lake: Lake, *, since: datetime, pending: bool = False) -> list[Erasure]:
    """The erasures made at ``since`` or later; those that did not go through as well if ``pending``."""
    store = lake.store()
    names = {file.path.rpartition("/")[2] for file in store.list(FOLDER)}
    found = []
    for name in sorted(names):
        stem = name.removesuffix(".json")
        if stem == name or not _NAME.fullmatch(stem):  # somebody else's file
            continue
        done = f"{stem}{_DONE}" in names
        at = datetime.strptime(stem.partition("-")[0], _TIME).replace(tzinfo=UTC)
        if at >= since or (pending and not done):
            try:
                content = json.loads(store.read_bytes(f"{FOLDER}/{name}"))
                key, digests = bytes.fromhex(content["key"]), frozenset(content["digests"])
                found.append(Erasure(stem, content["kind"], at, key, digests, done))
            except (ValueError, KeyError, TypeError) as error:
                raise LakeError(
                    f"{lake.uri}/{FOLDER}/{name} is damaged ({error!r}), so what it says was erased is not known; "
                    "repeat that erasure and remove the file"
                ) from error
    return found


def _digest(key: bytes, value: str) -> str:
    return hashlib.blake2b(value.encode(), digest_size=16, key=key).hexdigest()


def _joined(rows: pa.RecordBatch | pa.Table, names: tuple[str, ...]) -> pa.Array:
    columns = [rows.column(name) for name in names]
    joined = columns[0] if len(columns) == 1 else pc.binary_join_element_wise(*columns, "\0")
    return joined.combine_chunks() if isinstance(joined, pa.ChunkedArray) else joined


def _timestamp(at: datetime) -> pa.Scalar:
    return pa.scalar(at, pa.timestamp("us", tz="UTC"))
