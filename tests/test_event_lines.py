"""Streams of events are read by their own lines, whatever a response has in it."""

from __future__ import annotations

import re

import httpx
import pytest

from loadtests.event_lines import lines_of, read_lines
from tests.paths import ROOT

EVENT = 'data: {"text":"one\x85two\u2028three\x0cfour"}\n\nevent: done'


async def test_a_line_ends_with_a_line_feed_alone() -> None:
    expected = EVENT.split("\n")
    for size in (1, 7, 1000):
        pieces = [EVENT.encode()[start : start + size] for start in range(0, len(EVENT.encode()), size)]
        assert list(read_lines(httpx.Response(200, content=iter(pieces)))) == expected

        async def coming(pieces: list[bytes] = pieces):  # type: ignore[no-untyped-def]
            for piece in pieces:
                yield piece

        assert [line async for line in lines_of(httpx.Response(200, content=coming()))] == expected


@pytest.mark.parametrize("folder", ["tests", "loadtests", "deploy", "evaluation"])
def test_nothing_reads_a_stream_by_lines_that_end_elsewhere(folder: str) -> None:
    by_lines = re.compile(r"\.a?iter_lines\(")
    assert [path for path in (ROOT / folder).rglob("*.py") if by_lines.search(path.read_text())] == []
