"""Lines of a stream of server-sent events."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx


async def lines_of(answer: httpx.Response) -> AsyncIterator[str]:
    """As ``aiter_lines``, for which a response's own U+0085 or U+2028 ends a line, but by line feeds alone."""
    rest = ""
    async for text in answer.aiter_text():
        *lines, rest = (rest + text).split("\n")
        for line in lines:
            yield line
    if rest:
        yield rest
