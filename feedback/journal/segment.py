"""One journal file: an Arrow IPC stream whose every message has a checksum.

A segment is an ordinary Arrow IPC stream (a schema, record batches, an end mark), which any Arrow reader can read
when it is whole. Each message also carries, in its own custom metadata, its length, its number and a CRC32C of all
its bytes, so that no byte is handed to Arrow before it is known to be what was written. A message that is torn or
damaged is left out; those before and behind it are not.

A segment is named ``<table>.<writer>.<incarnation>.<number>.open`` while it is written and ``….arrows`` afterwards.
An incarnation is one session of a writer; its segments of a table are numbered upwards and sealed in that order.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

import google_crc32c
import pyarrow as pa

from feedback.schema import TABLES, conform

OPEN: Final = ".open"
CLOSED: Final = ".arrows"
END_MARK: Final = b"\xff\xff\xff\xff\x00\x00\x00\x00"

_CONTINUATION: Final = b"\xff\xff\xff\xff"
_SEAL: Final = "crc32c={crc:08x} bytes={length:012d} message={number:010d}"
_SEAL_PATTERN: Final = re.compile(rb"crc32c=([0-9a-f]{8}) bytes=(\d{12}) message=(\d{10})")
_CRC_AT: Final = len("crc32c=")
_NAME: Final = re.compile(
    r"(?P<table>[a-z]+)\.(?P<writer>[\w-]{1,64})\.(?P<incarnation>[0-9a-f]{32})\.(?P<number>\d{10})", re.ASCII
)
_MAX_METADATA: Final = 16 << 20
_SEAL_ROOM: Final = 512  # for the seal, and the padding around it
WRITER: Final = re.compile(r"[\w-]{1,64}", re.ASCII)


@dataclass(frozen=True, order=True)
class SegmentName:
    """Which segment it is: the ``number``-th that one session (``incarnation``) of ``writer`` wrote for ``table``."""

    table: str
    writer: str
    incarnation: str
    number: int

    def __str__(self) -> str:
        return f"{self.table}.{self.writer}.{self.incarnation}.{self.number:010d}"

    @property
    def application(self) -> str:
        """The Delta application id whose transaction version is ``number`` once this segment is in the lake."""
        return f"journal.{self.writer}.{self.incarnation}"

    @classmethod
    def parse(cls, filename: str) -> tuple[SegmentName, bool] | None:
        """The name and whether it is still open; None for a file that is not a segment."""
        stem, suffix = os.path.splitext(filename)
        match = _NAME.fullmatch(stem)
        if match is None or suffix not in (OPEN, CLOSED) or match["table"] not in TABLES:
            return None
        return cls(match["table"], match["writer"], match["incarnation"], int(match["number"])), suffix == OPEN


@dataclass(frozen=True)
class Segment:
    """A segment file as a listing of the folder saw it."""

    path: Path
    name: SegmentName
    is_open: bool

    @property
    def closed_path(self) -> Path:
        return self.path.with_suffix(CLOSED)


@dataclass(frozen=True)
class Scan:
    """What the bytes of a segment hold.

    ``messages`` are the (start, end) of the whole record batches, ``schema`` that of the schema if it is whole,
    ``damaged`` the ranges before ``end`` that are no message, ``torn`` the bytes from ``end`` (the last whole
    message's) to the end of the file, an end mark not counted.
    """

    schema: tuple[int, int] | None
    messages: list[tuple[int, int]]
    damaged: list[tuple[int, int]]
    end: int
    torn: int
    finished: bool


def encode_schema(name: SegmentName) -> bytes:
    """The schema message that begins a segment."""
    sealed = TABLES[name.table].with_metadata({"millrace": _SEAL.format(crc=0, length=0, number=0)})
    message = sealed.serialize()
    buffer = pa.allocate_buffer(message.size)
    memoryview(buffer).cast("B")[:] = memoryview(message).cast("B")
    return _seal(buffer, 0, message.size, name, 0).to_pybytes()


def encode_batch(batch: pa.RecordBatch, name: SegmentName, number: int) -> pa.Buffer:
    """One record batch, in its table's schema, as the ``number``-th message (the first is 1) of a segment."""
    start = _schema_length(name.table)  # the segment has the schema already
    buffer = pa.allocate_buffer(start + pa.ipc.get_record_batch_size(batch) + _SEAL_ROOM)
    sink = pa.FixedSizeBufferWriter(buffer)
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch, custom_metadata={"millrace": _SEAL.format(crc=0, length=0, number=0)})
        end = sink.tell()
    return _seal(buffer, start, end, name, number)


@lru_cache(maxsize=16)
def _schema_length(table: str) -> int:
    """Bytes of the schema at the head of a stream of the table's rows."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, TABLES[table]):
        pass
    return int(sink.getvalue().size) - len(END_MARK)


def _seal(buffer: pa.Buffer, start: int, end: int, name: SegmentName, number: int) -> pa.Buffer:
    """The message in ``buffer``, with its length, number and checksum (taken with its own digits as zeros) put in."""
    message = buffer.slice(start, end - start)
    view = memoryview(buffer).cast("B")[start:end]
    match = _SEAL_PATTERN.search(view, 8, 8 + _metadata_length(view, 0))
    if match is None:
        raise AssertionError("an Arrow message lost its custom metadata")
    view[match.start() : match.end()] = _SEAL.format(crc=0, length=len(view), number=number).encode()
    crc_start = match.start() + _CRC_AT
    view[crc_start : crc_start + 8] = f"{_checksum(name, message):08x}".encode()
    return message


def _metadata_length(data: bytes | memoryview, start: int) -> int:
    return int(struct.unpack_from("<i", data, start + 4)[0])


def _checksum(name: SegmentName, *parts: bytes | pa.Buffer) -> int:
    # Seeded with the segment's name: a message of another file, left in a reused block of the disk, is not taken.
    crc = google_crc32c.value(str(name).encode())
    for part in parts:
        crc = google_crc32c.extend(crc, part)
    return crc


def _whole_message(data: bytes, start: int, name: SegmentName) -> tuple[int, int] | None:
    """(end, number) of the message at ``start`` if every byte of it is what was written."""
    if data[start : start + 4] != _CONTINUATION or start + 8 > len(data):
        return None
    metadata_length = _metadata_length(data, start)
    metadata_end = start + 8 + metadata_length
    if not 0 < metadata_length <= _MAX_METADATA or metadata_end > len(data):
        return None
    match = _SEAL_PATTERN.search(data, start + 8, metadata_end)
    if match is None:
        return None
    end = start + int(match[2])
    if not metadata_end <= end <= len(data):
        return None
    crc_start = match.start() + _CRC_AT
    crc = _checksum(name, data[start:crc_start], b"00000000", data[crc_start + 8 : end])
    return (end, int(match[3])) if crc == int(match[1], 16) else None


def scan(data: bytes, name: SegmentName) -> Scan:
    """Find every whole message in the bytes of segment ``name``, also behind damaged ones."""
    schema: tuple[int, int] | None = None
    messages: list[tuple[int, int]] = []
    damaged: list[tuple[int, int]] = []
    at = end = 0
    last_number = -1
    finished = False
    while at < len(data):
        found = _whole_message(data, at, name)
        if found is not None and found[1] > last_number:
            if at > end:
                damaged.append((end, at))
            if found[1] == 0:
                schema = (at, found[0])
            else:
                messages.append((at, found[0]))
            last_number = found[1]
            at = end = found[0]
        elif len(data) - at == len(END_MARK) and data.endswith(END_MARK):
            if at > end:
                damaged.append((end, at))
                end = at
            finished = True
            break
        else:
            at = data.find(_CONTINUATION, at + 1)
            if at < 0:
                break
    torn = 0 if finished else len(data) - end
    return Scan(schema, messages, damaged, end, torn, finished)


def decode(data: bytes, name: SegmentName, found: Scan) -> pa.Table:
    """The rows of the whole messages, in the table's schema."""
    if not found.messages:
        return TABLES[name.table].empty_table()
    with pa.ipc.open_stream(_stream(data, name, found)) as reader:
        return conform(reader.read_all(), TABLES[name.table])  # one that lacks a column was written before there was it


def _stream(data: bytes, name: SegmentName, found: Scan) -> pa.Buffer:
    """An Arrow stream of the whole messages, without a copy if nothing is damaged."""
    if found.schema is not None and not found.damaged:
        return pa.py_buffer(memoryview(data)[: found.end])
    # Where the schema is damaged, the table's own is what the segment was written with.
    schema = encode_schema(name) if found.schema is None else data[slice(*found.schema)]
    return pa.py_buffer(b"".join([schema, *(data[start:end] for start, end in found.messages)]))


def list_segments(folder: Path) -> list[Segment]:
    """All segments of a journal folder, in the order in which they are sealed; other files are left out.

    A folder that is read while a file in it is renamed may show that file under neither name. A segment is renamed
    only once, so two listings that agree have missed none.
    """
    previous: list[Segment] | None = None
    while True:
        listing = sorted(_listing(folder), key=lambda segment: segment.name)
        if listing == previous:
            return listing
        previous = listing


def _listing(folder: Path) -> Iterator[Segment]:
    with os.scandir(folder) as entries:
        for entry in entries:
            parsed = SegmentName.parse(entry.name)
            if parsed is not None:
                yield Segment(Path(entry.path), *parsed)
