"""A folder's files over HTTP, sent from memory: a client that reads slowly, or not at all, keeps no file open."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from functools import lru_cache
from typing import Final

from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.staticfiles import PathLike, StaticFiles
from starlette.types import Scope

_PIECE_BYTES: Final = 64 << 10


class StaticFolder(StaticFiles):
    """As Starlette's, for files that are few and small: what was read of them stays in memory. It knows no ranges."""

    def file_response(
        self, full_path: PathLike, stat_result: os.stat_result, scope: Scope, status_code: int = 200
    ) -> Response:
        """The whole file, or that the client has it."""
        response = super().file_response(full_path, stat_result, scope, status_code)
        if not isinstance(response, FileResponse):
            return response
        del response.headers["accept-ranges"]
        content = _read(os.fspath(full_path), stat_result.st_mtime_ns, stat_result.st_size)
        return StreamingResponse(_pieces(content), status_code, dict(response.headers))


@lru_cache(64)
def _read(path: str, changed_ns: int, size: int) -> bytes:
    with open(path, "rb") as file:
        return file.read()


async def _pieces(content: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(content), _PIECE_BYTES):
        yield content[start : start + _PIECE_BYTES]
