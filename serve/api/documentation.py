"""GET /docs: Swagger UI, from files of this package; its page asks no other host for anything."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import FileResponse
from starlette.staticfiles import StaticFiles

from serve.http import page_headers

_FOLDER: Final = Path(__file__).with_name("static")


def install(app: FastAPI) -> None:
    """Add the page and its files."""
    app.add_route("/docs", _docs)
    app.mount("/docs/static", StaticFiles(directory=_FOLDER))


async def _docs(request: Request) -> FileResponse:
    return FileResponse(_FOLDER / "docs.html", headers=page_headers(images="data:"))
