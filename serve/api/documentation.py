"""GET /docs: Swagger UI, from files of this package; its page asks no other host for anything. GET /: the way there."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from serve.http import json_response, page_headers
from serve.middleware.keyring import CONSOLE
from serve.static_files import StaticFolder

_FOLDER: Final = Path(__file__).with_name("static")


def install(app: FastAPI, *, console: bool) -> None:
    """Add the page and its files, and what leads from / to the console or, without one, says where things are."""

    async def start(request: Request) -> Response:
        if console:
            return RedirectResponse(f"{CONSOLE}/", 302)
        return json_response(
            {"documentation": "/docs", "openapi": "/openapi.json", "health": "/health", "ready": "/ready"}
        )

    app.add_route("/", start)
    if console:
        app.add_route(CONSOLE, start)
    page = (_FOLDER / "docs.html").read_bytes()

    async def docs(request: Request) -> Response:
        return Response(page, media_type="text/html", headers=page_headers(images="data:"))

    app.add_route("/docs", docs)
    app.mount("/docs/static", StaticFolder(directory=_FOLDER))
