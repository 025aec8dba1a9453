"""Lines of a stream of server-sent events, which end with line feeds alone.

httpx's ``iter_lines`` and ``aiter_lines`` also end one at a U+0085 or U+2028, which a response may have in it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import httpx


async def lines_of(answer: httpx.Response) -> AsyncIterator[str]:
    """In place of ``aiter_lines``."""
    rest = ""
    async for text in answer.aiter_text():
        *lines, rest = (rest + text).split("\n")
        for line in lines:
            yield line
    if rest:
        yield rest


def read_lines(answer: httpx.Response) -> Iterator[str]:
    """In place of ``iter_lines``."""
    rest = ""
    for text in answer.iter_text():
        *lines, rest = (rest + text).split("\n")
        yield from lines
    if rest:
        yield rest
